"""Detection of unusual updates, and descriptions of their samples."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megappo.config import Config
from megappo.config.sections.algorithm import JumpSettings
from megappo.types import Experience

_REMEMBERED = 50
_FEWEST = 10
"""Minimum number of earlier updates for a median."""


@dataclass(frozen=True)
class Jump:
    """An unusual update."""

    role: str
    minibatch: int
    """Number of the minibatch in the step, from 0."""
    reasons: tuple[str, ...]
    samples: tuple[dict[str, Any], ...]
    """This rank's samples of the minibatch as JSON types."""


class JumpWatch:
    """Stores the recent gradient norms of one role. The same numbers lead to the same decision on every rank."""

    def __init__(self, settings: JumpSettings, clip_norm: float) -> None:
        """`clip_norm` is `clip_grad_norm` of the role. Smaller gradients are applied unclipped and are not unusual."""
        self._settings, self._clip_norm = settings, clip_norm
        self._norms: deque[float] = deque(maxlen=_REMEMBERED)

    def judge(self, grad_norm: float, kl: float | None) -> tuple[str, ...]:
        """Return the reasons why an applied update is unusual, or an empty tuple.

        A gradient norm is not unusual if the recent updates had a larger one: a policy that is nearly always right
        has tiny gradients and, at each wrong answer, a gradient of ordinary size.

        Args:
            grad_norm: L2 norm of the gradient before clipping.
            kl: KL(old || new) of the minibatch before the update, in nats per token. None for the critic.
        """
        reasons = []
        ratio, bound = self._settings.grad_norm_ratio, self._settings.kl_nats
        usual = statistics.median(self._norms) if len(self._norms) >= _FEWEST else None
        largest = max((*self._norms, self._clip_norm))
        if ratio is not None and usual is not None and grad_norm > max(ratio * usual, largest):
            reasons.append(f"gradient norm {grad_norm:.3g}, usually {usual:.3g}")
        if bound is not None and kl is not None and kl > bound:
            reasons.append(f"KL to the old policy {kl:.3g} nats per token, above {bound:g}")
        self._norms.append(grad_norm)
        return tuple(reasons)

    def state_dict(self) -> list[float]:
        """Return the state for a checkpoint."""
        return list(self._norms)

    def load_state_dict(self, state: Sequence[float]) -> None:
        """Restore the result of `state_dict`."""
        self._norms = deque(state, maxlen=_REMEMBERED)


def watches_of(config: Config, roles: Iterable[str]) -> dict[str, JumpWatch]:
    """Return a watch for each of these trained roles."""
    return {role: JumpWatch(config.algorithm.jumps, config.trained[role].optimizer.clip_grad_norm) for role in roles}


def describe_samples(experience: Experience, chosen: Sequence[int]) -> tuple[dict[str, Any], ...]:
    """Return descriptions of these samples of this rank as JSON types."""
    scored = experience.scored
    rollouts, mask_BR = scored.rollouts, experience.loss_mask_BR
    total_rewards_B = rollouts.total_rewards_B(scored.scores_B)
    push_B = (experience.advantages_BR * mask_BR).abs().sum(-1)
    lowest_B = scored.old_logprob_BR.masked_fill(~mask_BR, 0.0).amin(-1)
    return tuple(
        {
            "sample_id": int(rollouts.sample_ids_B[b]),
            "prompt": rollouts.prompts[b].text,
            "response": rollouts.responses[b],
            "raw_response": rollouts.raw_responses[b],
            "score": float(total_rewards_B[b]),
            "tokens": int(rollouts.response_lengths_B[b]),
            "sum_abs_advantage": float(push_B[b]),
            "lowest_old_logprob": float(lowest_B[b]),
        }
        for b in chosen
    )
