"""Evaluation: responses to the validation prompts, and their rewards."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

import torch
from torch import Tensor

from megappo.algo.pass_at_k import pass_at_k
from megappo.config.sections.data import ValidationSetSettings
from megappo.data import PromptDataset
from megappo.errors import one_line
from megappo.observe.terminal.messages import show_message
from megappo.ppo.assembly.components import RunComponents
from megappo.ppo.rollout.sampling import finish_rollout, prompts_of_rank, request_samples, sample_seed
from megappo.rewards.processes.workers import too_many_failures
from megappo.runtime.ranks.objects import all_gather_objects, first_of_ranks
from megappo.runtime.ranks.tally import Tally
from megappo.types import Rollouts

_STEP_OF_SEEDS = 0
"""Step number in seeds. All evaluations of a run use the same seeds, so that only the model differs."""


def evaluate_policy(parts: RunComponents, report: Callable[[str], object] = show_message) -> dict[str, float]:
    """Return the mean reward, mean length and `pass@k` of every validation set. A collective of the world.

    Responses come from the engine weights. Failed samples count only in the mean length. `eval/failures` is the share
    of failed samples. The main rank prints their number and the first reason. Raises RewardError on every rank if too
    many rewards failed.
    """
    tally = Tally()
    for name, settings in parts.config.data.evaluated.items():
        prefix = f"eval/{name}" if name else "eval"
        tally.mean(f"{prefix}/dropped", torch.tensor([parts.validation_prompts[name].dropped]))
        sentence = _evaluate_set(prefix, settings, parts.validation_prompts[name], parts, tally)
        if sentence and parts.runtime.is_main:
            report(f"{prefix}: {sentence}")
    return tally.reduce(parts.runtime.device)


def _evaluate_set(
    prefix: str, settings: ValidationSetSettings, dataset: PromptDataset, parts: RunComponents, tally: Tally
) -> str:
    """Evaluate one set into `tally`. Returns a message about failures on any rank, or ""."""
    config = parts.config
    own_limit = config.evaluation.max_response_tokens if config.evaluation is not None else None
    prompts = prompts_of_rank(dataset, range(len(dataset)), parts.runtime)
    params = parts.sampling(own_limit or config.rollout.max_response_tokens, temperature=settings.temperature)

    def seed_of(sample_id: int) -> int:
        return sample_id if params.greedy else sample_seed(config.run.seed, _STEP_OF_SEEDS, sample_id)

    most = config.rollout.max_total_tokens
    batch = request_samples(prompts, samples_per_prompt=settings.samples, seed_of=seed_of, max_total_tokens=most)
    answers = parts.answer(batch.prompts, batch.requests, params)
    rollouts = finish_rollout(batch, answers, parts.tokenizer, parts.vocabulary, parts.answerer)
    failures = dict[int, str]()
    assert parts.reward is not None, "validated: evaluations need an engine"
    total_rewards_B = rollouts.total_rewards_B(parts.reward.score_local(rollouts, failures))
    sentence = _failure_message(parts, rollouts, failures)
    graded_B = torch.tensor([b not in failures for b in range(len(total_rewards_B))], dtype=torch.bool)
    tally.mean(f"{prefix}/reward_mean", total_rewards_B, graded_B)
    tally.mean(f"{prefix}/failures", ~graded_B)
    tally.mean(f"{prefix}/response_length", rollouts.response_lengths_B)
    for k in settings.pass_at:
        tally.mean(f"{prefix}/pass@{k}", passed_P(total_rewards_B, settings, k, graded_B))
    return sentence


def _failure_message(parts: RunComponents, rollouts: Rollouts, failures: MutableMapping[int, str]) -> str:
    """Return a message with the number of ungraded samples of all ranks and the first reason.

    Adds failed episodes to `failures`, which contains the samples with failed rewards. Raises RewardError on every
    rank if too many rewards failed.
    """
    rewards, settings = len(failures), parts.config.reward
    for b, episode in enumerate(rollouts.episodes.of_samples if rollouts.episodes is not None else ()):
        if episode.failure:
            failures[b] = f"{episode.failure}: {episode.reason}"
    counts = all_gather_objects((rewards, len(failures), len(rollouts.responses)))
    failed_rewards, failed, total = map(sum, zip(*counts, strict=True))
    reasons = first_of_ranks(list(failures.values()))
    if failed_rewards > settings.max_failure_fraction * total:
        raise too_many_failures(settings, failed_rewards, total, [(0, reason) for reason in reasons])
    return f"{failed} of {total} answers have no grade; the first: {one_line(reasons[0])}" if failed else ""


def passed_P(
    total_rewards_B: Tensor, settings: ValidationSetSettings, k: int, graded_B: Tensor | None = None
) -> Tensor:
    """Return `pass@k` of each prompt as float64. The samples of a prompt are consecutive.

    Ungraded samples do not count. Prompts with fewer than `k` graded samples are omitted.
    """
    totals_PS = total_rewards_B.view(-1, settings.samples)
    graded_PS = torch.ones_like(totals_PS, dtype=torch.bool) if graded_B is None else graded_B.view(totals_PS.shape)
    right_P = ((totals_PS > settings.right_above) & graded_PS).sum(-1)
    counts = zip(graded_PS.sum(-1).tolist(), right_P.tolist(), strict=True)
    return torch.tensor([pass_at_k(n, right, k) for n, right in counts if n >= k], dtype=torch.float64)
