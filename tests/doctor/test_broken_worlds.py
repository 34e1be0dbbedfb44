"""Problems of a machine are reported before the job is queued, with the remedy, by doctor, plan or dry run."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.cli import main
from megappo.doctor.engines import differing_settings, nccl_finding
from megappo.doctor.findings import merge
from megappo.runtime.nccl import own_stack
from tests.support import worlds

DRY = ("train", worlds.QUICKSTART, "--dry-run")
TINY = str(worlds.TINY)


@pytest.fixture(autouse=True)
def nothing_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to the repository, and remove all variables of launchers."""
    monkeypatch.chdir(worlds.ROOT)
    for name in set(os.environ) - set(worlds.environment()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Return the exit code and the whole output of a command."""
    code = main([str(word) for word in arguments])
    output = capsys.readouterr()
    return code, output.out + output.err


def findings(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, dict[str, str]]]:
    """Return the exit code of `megappo doctor --json`, and the last finding of every check."""
    code = main(["doctor", *map(str, arguments), "--json"])
    reported = json.loads(capsys.readouterr().out)["findings"]
    assert code == int(any(f["state"] == "broken" for f in reported))
    return code, {f["check"]: f for f in reported}


def expect(finding: dict[str, str], state: str, message: str, remedy: str) -> None:
    assert (finding["state"], message in finding["words"], remedy in finding["remedy"]) == (state, True, True), finding


# The software


@pytest.mark.parametrize(
    ("name", "version", "check", "message", "remedy"),
    [
        ("sglang", "0.4.1", "generation", "SGLang 0.4.1, but 0.5.23 is required", "pip install 'sglang==0.5.23'"),
        ("transformers", "4.51.0", "transformers", "version 4.51.0, but >=5", "pip install 'transformers>=5"),
        ("megatron-core", "0.12.0", "megatron-core", "version 0.12.0", "pip install 'megatron-core>=0.1"),
    ],
)
def test_wrong_version_of_a_package(
    name: str, version: str, check: str, message: str, remedy: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    worlds.fake_package(tmp_path, name.replace("-", "_"), version)
    monkeypatch.syspath_prepend(tmp_path)
    code, results = findings(capsys)
    assert code == 1
    expect(results[check], "broken", message, remedy)


@pytest.mark.slow
@pytest.mark.waits
def test_other_apex(tmp_path: Path) -> None:
    path = worlds.fake_package(tmp_path, "apex", "0.9.10")
    done = worlds.megappo("doctor", PYTHONPATH=path, CUDA_HOME=str(tmp_path))
    assert (
        "slow    apex             version 0.9.10 is a different project with the same name; pip uninstall apex"
        in done.stdout
    ), done.stderr
    assert done.stderr == "", "imports print no warnings"


def test_missing_reward_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from megappo.doctor import software

    real = software.installed_version
    monkeypatch.setattr(software, "installed_version", lambda name: None if name == "math-verify" else real(name))
    code, output = run(capsys, *DRY, "reward.function=math_verify")
    assert (code, "math-verify is not installed; pip install '.[tasks]' in megappo's repository" in output) == (
        2,
        True,
    ), output


# SGLang and its servers

DISAGGREGATED = "configs/sglang_disaggregated.yaml"
COLOCATED = "configs/sglang_quickstart.yaml"


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the required version of SGLang."""
    worlds.fake_package(tmp_path / "packages", "sglang", "0.5.23")
    monkeypatch.syspath_prepend(tmp_path / "packages")


def test_missing_sglang(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from megappo.doctor import software

    real = software.installed_version
    monkeypatch.setattr(software, "installed_version", lambda name: None if name == "sglang" else real(name))
    code, results = findings(capsys, DISAGGREGATED)
    assert code == 1
    expect(
        results["generation"],
        "broken",
        "rollout.engine is sglang, which is not installed",
        "pip install '.[sglang]' in megappo's repository",
    )


def test_wrong_version_of_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worlds.fake_package(tmp_path, "sglang", "0.5.11")
    monkeypatch.syspath_prepend(tmp_path)
    code, results = findings(capsys, DISAGGREGATED)
    assert code == 1
    expect(results["generation"], "broken", "SGLang 0.5.11, but 0.5.23 is required", "pip install 'sglang==0.5.23'")


@pytest.mark.usefixtures("sglang")
def test_no_room_for_buckets(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Handles of buckets are sent to the servers. Broadcasts use the memory of a rank."""
    code, results = findings(capsys, COLOCATED)
    assert code == 0
    expect(results["buckets"], "fine", "/dev/shm has room for 0.001 GB of buckets of weights", "")
    monkeypatch.setattr("megappo.plan.shared_memory.bucket_bytes", lambda setup: 1e15)
    code, results = findings(capsys, COLOCATED)
    assert code == 1
    expect(results["buckets"], "broken", "needs 2e+06 GB of /dev/shm for buckets", "lower rollout.sync_bucket_bytes")
    monkeypatch.undo()
    monkeypatch.chdir(worlds.ROOT)
    monkeypatch.setenv("TMPDIR", "/tmp/" + 80 * "x")
    code, results = findings(capsys, COLOCATED)
    assert code == 1
    expect(results["buckets"], "broken", "needs a writable folder for the sockets", "export TMPDIR=/tmp")
    monkeypatch.delenv("TMPDIR")
    code, results = findings(capsys, DISAGGREGATED)
    assert code == 0 and "buckets" not in results


def elsewhere(port: int) -> tuple[str, ...]:
    """Return the settings of a run with a server at this port."""
    return (DISAGGREGATED, f"rollout.sglang.urls=['http://127.0.0.1:{port}']")


@pytest.mark.waits
@pytest.mark.usefixtures("sglang")
def test_unreachable_server(capsys: pytest.CaptureFixture[str]) -> None:
    code, results = findings(capsys, *elsewhere(worlds.closed_port()))
    assert code == 1
    expect(
        results["engines"], "broken", "of rollout.sglang.urls cannot be reached (Connection refused)", "megappo serve"
    )


@pytest.mark.waits
@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(
    ("status", "key", "state", "message", "remedy"),
    [
        (404, "", "broken", "is the port of another program", "megappo serve --port"),
        (401, "k", "broken", "rejects the key in MEGAPPO_SGLANG_API_KEY", "to the key of the server"),
        (401, "", "broken", "requires a key, and MEGAPPO_SGLANG_API_KEY is empty", "export the key"),
        (200, "k", "broken", "accepts any key, so the server was started", "start the server with `megappo serve`"),
        (200, "", "fine", "serves /models/a", ""),
    ],
)
def test_wrong_programs_at_the_port_of_a_server(
    status: int, key: str, state: str, message: str, remedy: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("MEGAPPO_SGLANG_API_KEY", key)
    with worlds.answering(status, {"model_path": "/models/a"} if status == 200 else {}) as port:
        code, results = findings(capsys, *elsewhere(port))
    assert code == (state == "broken")
    expect(results["engines"], state, message, remedy)


@pytest.mark.waits
@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(
    ("on_cuda", "changes", "message", "remedy"),
    [
        (False, {}, "serves /models/a", ""),
        (True, {}, "serves /models/a", ""),
        (False, {"torch": "1.2.3"}, "has torch 1.2.3 and ", "install the same versions"),
        (False, {"nccl": "2.1"}, "serves /models/a", ""),  # NCCL is not used
        (True, {"nccl": "2.1"}, " and NCCL 2.1, the trainers have torch ", "install the same versions"),
        (
            True,
            {"nvls": "1"},
            "NCCL_NVLS_ENABLE=1, the trainers with NCCL_CUMEM_ENABLE=0 and NCCL_NVLS_ENABLE=0",
            "export",
        ),
    ],
)
def test_server_without_a_common_process_group(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    on_cuda: bool,
    changes: dict[str, str],
    message: str,
    remedy: str,
) -> None:
    stack = replace(own_stack(os.environ), **changes)
    monkeypatch.setattr("megappo.doctor.engines.by_nccl", lambda: on_cuda)
    with worlds.answering(200, {"model_path": "/models/a", "extra_metric_labels": stack.labels()}) as port:
        code, results = findings(capsys, *elsewhere(port))
    assert code == bool(remedy)
    expect(results["engines"], "broken" if remedy else "fine", message, remedy)


@pytest.mark.waits
@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(
    ("server_info", "overrides", "message", "remedy"),
    [
        ({"max_req_input_len": 10}, (), "rejects inputs of 10 tokens and more", "by 1"),
        ({"max_req_input_len": 11}, (), "", ""),
        ({"allow_auto_truncate": True}, (), "shortens long prompts", "start the server without --allow-auto-truncate"),
        ({}, ("rollout.min_response_tokens=2",), "counts rollout.min_response_tokens from 0", "start the server with"),
        (
            {"speculative_algorithm": "NGRAM", "speculative_accept_threshold_acc": 0.5}, (), "accepts drafts",
            "without --speculative-accept-threshold-single",
        ),
    ],
)  # fmt: skip
def test_external_server_with_incompatible_limits(
    capsys: pytest.CaptureFixture[str],
    server_info: dict[str, Any],
    overrides: tuple[str, ...],
    message: str,
    remedy: str,
) -> None:
    """Prompts have 8 tokens, and responses have 3."""
    with worlds.answering(200, {"model_path": "/models/a", **server_info}) as port:
        code, results = findings(capsys, *elsewhere(port), *overrides)
    assert code == bool(remedy)
    expect(results["engines"], "broken" if remedy else "fine", message or "serves /models/a", remedy)


def test_machines_with_different_settings_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = nccl_finding()
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    theirs = nccl_finding()
    assert list(differing_settings(merge([("a", [ours]), ("b", [ours])]))) == []
    (finding,) = differing_settings(merge([("a", [ours]), ("b", [theirs]), ("c", [ours])]))
    assert finding.state == "broken" and finding.remedy == "export the same values on all machines"
    assert "a, c: NCCL_CUMEM_ENABLE=0 and NCCL_NVLS_ENABLE=0; b: NCCL_CUMEM_ENABLE=0 and NCCL_NVLS_EN" in finding.text


@pytest.mark.waits
@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize("name", ["host", "sync_address"])
def test_address_of_another_machine(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, results = findings(capsys, DISAGGREGATED, f"rollout.sglang.{name}=192.0.2.1")
    assert code == 1
    expect(results["engines"], "broken", f"rollout.sglang.{name} is 192.0.2.1, which is not an address of", "remove it")


@pytest.mark.usefixtures("sglang")
def test_no_room_in_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", "configs/qwen3_8b_8gpu_math.yaml", "--gpus", "8")
    code, output = run(capsys, *arguments, "rollout.sglang={memory_fraction: 0.2}")
    assert (code, "memory_fraction 0.2 gives a server 16.0 GB of each device" in output) == (2, True), output
    code, output = run(capsys, *arguments, "rollout.sglang={max_total_tokens: 100}")
    assert (code, "max_total_tokens 100 is below the longest prompt and response" in output) == (2, True), output


# The machine


def test_no_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("megappo.doctor.machine.SHARED_MEMORY", tmp_path / "none")
    code, results = findings(capsys)
    assert code == 1
    expect(results["shared memory"], "broken", "is not a writable folder", "--ipc=host or --shm-size=16g")


def mounted(folder: Path, size: str) -> tuple[str, ...]:
    """Return a prefix for commands that mounts a tiny disk at `folder`. Skip the test if mounts are not permitted."""
    script = 'mount -t tmpfs -o size="$1" tmpfs "$2" && shift 2 && exec "$@"'
    prefix = ("unshare", "--mount", "sh", "-c", script, "sh", size, str(folder))
    probe = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"mounts are not permitted: {probe.stderr.strip()}")
    return prefix


@pytest.mark.slow
@pytest.mark.waits
def test_container_with_little_shared_memory() -> None:
    done = worlds.megappo("doctor", prefix=mounted(Path("/dev/shm"), "64m"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "broken  shared memory    /dev/shm has 0.0671 of 0.0671 GB free; start the container" in done.stdout


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs the full environment")
def test_start_with_little_shared_memory(tmp_path: Path) -> None:
    """The run ends with one sentence before a server starts. The plan needs 1,002 kB. The second run has 1,100 KiB."""
    one = ("actor.layout={}", "critic.layout={}", "run.steps=1", f"run.directory={tmp_path / 'run'}")
    done = worlds.megappo("train", COLOCATED, *one, prefix=mounted(Path("/dev/shm"), "64k"))
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "megappo: error: the weight sync needs " in done.stderr and "--shm-size=16g" in done.stderr
    assert not list(tmp_path.rglob("engine-*.log"))
    done = worlds.megappo("train", COLOCATED, *one, prefix=mounted(Path("/dev/shm"), "1100k"))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.waits
def test_full_disk(tmp_path: Path) -> None:
    prefix = mounted(tmp_path, "1m")
    done = worlds.megappo("doctor", worlds.QUICKSTART, f"run.directory={tmp_path}/run", prefix=prefix)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"broken  disk             {tmp_path} cannot be written: No space left on device; free some" in done.stdout


@pytest.mark.waits
def test_run_directory_without_write_access(capsys: pytest.CaptureFixture[str]) -> None:
    code, results = findings(capsys, worlds.QUICKSTART, "run.directory=/proc/runs/a")
    assert code == 1
    expect(results["disk"], "broken", "/proc cannot be written", "choose another run.directory")
    code, output = run(capsys, *DRY, "run.directory=/proc/runs/a")
    assert (code, "/proc cannot be written" in output) == (2, True)


def test_file_in_place_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs").write_text("")
    code, results = findings(capsys, worlds.QUICKSTART, f"run.directory={tmp_path}/runs/a")
    assert code == 1
    expect(results["disk"], "broken", "runs is a file, but run.directory", "choose another run.directory")


def test_few_open_files(capsys: pytest.CaptureFixture[str]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        _, results = findings(capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    expect(results["limits"], "slow", "256 open files, fewer than 4096", "ulimit -n 4096")


def test_cuda_device_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    code, results = findings(capsys, worlds.QUICKSTART, "runtime.device=cuda")
    assert code == 1
    expect(results["gpu"], "broken", "runtime.device is cuda, but there is no CUDA device", "use runtime.device: cpu")


@contextmanager
def gpus(monkeypatch: pytest.MonkeyPatch, free: list[float]) -> Iterator[None]:
    """Simulate a machine with GPUs that have these fractions of free memory."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: len(free))
        patch.setattr(torch.cuda, "get_device_name", lambda _index: "NVIDIA H100 80GB HBM3")
        patch.setattr(torch.cuda, "mem_get_info", lambda index: (free[index] * 80e9, 80e9))
        patch.setattr(torch.cuda, "can_device_access_peer", lambda _a, _b: True)
        yield


def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from megappo.doctor.devices import device_findings
    from megappo.runtime.launchers import Ranks

    with gpus(monkeypatch, [1.0] * 4):
        results = {f.check: f for f in device_findings(None, Ranks(0, 8, 0, 8))}
    assert results["gpu"].state == "broken"
    assert results["gpu"].text == "8 ranks are on this machine, which has 4 visible CUDA devices"
    assert results["gpu"].remedy == "start at most 4 per machine"


@pytest.mark.parametrize(
    ("ranks", "launched", "idle"),
    [
        ((0, 2, 0, 1), True, 3),  # two machines with one rank each
        ((0, 1, 0, 1), True, 3),
        ((0, 4, 0, 4), True, 0),
        ((0, 1, 0, None), False, 0),  # no launcher
    ],
)
def test_gpus_without_a_rank_are_reported(
    monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, int, int, int | None], launched: bool, idle: int
) -> None:
    from megappo.doctor.devices import device_findings
    from megappo.runtime.launchers import Ranks

    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    if launched:
        monkeypatch.setenv("RANK", "0")
    with gpus(monkeypatch, [1.0] * 4):
        messages = [f.text for f in device_findings(None, Ranks(*ranks)) if f.state == "slow" and "unused" in f.text]
    local_ranks = ranks[3]
    assert messages == (
        [f"{local_ranks} ranks run on this machine, so {idle} of its 4 GPUs are unused"] if idle else []
    )


def test_end_time_of_an_earlier_job_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from megappo.doctor.devices import device_findings
    from megappo.runtime.launchers import Ranks

    monkeypatch.setenv("SLURM_JOB_END_TIME", "1700000000")
    (finding,) = [f for f in device_findings(None, Ranks(0, 1, 0, None)) if "SLURM_JOB_END_TIME" in f.text]
    assert finding.state == "slow" and finding.remedy == "unset it"


def test_gpu_with_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    from megappo.doctor.devices import device_findings
    from megappo.runtime.launchers import Ranks

    with gpus(monkeypatch, [1.0, 0.25]):
        results = {f.check: f for f in device_findings(None, Ranks(0, 2, 0, 2))}
    assert (results["gpu"].state, results["links"].state) == ("slow", "fine")
    assert results["gpu"].text == "2 x NVIDIA H100 80GB HBM3; other processes use 1 (20 of 80 GB free)"
    assert results["gpu"].remedy == "end the processes that nvidia-smi lists"


@pytest.mark.parametrize(
    ("name", "value", "state", "message", "remedy"),
    [
        ("NCCL_SOCKET_IFNAME", "ib99", "broken", "there is no interface 'ib99'", "set it to one of"),
        ("CUDA_LAUNCH_BLOCKING", "1", "slow", "CUDA_LAUNCH_BLOCKING=1", "unset CUDA_LAUNCH_BLOCKING"),
    ],
)
def test_variables(
    name: str, value: str, state: str, message: str, remedy: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv(name, value)
    _, results = findings(capsys)
    expect(results["variables"], state, message, remedy)


# The other ranks


def rendezvous(monkeypatch: pytest.MonkeyPatch, rank: int, address: str, port: int) -> None:
    monkeypatch.setattr("megappo.doctor.network.MEET_SECONDS", 2)
    values = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": address, "MASTER_PORT": port}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.waits
def test_busy_port(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with worlds.listening() as taken:
        port = taken.getsockname()[1]
        rendezvous(monkeypatch, 0, "127.0.0.1", port)
        code, results = findings(capsys)
    assert code == 1
    expect(results["rendezvous"], "broken", f"port {port} cannot be opened: Address already in use", "set MASTER_PORT")


@pytest.mark.waits
def test_rendezvous_without_rank_0(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    port = worlds.closed_port()
    rendezvous(monkeypatch, 1, "127.0.0.1", port)
    code, results = findings(capsys)
    assert code == 1
    expect(results["rendezvous"], "broken", f"127.0.0.1:{port} does not answer within 2 seconds", "and start rank 0")


def test_rendezvous_without_an_address(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rendezvous(monkeypatch, 1, "no-such-host.invalid", 29500)
    code, results = findings(capsys)
    assert code == 1
    expect(results["rendezvous"], "broken", "'no-such-host.invalid' has no address", "set MASTER_ADDR to an address")


def test_invalid_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    code, output = run(capsys, "doctor")
    assert (code, "WORLD_SIZE is 4, but RANK is not set; start with torchrun, srun" in output) == (2, True)


@pytest.mark.waits
def test_wrong_number_of_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rendezvous(monkeypatch, 0, "127.0.0.1", worlds.closed_port())
    monkeypatch.setenv("WORLD_SIZE", "3")
    code, output = run(capsys, "doctor", worlds.QUICKSTART)
    assert code == 2
    assert "actor.layout.tensor_parallel 2 x pipeline_parallel 1 = 2 does not divide its 3 ranks" in output
    code, output = run(capsys, *DRY, "--gpus", "3")
    assert (code, "does not divide its 3 ranks; the nearest layouts are" in output) == (2, True)


# The plan


def test_plan_without_room(capsys: pytest.CaptureFixture[str]) -> None:
    big = "configs/qwen3_8b_8gpu_math.yaml"
    small = [
        f"{role}.layout.{key}"
        for role in ("actor", "critic")
        for key in ("tensor_parallel=1", "sequence_parallel=false")
    ]
    code, output = run(capsys, "plan", big, "--machine", "h100", "--gpus", "8", *small)
    assert code == 1
    assert "does not fit: ranks 0-7 need" in output
    assert "the nearest layout that fits: " in output


def test_plan_without_room_on_this_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The doctor plans with the memory of this machine."""
    from megappo.doctor import settings
    from megappo.plan.machines import MACHINES

    monkeypatch.setattr(settings, "this_machine", lambda: MACHINES["h100"])
    wide = ("actor.layout.tensor_parallel=8", "actor.microbatch_budget_tokens=131072")
    code, results = findings(capsys, "configs/qwen3_8b_8gpu_math.yaml", *wide)
    assert code == 1
    expect(results["plan"], "broken", "does not fit: ranks 0-7 need", "the nearest layout that fits")


def test_unknown_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run(capsys, "plan", worlds.QUICKSTART, "--machine", "h201")
    assert (code, "the nearest is h20\n" in output) == (2, True), output


# Model, data, rewards: the dry run

CHAT = '{"prompt": "1+2=", "answer": "3"}\n'


@pytest.mark.waits
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor.epoch=2"], "actor.epoch is not a setting; did you mean actor.epochs?"),
        (["model.path=./nowhere"], "model.path './nowhere': there is no such folder"),
        (["model.tokenizer=./nowhere"], "model.tokenizer './nowhere': there is no such folder"),
        (["data.train={source: gone.jsonl}"], "data source 'gone.jsonl' does not exist"),
        (
            ["data.apply_chat_template=true"],
            "the tokenizer has no chat template; name a file with one in data.chat_template, or set",
        ),
        (["data.max_prompt_tokens=3"], "prompts of 'megappo.data.arithmetic:sums' are longer than"),
        (["reward.function=exakt"], "did you mean 'exact'?"),
        (
            ["reward.function=tests.support.troubled:crashing"],
            "of 8 rewards failed, more than reward.max_failure_fraction",
        ),
        (["rollout.prompts_per_step=51"], "does not divide the step's 408 samples"),
    ],
    ids=lambda value: value[0].split("=")[0] if isinstance(value, list) else "",
)
def test_settings_data_and_rewards(overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run(capsys, *DRY, *overrides)
    assert (code, message in output) == (2, True), output
    assert "would run" not in output


@pytest.mark.waits
def test_reward_without_positive_scores(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run(capsys, *DRY, "reward.function=tests.support.troubled:zero")
    assert code == 0
    assert "no written form of the answers scores above an empty response; inspect an example by hand" in output


@pytest.mark.waits
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (worlds.cut_short, "it may be cut short: fetch or save it again"),
        (worlds.lose_a_tensor, "has no tensor 'model.layers.1.mlp.down_proj.weight'; the weights do not fit"),
        (worlds.other_sizes, "its config.json requires (512, 64); the weights do not fit the configuration"),
        (lambda model: (model / "model.safetensors").unlink(), "has no model.safetensors; save the model as"),
        (lambda model: (model / "tokenizer.json").unlink(), "holds no tokenizer that can be loaded"),
        (lambda model: (model / "config.json").unlink(), "has no config.json; give a Hugging Face model folder"),
    ],
    ids=["cut short", "lost tensor", "other sizes", "no weights", "no tokenizer", "no config"],
)
def test_damaged_model(damage, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    model = worlds.pretrained(tmp_path / "model")
    damage(model)
    code, output = run(capsys, *DRY, f"model.path={model}", "model.init=pretrained")
    assert (code, message in output) == (2, True), output


@pytest.mark.waits
def test_doctor_and_dry_run_agree_on_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = worlds.pretrained(tmp_path / "model")
    settings = (f"model.path={model}", "model.init=pretrained", f"run.directory={tmp_path / 'run'}")
    (line,) = (row for row in run(capsys, *DRY, *settings)[1].splitlines() if " weights " in row)
    assert line.startswith(f"fine    weights          actor: all 21 tensors are in {model}")
    assert line in run(capsys, "doctor", worlds.QUICKSTART, *settings)[1].splitlines()
    worlds.cut_short(model)
    _, results = findings(capsys, worlds.QUICKSTART, *settings)
    expect(results["weights"], "broken", "incomplete metadata", "it may be cut short: fetch or save it again")


def test_used_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The directory contains a run without a checkpoint."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    code, output = run(capsys, *DRY, f"run.directory={tmp_path}")
    assert (code, "without any checkpoint to continue from; choose another run.directory" in output) == (2, True), (
        output
    )


def test_all_problems_are_reported_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = worlds.pretrained(tmp_path / "model")
    worlds.cut_short(model)
    settings = [f"model.path={model}", "model.init=pretrained", "reward.function=exakt", "run.directory=/proc/a"]
    code, output = run(capsys, *DRY, *settings)
    assert code == 2
    assert output.count("megappo: error: ") == 3


@pytest.mark.waits
def test_run_on_a_busy_port_reports_the_port(tmp_path: Path) -> None:
    with worlds.listening() as taken:
        port = str(taken.getsockname()[1])
        ranks: dict[str, Any] = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        ranks |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = worlds.megappo("train", worlds.QUICKSTART, f"run.directory={tmp_path}/run", **ranks)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("megappo: error: ")]
    assert len(errors) == 1, done.stderr
    assert f"rank 0 of 2 could not connect to the others at 127.0.0.1:{port}" in errors[0]
    assert (
        "set MASTER_ADDR and MASTER_PORT to rank 0's machine and a free port on it, and run `megappo doctor`"
        in errors[0]
    )
    assert "Traceback" not in done.stderr
