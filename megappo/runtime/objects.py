"""Collectives of Python objects: small pickled values that ranks exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")


def broadcast_object(value: T, src: int = 0) -> T:
    """The `value` of global rank `src`, on every rank of the world."""
    shared = [value]
    dist.broadcast_object_list(shared, src=src)
    return shared[0]


def all_gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's `value` on every rank of the group (None: the world), in the order of ranks."""
    gathered = [value] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def first_of_ranks(values: Sequence[T]) -> list[T]:
    """The first value of each rank that has values, in the order of ranks; a collective of the world."""
    return [value for of_rank in all_gather_objects(values[:1]) for value in of_rank]


def send_object(value: object, rank: int) -> None:
    """Send a value to one other rank, which receives it by `receive_object`; over host memory, as all objects."""
    dist.send_object_list([value], dst=rank, device=torch.device("cpu"))


def receive_object(rank: int) -> Any:
    """Receive a value that another rank sends by `send_object`."""
    taken: list[Any] = [None]
    dist.recv_object_list(taken, src=rank, device=torch.device("cpu"))
    return taken[0]


def attempt(work: Callable[[], T], caught: tuple[type[Exception], ...] = (ValueError, OSError)) -> tuple[T | None, str]:
    """Result of this process's work, and why it failed; "" where it did not."""
    try:
        return work(), ""
    except caught as error:
        return None, str(error) or type(error).__name__


def agreed(work: Callable[[], T], caught: tuple[type[Exception], ...] = (ValueError, OSError)) -> T:
    """Result of this rank's work; a collective of the world.

    Raises ValueError on every rank where the work of one failed, so that none waits for a rank that has stopped.
    """
    result, problem = attempt(work, caught)
    problems = all_gather_objects(problem)
    for rank, other in enumerate(problems):
        if other:
            raise ValueError(other if all(problems) else f"{other} (on rank {rank}, not on every other)")
    return cast(T, result)
