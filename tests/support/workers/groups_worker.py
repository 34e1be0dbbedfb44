"""Create the groups of several roles on real processes and send data over each group: groups_worker.py CASE FOUND."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megappo.config.grid import Grid
from megappo.config.schema import RuntimeSettings
from megappo.megatron.layout import Cut, Layout, make_layouts
from megappo.runtime.process import start_runtime
from megappo.runtime.ranks.groups import make_host_group
from megappo.runtime.ranks.objects import all_gather_objects

TIMEOUT_SECONDS = 90


def named_groups(layout: Layout) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """Yield the groups of Megatron and the group of the role."""
    for field in fields(layout.groups):
        group = getattr(layout.groups, field.name, None)
        if group is not None:
            yield field.name, group
    yield "role", layout.role_group


def met(group: dist.ProcessGroup) -> list[int]:
    """Return the ranks that contribute to a sum over the group."""
    present = torch.zeros(dist.get_world_size())
    present[dist.get_rank()] = 1
    dist.all_reduce(present, group=group)
    return present.nonzero().flatten().tolist()


def main() -> None:
    case = json.loads(Path(sys.argv[1]).read_text())
    cuts = {name: Cut(Grid(*arguments)) for name, arguments in case.items()}
    timeouts: list[timedelta | None] = []
    new_group = dist.new_group

    def noted(*args: Any, **options: Any) -> Any:
        timeouts.append(options.get("timeout"))
        return new_group(*args, **options)

    dist.new_group = noted
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))  # connections of large groups need more files
    with start_runtime(RuntimeSettings(collective_timeout_seconds=TIMEOUT_SECONDS)) as runtime:
        layouts = make_layouts(cuts, runtime.device.type, TIMEOUT_SECONDS)
        own = {
            role: {name: met(group) for name, group in named_groups(layout)}
            for role, layout in layouts.items()
            if isinstance(layout, Layout)
        }
        assert met(make_host_group("host", timedelta(seconds=TIMEOUT_SECONDS))) == list(range(runtime.world_size))
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == most
        assert set(timeouts) == {timedelta(seconds=TIMEOUT_SECONDS)}
        gathered = all_gather_objects({"groups": own, "made": len(timeouts)})
        if runtime.is_main:
            Path(sys.argv[2]).write_text(json.dumps(gathered))


if __name__ == "__main__":
    main()
