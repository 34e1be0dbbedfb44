"""Shipped configurations: comments, planned throughput, spare memory, and no much faster layout in the search."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from megappo.cli import main
from megappo.config import Config, load_config
from megappo.data.prepare import SETS
from megappo.families.served import Served
from megappo.plan.engines import other_engine
from megappo.plan.hardware.machine_file import find_machine
from megappo.plan.planner import Plan, fewest_ranks, local_models_folder, make_plan, planning, read_models
from megappo.plan.search import best_layouts
from tests.support.configurations import CONFIGURATIONS, head_command, head_commands, trainer_ranks
from tests.support.places import ROOT
from tests.support.quick import cases


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda p: p.stem)
def test_configuration_fits_the_machine(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = time.perf_counter()
    assert main(head_command(path, "megappo")[1:]) == 0
    assert time.perf_counter() - start < 10
    assert re.search(r"^fits: rank", capsys.readouterr().out, re.MULTILINE)


def components(arguments: list[str]) -> list[list[str]]:
    """Split the sbatch command of a heterogeneous job at colons."""
    parts: list[list[str]] = [[]]
    for argument in arguments:
        if argument == ":":
            parts.append([])
        else:
            parts[-1].append(argument)
    return parts


def size_of(component: list[str]) -> int:
    """Return the number of GPUs of a job component."""
    return int(component[component.index("--nodes") + 1]) * int(component[component.index("--gpus-per-node") + 1])


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda p: p.stem)
def test_start_command_uses_the_planned_ranks(path: Path) -> None:
    plan, gpus = head_command(path, "megappo"), trainer_ranks(path)
    start = head_command(path, "sbatch", "launch/torchrun.sh")
    config = load_config(path)
    if start[0] == "sbatch":
        ranks, *of_servers = (size_of(component) for component in components(start))
        servers = config.rollout.server_settings
        elsewhere = config.rollout.broadcasts
        script = "launch/slurm/ppo_disaggregated.sbatch" if elsewhere else "launch/slurm/ppo.sbatch"
        assert start[start.index(script) + 1] == f"configs/{path.name}"
        assert of_servers == ([(servers.count or 1) * servers.tensor_parallel] if elsewhere else [])
    else:
        ranks = int(start[1])
        assert start[2] == "train"
    assert ranks == gpus
    assert gpus % fewest_ranks(config) == 0
    assert f"configs/{path.name}" in plan
    assert f"configs/{path.name}" in start


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda p: p.stem)
def test_data_command_writes_the_configured_files(path: Path) -> None:
    """The command in the comment writes the files in the settings."""
    config = load_config(path)
    sources = [source.source for source in (*config.data.sources.values(), *config.data.evaluated.values())]
    files = {source for source in sources if source.endswith(".parquet")}
    commands = [command for command in head_commands(path) if command[:2] == ["megappo", "data"]]
    written = {f"{out}/{split.name}.parquet" for *_, name, out in commands for split in SETS[name]}
    assert files == written


def test_common_model_sizes_are_included() -> None:
    ranks = {int(head_command(p, "megappo")[-1]) for p in CONFIGURATIONS}
    assert ranks >= {1, 8, 16, 128, 320}
    names = " ".join(path.stem for path in CONFIGURATIONS)
    assert all(word in names for word in ("0.6b", "8b", "32b", "gsm8k", "math", "dapo"))


GPU_CONFIGURATIONS = [path for path in CONFIGURATIONS if head_command(path, "megappo")[-3] != "cpu"]


def planned(path: Path) -> tuple[Config, Plan]:
    command = head_command(path, "megappo")
    config = load_config(path)
    models = read_models(config, ROOT / "configs" / "models").models
    return config, make_plan(config, models, find_machine(command[-3]), int(command[-1]))


@pytest.mark.parametrize("path", GPU_CONFIGURATIONS, ids=lambda p: p.stem)
def test_sglang_is_the_faster_engine_on_gpus(path: Path) -> None:
    """SGLang is the faster engine for all models that SGLang supports."""
    config, plan = planned(path)
    assert plan.fits
    command = head_command(path, "megappo")
    models = read_models(config, ROOT / "configs" / "models").models
    other = other_engine(config, models, find_machine(command[-3]), int(command[-1]))
    if models.actor.declaration.unserved(models.actor, Served(on_cuda=True, tokens=1)):
        assert config.rollout.engine_name == "transformers" and other.engine == "sglang"
        assert "SGLang is not possible: " in other.sentence
        return
    assert config.rollout.engine_name == "sglang" and other.engine == "transformers"
    assert other.rollout_seconds is None or other.rollout_seconds > 2 * plan.stages[0].seconds


@pytest.mark.parametrize("path", GPU_CONFIGURATIONS, ids=lambda p: p.stem)
def test_checkpoint_interval_is_the_recommended_one(path: Path) -> None:
    config, plan = planned(path)
    assert config.checkpoint is not None
    assert config.checkpoint.every_steps == plan.stopping.every_steps
    assert plan.stopping.checkpoint_seconds < plan.stopping.every_steps * plan.step_seconds <= 3600


@pytest.mark.parametrize("script", ["ppo.sbatch", "ppo_disaggregated.sbatch"])
def test_batch_script_has_the_longest_lead_time(script: str) -> None:
    leads = []
    for path in GPU_CONFIGURATIONS:
        if f"launch/slurm/{script}" in head_command(path, "sbatch", "launch/torchrun.sh"):
            leads.append(planned(path)[1].stopping.lead_seconds)
    text = (ROOT / "launch" / "slurm" / script).read_text()
    assert re.findall(r"^#SBATCH --signal=USR1@(\d+)$", text, re.MULTILINE) == [str(max(leads))]
    guide, lead = (ROOT / "launch/README.md").read_text(), max(leads)
    assert f"`USR1@{lead}`" in guide and f" {lead // 60} " in guide


PLANNED = re.compile(r"# Planned on (\d+) x (\w+): ([\d.]+) samples/s \(([\d.]+) with ")
_MATCHES = {path.stem: PLANNED.search(path.read_text()) for path in sorted((ROOT / "configs").glob("*.yaml"))}
HEADS = {name: match for name, match in _MATCHES.items() if match is not None}
SOME = ("qwen3_8b_8gpu_math", "qwen3_30b_a3b_4node_math")


def path_of(name: str) -> Path:
    return ROOT / "configs" / f"{name}.yaml"


@pytest.mark.parametrize("name", HEADS)
def test_planned_throughput_is_current(name: str) -> None:
    """No rank uses more than 90% of the memory of its device in any stage."""
    gpus, machine, rate, before = HEADS[name].groups()
    config = load_config(path_of(name))
    planned = planning(config, machine, int(gpus), local_models_folder(path_of(name)))
    assert config.rollout.batch_sequences / planned.plan.step_seconds == pytest.approx(float(rate), rel=0.005)
    assert float(before) < float(rate)
    assert planned.plan.fits and planned.plan.fullest.peak < 0.9 * planned.machine.memory_bytes


@pytest.mark.parametrize("name", cases(HEADS, quick=SOME[:1], exhaustive=set(HEADS) - set(SOME)))
def test_search_finds_no_much_faster_layout(name: str) -> None:
    gpus, machine, _, _ = HEADS[name].groups()
    config = load_config(path_of(name))
    planned = planning(config, machine, int(gpus), local_models_folder(path_of(name)))
    fastest = best_layouts(config, planned.models, planned.machine, int(gpus), count=1)[0]
    assert 0.95 * planned.plan.step_seconds < fastest.step_seconds <= planned.plan.step_seconds * (1 + 1e-9)
