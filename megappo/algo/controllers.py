"""Controllers that adjust the weight of a KL term in each step."""

from __future__ import annotations

import math
from collections.abc import Mapping


def _finite(current_kl: float) -> float:
    if not math.isfinite(current_kl):
        raise ValueError(f"the measured KL is {current_kl}, must be finite; the log-probabilities are broken")
    return current_kl


class FixedKLController:
    """A constant weight of a KL term, and the base class of adaptive controllers."""

    def __init__(self, value: float) -> None:
        self.first = self.value = value
        """`first` is the weight in the settings. `value` is the current weight."""

    def update(self, current_kl: float, n_steps: int) -> None:
        """Raise ValueError if the KL is not finite. The weight is unchanged."""
        _finite(current_kl)

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"value": self.value, "first": self.first}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint. The constant weight comes from the settings, which may have changed."""

    def _continued(self, state: Mapping[str, float]) -> float:
        """Return the weight of the checkpoint, or the weight of the settings if this setting has changed."""
        return float(state["value"]) if state.get("first", self.first) == self.first else self.first


class AdaptiveKLController(FixedKLController):
    """A weight that moves towards a target KL: value *= 1 + clip(kl/target - 1, -.2, .2) * n_steps / horizon.

    Ziegler et al. 2019, section 2.2. `target` and `current_kl` are in nats, both per token or both per response.
    `horizon` and `n_steps` are in samples. `n_steps` is limited to the horizon, and the settings require this limit
    too. With five times the horizon or more, the formula would make the weight zero or negative.
    """

    def __init__(self, value: float, target: float, horizon: int) -> None:
        super().__init__(value)
        self.target, self.horizon = target, horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adjust the weight after `n_steps` samples with mean KL `current_kl`."""
        error = min(max(_finite(current_kl) / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * min(n_steps / self.horizon, 1.0)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint, or from the weight of the settings if this setting has changed."""
        self.value = self._continued(state)


class PenaltyController(FixedKLController):
    """The weight of PPO-penalty. The weight is doubled above 1.5 x target, and halved below target / 1.5.

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", section 4. KL is in nats per token. The weight
    stays within a factor of 2**10 of the first weight. Otherwise repeated halving could reach 0, and doubling has no
    effect on 0.
    """

    MOST_DOUBLINGS = 10

    def __init__(self, value: float, target: float) -> None:
        super().__init__(value)
        self.target = target
        self._least, self._most = value / 2**self.MOST_DOUBLINGS, value * 2**self.MOST_DOUBLINGS

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adjust the weight after a step with final KL(old || new) = `current_kl`. `n_steps` is ignored."""
        if _finite(current_kl) > 1.5 * self.target:
            self._move_to(2 * self.value)
        elif current_kl < self.target / 1.5:
            self._move_to(self.value / 2)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint within the bounds, or from the weight of the settings if this setting has
        changed."""
        self._move_to(self._continued(state))

    def _move_to(self, value: float) -> None:
        self.value = min(max(value, self._least), self._most)
