"""Probes of the engines after a sync: each engine responds to two prompts, and the actor scores the responses."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import torch
from torch import Tensor

from megappo.engines.protocol import GenerateRequest, ServedEngine
from megappo.engines.rows import check_answers
from megappo.megatron.placed import announce, place
from megappo.ppo.components import RunComponents
from megappo.ppo.measures import check_mismatch
from megappo.ppo.sampling import finish_rollout, request_samples, routing_of
from megappo.types import Prompts, Samples

_PROMPT_TOKENS = (8, 1024)
"""Lengths of the two prompts. Engines use different kernels or CUDA graphs for such different lengths."""
_RESPONSE_TOKENS = 8


def probe_engines(parts: RunComponents) -> dict[str, float]:
    """Compare the log-probabilities of each engine's probe with the actor. A collective of the world.

    Empty for an engine that cannot be probed. Raises SyncError above `probe_tolerance_nats` of the servers.
    """
    engine, config = parts.engine, parts.config
    if not isinstance(engine, ServedEngine) or not config.rollout.servers.probes:
        return {}
    params = parts.sampling(min(_RESPONSE_TOKENS, config.rollout.max_response_tokens), temperature=0.0, trained_on=True)
    params = replace(params, min_new_tokens=0)  # a minimum length would change the distribution
    started, gaps = time.monotonic(), dict[int, float]()
    for request in _requests(parts):
        answers = engine.probe(request, params)
        check_answers(answers.values(), parts.vocabulary, parts.answerer)
        samples = Samples(
            torch.tensor(list(answers), dtype=torch.int64),
            tuple(torch.tensor(request.token_ids + answer.token_ids) for answer in answers.values()),
            torch.tensor([len(answer.token_ids) for answer in answers.values()], dtype=torch.int64),
            routing=None if params.routing is None else tuple(routing_of(answer) for answer in answers.values()),
        )
        for output_R, (index, answer) in zip(_as_the_actor_says(parts, samples), answers.items(), strict=True):
            gap = (output_R[: len(answer.logprobs)] - torch.tensor(answer.logprobs)).abs().max()
            gaps[index] = float(torch.maximum(gap, torch.tensor(gaps.get(index, 0.0))))  # NaN is propagated
    given_nats = config.rollout.servers.probe_tolerance_nats
    gap_nats = engine.judge(gaps, given_nats or default_tolerance_nats(config.model.dtype))
    return {"sync/probe_gap": gap_nats, "sync/probe_seconds": time.monotonic() - started}


def _requests(parts: RunComponents) -> list[GenerateRequest]:
    """Return a short request, and a long request if the run may have longer prompts.

    The tokens are concatenated training prompts, cut to the lengths of the requests.
    """
    longest, total = parts.config.data.max_prompt_tokens, parts.config.rollout.max_total_tokens
    prompts = (parts.train_prompts[position] for position in range(len(parts.train_prompts)))
    tokens = itertools.chain.from_iterable(prompt.token_ids for prompt in prompts)
    found = tuple(itertools.islice(tokens, min(longest, max(_PROMPT_TOKENS))))
    wanted = dict.fromkeys(found[:count] for count in _PROMPT_TOKENS)
    rooms = ((token_ids, None if total is None else total - len(token_ids)) for token_ids in wanted)
    return [GenerateRequest(token_ids, seed=0, prompt_id=0, max_new_tokens=room) for token_ids, room in rooms]


def default_tolerance_nats(dtype: str) -> float:
    """Return the largest difference of token log-probabilities that rounding in `dtype` of the models explains."""
    return 1e-3 if dtype == "float32" else 0.5


def probe_rollout(parts: RunComponents) -> None:
    """Compare engine and actor on one token per rank, with the code for step responses. A collective of the world.

    Does nothing without an engine (`rollout.load_from`). Raises MismatchError if engine and actor are different models.
    """
    if parts.config.rollout.load_from is not None:
        return
    rank = parts.runtime.rank
    prompts = Prompts((parts.train_prompts[rank % len(parts.train_prompts)],), first_position=rank)
    wanted = request_samples(prompts, samples_per_prompt=1, seed_of=lambda sample_id: sample_id)
    params = replace(parts.sampling(1, trained_on=True), min_new_tokens=0)
    completions = parts.engine.generate(wanted.requests, params)
    rollouts = finish_rollout(wanted, completions, parts.tokenizer, parts.vocabulary, parts.answerer)
    logprob_BR = _as_the_actor_says(parts, rollouts)
    check_mismatch(logprob_BR, rollouts, parts.config.algorithm, parts.runtime, parts.engine.version)


def _as_the_actor_says(parts: RunComponents, samples: Samples) -> Tensor:
    """Return the log-probabilities of the actor, (B, R).

    Offloads the actor afterwards, because the awake engine needs the memory.
    """
    outputs_BR = place(parts.actor, announce(samples, parts.runtime.device)).forward()
    parts.actor.rest()
    return outputs_BR
