"""The benchmark compares planned seconds with measured seconds for each stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.planned import Size
from megappo.config import load_config
from tests.support.harness import start
from tests.support.places import ROOT

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


def test_size_keeps_the_number_of_updates() -> None:
    base = load_config(QUICKSTART)
    config = load_config(QUICKSTART, Size.read("80:3").overrides(base, 5))
    assert config.rollout.batch_sequences == 80 and config.data.max_prompt_tokens == 5
    for name, role in config.trained.items():
        assert len(role.minibatch_sizes(80)) == len(base.trained[name].minibatch_sizes(400))


@pytest.mark.parametrize("text", ["80", "80:", "0:3", "a:b"])
def test_invalid_sizes_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' is no size; give samples and response tokens such as 32:64"):
        Size.read(text)


@pytest.mark.waits
@pytest.mark.slow
def test_benchmark_saves_planned_and_measured_seconds(tmp_path: Path) -> None:
    saved = tmp_path / "planned.json"
    command = ["benchmarks.planned", "configs/quickstart.yaml"]
    command += ["actor.layout={}", "critic.layout={}", "--ranks", "1", "--threads", "1", "--sizes", "16:3"]
    done = start(*command, "--machine", "cpu", "--json", saved)
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = json.loads(saved.read_text())["rows"]
    stages = ["rollout", "forward", "update_critic", "update_actor", "sync", "step"]
    assert list(row["planned"]) == list(row["measured"]) == stages
    assert row["words"] == "16 x (4 + 3) tokens" and "planned/measured" in done.stdout
    for stage in stages:
        least, most = row["spread"][stage]
        assert 0 < least <= row["measured"][stage] <= most
    assert row["planned"]["step"] == pytest.approx(sum(row["planned"][stage] for stage in stages[:-1]))
