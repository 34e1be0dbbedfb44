"""Prompts that are answered well rest: they are left out of the next passes over their source."""

from __future__ import annotations

from collections.abc import Iterable

from megappo.config.data import CurriculumSettings
from megappo.data.cursor import Cursor
from megappo.data.mixture import MixedCursor


class Curriculum:
    """Remembers which prompts a step answered well, until the cursor may leave them out.

    The cursor learns of them when it draws the prompts of the next step, or one step later where that step draws before
    the rewards of this one exist (`rollout.ahead: 1`); so a continued run tells the cursor at the same point. Prompts
    in flight are drawn while a step waits and after its rewards, so prompts that were already sent are still answered.
    """

    def __init__(self, settings: CurriculumSettings, cursor: Cursor | MixedCursor, ahead: int) -> None:
        self._settings, self._cursor, self._ahead = settings, cursor, ahead
        self._right: dict[int, list[int]] = {}

    @property
    def right_above(self) -> float:
        """The mean reward above which a prompt is answered well."""
        return self._settings.right_above

    def note(self, step: int, positions: Iterable[int]) -> None:
        """Note prompts that a step answered well; the same on every rank."""
        self._right.setdefault(step, []).extend(positions)

    def before_drawing(self, step: int) -> None:
        """Let prompts rest that earlier steps answered well, as far as their rewards are known at this point."""
        for before in sorted(self._right):
            if before < step - self._ahead and (right := self._right.pop(before)):
                self._cursor.rest(right, self._settings.rest_epochs)

    def state_dict(self, last_step: int | None = None) -> list[list[int | list[int]]]:
        """State for a checkpoint, in JSON's types, without notes of steps after `last_step`."""
        return [
            [step, list(positions)] for step, positions in self._right.items() if last_step is None or step <= last_step
        ]

    def load_state_dict(self, state: Iterable[tuple[int, Iterable[int]]]) -> None:
        """Restore what `state_dict` returned."""
        self._right = {step: list(positions) for step, positions in state}
