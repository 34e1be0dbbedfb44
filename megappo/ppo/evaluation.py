"""Greedy answers to the validation prompts."""

from __future__ import annotations

from megappo.ppo.parts import Parts
from megappo.ppo.sampling import finish_rollout, prompts_of_rank, request_samples
from megappo.runtime.tally import Tally


def evaluate_policy(parts: Parts) -> dict[str, float]:
    """Mean reward and length over `data.validation` with the engine's weights; a collective of the whole world."""
    config, dataset = parts.config, parts.validation_prompts
    assert dataset is not None
    own_limit = config.evaluation.max_response_tokens if config.evaluation is not None else None
    prompts = prompts_of_rank(dataset, range(len(dataset)), parts.runtime)
    params = parts.sampling(own_limit or config.rollout.max_response_tokens, greedy=True)
    wanted = request_samples(prompts, samples_per_prompt=1, seed_of=lambda sample_id: sample_id)
    answers = parts.answer(wanted.prompts, wanted.requests, params)
    rollouts = finish_rollout(wanted, answers, parts.tokenizer)
    tally = Tally()
    tally.mean("eval/reward_mean", rollouts.totals_B(parts.reward.score_local(rollouts)))
    tally.mean("eval/response_length", rollouts.response_lengths_B)
    return tally.reduce(None, parts.runtime.device)
