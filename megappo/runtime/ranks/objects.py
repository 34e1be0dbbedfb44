"""Collectives of Python objects, for small pickled values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")


def broadcast_object(value: T, src: int = 0) -> T:
    """Return the `value` of global rank `src` on every rank of the world."""
    shared = [value]
    dist.broadcast_object_list(shared, src=src)
    return shared[0]


def all_gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the `value` of every rank of the group, in the order of ranks. `group`: by default the world."""
    gathered = [value] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def first_of_ranks(values: Sequence[T]) -> list[T]:
    """Return the first value of each rank that has values, in the order of ranks; a collective of the world."""
    return [value for of_rank in all_gather_objects(values[:1]) for value in of_rank]


def send_object(value: object, rank: int) -> None:
    """Send a value to one other rank, which calls `receive_object`. Like all objects, the value is sent over host
    memory."""
    dist.send_object_list([value], dst=rank, device=torch.device("cpu"))


def receive_object(rank: int) -> Any:
    """Receive a value that another rank sends with `send_object`."""
    taken: list[Any] = [None]
    dist.recv_object_list(taken, src=rank, device=torch.device("cpu"))
    return taken[0]


def attempt(work: Callable[[], T], caught: tuple[type[Exception], ...] = (ValueError, OSError)) -> tuple[T | None, str]:
    """Return the result of the work and "", or None and the reason of its failure."""
    try:
        return work(), ""
    except caught as error:
        return None, str(error) or type(error).__name__


def agreed(work: Callable[[], T], caught: tuple[type[Exception], ...] = (ValueError, OSError)) -> T:
    """Return the result of the work of this rank; a collective of the world.

    Raises ValueError on every rank if the work of any rank failed, so that no rank waits for a rank that has stopped.
    """
    result, problem = attempt(work, caught)
    problems = all_gather_objects(problem)
    for rank, other in enumerate(problems):
        if other:
            raise ValueError(other if all(problems) else f"{other} (on rank {rank}, but not on every rank)")
    return cast(T, result)
