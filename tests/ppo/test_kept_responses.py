"""Tests of responses in a checkpoint that a run with another number of ranks loads."""

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
def test_ranks_share_files_and_get_all_responses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Each file of the five earlier ranks is read by one rank. All ranks get the responses of all five in order."""
    names = [f"responses-{n:05d}.pt" for n in range(5)]
    contents = {name: {1: {"numbers_B": torch.tensor([n])}} for n, name in enumerate(names)}
    files: dict[str, Any] = dict.fromkeys(["shards.distcp", *reversed(names), "random-00000.pt"])
    marker = Marker(1, files, {"trainer": {"cursor": CURSOR}})
    read, shares = list[str](), list[dict[str, Any]]()

    def load(path: Path) -> Any:
        read.append(path.name)
        return contents[path.name]

    monkeypatch.setattr(checkpoints, "load_values", load)

    def gathered(own: dict[str, Any]) -> list[dict[str, Any]]:
        """Collect the shares in the first pass. Return all shares in the second pass."""
        if len(shares) < ranks:
            shares.append(own)
        return shares if len(shares) == ranks else [contents]

    monkeypatch.setattr(checkpoints, "all_gather_objects", gathered)

    def load_responses(rank: int) -> list[Any]:
        parts: Any = SimpleNamespace(
            runtime=SimpleNamespace(rank=rank, world_size=ranks),
            cursor=SimpleNamespace(state_dict=lambda: CURSOR),
            trained=(),
        )
        return checkpoints.Resumed(parts, tmp_path, marker, {}).kept_responses()

    for rank in range(ranks):
        load_responses(rank)
    assert sorted(read) == names
    for rank in range(ranks):
        assert [of_rank[1]["numbers_B"].tolist() for of_rank in load_responses(rank)] == [[n] for n in range(5)]


def test_stopped_step_keeps_earlier_responses() -> None:
    """The responses of the boundary are saved. The stopped step adds only its own requests."""
    before, now = {"returned": torch.tensor([1])}, {"returned": torch.tensor([2])}
    whole = {"lengths_B": torch.tensor([3])}
    boundary = Boundary(cast(Any, {"step": 4}), {}, {5: whole, KEY: before})
    responses = SimpleNamespace(pause=lambda stops: None, state_dict=lambda step: {KEY: now}, draws_on=False)
    trainer = cast(Any, SimpleNamespace(responses=responses, boundary=boundary))
    responses_at_stop = Trainer.boundary_when_stopped(trainer).responses
    assert responses_at_stop.keys() == {5, KEY} and responses_at_stop[5] is whole and responses_at_stop[KEY] is now
