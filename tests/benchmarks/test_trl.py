"""Both sides of the comparison with TRL use equal lengths and alternate, and curves are compared with standard
errors."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.lengths import Forcing, Profile
from benchmarks.sides import Turn, started
from benchmarks.trl import COMPARABLE, Comparison, Curve, Row, read_rows
from benchmarks.trl_sides import Run, check, trl_settings
from megappo.engines.protocol import GenerateRequest, SamplingParams
from megappo.engines.requests import generate
from megappo.engines.transformers_engine import TransformersEngine
from megappo.models.model_files import read_architecture
from tests.benchmarks.two_steps import two_steps
from tests.support.harness import succeed
from tests.support.places import ROOT, TINY

SIDES = ("trl", "megappo")
SMALL = [
    *("configs/quickstart.yaml", "actor.layout={}", "critic.layout={}", "algorithm.entropy_coef=0"),
    *("rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.generate_batch_sequences=8"),
    *("actor.minibatch_sequences=4", "critic.minibatch_sequences=4", "--ranks", "1", "--threads", "1"),
]


@pytest.mark.parametrize(
    ("text", "shortest", "mean", "longest"),
    [("full:64", 64, 64, 64), ("even:1-64", 1, 32.5, 64), ("tail:32-256", 1, 32, 256)],
)
def test_profiles_have_the_specified_lengths(text: str, shortest: int, mean: float, longest: int) -> None:
    profile = Profile.read(text)
    lengths = profile.of_step(32, step=1)
    assert lengths is not None and str(profile) == text
    assert (min(lengths), statistics.mean(lengths), max(lengths)) == (shortest, mean, longest)
    assert lengths == profile.of_step(32, step=1)
    other = profile.of_step(32, step=2)
    assert other is not None and sorted(other) == sorted(lengths) and (other != lengths or text == "full:64")


def test_trl_accepts_the_settings(tmp_path: Path) -> None:
    """The configuration of TRL does not check types. A wrong type would fail only during an update."""
    overrides = (*COMPARABLE, "actor.layout={}", "critic.layout={}", "algorithm.entropy_coef=0")
    run = Run("configs/quickstart.yaml", overrides, str(tmp_path), Profile.read("full:8"), "float32", 1, 3, 4)
    config = run.read()
    check(config)
    trl_options = trl_settings(config, run, stop=1)
    assert {type(value) for value in trl_options.values()} <= {str, int, float, bool}
    assert (trl_options["lam"], trl_options["num_mini_batches"], trl_options["stop_token_id"]) == (0.95, 16, 1)
    ppo = pytest.importorskip("trl.experimental.ppo", reason="needs `pip install --no-deps trl==1.12.0`")
    taken = ppo.PPOConfig(**trl_options)
    assert all(getattr(taken, name) == value for name, value in trl_options.items() if name != "report_to")


@pytest.mark.parametrize("text", ["full", "even:64", "even:64-1", "tail:0-3", "long:3", "full:a"])
def test_invalid_profiles_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=f"'{text}' is no profile of lengths; give full:64"):
        Profile.read(text)


def test_generation_ends_at_requested_lengths(world_of_one: None) -> None:
    """The test covers the embedded engine and `generate` with the arguments of TRL. Forbidden tokens are not
    sampled, and all lengths are used."""
    lengths, end, padding = [3, 1, 5, 2], 1, 0
    engine = TransformersEngine(
        read_architecture(TINY), dtype=torch.float32, device=torch.device("cpu"), generate_batch_sequences=2
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(TINY)).eval()
    engine.update_weights(model.named_parameters(), 1)
    requests = [GenerateRequest((4, 5, 6), seed=i, prompt_id=i) for i in range(4)]
    forcing = Forcing(end, (padding, end))
    with forcing.applied():
        forcing.begin(lengths)
        answers = generate(engine, requests, SamplingParams(1.0, 5, (end,)))
        forcing.begin(lengths)
        ids = torch.tensor([[4, 5, 6]] * 4)
        rows = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=5, eos_token_id=end,
            pad_token_id=padding,
        )[:, 3:].tolist()  # fmt: skip
        with pytest.raises(RuntimeError, match="2 sequences are generated, but only 0 lengths are left"):
            generate(engine, requests[:2], SamplingParams(1.0, 5, (end,)))
    for tokens in ([list(a.token_ids) for a in answers], [row[:n] for row, n in zip(rows, lengths, strict=True)]):
        assert [len(t) for t in tokens] == lengths
        assert all(t[-1] == end and not {end, padding} & set(t[:-1]) for t in tokens)
    assert not any(a.truncated for a in answers)


@pytest.mark.waits
def test_side_reports_memory_per_step_and_failures(tmp_path: Path) -> None:
    size = 200_000_000
    with started("the side", two_steps, (size,), ranks=2, threads=1, log=tmp_path / "log") as side:
        side.await_ready()
        first, second = side.turn(), side.turn()
        assert (first.metrics["number"], second.metrics["number"]) == (0, 1)
        assert first.peak_bytes - second.peak_bytes == pytest.approx(2 * size, rel=0.05)
        assert first.seconds > 0 and first.cpu_seconds > 0
        with pytest.raises(RuntimeError, match="(?s)a process of the side ended.*two steps were promised"):
            side.turn()


def test_curves_are_compared_with_standard_errors() -> None:
    def curve(seed: int, trl: float, megappo: float) -> Curve:
        return Curve(seed, [0.0, *[trl] * 5], [9.0, *[megappo] * 5], [], [])

    comparison = Comparison.of([curve(1, 0.8, 0.7), curve(2, 0.9, 0.9), curve(3, 1.0, 0.8)])
    assert comparison.difference == pytest.approx(-0.1)
    assert comparison.standard_error == pytest.approx(math.sqrt(0.01 / 3 + 0.01 / 3))
    assert "TRL 0.900, megappo 0.800, 1.2 standard errors apart (0.082)" in comparison.sentence
    assert "no number of standard errors" in Comparison.of([curve(1, 0.8, 0.7)]).sentence


def test_rounds_of_several_runs_become_one_row() -> None:
    def row(profile: str, *seconds: tuple[float, float]) -> dict[str, Any]:
        turns = {name: [Turn(s[side], 1.0, int(s[side]), {}) for s in seconds] for side, name in enumerate(SIDES)}
        return asdict(Row.of(profile, "mixed", 1, 8, turns))

    first, other = read_rows([row("full:3", (6, 3), (8, 2)), row("even:1-3", (2, 2)), row("full:3", (3, 3))])
    assert (first.profile, first.speeds, first.median_speed) == ("full:3", [2, 4, 1], 2)
    assert (first.trl_samples_per_second, first.megappo_samples_per_second) == (8 / 6, 8 / 3)
    assert (first.trl_peak_bytes, first.megappo_peak_bytes) == (8, 3)
    assert (other.profile, other.speeds) == ("even:1-3", [1])


@pytest.mark.waits
def test_missing_trl_error_includes_the_installation() -> None:
    code = "import sys, importlib.util; importlib.util.find_spec = lambda name: None; import benchmarks.trl as t; "
    done = subprocess.run(
        [sys.executable, "-c", code + "sys.argv = ['trl.py']; sys.exit(t.main())"],
        capture_output=True, text=True, timeout=100, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "TRL is not installed" in line and "pip install --no-deps trl==" in line


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed; see benchmarks/trl.py")
def test_trl_benchmark_saves_both_sides(tmp_path: Path) -> None:
    saved = tmp_path / "trl.json"
    measured = [*SMALL, "--precision", "float32", "--lengths", "even:1-3", "--repeat", "3", "--trl-microbatch", "2"]
    output = succeed("benchmarks.trl", *measured, "--json", saved)
    (row,) = json.loads(saved.read_text())["rows"]
    assert row["profile"] == "even:1-3" and "even:1-3" in output
    for side in SIDES:
        assert len(row[side]) == 3 and row[f"{side}_peak_bytes"] == max(turn["peak_bytes"] for turn in row[side])
        assert [turn["metrics"]["response_tokens"] for turn in row[side]] == [2.0] * 3
    speeds = [trl["seconds"] / own["seconds"] for trl, own in zip(row["trl"], row["megappo"], strict=True)]
    assert row["speeds"] == speeds and row["median_speed"] == statistics.median(speeds)
