"""A refused update is repeated from its folder, and no code that the folder names is imported for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.checkpoint.files import Marker, step_folder, write_marker
from megappo.ppo.replay import replay


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"model": {"family": "antigravity:FAMILY"}}, "model.family 'antigravity:FAMILY'"),
        ({"algorithm": {"policy_loss": "antigravity:loss"}}, "algorithm.policy_loss 'antigravity:loss'"),
    ],
)
def test_code_that_a_folder_names_is_not_imported(tmp_path: Path, settings: dict[str, Any], key: str) -> None:
    folder = step_folder(tmp_path, 1)
    folder.mkdir()
    given = {"run": {}, "rollout": {}, "model": {}, "algorithm": {"policy_loss": "ppo"}, **settings}
    content = {
        "world_size": 1,
        "refused": {"role": "actor", "minibatch": 1, "weights": None},
        "versions": {"torch": torch.__version__},
        "steps": 3,
        "settings": given,
    }
    write_marker(folder, Marker(1, {}, content))
    with pytest.raises(ValueError, match=f"is of {key}, code that a replay does not import"):
        replay(str(folder), world_size=1)
