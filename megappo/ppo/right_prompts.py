"""Which prompts of a step were answered well, for the curriculum."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megappo.data.mixture import MixedPrompts
from megappo.ppo.parts import Parts
from megappo.runtime.objects import all_gather_objects
from megappo.types import Rollouts


def note_right_prompts(
    step: int, rollouts: Rollouts, scores_B: Tensor, parts: Parts, before: Mapping[str, float]
) -> dict[str, float]:
    """Tell the curriculum, where there is one, the prompts of all ranks whose rewards were above its limit; a
    collective of the world.

    Returns how many they are, of each source of a mixture too, and how many prompts rest; `before` has those of the
    rounds of the step before this one.
    """
    curriculum = parts.curriculum
    if curriculum is None:
        return {}
    here = _right_positions(rollouts, scores_B, curriculum.right_above, parts)
    right = [position for of_rank in all_gather_objects(here) for position in of_rank]
    curriculum.note(step, right)
    metrics = {"curriculum/right": float(len(right))}
    if isinstance(parts.train_prompts, MixedPrompts):
        names = [parts.train_prompts[position].source for position in right]
        metrics |= {f"source/{name}/right": float(names.count(name)) for name in parts.train_prompts.names}
    summed = {name: before.get(name, 0.0) + number for name, number in metrics.items()}
    return {**summed, "curriculum/resting": float(parts.cursor.resting)}


def _right_positions(rollouts: Rollouts, scores_B: Tensor, above: float, parts: Parts) -> list[int]:
    """Of this rank's prompts, in their order; failed episodes say nothing of a prompt."""
    rewards: dict[int, list[float]] = {}
    prompts = {}
    total_rewards_B, failed_B = rollouts.total_rewards_B(scores_B), rollouts.group_ids_B < 0
    for b, sample_id in enumerate(rollouts.sample_ids_B.tolist()):
        group = sample_id // parts.config.rollout.samples_per_prompt
        prompts[group] = rollouts.prompts[b]
        rewards.setdefault(group, []).extend([] if failed_B[b] else [float(total_rewards_B[b])])
    right = [group for group, found in rewards.items() if found and sum(found) / len(found) > above]
    return [parts.train_prompts.position_of(prompts[group]) for group in right]
