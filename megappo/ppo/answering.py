"""Generation of responses by a function of the user's (`rollout.generation`) instead of the engine alone.

The function is called by keyword on every rank at the same time, with

    prompts    a `Prompt` for each request, in the same order
    requests   `GenerateRequest`s, of which a rank may have none
    params     `SamplingParams` for all of them
    generate   `generate(requests, params)` of the engine, which every rank has to call equally often

and returns a `Completion` for each request: token ids as they were sampled, with their log-probabilities at the
temperature of `params`, the stop token included. Evaluations call it too, with `params.greedy` or with a temperature of
their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from megappo.config.schema import RolloutSettings
from megappo.engines.protocol import Completion, Engine, GenerateRequest, SamplingParams
from megappo.engines.rows import check_answers, check_requests
from megappo.engines.stopping import stopped
from megappo.errors import RunError
from megappo.plugins import check_call, load_function
from megappo.types import Prompt

_ARGUMENTS = ("prompts", "requests", "params", "generate")


class Generation(Protocol):
    """Signature of the function that `find_generation` returns."""

    def __call__(
        self,
        *,
        prompts: Sequence[Prompt],
        requests: Sequence[GenerateRequest],
        params: SamplingParams,
        generate: Callable[..., list[Completion]],
    ) -> list[Completion]: ...


def find_generation(settings: RolloutSettings) -> Generation | None:
    """The function that `rollout.generation` names; None: the engine generates by itself. Raises ValueError where it
    cannot be imported or called."""
    if settings.generation is None:
        return None
    function = load_function(settings.generation, "rollout.generation")
    what, remedy = f"rollout.generation '{settings.generation}'", "change its parameters or rollout.generation_options"
    check_call(function, _ARGUMENTS, settings.generation_options, what=what, remedy=remedy)
    return partial(function, **settings.generation_options)


def generated(
    function: Generation,
    engine: Engine,
    prompts: Sequence[Prompt],
    requests: Sequence[GenerateRequest],
    params: SamplingParams,
    rows: int | None = None,
) -> list[Completion]:
    """Completions that the function returns for the requests.

    Raises RunError unless there is one for each request, and for token ids of `rows` or above; None: any id is allowed.
    """

    def generate(asked: Sequence[GenerateRequest], *others: Any, **named: Any) -> list[Completion]:
        check_requests(asked, rows, "rollout.generation")
        return engine.generate(asked, *others, **named)

    found: Any = function(prompts=prompts, requests=requests, params=params, generate=generate)
    if not isinstance(found, list) or len(found) != len(requests):
        count = f"{len(found)} of them" if isinstance(found, list) else f"a {type(found).__name__}"
        raise RunError(f"rollout.generation returned {count}, must be a list of {len(requests)} completions; fix it")
    for each, request in zip(found, requests, strict=True):
        if not isinstance(each, Completion) or not 0 < len(each.token_ids) == len(each.logprobs):
            raise RunError(
                "rollout.generation returned something else than completions with a log-probability for each of their "
                "tokens, at least one; fix it"
            )
        if len(each.token_ids) > request.most_tokens(params):
            raise RunError(
                f"rollout.generation returned {len(each.token_ids)} tokens, above the limit of "
                f"{request.most_tokens(params)} in request.most_tokens(params); heed it"
            )
    check_answers(found, rows, "rollout.generation")
    return [stopped(each, params) for each in found]
