"""Curriculum: solved prompts rest for the next passes over their source."""

from __future__ import annotations

from collections.abc import Iterable

from megappo.config.sections.data import CurriculumSettings
from megappo.data.cursor import Cursor
from megappo.data.mixture import MixedCursor


class Curriculum:
    """Stores the solved prompts of each step until the cursor skips the prompts.

    Prompts of a step rest from the draw of the next step. With `rollout.ahead: 1` they rest one step later, because the
    next step draws before the rewards of this step exist. A resumed run updates the cursor at the same point. With
    prompts in flight, draws happen during and after a step, and drawn prompts are always answered.
    """

    def __init__(self, settings: CurriculumSettings, cursor: Cursor | MixedCursor, ahead: int) -> None:
        self._settings, self._cursor, self._ahead = settings, cursor, ahead
        self._right: dict[int, list[int]] = {}

    @property
    def right_above(self) -> float:
        """Mean reward of a solved prompt must exceed this value."""
        return self._settings.right_above

    def note(self, step: int, positions: Iterable[int]) -> None:
        """Store the solved prompts of a step. All ranks must pass the same positions."""
        self._right.setdefault(step, []).extend(positions)

    def before_drawing(self, step: int) -> None:
        """Let the solved prompts of earlier steps rest, if their rewards are known at this point."""
        for before in sorted(self._right):
            if before < step - self._ahead and (right := self._right.pop(before)):
                self._cursor.rest(right, self._settings.rest_epochs)

    def state_dict(self, last_step: int | None = None) -> list[list[int | list[int]]]:
        """Return the state for a checkpoint in JSON types, without steps after `last_step`."""
        return [
            [step, list(positions)] for step, positions in self._right.items() if last_step is None or step <= last_step
        ]

    def load_state_dict(self, state: Iterable[tuple[int, Iterable[int]]]) -> None:
        """Restore the state from `state_dict`."""
        self._right = {step: list(positions) for step, positions in state}
