"""Selection of the prompts in flight for a step.

Every prompt gets a ticket when it is first sent. Ranks identify a prompt and its samples by the ticket. All decisions
use the same numbers on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Group:
    """A prompt in flight with its samples. Identical on every rank."""

    ticket: int
    """Number of the prompt in sending order."""
    prompt: int
    """Index among the training prompts."""
    version: int
    """Oldest version of the weights that may have sampled tokens of the group."""
    finished: bool = False
    """True if all samples of the group are finished."""


def choose(
    groups: Sequence[Group], *, size: int, newest: int, max_lag: int, of_step: int | None = None
) -> list[Group] | None:
    """Return the groups for a step in ticket order, or None if the step must wait.

    A step takes the finished groups with the lowest tickets, so that long responses have no disadvantage. A step with
    enough finished groups still waits if later steps could not take all remaining old groups within `max_lag` syncs.
    The groups that would become too old are the groups with long responses.

    Args:
        groups: all groups in flight in ticket order. No group is older than `max_lag`.
        size: number of groups that the step takes.
        newest: version of the weights when the step is trained.
        max_lag: largest allowed difference between `newest` and the version of a group.
        of_step: number of groups of later steps if `size` belongs to another round. Default: `size`.
    """
    taken = [group for group in groups if group.finished][:size]
    if len(taken) < size:
        return None
    for later_steps in range(max_lag + 1):
        due = {group.ticket for group in groups if newest - group.version + later_steps >= max_lag}
        if sum(group.ticket in due for group in taken) < min(size, len(due) - later_steps * (of_step or size)):
            return None
    return taken
