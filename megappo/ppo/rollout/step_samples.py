"""Source of the samples of each step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megappo.files.json_values import JSONValue
from megappo.ppo.assembly.components import RunComponents
from megappo.types import Rollouts

Kept = dict[int, dict[str, Tensor]]
"""State of the untrained prompts as tensors for a checkpoint, under `in_flight_state.KEY`."""


class StepSamples:
    """Source of the samples of each step. Every call is a collective of the world.

    By default, no generation runs between steps and there is no state to save.
    """

    saves_cursor = False
    """True if `state_dict` contains the drawn prompts. The cursor must then be saved together with `state_dict`."""

    def __init__(self, parts: RunComponents) -> None:
        self._parts = parts

    def of_step(self, step: int, *, weights_changed: bool) -> Rollouts:
        """Return this rank's responses of a step. Training uses exactly the sampled tokens.

        `weights_changed`: whether the actor is newer than the engine weights, which matters if an engine is
        restarted. Raises Interrupted on every rank if the run is interrupted.
        """
        raise NotImplementedError

    def more(self, step: int, number: int, prompts: int) -> Rollouts:
        """Return this rank's responses to more prompts of a step, in round `number` (the first is 0).

        Raises like `of_step`. A run that is stopped during this call generates the responses again.
        """
        raise NotImplementedError

    def begin(self, step: int) -> None:
        """Start generating the responses of a later step."""

    def settle(self, *, weights_changed: bool) -> None:
        """Wait for all started generation. Raises Interrupted like `of_step`."""

    def pause(self, *, stops: bool = False) -> None:
        """Interrupt generation because weights change or the run stops."""

    def go_on(self) -> None:
        """Continue after a change of weights."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of responses that no step has used yet."""
        return {}

    def needs_old_weights(self, step: int) -> bool:
        """Return whether a step must continue with the weights of its first responses. The same on every rank."""
        return False

    def cursor_state(self) -> dict[str, JSONValue]:
        """Return the state of the cursor for a checkpoint."""
        return self._parts.cursor.state_dict()

    def forget(self, step: int) -> None:
        """Drop the responses of a step after its updates."""

    def state_dict(self, step: int) -> Kept:
        """Return this rank's responses of untrained steps, starting at `step`."""
        return {}

    def load_state_dict(self, kept: Sequence[Kept]) -> None:
        """Restore the results of `state_dict` from every rank. The number of ranks may have changed."""
