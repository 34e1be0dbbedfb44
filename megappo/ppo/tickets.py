"""Chooses which of the prompts in flight a step takes.

Every prompt gets a ticket when it is first sent; ranks identify it and its samples by the ticket. Decisions here use
the same numbers on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Group:
    """A prompt in flight with its samples, as every rank knows it."""

    ticket: int
    """Number of the prompt in the order in which the run's prompts were sent."""
    prompt: int
    """Index among the training prompts."""
    version: int
    """Version of the weights that its first tokens may come from."""
    finished: bool = False
    """Whether all of its samples are finished."""


def choose(
    groups: Sequence[Group], *, wanted: int, newest: int, max_lag: int, of_step: int | None = None
) -> list[Group] | None:
    """The groups that a step takes, in the order of their tickets; None: the step waits.

    They are the finished ones that were sent first, so that a long response has no disadvantage against a short one
    that was begun later. A step with enough groups still waits if it would leave so many old groups behind that some
    would become older than `max_lag` syncs before later steps can take them: these would be the long responses.

    Args:
        groups: all in flight, none of them older than `max_lag`, in the order of their tickets.
        wanted: how many a step takes.
        newest: version of the weights when the step is trained.
        max_lag: largest difference of versions between those weights and a group's.
        of_step: how many groups later steps take, where `wanted` is for a further round; default: `wanted`.
    """
    taken = [group for group in groups if group.finished][:wanted]
    if len(taken) < wanted:
        return None
    for later_steps in range(max_lag + 1):
        due = {group.ticket for group in groups if newest - group.version + later_steps >= max_lag}
        if sum(group.ticket in due for group in taken) < min(wanted, len(due) - later_steps * (of_step or wanted)):
            return None
    return taken
