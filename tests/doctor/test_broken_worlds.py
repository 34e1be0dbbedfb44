"""Problems of a machine are reported before the job is queued, with the remedy, by doctor, plan or dry run."""

from __future__ import annotations

import importlib.util
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.doctor.devices import device_findings
from megappo.doctor.findings import Finding
from megappo.plan.hardware.machines import MACHINES
from megappo.runtime.launchers import Ranks
from tests.support import worlds

pytestmark = pytest.mark.usefixtures("nothing_launched")


# The machine


def test_no_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expect: Callable[..., None]) -> None:
    monkeypatch.setattr("megappo.doctor.machine.SHARED_MEMORY", tmp_path / "none")
    expect("shared memory", "broken", "is not a writable folder", "--ipc=host or --shm-size=16g")


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
    done = worlds.megappo("train", "configs/sglang_quickstart.yaml", *one, prefix=mounted(Path("/dev/shm"), "64k"))
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "megappo: error: the weight sync needs " in done.stderr and "--shm-size=16g" in done.stderr
    assert not list(tmp_path.rglob("engine-*.log"))
    done = worlds.megappo("train", "configs/sglang_quickstart.yaml", *one, prefix=mounted(Path("/dev/shm"), "1100k"))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.waits
def test_full_disk(tmp_path: Path) -> None:
    prefix = mounted(tmp_path, "1m")
    done = worlds.megappo("doctor", worlds.QUICKSTART, f"run.directory={tmp_path}/run", prefix=prefix)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"broken  disk             {tmp_path} cannot be written: No space left on device; free some" in done.stdout


@pytest.mark.waits
def test_run_directory_without_write_access(expect: Callable[..., None], refused: Callable[..., str]) -> None:
    setting, message = "run.directory=/proc/runs/a", "/proc cannot be written"
    expect("disk", "broken", message, "choose another run.directory", worlds.QUICKSTART, setting)
    refused(message, *worlds.DRY, setting)


def test_file_in_place_of_a_folder(tmp_path: Path, expect: Callable[..., None]) -> None:
    (tmp_path / "runs").write_text("")
    message, setting = "runs is a file, but run.directory", f"run.directory={tmp_path}/runs/a"
    expect("disk", "broken", message, "choose another run.directory", worlds.QUICKSTART, setting)


def test_few_open_files(expect: Callable[..., None]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        expect("limits", "slow", "256 open files, fewer than 4096", "ulimit -n 4096")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_device_is_missing(expect: Callable[..., None]) -> None:
    message = "runtime.device is cuda, but there is no CUDA device"
    expect("gpu", "broken", message, "use runtime.device: cpu", worlds.QUICKSTART, "runtime.device=cuda")


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


@pytest.mark.parametrize(
    ("free", "ranks", "finding"),
    [
        (
            [1.0] * 4, 8,
            Finding(
                "gpu", "broken", "8 ranks are on this machine, which has 4 visible CUDA devices",
                "start at most 4 per machine",
            ),
        ),
        (
            [1.0, 0.25], 2,
            Finding(
                "gpu", "slow", "2 x NVIDIA H100 80GB HBM3; other processes use 1 (20 of 80 GB free)",
                "end the processes that nvidia-smi lists",
            ),
        ),
    ],
)  # fmt: skip
def test_too_few_or_busy_gpus(monkeypatch: pytest.MonkeyPatch, free: list[float], ranks: int, finding: Finding) -> None:
    with gpus(monkeypatch, free):
        results = {f.check: f for f in device_findings(None, Ranks(0, ranks, 0, ranks))}
    assert results["gpu"] == finding
    assert finding.state == "broken" or results["links"].state == "fine"


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
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1700000000")
    (finding,) = [f for f in device_findings(None, Ranks(0, 1, 0, None)) if "SLURM_JOB_END_TIME" in f.text]
    assert finding.state == "slow" and finding.remedy == "unset it"


@pytest.mark.parametrize(
    ("name", "value", "state", "message", "remedy"),
    [
        ("NCCL_SOCKET_IFNAME", "ib99", "broken", "there is no interface 'ib99'", "set it to one of"),
        ("CUDA_LAUNCH_BLOCKING", "1", "slow", "CUDA_LAUNCH_BLOCKING=1", "unset CUDA_LAUNCH_BLOCKING"),
    ],
)
def test_variables(
    name: str, value: str, state: str, message: str, remedy: str,
    monkeypatch: pytest.MonkeyPatch, expect: Callable[..., None],
) -> None:  # fmt: skip
    monkeypatch.setenv(name, value)
    expect("variables", state, message, remedy)


# The other ranks


def rendezvous(monkeypatch: pytest.MonkeyPatch, rank: int, address: str, port: int) -> None:
    monkeypatch.setattr("megappo.doctor.network.MEET_SECONDS", 2)
    values = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": address, "MASTER_PORT": port}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.waits
def test_busy_port(monkeypatch: pytest.MonkeyPatch, expect: Callable[..., None]) -> None:
    with worlds.listening() as taken:
        port = taken.getsockname()[1]
        rendezvous(monkeypatch, 0, "127.0.0.1", port)
        expect("rendezvous", "broken", f"port {port} cannot be opened: Address already in use", "set MASTER_PORT")


@pytest.mark.waits
def test_rendezvous_without_rank_0(monkeypatch: pytest.MonkeyPatch, expect: Callable[..., None]) -> None:
    port = worlds.closed_port()
    rendezvous(monkeypatch, 1, "127.0.0.1", port)
    expect("rendezvous", "broken", f"127.0.0.1:{port} does not answer within 2 seconds", "and start rank 0")


def test_rendezvous_without_an_address(monkeypatch: pytest.MonkeyPatch, expect: Callable[..., None]) -> None:
    rendezvous(monkeypatch, 1, "no-such-host.invalid", 29500)
    expect("rendezvous", "broken", "'no-such-host.invalid' has no address", "set MASTER_ADDR to an address")


def test_invalid_ranks(monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    refused("WORLD_SIZE is 4, but RANK is not set; start with torchrun, srun", "doctor")


@pytest.mark.waits
def test_wrong_number_of_ranks(monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]) -> None:
    rendezvous(monkeypatch, 0, "127.0.0.1", worlds.closed_port())
    monkeypatch.setenv("WORLD_SIZE", "3")
    message = "actor.layout.tensor_parallel 2 x pipeline_parallel 1 = 2 does not divide its 3 ranks"
    refused(message, "doctor", worlds.QUICKSTART)
    refused("does not divide its 3 ranks; the nearest layouts are", *worlds.DRY, "--gpus", "3")


# The plan


def test_plan_without_room(refused: Callable[..., str]) -> None:
    one = ("tensor_parallel=1", "sequence_parallel=false")
    small = [f"{role}.layout.{key}" for role in ("actor", "critic") for key in one]
    command = ("plan", worlds.BIG, "--machine", "h100", "--gpus", "8", *small)
    assert "the nearest layout that fits: " in refused("does not fit: ranks 0-7 need", *command, code=1)


def test_plan_without_room_on_this_machine(monkeypatch: pytest.MonkeyPatch, expect: Callable[..., None]) -> None:
    """The doctor plans with the memory of this machine."""
    monkeypatch.setattr("megappo.doctor.settings.this_machine", lambda: MACHINES["h100"])
    wide = ("actor.layout.tensor_parallel=8", "actor.microbatch_budget_tokens=131072")
    expect("plan", "broken", "does not fit: ranks 0-7 need", "the nearest layout that fits", worlds.BIG, *wide)


def test_unknown_machine(refused: Callable[..., str]) -> None:
    refused("the nearest is h20\n", "plan", worlds.QUICKSTART, "--machine", "h201")


# Model, data, rewards: the dry run


@pytest.mark.waits
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor.epoch=2"], "actor.epoch is not a setting; did you mean actor.epochs?"),
        (["model.path=./nowhere"], "model.path './nowhere': there is no such folder"),
        (["model.tokenizer=./nowhere"], "model.tokenizer './nowhere': there is no such folder"),
        (["data.train={source: gone.jsonl}"], "data source 'gone.jsonl' does not exist"),
        (["data.apply_chat_template=true"], "has no chat template; name a file with one in data.chat_template, or set"),
        (["data.max_prompt_tokens=3"], "prompts of 'megappo.data.arithmetic:sums' are longer than"),
        (["reward.function=exakt"], "did you mean 'exact'?"),
        (["reward.function=tests.support.troubled:crashing"], "of 8 rewards failed, more than reward.max_failure_f"),
        (["rollout.prompts_per_step=51"], "does not divide the step's 408 samples"),
    ],
    ids=lambda value: value[0].split("=")[0] if isinstance(value, list) else "",
)
def test_settings_data_and_rewards(overrides: list[str], message: str, refused: Callable[..., str]) -> None:
    assert "would run" not in refused(message, *worlds.DRY, *overrides)


@pytest.mark.waits
def test_reward_without_positive_scores(refused: Callable[..., str]) -> None:
    message = "no written form of the answers scores above an empty response; inspect an example by hand"
    refused(message, *worlds.DRY, "reward.function=tests.support.troubled:zero", code=0)


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
def test_damaged_model(
    damage: Callable[[Path], None], message: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    model = worlds.pretrained(tmp_path / "model")
    damage(model)
    refused(message, *worlds.DRY, f"model.path={model}", "model.init=pretrained")


@pytest.mark.waits
def test_doctor_and_dry_run_agree_on_weights(
    tmp_path: Path, refused: Callable[..., str], expect: Callable[..., None]
) -> None:
    model = worlds.pretrained(tmp_path / "model")
    settings = (f"model.path={model}", "model.init=pretrained", f"run.directory={tmp_path / 'run'}")
    start = f"fine    weights          actor: all 21 tensors are in {model}"
    (line,) = (row for row in refused(start, *worlds.DRY, *settings, code=0).splitlines() if " weights " in row)
    assert line.startswith(start)
    assert line in refused(line, "doctor", worlds.QUICKSTART, *settings, code=0).splitlines()
    worlds.cut_short(model)
    remedy = "it may be cut short: fetch or save it again"
    expect("weights", "broken", "incomplete metadata", remedy, worlds.QUICKSTART, *settings)


def test_used_run_directory(tmp_path: Path, refused: Callable[..., str]) -> None:
    """The directory contains a run without a checkpoint."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    message = "without any checkpoint to continue from; choose another run.directory"
    refused(message, *worlds.DRY, f"run.directory={tmp_path}")


def test_all_problems_are_reported_together(tmp_path: Path, refused: Callable[..., str]) -> None:
    model = worlds.pretrained(tmp_path / "model")
    worlds.cut_short(model)
    settings = [f"model.path={model}", "model.init=pretrained", "reward.function=exakt", "run.directory=/proc/a"]
    assert refused("", *worlds.DRY, *settings).count("megappo: error: ") == 3


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
    remedy = "set MASTER_ADDR and MASTER_PORT to rank 0's machine and a free port on it, and run `megappo doctor`"
    assert remedy in errors[0]
    assert "Traceback" not in done.stderr
