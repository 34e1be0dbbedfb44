"""Answers to the validation prompts, and how good they are."""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.algo.pass_at_k import pass_at_k
from megappo.config.data import ValidationSetSettings
from megappo.data import PromptDataset
from megappo.ppo.parts import Parts
from megappo.ppo.sampling import finish_rollout, prompts_of_rank, request_samples, sample_seed
from megappo.runtime.tally import Tally

_STEP_OF_SEEDS = 0
"""No step of training: every evaluation of a run draws with the same seeds, so that what differs is the model."""


def evaluate_policy(parts: Parts) -> dict[str, float]:
    """Mean reward and length over every validation set with the engine's weights, and `pass@k`; a collective of the
    whole world."""
    tally = Tally()
    for name, settings in parts.config.data.evaluated.items():
        _evaluate_set(f"eval/{name}" if name else "eval", settings, parts.validation_prompts[name], parts, tally)
    return tally.reduce(None, parts.runtime.device)


def _evaluate_set(
    prefix: str, settings: ValidationSetSettings, dataset: PromptDataset, parts: Parts, tally: Tally
) -> None:
    config = parts.config
    own_limit = config.evaluation.max_response_tokens if config.evaluation is not None else None
    prompts = prompts_of_rank(dataset, range(len(dataset)), parts.runtime)
    params = parts.sampling(own_limit or config.rollout.max_response_tokens, temperature=settings.temperature)

    def seed_of(sample_id: int) -> int:
        return sample_id if params.greedy else sample_seed(config.run.seed, _STEP_OF_SEEDS, sample_id)

    wanted = request_samples(prompts, samples_per_prompt=settings.samples, seed_of=seed_of)
    answers = parts.answer(wanted.prompts, wanted.requests, params)
    rollouts = finish_rollout(wanted, answers, parts.tokenizer, parts.vocabulary)
    totals_B = rollouts.totals_B(parts.reward.score_local(rollouts))
    tally.mean(f"{prefix}/reward_mean", totals_B)
    tally.mean(f"{prefix}/response_length", rollouts.response_lengths_B)
    for k in settings.pass_at:
        tally.mean(f"{prefix}/pass@{k}", passed_P(totals_B, settings, k))


def passed_P(totals_B: Tensor, settings: ValidationSetSettings, k: int) -> Tensor:
    """float64: `pass@k` of each prompt, of whose samples the rewards stand together."""
    right_P = (totals_B.view(-1, settings.samples) > settings.right_above).sum(-1)
    passed = [pass_at_k(settings.samples, right, k) for right in right_P.tolist()]
    return torch.tensor(passed, dtype=torch.float64)
