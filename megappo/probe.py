"""After a sync engines answer small prompts, and the actor says what it would have said."""

from __future__ import annotations

import time

import torch

from megappo.assembly import Parts
from megappo.measures import check_mismatch
from megappo.models.scoring import score_responses
from megappo.rollout import Completion, GenerateRequest, SamplingParams, finish_rollout, plan_rollout
from megappo.rollout.engine import ServedEngine
from megappo.runtime.exchange import Row
from megappo.types import Prompts

_PROMPT_TOKENS = 8
_RESPONSE_TOKENS = 8


def probe_engines(parts: Parts) -> dict[str, float]:
    """Compare the log-probabilities of every engine's probe with the actor's; a collective of the world.

    Empty for an engine that has nothing to probe. Raises SyncError beyond `rollout.sglang.probe_tolerance_nats`.
    """
    engine, config = parts.engine, parts.config
    if not isinstance(engine, ServedEngine) or not config.rollout.servers.verify:
        return {}
    request = GenerateRequest(parts.train_prompts[0].token_ids[:_PROMPT_TOKENS], seed=0, prompt_id=0)
    params = SamplingParams(
        temperature=config.rollout.temperature,
        max_new_tokens=min(_RESPONSE_TOKENS, config.rollout.max_response_tokens),
        stop_token_ids=parts.stop_token_ids,
        greedy=True,
    )
    started = time.monotonic()
    answers = engine.probe(request, params)
    outputs = parts.actor.score([_row(index, request, answer) for index, answer in answers.items()])
    gaps = {
        index: float((outputs[index][:, 0].cpu() - torch.tensor(answer.logprobs)).abs().max())
        for index, answer in answers.items()
    }
    gap = engine.judge(gaps, _tolerance(parts))
    return {"sync/probe_gap": gap, "sync/probe_seconds": time.monotonic() - started}


def probe_rollout(parts: Parts) -> None:
    """Compare engine and actor on one token per rank, by the way of a step's responses; a collective of the world.

    Raises MismatchError where they are not the same model.
    """
    rank = parts.runtime.rank
    prompts = Prompts((parts.train_prompts[rank % len(parts.train_prompts)],), first_position=rank)
    plan = plan_rollout(prompts, samples_per_prompt=1, seed_of=lambda sample_id: sample_id)
    params = SamplingParams(
        temperature=parts.config.rollout.temperature, max_new_tokens=1, stop_token_ids=parts.stop_token_ids
    )
    rollouts = finish_rollout(plan, parts.engine.generate(plan.requests, params), parts.tokenizer)
    check_mismatch(score_responses(parts.actor, rollouts), rollouts, parts.config.algorithm, parts.runtime)


def _row(index: int, request: GenerateRequest, answer: Completion) -> Row:
    tokens = torch.tensor(request.token_ids + answer.token_ids)
    return Row(index, tokens, torch.zeros(1, len(answer.token_ids)))


def _tolerance(parts: Parts) -> float:
    given = parts.config.rollout.servers.probe_tolerance_nats
    if given is not None:
        return given
    return 1e-3 if parts.config.model.dtype == "float32" else 0.5
