"""Generation of responses by a user function (`rollout.generation`) that calls the engine.

The function is called with keyword arguments on every rank at the same time:

    prompts    a `Prompt` for each request, in the same order
    requests   a sequence of `GenerateRequest`, possibly empty on a rank
    params     `SamplingParams` of all requests
    generate   `generate(requests, params)`, which returns the completions of the engine in order. Every rank must call
               this function equally often.

The function returns a `Completion` for each request. A completion contains the sampled token ids including the stop
token, and their log-probabilities at the temperature of `params`. Evaluations also call the function, with
`params.greedy` or with the temperature of the evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from megappo.config.rollout import RolloutSettings
from megappo.engines.protocol import Completion, Engine, GenerateRequest, SamplingParams
from megappo.engines.requests import generate
from megappo.engines.rows import check_answers, check_requests
from megappo.engines.stretches import stopped
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
    """Return the function of `rollout.generation`, or None if the engine generates without a user function.

    Raises ValueError if the function cannot be imported or called.
    """
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
    """Return the completions of the function for the requests.

    Raises RunError if the number of completions is wrong, or if a token id is `rows` or above. None allows any id.
    """

    def generate_checked(own_requests: Sequence[GenerateRequest], own_params: SamplingParams) -> list[Completion]:
        check_requests(own_requests, rows, "rollout.generation")
        return generate(engine, own_requests, own_params)

    found: Any = function(prompts=prompts, requests=requests, params=params, generate=generate_checked)
    if not isinstance(found, list) or len(found) != len(requests):
        count = f"{len(found)} of them" if isinstance(found, list) else f"a {type(found).__name__}"
        raise RunError(f"rollout.generation returned {count}, must be a list of {len(requests)} completions; fix it")
    for each, request in zip(found, requests, strict=True):
        if not isinstance(each, Completion) or not 0 < len(each.token_ids) == len(each.logprobs):
            raise RunError(
                "rollout.generation must return completions with at least one token and a log-probability for "
                "each token; fix the function"
            )
        if len(each.token_ids) > request.most_tokens(params):
            raise RunError(
                f"rollout.generation returned {len(each.token_ids)} tokens, above the limit of "
                f"{request.most_tokens(params)} in request.most_tokens(params); return at most this number of "
                "tokens"
            )
    check_answers(found, rows, "rollout.generation")
    return [stopped(each, params) for each in found]
