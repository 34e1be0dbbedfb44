"""Reports the well answered prompts of a step to the curriculum."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megappo.data.mixture import MixedPrompts
from megappo.ppo.assembly.components import RunComponents
from megappo.ppo.rollout.selection import rewards_of_groups
from megappo.runtime.ranks.objects import all_gather_objects
from megappo.types import Rollouts


def report_solved_prompts(
    step: int, rollouts: Rollouts, scores_B: Tensor, parts: RunComponents, before: Mapping[str, float]
) -> dict[str, float]:
    """Report prompts with a mean reward above the limit of the curriculum. A collective of the world.

    Returns the number of these prompts, also by source of a mixture, and the number of resting prompts. `before`
    contains the numbers of earlier rounds of the step. Returns {} without a curriculum.
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


def _right_positions(rollouts: Rollouts, scores_B: Tensor, above: float, parts: RunComponents) -> list[int]:
    """Return the positions of this rank's well answered prompts in order. Failed episodes do not count."""
    samples = parts.config.rollout.samples_per_prompt
    prompts = {i // samples: rollouts.prompts[b] for b, i in enumerate(rollouts.sample_ids_B.tolist())}
    rewards = rewards_of_groups(rollouts, scores_B, samples)
    right = [group for group, found in rewards.items() if found and sum(found) / len(found) > above]
    return [parts.train_prompts.position_of(prompts[group]) for group in right]
