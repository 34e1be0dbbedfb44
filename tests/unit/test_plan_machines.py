"""Machines of the planner: the table, files that describe others, and the exit code that makes a plan a gate."""

from __future__ import annotations

from pathlib import Path

import pytest

from megappo.cli import main
from megappo.config import ConfigError
from megappo.observe.throughput import peak_flops
from megappo.plan import MACHINES, find_machine

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "configs" / "machines" / "rtx4090.yaml"
SMALL = "configs/qwen3_0.6b_1gpu_gsm8k.yaml"


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    ("overrides", "code", "verdict"),
    [
        ([], 0, "fits: rank 0 needs"),
        (["actor.microbatch_budget_tokens=65536"], 1, "does not fit: rank 0 needs"),
        (["actor.microbatch_budget_tokens=65536", "--json"], 1, '"fits": false'),
    ],
)
def test_a_plan_that_does_not_fit_stops_what_comes_after_it(
    overrides: list[str], code: int, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", SMALL, "--machine", "h100", "--gpus", "1", *overrides]) == code
    assert verdict in capsys.readouterr().out


def test_published_machines() -> None:
    """Figures of the data sheets: TFLOP/s of bfloat16, GB, TB/s, GB/s one way in a node and out of it."""
    published = {
        "a100-40": (312, 40, 1.555, 300, 25),
        "a100-80": (312, 80, 2.039, 300, 25),
        "h800": (989, 80, 3.35, 200, 50),
        "h20": (148, 96, 4.0, 450, 50),
        "l40s": (362.05, 48, 0.864, 32, 25),
    }
    for name, (tera, memory, bandwidth, inside, outside) in published.items():
        found = find_machine(name)
        assert found.bfloat16_flops == pytest.approx(tera * 1e12) and found.memory_bytes == memory * 1e9
        assert found.memory_bandwidth == pytest.approx(bandwidth * 1e12)
        assert (found.intra_node_bandwidth, found.inter_node_bandwidth) == (inside * 1e9, outside * 1e9)
        assert main(["plan", SMALL, "--machine", name, "--gpus", "1", "--json"]) in (0, 1)


@pytest.mark.parametrize(
    ("device", "tera"),
    [
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA H20", 148),
        ("NVIDIA H200", 989),
        ("NVIDIA H800", 989),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L40", None),
    ],
)
def test_the_peak_follows_the_device_not_a_part_of_its_name(device: str, tera: float | None) -> None:
    assert peak_flops(device) == (None if tera is None else pytest.approx(tera * 1e12))


def test_a_machine_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    found = find_machine(str(EXAMPLE))
    assert (found.name, found.words, found.is_cuda) == ("rtx4090", "RTX 4090, 24 GB", True)
    assert (found.bfloat16_flops, found.memory_bytes, found.devices_per_node) == (165.2e12, 24e9, 8)
    assert main(["plan", SMALL, "--machine", "configs/machines/rtx4090.yaml", "--gpus", "8"]) == 1
    out = capsys.readouterr().out
    assert "on 8 x rtx4090" in out and "the nearest layout that fits" in out


def test_a_machine_without_gpus(tmp_path: Path) -> None:
    path = tmp_path / "workstation.yml"
    path.write_text(EXAMPLE.read_text().replace("kind: gpu", "kind: cpu"))
    found = find_machine(str(path))
    assert found.shared_by_ranks and not found.is_cuda
    assert found.per_rank(2).memory_bytes == 12e9


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("memory_gigabytes: 24", "memory_gigabytes: -1", "memory_gigabytes is -1, must be a number above 0"),
        ("memory_gigabytes: 24", "memory_gigabytes: 24 GB", "memory_gigabytes is '24 GB', must be a number above 0"),
        ("memory_gigabytes: 24", "memory_gigabytes: .inf", "memory_gigabytes is inf, must be a number above 0"),
        ("memory_gigabytes: 24", "memory_bytes: 24", "memory_gigabytes is missing; a machine has words, kind"),
        ("memory_gigabytes: 24", "memory_gigabyte: 24", "no figure of a machine; the nearest is 'memory_gigabytes'"),
        ("kind: gpu", "kind: tpu", "kind is 'tpu', must be gpu or cpu"),
        ("kind: gpu", "kind: [gpu]", "kind is ['gpu'], must be gpu or cpu"),
        ("words: RTX 4090, 24 GB", "words: 4090", "words is 4090, must be text"),
        ("devices_per_node: 8", "devices_per_node: 2.5", "devices_per_node is 2.5, must be a whole number from 1"),
        ("devices_per_node: 8", "devices_per_node: true", "devices_per_node is true, must be a whole number from 1"),
    ],
)
def test_a_mistake_in_a_file_is_a_sentence(
    old: str, new: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(EXAMPLE.read_text().replace(old, new))
    assert main(["plan", SMALL, "--machine", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and str(path) in err
    assert all(line.startswith("megappo: error: ") for line in err.splitlines())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere/machine.yaml", "there is no file nowhere/machine.yaml"),
        ("configs", "must be a100-40, a100-80, h100"),
        ("V100", "or a YAML file that describes one"),
    ],
)
def test_no_machine(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        find_machine(name)


def test_a_file_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("[1, 2]")
    with pytest.raises(ConfigError, match="must describe a machine by words, kind"):
        find_machine(str(path))


def test_every_machine_of_the_table_is_in_the_readme() -> None:
    section = (ROOT / "README.md").read_text().split("## Plan before the queue\n")[1].split("\n## ")[0]
    assert all(f"`{name}`" in section for name in MACHINES)
    assert "configs/machines/rtx4090.yaml" in section
