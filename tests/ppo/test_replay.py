"""Tests of the replay of a refused update: no code that the folder names is imported."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megappo.checkpoint.files import Marker, step_folder, write_marker
from megappo.ppo import replay as replays
from megappo.ppo.replay import replay


def refused_step(root: Path, refused: dict[str, Any], settings: dict[str, Any] | None = None, **more: Any) -> Path:
    """Write the folder of a refused update."""
    folder = step_folder(root, 1)
    folder.mkdir()
    own = {"run": {}, "rollout": {}, "model": {}, "algorithm": {"policy_loss": "clip"}, **(settings or {})}
    content = {"world_size": 1, "refused": refused, "versions": {"torch": torch.__version__}, "steps": 3, **more}
    write_marker(folder, Marker(1, {}, content | {"settings": own}))
    return folder


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"model": {"family": "antigravity:FAMILY"}}, "model.family 'antigravity:FAMILY'"),
        ({"algorithm": {"policy_loss": "antigravity:loss"}}, "algorithm.policy_loss 'antigravity:loss'"),
    ],
)
def test_replay_imports_no_code_named_by_folder(tmp_path: Path, settings: dict[str, Any], key: str) -> None:
    folder = refused_step(tmp_path, {"role": "actor", "minibatch": 1, "weights": None}, settings)
    with pytest.raises(ValueError, match=f"uses {key}, code that a replay does not import"):
        replay(str(folder), world_size=1)


@pytest.mark.parametrize("trained", [["critic"], ["actor"], ["actor", "critic"]])
def test_replay_builds_the_roles_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: list[str]
) -> None:
    """During value pretraining, a run trains no actor."""
    built = list[str]()

    class Builder:
        def __init__(
            self, *_arguments: object, roles: list[str], resumed: bool, stop_token_ids: tuple[int, ...]
        ) -> None:
            assert roles == trained and resumed and stop_token_ids == (7,)

        def actor(self) -> str:
            built.append("actor")
            return "actor"

        def critic(self) -> str:
            built.append("critic")
            return "critic"

    def load(_folder: Path, roles: list[str], updates: dict[str, int]) -> None:
        assert roles == trained == list(updates)
        raise LookupError("loaded")

    monkeypatch.setattr(replays, "ModelBuilder", Builder)
    monkeypatch.setattr(replays, "load_shards", load)
    monkeypatch.setattr(replays, "derive_run", lambda *_: None)
    monkeypatch.setattr(replays, "shared_problems", lambda *_: ())
    monkeypatch.setattr(replays, "start_runtime", lambda _: nullcontext(SimpleNamespace(is_main=False)))
    monkeypatch.setattr(replays.Config, "model_validate", lambda _: SimpleNamespace(runtime=None))
    refused = {"role": trained[-1], "weights": None, "stop_token_ids": [7]}
    folder = refused_step(tmp_path, refused, updates=dict.fromkeys(trained, 4))
    with pytest.raises(LookupError, match="loaded"):
        replay(str(folder), world_size=1)
    assert built == trained
