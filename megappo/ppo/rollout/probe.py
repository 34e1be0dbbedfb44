"""Probes of the engines after a sync: each engine responds to two prompts, and the actor scores the responses."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from megappo.engines.base import SyncError
from megappo.engines.protocol import GenerateRequest
from megappo.engines.requests import generate
from megappo.engines.rows import check_answers
from megappo.megatron.placed import announce, place
from megappo.ppo.assembly.components import RunComponents
from megappo.ppo.reports.measures import check_mismatch
from megappo.ppo.rollout.sampling import finish_rollout, request_samples, routing_of
from megappo.runtime.ranks.objects import all_gather_objects
from megappo.types import Prompts, Samples

_PROMPT_TOKENS = (8, 1024)
"""Lengths of the two prompts. Engines use different kernels or CUDA graphs for such different lengths."""
_RESPONSE_TOKENS = 8


def probe_engines(parts: RunComponents) -> dict[str, float]:
    """Compare the log-probabilities of each replica's probe with the actor. A collective of the world.

    Empty for an engine without replicas. Raises SyncError above `probe_tolerance_nats` of the servers.
    """
    engine, config = parts.engine, parts.config
    if not config.rollout.server_settings.probes or not any(all_gather_objects(bool(engine.replicas))):
        return {}
    params = parts.sampling(min(_RESPONSE_TOKENS, config.rollout.max_response_tokens), temperature=0.0, trained_on=True)
    params = replace(params, min_new_tokens=0)  # a minimum length would change the distribution
    started, gaps = time.monotonic(), dict[int, float]()
    replicas = engine.replicas
    for request in _requests(parts):
        answers = generate(engine, [replace(request, replica=replica) for replica in replicas], params)
        check_answers(answers, parts.vocabulary, parts.answerer)
        samples = Samples(
            torch.tensor(replicas, dtype=torch.int64),
            tuple(torch.tensor(request.token_ids + answer.token_ids) for answer in answers),
            torch.tensor([len(answer.token_ids) for answer in answers], dtype=torch.int64),
            routing=None if params.routing is None else tuple(map(routing_of, answers)),
        )
        for output_R, replica, answer in zip(_actor_logprobs(parts, samples), replicas, answers, strict=True):
            gap = (output_R[: len(answer.logprobs)] - torch.tensor(answer.logprobs)).abs().max()
            gaps[replica] = float(torch.maximum(gap, torch.tensor(gaps.get(replica, 0.0))))  # NaN is propagated
    tolerance = config.rollout.server_settings.probe_tolerance_nats or default_tolerance_nats(config.model.dtype)
    return {"sync/probe_gap": _judge(parts, gaps, tolerance), "sync/probe_seconds": time.monotonic() - started}


def _judge(parts: RunComponents, gaps: Mapping[int, float], tolerance_nats: float) -> float:
    """Return the largest gap in nats over the replicas of all ranks. A collective of the world.

    Raises SyncError if a gap exceeds the tolerance.
    """
    gap_of = {replica: gap for of_rank in all_gather_objects(dict(gaps)) for replica, gap in of_rank.items()}
    worst = max(gap_of, key=lambda replica: math.inf if math.isnan(gap_of[replica]) else gap_of[replica])
    if not gap_of[worst] <= tolerance_nats:
        raise SyncError(
            f"after weight sync {parts.engine.version} server {worst} has log-probabilities {gap_of[worst]:.3g} nats "
            f"from those of the trainer, above rollout.servers.probe_tolerance_nats {tolerance_nats:g}; the "
            "server computes a different result with the same weights"
        )
    return gap_of[worst]


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
    completions = generate(parts.engine, wanted.requests, params)
    rollouts = finish_rollout(wanted, completions, parts.tokenizer, parts.vocabulary, parts.answerer)
    logprob_BR = _actor_logprobs(parts, rollouts)
    check_mismatch(logprob_BR, rollouts, parts.config.algorithm, parts.runtime, parts.engine.version)


def _actor_logprobs(parts: RunComponents, samples: Samples) -> Tensor:
    """Return the log-probabilities of the actor, (B, R).

    Offloads the actor afterwards, because the awake engine needs the memory.
    """
    outputs_BR = place(parts.actor, announce(samples, parts.runtime.device)).forward()
    parts.actor.rest()
    return outputs_BR
