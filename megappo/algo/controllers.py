"""Controllers that adjust the weight of a KL term from step to step."""

from __future__ import annotations

import math
from collections.abc import Mapping


def _finite(current_kl: float) -> float:
    if not math.isfinite(current_kl):
        raise ValueError(f"the measured KL is {current_kl}, must be finite; the log-probabilities are broken")
    return current_kl


class FixedKLController:
    """A constant weight of a KL term, and the base of the controllers that change it."""

    def __init__(self, value: float) -> None:
        self.first = self.value = value
        """`first`: the weight of the settings. `value`: the one in force."""

    def update(self, current_kl: float, n_steps: int) -> None:
        """Raise ValueError for a KL that is not finite; the weight stays."""
        _finite(current_kl)

    def state_dict(self) -> dict[str, float]:
        """State for a checkpoint."""
        return {"value": self.value, "first": self.first}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint. A constant weight is that of the settings, which may have changed since."""

    def _continued(self, state: Mapping[str, float]) -> float:
        """The weight to continue with: the checkpoint's, or that of the settings where it is another one since."""
        return float(state["value"]) if state.get("first", self.first) == self.first else self.first


class AdaptiveKLController(FixedKLController):
    """A weight that moves towards a target KL: value *= 1 + clip(kl/target - 1, -.2, .2) * n_steps / horizon.

    Ziegler et al. 2019, section 2.2. `target` and `current_kl` are in nats, both per token or both per response;
    `horizon` and `n_steps` in samples. More samples than the horizon, which settings refuse, count as the horizon: from
    five times as many on, the formula would turn the weight negative.
    """

    def __init__(self, value: float, target: float, horizon: int) -> None:
        super().__init__(value)
        self.target, self.horizon = target, horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adjust the weight after `n_steps` samples whose mean KL was `current_kl`."""
        error = min(max(_finite(current_kl) / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * min(n_steps / self.horizon, 1.0)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint; with the first weight of the settings where that has changed since."""
        self.value = self._continued(state)


class PenaltyController(FixedKLController):
    """The weight of PPO-penalty: doubled above 1.5 x target, halved below target / 1.5.

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", section 4; nats per token. The weight stays within
    2**10 times the first one, up and down: repeated halving would reach 0, which doubling never raises again.
    """

    MOST_DOUBLINGS = 10

    def __init__(self, value: float, target: float) -> None:
        super().__init__(value)
        self.target = target
        self._least, self._most = value / 2**self.MOST_DOUBLINGS, value * 2**self.MOST_DOUBLINGS

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adjust the weight after a step whose updates ended at KL(old || new) = `current_kl`; `n_steps` is ignored."""
        if _finite(current_kl) > 1.5 * self.target:
            self._move_to(2 * self.value)
        elif current_kl < self.target / 1.5:
            self._move_to(self.value / 2)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint, within the bounds; with the first weight of the settings where that has changed
        since."""
        self._move_to(self._continued(state))

    def _move_to(self, value: float) -> None:
        self.value = min(max(value, self._least), self._most)
