"""Machines of the planner: the table, machine files, and the exit code of a plan that does not fit."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from megappo.cli import main
from megappo.config import ConfigError, load_config
from megappo.observe.timing.throughput import peak_flops
from megappo.plan.hardware.machine_file import find_machine
from megappo.plan.hardware.machines import ASSUMED, MACHINES
from megappo.plan.here import this_machine
from megappo.plan.planner import make_plan, read_models
from tests.support.places import ROOT

EXAMPLE = ROOT / "configs" / "machines" / "rtx4090.yaml"
SMALL = "configs/qwen3_0.6b_1gpu_gsm8k.yaml"


@pytest.mark.parametrize(
    ("overrides", "code", "verdict"),
    [([], 0, "fits: rank 0 needs"), (["actor.microbatch_budget_tokens=65536"], 1, "does not fit: rank 0 needs"),
     (["actor.microbatch_budget_tokens=65536", "--json"], 1, '"fits": false')],
)  # fmt: skip
def test_plan_without_room_exits_with_an_error(
    overrides: list[str], code: int, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", SMALL, "--machine", "h100", "--gpus", "1", *overrides]) == code
    assert verdict in capsys.readouterr().out


PUBLISHED = {
    "a100-40": (312, 19.5, 40, 1.555, 300, 25), "a100-80": (312, 19.5, 80, 2.039, 300, 25),
    "h100": (989, 67, 80, 3.35, 450, 50), "h800": (989, 67, 80, 3.35, 200, 50), "h200": (989, 67, 141, 4.8, 450, 50),
    "h20": (148, 44, 96, 4.0, 450, 50), "b200": (2250, 75, 180, 8, 900, 50), "l40s": (362.05, 91.6, 48, 0.864, 32, 25),
    "cpu": (229.376, 7.168, 512, 0.3072, 307.2, 12.5),
}  # fmt: skip
"""Figures of the data sheets: TFLOP/s of bfloat16 and float32, GB, TB/s, GB/s in one direction inside a node and
between nodes. The CPU has 56 cores of 2 GHz, 2,048 and 64 operations per cycle, and eight channels of 38.4 GB/s."""


def test_published_machines() -> None:
    assert list(PUBLISHED) == list(MACHINES)
    units = (1e12, 1e12, 1e9, 1e12, 1e9, 1e9)
    for name, figures in PUBLISHED.items():
        m, is_gpu = find_machine(name), name != "cpu"
        actual = [m.bfloat16_flops, m.float32_flops, m.memory_bytes, m.memory_bandwidth]
        actual += [m.intra_node_bandwidth, m.inter_node_bandwidth]
        # The values are equal except for rounding of a product.
        assert actual == pytest.approx([n * unit for n, unit in zip(figures, units, strict=True)], rel=1e-15), name
        assert (m.name, m.devices_per_node) == (name, 8 if is_gpu else 1)
        assert (m.is_cuda, m.shared_by_ranks) == (is_gpu, not is_gpu)
        if is_gpu:
            assert main(["plan", SMALL, "--machine", name, "--gpus", "1", "--json"]) in (0, 1)


def test_shares_of_a_machine() -> None:
    """A rank has a share of the shared resources, and a GPU alone."""
    cpu, gpu = MACHINES["cpu"], MACHINES["h100"]
    quarter = cpu.per_rank(4)
    assert (quarter.bfloat16_flops, quarter.float32_flops) == (cpu.bfloat16_flops / 4, cpu.float32_flops / 4)
    assert (quarter.memory_bytes, quarter.memory_bandwidth) == (128e9, cpu.memory_bandwidth / 4)
    assert quarter.intra_node_bandwidth == cpu.intra_node_bandwidth / 4
    assert quarter.inter_node_bandwidth == cpu.inter_node_bandwidth
    assert quarter.host_bandwidth == cpu.host_bandwidth / 4
    assert gpu.per_rank(4) is gpu
    assert [gpu.flops(2), gpu.flops(4)] == [gpu.bfloat16_flops, gpu.float32_flops]
    assert [gpu.same_node(*ranks) for ranks in ((0, 7), (7, 8), (8, 15), (0, 8))] == [True, False, True, False]
    assert cpu.same_node(0, 99)
    assert quarter.usable_bytes == 0.95 * 128e9 - 1e9 and gpu.usable_bytes == 0.95 * 80e9 - 3e9


def test_assumptions_are_reported() -> None:
    measured = dataclasses.replace(MACHINES["cpu"], is_measured=True)
    for machine, shares in (
        (MACHINES["h100"], ["40%", "70%", "70%", "1.4 ms"]),
        (measured, ["60%", "100%", "70%", "0.8 ms"]),
    ):
        sentence = ASSUMED.sentence(machine)
        figures = re.findall(r"(?<![\w.])[\d.]+(?:%| ms| us| GB/s| GB)", sentence)
        assert figures == [*shares, "10 us", "2 GB/s", "50 GB/s", "95%", "3 GB", "1 GB"]
        assert ("of measured FLOP/s" in sentence) == machine.is_measured


def test_cpu_of_this_machine_is_measured() -> None:
    threads = torch.get_num_threads()
    measured = find_machine("here")
    assert torch.get_num_threads() == threads
    assert measured.is_measured and measured.shared_by_ranks and not measured.is_cuda
    assert measured.memory_bytes == psutil.virtual_memory().total and "this machine, measured: " in measured.summary
    x = torch.ones(512, 768)
    start = time.perf_counter()
    for _ in range(20):
        torch.nn.functional.linear(x, torch.ones(2048, 768))
    flops = 20 * 2 * 512 * 768 * 2048 / (time.perf_counter() - start)
    # The bounds are loose, because other processes use the cores. The fastest of a few calls is at least as fast as the
    # mean of many.
    assert flops / 3 < measured.float32_flops < 1e14 and 1e9 < measured.bfloat16_flops < 1e15
    assert 1e8 < measured.memory_bandwidth < 1e12


def test_times_add_up_on_a_measured_machine() -> None:
    """A step has arithmetic, memory traffic and time of the host. If one of them costs nothing, the others do not
    change."""
    config = load_config(str(ROOT / "configs" / "smollm2_arithmetic.yaml"))
    models = read_models(config, ROOT / "configs" / "models").models

    def seconds(*, bfloat16_flops: float = 1e12, memory_bandwidth: float = 1e10) -> list[float]:
        machine = dataclasses.replace(
            MACHINES["cpu"], is_measured=True, bfloat16_flops=bfloat16_flops, memory_bandwidth=memory_bandwidth
        )
        return [stage.seconds for stage in make_plan(config, models, machine, 2).stages[:-1]]

    whole, rest = seconds(), seconds(bfloat16_flops=1e30, memory_bandwidth=1e30)
    no_products, no_traffic = seconds(bfloat16_flops=1e30), seconds(memory_bandwidth=1e30)
    for of_all, traffic, products, of_rest in zip(whole, no_products, no_traffic, rest, strict=True):
        assert of_all == pytest.approx(traffic + products - of_rest)
        assert of_rest < min(traffic, products) and max(traffic, products) < of_all


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fourteen of the 56 cores of the table are a quarter of the machine. 56 cores or more are the whole machine. The
    memory is the memory of this machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=10 * 10**9))
    for cores, share in ((14, 1 / 4), (56, 1), (64, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: range(cores))
        machine = this_machine()
        expected = MACHINES["cpu"].scaled(share)
        label = f"this machine's {cores} cores and 10 GB"
        assert machine == dataclasses.replace(expected, memory_bytes=10e9, summary=label)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", ["NVIDIA H200"].__getitem__)  # only device 0 exists
    monkeypatch.setattr(torch.cuda, "get_device_properties", [SimpleNamespace(total_memory=150 * 10**9)].__getitem__)
    expected = dataclasses.replace(MACHINES["h200"], memory_bytes=150e9, summary="NVIDIA H200, 150 GB")
    assert this_machine() == expected


@pytest.mark.parametrize(
    ("device", "tera"),
    [
        ("NVIDIA A100-SXM4-40GB", 312), ("NVIDIA H20", 148), ("NVIDIA H200", 989), ("NVIDIA H800", 989),
        ("NVIDIA L40S", 362.05), ("NVIDIA L40", None),
    ],
)  # fmt: skip
def test_peak_follows_the_whole_device_name(device: str, tera: float | None) -> None:
    assert peak_flops(device) == (None if tera is None else pytest.approx(tera * 1e12))


def test_machine_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    machine = find_machine(str(EXAMPLE))
    assert (machine.name, machine.summary, machine.is_cuda) == ("rtx4090", "RTX 4090, 24 GB", True)
    assert (machine.bfloat16_flops, machine.memory_bytes, machine.devices_per_node) == (165.2e12, 24e9, 8)
    assert main(["plan", SMALL, "--machine", "configs/machines/rtx4090.yaml", "--gpus", "8"]) == 1
    out = capsys.readouterr().out
    assert "on 8 x rtx4090" in out and "the nearest layout that fits" in out


def test_machine_without_gpus(tmp_path: Path) -> None:
    path = tmp_path / "workstation.yml"
    path.write_text(EXAMPLE.read_text().replace("kind: gpu", "kind: cpu"))
    machine = find_machine(str(path))
    assert machine.shared_by_ranks and not machine.is_cuda
    assert machine.per_rank(2).memory_bytes == 12e9
    assert (machine.float32_flops, machine.memory_bandwidth) == (82.6e12, 1008e9)
    assert (machine.intra_node_bandwidth, machine.inter_node_bandwidth) == (32e9, 1.5e9)
    path.write_text(EXAMPLE.read_text().replace("memory_gigabytes: 24", "memory_gigabytes: 1.0e+9"))
    assert find_machine(str(path)).memory_bytes == 1e18


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_gigabytes: 24", "memory_gigabytes: -1", "memory_gigabytes is -1, must be a number above 0"),
        ("memory_gigabytes: 24", "memory_gigabytes: 0", "memory_gigabytes is 0, must be a number above 0"),
        ("memory_gigabytes: 24", "memory_gigabytes: 1000000001", "must be a number above 0, at most 1e+09"),
        ("memory_gigabytes: 24", "memory_gigabytes: 24 GB", "memory_gigabytes is '24 GB', must be a number above 0"),
        ("memory_gigabytes: 24", "memory_gigabytes: .inf", "memory_gigabytes is inf, must be a number above 0"),
        ("memory_gigabytes: 24", "memory_bytes: 24", "memory_gigabytes is missing; a machine has words, kind"),
        ("memory_gigabytes: 24", "memory_gigabyte: 24", "not a key of a machine; the nearest is 'memory_gigabytes'"),
        ("kind: gpu", "kind: tpu", "kind is 'tpu', must be gpu or cpu"),
        ("kind: gpu", "kind: [gpu]", "kind is ['gpu'], must be gpu or cpu"),
        ("words: RTX 4090, 24 GB", "words: 4090", "words is 4090, must be text"),
        ("devices_per_node: 8", "devices_per_node: 2.5", "devices_per_node is 2.5, must be a whole number from 1"),
        ("devices_per_node: 8", "devices_per_node: true", "devices_per_node is true, must be a whole number from 1"),
    ],
)
def test_mistakes_in_machine_files_are_reported(
    old: str, new: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(EXAMPLE.read_text().replace(old, new))
    assert main(["plan", SMALL, "--machine", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and str(path) in err
    assert all(line.startswith("megappo: error: ") for line in err.splitlines())


@pytest.mark.parametrize(
    ("name", "message"),
    [("nowhere/machine.yaml", "there is no file nowhere/machine.yaml"), ("configs", "must be a100-40, a100-80, h100"),
     ("V100", "or a YAML file that describes one")],
)  # fmt: skip
def test_unknown_machine(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        find_machine(name)


def test_file_without_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "list.yaml"
    path.write_text("[1, 2]")
    with pytest.raises(ConfigError, match="must describe a machine by words, kind"):
        find_machine(str(path))


def test_readme_lists_every_machine() -> None:
    text = (ROOT / "megappo" / "plan" / "README.md").read_text()
    assert all(f"`{name}`" in text for name in MACHINES)
    assert "configs/machines/rtx4090.yaml" in text


def test_host_bandwidth(tmp_path: Path) -> None:
    """GPUs have the PCIe bandwidth of the data sheets, and Gen4 by default in files. Memory on a CPU is read and
    written."""
    bandwidths = {name: machine.host_bandwidth for name, machine in MACHINES.items()}
    gen5 = {"h100", "h800", "h200", "h20", "b200"}
    assert bandwidths == {name: 64e9 if name in gen5 else 32e9 for name in bandwidths} | {
        "cpu": MACHINES["cpu"].memory_bandwidth / 2
    }
    assert find_machine(str(EXAMPLE)).host_bandwidth == 32e9
    (tmp_path / "own.yaml").write_text(EXAMPLE.read_text() + "host_gigabytes_per_second: 20\n")
    assert find_machine(str(tmp_path / "own.yaml")).host_bandwidth == 20e9
    (tmp_path / "own.yaml").write_text(EXAMPLE.read_text() + "host_gigabytes_per_second: fast\n")
    with pytest.raises(ConfigError, match="host_gigabytes_per_second is 'fast', must be a number above 0"):
        find_machine(str(tmp_path / "own.yaml"))
