"""After a sync engines answer small prompts, and the actor says what it would have said."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor

from megappo.engines.protocol import GenerateRequest, ServedEngine
from megappo.engines.rows import check_answers
from megappo.megatron.placed import announce, place
from megappo.ppo.measures import check_mismatch
from megappo.ppo.parts import Parts
from megappo.ppo.sampling import finish_rollout, request_samples, routing_of
from megappo.types import Prompts, Samples

_PROMPT_TOKENS = 8
_RESPONSE_TOKENS = 8


def probe_engines(parts: Parts) -> dict[str, float]:
    """Compare the log-probabilities of every engine's probe with the actor's; a collective of the world.

    Empty for an engine that has nothing to probe. Raises SyncError beyond `rollout.sglang.probe_tolerance_nats`.
    """
    engine, config = parts.engine, parts.config
    if not isinstance(engine, ServedEngine) or not config.rollout.servers.probes:
        return {}
    request = GenerateRequest(parts.train_prompts[0].token_ids[:_PROMPT_TOKENS], seed=0, prompt_id=0)
    params = parts.sampling(min(_RESPONSE_TOKENS, config.rollout.max_response_tokens), temperature=0.0, trained_on=True)
    params = replace(params, min_new_tokens=0)  # of the actor's distribution
    started = time.monotonic()
    answers = engine.probe(request, params)
    check_answers(answers.values(), parts.vocabulary, parts.answerer)
    samples = Samples(
        torch.tensor(list(answers), dtype=torch.int64),
        tuple(torch.tensor(request.token_ids + answer.token_ids) for answer in answers.values()),
        torch.tensor([len(answer.token_ids) for answer in answers.values()], dtype=torch.int64),
        routing=None if params.routing is None else tuple(routing_of(answer) for answer in answers.values()),
    )
    outputs_BR = _as_the_actor_says(parts, samples)
    gaps = {
        index: float((output_R[: len(answer.logprobs)] - torch.tensor(answer.logprobs)).abs().max())
        for output_R, (index, answer) in zip(outputs_BR, answers.items(), strict=True)
    }
    default_nats = 1e-3 if config.model.dtype == "float32" else 0.5
    gap = engine.judge(gaps, config.rollout.servers.probe_tolerance_nats or default_nats)
    return {"sync/probe_gap": gap, "sync/probe_seconds": time.monotonic() - started}


def probe_rollout(parts: Parts) -> None:
    """Compare engine and actor on one token per rank, by the way of a step's responses; a collective of the world.

    Nothing is compared without an engine (`rollout.load_from`). Raises MismatchError where they are not the same model.
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


def _as_the_actor_says(parts: Parts, samples: Samples) -> Tensor:
    """Its log-probabilities, (B, R). What of it is offloaded leaves the device again, to the engine, which is awake."""
    outputs_BR = place(parts.actor, announce(samples, parts.runtime.device)).forward()
    parts.actor.rest()
    return outputs_BR
