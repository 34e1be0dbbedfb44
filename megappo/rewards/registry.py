"""Reward functions by their names in the configuration, and their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args, get_origin, get_type_hints

from megappo.errors import show
from megappo.network.http_client import check_proxy
from megappo.plugins import check_call, check_choice, load_function, signature_of
from megappo.rewards.http import scores, secret_headers
from megappo.rewards.judge import judge_key
from megappo.rewards.rules import GOLDS, RULES, warm_up

if TYPE_CHECKING:
    from megappo.config.reward import RewardSettings
    from megappo.types import Prompt

RewardCallable = Callable[..., Any]
"""A rule or a user's function. It takes what its author wrote, see `argument_names`, and options; what it returns is
checked in the worker."""
OF_ENVIRONMENT = "environment"
"""Name for rewards of the environment alone, without a function."""
_PER_SAMPLE = ("prompt", "response", "answer", "metadata")
_PER_BATCH = ("prompts", "responses", "answers", "metadata")
_FURTHER = ("raw_response", "prompt_token_ids", "token_ids", "truncated", "conversation")
"""Further arguments, for functions that have parameters for them."""
OF_EACH = {
    "prompts": "prompt", "responses": "response", "answers": "answer", "raw_responses": "raw_response",
    "conversations": "conversation",
}  # fmt: skip
"""For arguments of batch functions with another name: the argument of one sample that they are a list of."""
_VERLS = {"solution_str", "ground_truth"}
"""Parameters of verl's functions of one sample. Functions of many samples add an `s` to these names."""
_OF_BATCH = {one: many for many, one in OF_EACH.items()}


class RewardChoice(NamedTuple):
    """The reward function as it is sent to a worker, which does not import the configuration."""

    function: str
    options: dict[str, Any]
    batch: bool


ChosenReward: TypeAlias = "RewardSettings | RewardChoice"


def check_reward(settings: RewardSettings) -> None:
    """Raises ValueError if the reward cannot be used: the name is unknown, the import fails, the function does not take
    the options, the key of a server is missing, or a server requires a SOCKS proxy."""
    if settings.judge is not None:
        judge_key(settings.judge)
        if settings.judge.url is not None:
            check_proxy(settings.judge.url)
        return
    if settings.function in ("model", OF_ENVIRONMENT):
        unused = [name for name, value in (("options", settings.options), ("batch", settings.batch)) if value]
        if unused:
            raise ValueError(f"reward.function '{settings.function}' takes no reward.{unused[0]}; remove it")
        return
    if resolve(settings) is scores:
        secret_headers(**settings.options)
        check_proxy(str(settings.options.get("url", "")))


def check_prompts(settings: RewardSettings, prompts: Sequence[Prompt], source: str) -> None:
    """Raises ValueError for prompts whose answers no function is for, or with whose own answer a rule cannot compare,
    before a run begins; `source` names where they are from."""
    rules = {name: str(term.function) for name, (_, term) in settings.terms.items()}
    problems: dict[str, list[tuple[int, str]]] = {}
    for prompt in prompts:
        own = [rule for name, rule in rules.items() if settings.is_for(name, prompt.metadata)]
        if not own:
            problems.setdefault("", []).append((prompt.index, _without_function(settings, prompt)))
        for rule in own:
            if rule in GOLDS and (problem := _gold_problem(rule, prompt.answer)):
                problems.setdefault(rule, []).append((prompt.index, problem))
    for _, found in sorted(problems.items()):
        first, problem = found[0]
        others = f" (and so for {len(found) - 1} more prompts)" if len(found) > 1 else ""
        raise ValueError(f"prompt {first} of '{source}': {problem}{others}")


def _without_function(settings: RewardSettings, prompt: Prompt) -> str:
    named = sorted({source for term in settings.functions.values() for source in term.data_sources or ()})
    return (
        f"its data_source is {show(prompt.metadata.get('data_source'))}, and reward.functions are for "
        f"{', '.join(named)}; add it to the data_sources of one, or a function without them"
    )


def _gold_problem(rule: str, answer: str | None) -> str:
    try:
        GOLDS[rule](answer)
    except ValueError as error:
        return str(error)
    return ""


def resolve(settings: ChosenReward) -> RewardCallable:
    """The reward function, ready to be called with samples and `settings.options`: a rule, or a Python function.

    Raises ValueError with the nearest name, or with what of a Python path or of the options does not fit.
    """
    name = settings.function
    assert name is not None, "one of several functions has settings of its own"
    if name not in RULES:
        check_choice(name, [*RULES, "model", OF_ENVIRONMENT], "reward.function")
        function = load_function(name, "reward.function")
        _check_kind(function, settings)
        _check_call(function, settings)
        return function
    if settings.batch:
        raise ValueError(f"reward.batch is for Python functions, '{name}' scores sample by sample; remove it")
    _check_call(RULES[name], settings)
    _check_rule_options(RULES[name], settings)
    warm_up(name)
    return RULES[name]


def argument_names(function: RewardCallable, *, batch: bool) -> tuple[str, ...]:
    """The keyword arguments that a reward function is called with: those of `_offered` that it has parameters for.

    A function with `**kwargs` gets only the four basic arguments besides: it may pass the others on to a function that
    does not expect them. A function written in C whose parameters are not known gets the four basic ones too.
    """
    signature = signature_of(function)
    basic = _PER_BATCH if batch else _PER_SAMPLE
    if signature is None:
        return basic
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    offered = _offered(batch=batch)
    return tuple(name for name in offered if name in signature.parameters or (takes_any and name in basic))


def _offered(*, batch: bool) -> tuple[str, ...]:
    """Every argument that a reward function may have a parameter for."""
    if batch:
        return (*_PER_BATCH, *(_OF_BATCH.get(name, name) for name in _FURTHER))
    return (*_PER_SAMPLE, *_FURTHER)


def _check_kind(function: RewardCallable, settings: ChosenReward) -> None:
    """Raise ValueError if the parameter names belong to a function of one sample and `reward.batch` is true, or to a
    function of lists and `reward.batch` is false."""
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
            "what verl calls solution_str is response here, and ground_truth answer; data_source and extra_info are in "
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
            words = " or ".join(str(choice).lower() for choice in choices)
            raise ValueError(
                f"reward.options.{name} is {value!r}, must be {words} for '{settings.function}'; change it"
            )
