"""Worlds of any size in one process with the fake backend of torch, and models on their ranks without memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megappo.config.schema import RuntimeSettings
from megappo.runtime.launchers import Ranks
from megappo.runtime.process import Runtime
from megappo.runtime.ranks.groups import join_world

META = torch.device("meta")
TIMEOUT = timedelta(seconds=RuntimeSettings().collective_timeout_seconds)
Call = dict[str, Any]


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[list[Call]]:
    """Run this process as a rank of a world without the other ranks, and yield the calls to torch."""
    calls: list[Call] = []
    initialise, new_group = dist.init_process_group, dist.new_group

    def initialised(backend: str, **options: Any) -> None:
        calls.append({"ranks": tuple(range(world)), "backend": backend, "timeout": options["timeout"]})
        initialise("fake", **{**options, "store": FakeStore()})

    def made(ranks: list[int], **options: Any) -> Any:
        calls.append({"ranks": tuple(ranks), **options})
        return new_group(ranks, **{**options, "backend": "fake"})

    with patch.object(dist, "init_process_group", initialised), patch.object(dist, "new_group", made):
        join_world("cuda", Ranks(rank, world, 0, None), TIMEOUT)
        try:
            yield calls
        finally:
            dist.destroy_process_group()


class _MetaMeansCuda(TorchFunctionMode):
    """Replace the names of meta tensor types, because Megatron accepts only the names of CUDA types."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.replace("meta.", "") if func is Tensor.type and isinstance(result, str) else result


def _no_weights(_source: Any, _arch: Any, _entry: Any, like: Tensor, *_where: int) -> Tensor:
    return torch.empty_like(like)


@contextmanager
def without_memory(rank: int, world: int) -> Iterator[Runtime]:
    """Build only shapes inside the block: a rank of a fake world on the meta device of torch, with models without
    weights."""
    runtime = Runtime(rank, world, 0, META)
    with ExitStack() as inside:
        inside.enter_context(fake_world(rank, world))
        inside.enter_context(META)
        inside.enter_context(_MetaMeansCuda())
        inside.enter_context(patch.object(torch.cuda, "current_device", lambda: META))
        inside.enter_context(patch("megappo.megatron.build.read_shard", _no_weights))
        yield runtime
