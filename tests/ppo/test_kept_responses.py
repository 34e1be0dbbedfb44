"""Responses that a checkpoint keeps, for a run with other ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megappo.checkpoint.files import Marker
from megappo.ppo import checkpoints
from megappo.ppo.checkpoints import Boundary
from megappo.ppo.in_flight_state import KEY
from megappo.ppo.trainer import Trainer

CURSOR = {"fingerprint": "f", "seed": 1, "shuffle": True}


@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_ranks_share_out_the_files_and_have_them_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Of a run of five ranks: each file is read by one rank, and all have what five ranks kept, in their order."""
    names = [f"responses-{n:05d}.pt" for n in range(5)]
    kept = {name: {1: {"numbers_B": torch.tensor([n])}} for n, name in enumerate(names)}
    files: dict[str, Any] = dict.fromkeys(["shards.distcp", *reversed(names), "random-00000.pt"])
    marker = Marker(1, files, {"trainer": {"cursor": CURSOR}})
    read, shares = list[str](), list[dict[str, Any]]()

    def load(path: Path) -> Any:
        read.append(path.name)
        return kept[path.name]

    monkeypatch.setattr(checkpoints, "load_values", load)

    def gathered(own: dict[str, Any]) -> list[dict[str, Any]]:
        """The first time round each rank's share is noted, the second time all have come."""
        if len(shares) < ranks:
            shares.append(own)
        return shares if len(shares) == ranks else [kept]

    monkeypatch.setattr(checkpoints, "all_gather_objects", gathered)

    def found(rank: int) -> list[Any]:
        parts: Any = SimpleNamespace(
            runtime=SimpleNamespace(rank=rank, world_size=ranks),
            cursor=SimpleNamespace(state_dict=lambda: CURSOR),
            trained=(),
        )
        return checkpoints.Resumed(parts, tmp_path, marker, {}).kept_responses()

    for rank in range(ranks):
        found(rank)
    assert sorted(read) == names
    for rank in range(ranks):
        assert [of_rank[1]["numbers_B"].tolist() for of_rank in found(rank)] == [[n] for n in range(5)]


def test_a_step_that_is_stopped_keeps_what_was_generated_before_it() -> None:
    """Its responses are those of the boundary, however little the step itself can tell when it is stopped."""
    before, now = {"returned": torch.tensor([1])}, {"returned": torch.tensor([2])}
    whole = {"lengths_B": torch.tensor([3])}
    boundary = Boundary(cast(Any, {"step": 4}), {}, {5: whole, KEY: before})
    responses = SimpleNamespace(pause=lambda stops: None, state_dict=lambda step: {KEY: now}, draws_on=False)
    trainer = cast(Any, SimpleNamespace(responses=responses, boundary=boundary))
    kept = Trainer.boundary_when_stopped(trainer).responses
    assert kept.keys() == {5, KEY} and kept[5] is whole and kept[KEY] is now
