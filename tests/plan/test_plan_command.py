"""The command that plans: its verdict, table, JSON, models of other machines and errors."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from megappo.cli import main
from megappo.plan.hardware.machines import MACHINES
from megappo.plan.planner import Plan
from megappo.plan.search import Proposal, best_layouts
from tests.support.harness import succeed
from tests.support.places import ROOT
from tests.support.planned import EMBEDDED, MODELS, SHIPPED, SHIPPED_LARGE, load, models_of, plan


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_verdict_names_the_assumed_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assumed = "(planned for 4 x h100, the fewest that the layouts need; --gpus N plans another number)"
    assert main(["plan", "configs/qwen3_8b_8gpu_math.yaml", "--machine", "h100"]) == 1
    assert f"GB are usable {assumed}\n" in capsys.readouterr().out
    assert main(["plan", "configs/qwen3_8b_8gpu_math.yaml", "--machine", "h100", "--gpus", "8"]) == 0
    assert "planned for" not in capsys.readouterr().out.partition("assumed:")[0]


def test_json_round_trip(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = command(capsys, str(SHIPPED), "--machine", "h100", "--json", "--gpus", "8", *EMBEDDED[SHIPPED])
    assert (code, err) == (0, "")
    content = json.loads(out)
    assert TypeAdapter(Plan).validate_python(content["plan"]) == plan(SHIPPED)
    assert content["layouts"] == []
    assert content["notes"] == [f"Qwen/Qwen3-8B is planned from {MODELS / 'Qwen3-8B' / 'config.json'}"]
    ranks = content["plan"]["ranks"][0]
    assert ranks["peak_bytes"] == max(ranks["stages"].values()) == ranks["stages"][ranks["peak_stage"]]
    code, out, _ = command(capsys, str(SHIPPED_LARGE), "--machine", "h100", "--json", *EMBEDDED[SHIPPED_LARGE])
    assert code == 1
    content = json.loads(out)
    assert not content["plan"]["fits"] and content["layouts"][0]["machine"] == "h200"
    code, out, _ = command(capsys, str(SHIPPED), "--gpus", "8", "--search", "--json", *EMBEDDED[SHIPPED])
    content = json.loads(out)
    proposals = [TypeAdapter(Proposal).validate_python(p) for p in content["layouts"]]
    assert content["plan"] is None
    assert proposals == best_layouts(load(SHIPPED), models_of(SHIPPED), MACHINES["h100"], 8)


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command(capsys, "configs/quickstart.yaml", "runtime.device=cpu")
    assert code == 0
    assert "quickstart on 2 x cpu: MB on" in out
    for word in ("actor", "critic", "engine", "update_critic", "update_actor", "sync", "fits: ", "assumed: 40%"):
        assert word in out
    code, out, _ = command(capsys, str(SHIPPED), "--search", "--machine", "b200", "--gpus", "8")
    assert code == 0 and "layouts on 8 x b200, the fastest first" in out and "actor: TP " in out


def test_models_of_other_machines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = command(
        capsys, str(SHIPPED), "--gpus", "8", "model.path=/data/models/Qwen3-8B", "critic.path=Qwen3-0.6B"
    )
    assert code == 0
    assert "/data/models/Qwen3-8B is planned from" in out and "Qwen3-0.6B is planned from" in out
    elsewhere = tmp_path / "run.yaml"
    elsewhere.write_text(SHIPPED.read_text())
    assert command(capsys, str(elsewhere), "--gpus", "8", f"model.path={MODELS / 'Qwen3-8B'}")[0] == 0
    code, out, _ = command(capsys, str(elsewhere), "--gpus", "8", "model.path=/data/models/Qwen3-8B")
    assert code == 0 and f"/data/models/Qwen3-8B is planned from {MODELS / 'Qwen3-8B' / 'config.json'}" in out
    code, _, err = command(capsys, str(elsewhere), "model.path=/data/models/Qwen3-9B")
    assert code == 2 and "there is no such folder" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--machine", "v100"], "--machine is 'v100', must be a100-40, a100-80, h100, h800,"),
        (["--gpus", "0"], "--gpus is '0', must be a whole number from 1 to"),
        (["--gpus", "many"], "--gpus is 'many', must be a whole number from 1 to"),
        (["--gpus", "9"], "does not divide its 9 ranks"),
        (["actor.minibatch_sequences=7", "--search"], "actor.minibatch_sequences 7 does not divide"),
        (["actor.epoch=2"], "did you mean actor.epochs?"),
        (["--gpus", "1", "--search"], "no layout on 1 x h100 fits; "),
    ],
)
def test_bad_input_is_reported(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    code, out, err = command(capsys, str(SHIPPED), *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert all(line.startswith("megappo: error: ") for line in err.splitlines())
    if message.startswith(("--", "no layout")):
        assert err.count("\n") == 1


@pytest.mark.waits
def test_plan_command_needs_no_device() -> None:
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    output = succeed("megappo", "plan", "configs/qwen3_0.6b_1gpu_gsm8k.yaml", environment=variables)
    assert "fits: rank 0 needs" in output


def test_readme_shows_the_actual_output(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "megappo" / "plan" / "README.md").read_text()
    blocks: list[Any] = re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL)
    commands = [line for kind, text in blocks if kind == "bash" for line in text.splitlines()]
    shown = [line for kind, text in blocks if kind == "" for line in text.splitlines()]
    assert len(commands) == 5 and len(shown) == 3
    for line in commands:
        arguments = shlex.split(line, comments=True)
        assert arguments[:2] == ["megappo", "plan"]
        code, out, _ = command(capsys, *arguments[2:])
        assert code == int("does not fit" in out)
    assert all(line in out.splitlines() for line in shown)
