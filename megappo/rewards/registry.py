"""Reward functions by name, and their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args, get_origin, get_type_hints

from megappo.errors import show
from megappo.network.http_client import check_proxy
from megappo.plugins import check_call, check_choice, load_function, signature_of
from megappo.rewards.http import scores, secret_headers
from megappo.rewards.judge import judge_client
from megappo.rewards.rules import GOLDS, RULES, warm_up

if TYPE_CHECKING:
    from megappo.config.sections.reward import RewardSettings
    from megappo.types import Prompt

RewardCallable = Callable[..., Any]
"""Rule or custom function. The function receives the arguments of its parameters (`argument_names`) and the options.
The worker checks the result."""
OF_ENVIRONMENT = "environment"
"""Name for rewards of the environment, without a function."""
_PER_SAMPLE = ("prompt", "response", "answer", "metadata")
_PER_BATCH = ("prompts", "responses", "answers", "metadata")
_ADDITIONAL = ("raw_response", "prompt_token_ids", "token_ids", "truncated", "conversation")
"""Additional arguments for functions with parameters of these names."""
OF_EACH = {
    "prompts": "prompt", "responses": "response", "answers": "answer", "raw_responses": "raw_response",
    "conversations": "conversation",
}  # fmt: skip
"""Arguments of batch functions with a different name than the argument of a single sample."""
_VERLS = {"solution_str", "ground_truth"}
"""Parameters of verl's functions of one sample. Functions of many samples add an `s` to these names."""
_OF_BATCH = {one: many for many, one in OF_EACH.items()}


class RewardChoice(NamedTuple):
    """Reward function in the form for a worker, which does not import the configuration."""

    function: str
    options: dict[str, Any]
    batch: bool


ChosenReward: TypeAlias = "RewardSettings | RewardChoice"


def check_reward(settings: RewardSettings) -> None:
    """Check that the reward is usable.

    Raises ValueError if the name is unknown, the import fails, the function does not accept the options, the key of a
    server is missing, or a server requires a SOCKS proxy.
    """
    if settings.judge is not None:
        check_proxy(judge_client(settings.judge).url)
        return
    if settings.function in ("model", OF_ENVIRONMENT):
        unused = [name for name, value in (("options", settings.options), ("batch", settings.batch)) if value]
        if unused:
            raise ValueError(f"reward.function '{settings.function}' does not use reward.{unused[0]}; remove it")
        return
    if resolve(settings) is scores:
        secret_headers(**settings.options)
        check_proxy(str(settings.options.get("url", "")))


def check_prompts(settings: RewardSettings, prompts: Sequence[Prompt], source: str) -> None:
    """Check prompts from `source` before a run.

    Raises ValueError for a prompt without a matching reward function, and for a reference answer that a rule cannot
    compare.
    """
    rules = {name: str(term.function) for name, (_, term) in settings.terms.items()}
    problems: dict[str, list[tuple[int, str]]] = {}
    for prompt in prompts:
        own = [rule for name, rule in rules.items() if settings.is_for(name, prompt.metadata)]
        if not own:
            problems.setdefault("", []).append((prompt.index, _without_function(settings, prompt)))
        for rule in own:
            if rule in GOLDS and (problem := _gold_problem(rule, prompt.answer)):
                problems.setdefault(rule, []).append((prompt.index, problem))
    for _, reports in sorted(problems.items()):
        first, problem = reports[0]
        others = f" (and so for {len(reports) - 1} more prompts)" if len(reports) > 1 else ""
        raise ValueError(f"prompt {first} of '{source}': {problem}{others}")


def _without_function(settings: RewardSettings, prompt: Prompt) -> str:
    named = sorted({source for term in settings.functions.values() for source in term.data_sources or ()})
    return (
        f"its data_source is {show(prompt.metadata.get('data_source'))}, but reward.functions are for "
        f"{', '.join(named)}; add the data_source to a function, or add a function without data_sources"
    )


def _gold_problem(rule: str, answer: str | None) -> str:
    try:
        GOLDS[rule](answer)
    except ValueError as error:
        return str(error)
    return ""


def resolve(settings: ChosenReward) -> RewardCallable:
    """Return the reward function, ready for calls with samples and `settings.options`: a rule or a Python function.

    Raises ValueError with the nearest name for an unknown name, and for an unsuitable Python path or option.
    """
    name = settings.function
    assert name is not None, "each of several functions has separate settings"
    if name not in RULES:
        check_choice(name, [*RULES, "model", OF_ENVIRONMENT], "reward.function")
        function = load_function(name, "reward.function")
        _check_kind(function, settings)
        _check_call(function, settings)
        return function
    if settings.batch:
        raise ValueError(f"reward.batch is for Python functions, but '{name}' scores single samples; remove it")
    _check_call(RULES[name], settings)
    _check_rule_options(RULES[name], settings)
    warm_up(name)
    return RULES[name]


def argument_names(function: RewardCallable, *, batch: bool) -> tuple[str, ...]:
    """Return the names of keyword arguments in calls of a reward function: the names in `_offered` with a parameter.

    A function with `**kwargs` receives only the four basic arguments in addition, because the function may pass all
    its arguments to another function. A function in C with unknown parameters receives the four basic arguments.
    """
    signature = signature_of(function)
    basic = _PER_BATCH if batch else _PER_SAMPLE
    if signature is None:
        return basic
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    offered = _offered(batch=batch)
    return tuple(name for name in offered if name in signature.parameters or (takes_any and name in basic))


def _offered(*, batch: bool) -> tuple[str, ...]:
    """Return every argument that a reward function can have a parameter for."""
    if batch:
        return (*_PER_BATCH, *(_OF_BATCH.get(name, name) for name in _ADDITIONAL))
    return (*_PER_SAMPLE, *_ADDITIONAL)


def _check_kind(function: RewardCallable, settings: ChosenReward) -> None:
    """Check that the parameters match `reward.batch`.

    Raises ValueError if the parameters belong to a function of one sample and `reward.batch` is true, or to a function
    of lists and `reward.batch` is false.
    """
    signature = signature_of(function)
    if signature is None:
        return
    own, others = set(_offered(batch=settings.batch)), set(_offered(batch=not settings.batch))
    of_verl = _VERLS if settings.batch else {f"{name}s" for name in _VERLS}
    parameters = signature.parameters.keys() - settings.options.keys()
    if parameters & (own - others) or not parameters & ((others - own) | of_verl):
        return
    what = f"reward.function '{settings.function}' has the parameters {', '.join(signature.parameters)}"
    if settings.batch:
        raise ValueError(
            f"{what}, which belong to a function of one sample, but reward.batch is true; set reward.batch: false (in "
            f"reward.functions the batch of the function), or take lists: {', '.join(_PER_BATCH)}"
        )
    raise ValueError(
        f"{what}, which belong to a function of many samples, but reward.batch is false; set reward.batch: true (in "
        f"reward.functions the batch of the function), or take one sample: {', '.join(_PER_SAMPLE)}"
    )


def _check_call(function: RewardCallable, settings: ChosenReward) -> None:
    names = argument_names(function, batch=settings.batch)
    offered, remedy = _offered(batch=settings.batch), "change its parameters, reward.options or reward.batch"
    signature = signature_of(function)
    if signature is not None and "solution_str" in signature.parameters and not settings.batch:
        remedy = (
            "rename verl's solution_str to response and ground_truth to answer; data_source and extra_info are in "
            "metadata"
        )
    what = f"reward.function '{settings.function}'"
    check_call(function, names, settings.options, what=what, remedy=remedy, offered=offered)


def _check_rule_options(rule: RewardCallable, settings: ChosenReward) -> None:
    hints = get_type_hints(rule)
    for name, value in settings.options.items():
        hint = hints[name]
        choices = get_args(hint) if get_origin(hint) is Literal else (True, False)
        if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
            allowed = " or ".join(str(choice).lower() for choice in choices)
            raise ValueError(
                f"reward.options.{name} is {value!r}, must be {allowed} for '{settings.function}'; change it"
            )
