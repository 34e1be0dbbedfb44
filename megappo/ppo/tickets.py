"""Which prompts a step takes of those that are in flight.

Every prompt gets a ticket when it is sent for the first time, by which ranks call it and its samples. What is decided
here is decided from the same numbers on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Group:
    """A prompt in flight with its samples, as every rank knows it."""

    ticket: int
    """Counts the prompts of a run in the order in which they were sent."""
    prompt: int
    """Its index among the training prompts."""
    version: int
    """Of the weights that its first tokens may come from."""
    finished: bool = False
    """All of its samples are."""


def choose(
    groups: Sequence[Group], *, wanted: int, newest: int, max_lag: int, of_step: int | None = None
) -> list[Group] | None:
    """The groups that a step takes, in the order of their tickets; None: it waits.

    They are the finished ones that were sent first, so that a long answer has no disadvantage against a short one that
    was begun later. A step waits for more, also where it has enough, if it left so many old groups behind that some
    would become older than `max_lag` syncs before there is room for them: long answers would be those.

    Args:
        groups: all in flight, none of them older than `max_lag`, in the order of their tickets.
        wanted: how many a step takes.
        newest: version of the weights that it is trained on with.
        max_lag: most versions between those and a group's.
        of_step: how many later steps take, where these are of a further round of a step; default: `wanted`.
    """
    taken = [group for group in groups if group.finished][:wanted]
    if len(taken) < wanted:
        return None
    for later_steps in range(max_lag + 1):
        is_due = [newest - group.version + later_steps >= max_lag for group in groups]
        tickets = {group.ticket for group, due in zip(groups, is_due, strict=True) if due}
        if sum(group.ticket in tickets for group in taken) < min(
            wanted, len(tickets) - later_steps * (of_step or wanted)
        ):
            return None
    return taken
