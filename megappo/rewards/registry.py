"""From the name in the configuration to the function."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, get_args, get_origin, get_type_hints

from megappo.rewards.rules import RULES, warm_up

_PER_SAMPLE = ("prompt", "response", "answer", "metadata")
_PER_BATCH = ("prompts", "responses", "answers", "metadata")
_RAW = {False: "raw_response", True: "raw_responses"}
"""By whether the function takes a batch."""


class ChosenReward(Protocol):
    """The part of `RewardSettings` that names a function; workers have it without importing the configuration."""

    @property
    def function(self) -> str: ...
    @property
    def options(self) -> dict[str, Any]: ...
    @property
    def batch(self) -> bool: ...


class RewardChoice(NamedTuple):
    """What is sent to a worker."""

    function: str
    options: dict[str, Any]
    batch: bool


def check_reward(settings: ChosenReward) -> None:
    """Raises ValueError where the reward cannot be used: unknown name, failing import, options it does not take."""
    if settings.function == "model":
        unused = [name for name, value in (("options", settings.options), ("batch", settings.batch)) if value]
        if unused:
            raise ValueError(f"reward.function 'model' takes no reward.{unused[0]}; remove it")
        return
    resolve(settings)


def resolve(settings: ChosenReward) -> Callable[..., Any]:
    """The reward function, ready to be called with samples and `settings.options`: a rule, or a Python function.

    Raises ValueError with the nearest name, or with what of a Python path or of the options does not fit.
    """
    name = settings.function
    if name in RULES:
        if settings.batch:
            raise ValueError(f"reward.batch is for Python functions, '{name}' scores sample by sample; remove it")
        function = RULES[name]
        _check_call(function, settings)
        _check_rule_options(function, settings)
        warm_up(name)
        return function
    if ":" not in name:
        known = [*RULES, "model"]
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"reward.function '{name}' is not one of {', '.join(known)}; did you mean '{nearest}'? "
            "A Python function is written package.module:function"
        )
    function = load_function(name, "reward.function")
    _check_call(function, settings)
    return function


def argument_names(function: Callable[..., Any], *, batch: bool) -> tuple[str, ...]:
    """What a reward function is called with: the response with its special tokens only where it has a parameter for it.

    A function of `**anything` may hand all on to one that does not expect it, so that it is not asked for there.
    """
    names, signature = _PER_BATCH if batch else _PER_SAMPLE, _signature(function)
    return (*names, _RAW[batch]) if signature is not None and _RAW[batch] in signature.parameters else names


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except ValueError:  # some functions written in C have none
        return None


def _check_call(function: Callable[..., Any], settings: ChosenReward) -> None:
    names, signature = argument_names(function, batch=settings.batch), _signature(function)
    if signature is None:
        return
    try:
        signature.bind(**dict.fromkeys(names), **settings.options)
    except TypeError as error:
        call = ", ".join(f"{name}=" for name in (*names, *settings.options))
        raise ValueError(
            f"reward.function '{settings.function}' cannot be called with ({call}): {error}; "
            "change its parameters, reward.options or reward.batch"
        ) from error


def _check_rule_options(rule: Callable[..., Any], settings: ChosenReward) -> None:
    hints = get_type_hints(rule)
    for name, value in settings.options.items():
        hint = hints[name]
        choices = get_args(hint) if get_origin(hint) is Literal else (True, False)
        if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
            words = " or ".join(str(choice).lower() for choice in choices)
            raise ValueError(
                f"reward.options.{name} is {value!r}, must be {words} for '{settings.function}'; change it"
            )


def on_one_line(error: BaseException) -> str:
    """What an error says, fit for the middle of a sentence."""
    return " ".join(str(error).split())


def load_function(path: str, setting: str) -> Callable[..., Any]:
    """Import `package.module:function`; `setting` names the place in errors."""
    module_name, _, function_name = path.partition(":")
    if not function_name or not all(part.isidentifier() for part in module_name.split(".")):
        raise ValueError(f"{setting} '{path}' is no path of a function; write package.module:function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{setting} '{path}': module '{module_name}' cannot be imported ({on_one_line(error)}); "
            "install it or set PYTHONPATH"
        ) from error
    except (Exception, SystemExit) as error:  # a user's module can raise anything
        raise ValueError(
            f"{setting} '{path}': module '{module_name}' failed with {type(error).__name__}: {on_one_line(error)}; "
            "mend it"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        near = difflib.get_close_matches(function_name, names, n=1, cutoff=0.0)
        hint = f"did you mean '{module_name}:{near[0]}'?" if near else "define it there"
        raise ValueError(f"{setting} '{path}': module '{module_name}' has no function '{function_name}'; {hint}")
    return function  # type: ignore[no-any-return]
