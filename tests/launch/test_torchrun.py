"""Errors under a real torchrun: the message is printed once, at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed.run import parse_args

from megappo.config import ConfigError
from megappo.runtime.torchrun import with_head
from megappo.runtime.waiting import wait_until
from tests.support.places import ROOT
from tests.support.worlds import closed_port, listening

SENTENCE = "megappo: error: run.seed is -1, must be at least 0; the nearest is 0"


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.parametrize("program", ["torch.distributed.run", "megappo.runtime.torchrun"])
def test_error_is_printed_once_at_the_end(program: str) -> None:
    # The rendezvous options of launch/torchrun.sh for one machine.
    meeting = ["--standalone"]
    if program == "megappo.runtime.torchrun":
        meeting = ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", "--rdzv-id=test", "--local-addr=127.0.0.1"]
    start = [sys.executable, "-m", program, *meeting, "--nproc-per-node", "2"]
    done = subprocess.run(
        [*start, "-m", "megappo", "train", "configs/quickstart.yaml", "run.seed=-1"], cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, capture_output=True,
        text=True, timeout=200, check=False,
    )  # fmt: skip
    lines = done.stderr.splitlines()
    assert done.stderr.count(SENTENCE) == 1, done.stderr
    if program == "megappo.runtime.torchrun":
        assert (done.returncode, lines[-1]) == (2, SENTENCE), done.stderr
        assert "Traceback" not in done.stderr and "master_addr is only used" not in done.stderr
    else:  # torchrun prints its own traceback, and a summary with the message
        assert (done.returncode, SENTENCE in done.stderr.rpartition("Root Cause")[2]) == (1, True), done.stderr


KILLED = """
import os, signal, time
if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
REPORTING = """
import os, pathlib, sys, time
from megappo.runtime.launchers import write_torchrun_error
file = os.environ['TORCHELASTIC_ERROR_FILE']
if os.environ['RANK'] == '0':
    write_torchrun_error(os.environ, ['megappo: error: the seed is too small'], 2)
    time.sleep(60)  # the rank takes long to end
first = pathlib.Path(file.replace('/1/error.json', '/0/error.json'))
while not first.exists() or not first.read_text(): time.sleep(0.05)
sys.exit(2)
"""


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.parametrize(
    ("worker", "code", "message"),
    [
        (KILLED, 137, "megappo: error: rank 1 ended by SIGKILL, for example for a lack of memory"),
        (REPORTING, 2, "megappo: error: the seed is too small"),
    ],
    ids=["killed_rank_has_no_message", "rank_with_message_is_ended_by_torchrun"],
)
def test_first_failure_determines_message_and_exit_code(worker: str, code: int, message: str, tmp_path: Path) -> None:
    """Errors that other ranks report about a killed rank, such as a missing answer, come later."""
    (tmp_path / "worker.py").write_text(worker)
    start = [sys.executable, "-m", "megappo.runtime.torchrun", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*start, str(tmp_path / "worker.py")], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=200, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.splitlines()[-1]) == (code, message), done.stderr


STOPPING = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))
pathlib.Path('{folder}', 'began-' + os.environ['RANK']).touch()
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.parametrize("receiver", ["launcher", "rank"])
@pytest.mark.parametrize(("code", "from_launcher"), [(85, 85), (3, 143)])
def test_clean_stop_has_its_own_exit_code(receiver: str, code: int, from_launcher: int, tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(STOPPING.format(code=code, folder=tmp_path))
    start = [sys.executable, "-m", "megappo.runtime.torchrun", "--standalone", "--nproc-per-node", "2", str(worker)]
    launcher = subprocess.Popen(
        start, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True
    )
    assert wait_until(lambda: len(list(tmp_path.glob("began-*"))) == 2, 120, every_seconds=0.2)
    receivers = [launcher.pid] if receiver == "launcher" else [p.pid for p in psutil.Process(launcher.pid).children()]
    for process in receivers:
        os.kill(process, signal.SIGTERM)
    errors = launcher.communicate(timeout=60)[1]
    assert launcher.returncode == (from_launcher if receiver == "launcher" else code), errors
    stopped = "megappo: stopped as requested (exit code 85); the same command continues the run"
    assert (errors.splitlines()[-1] == stopped) == (code == 85)
    assert code != 85 or ("error" not in errors and "failed" not in errors)


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.parametrize("between", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_ranks_end_after_torchrun_is_killed(between: bool, tmp_path: Path) -> None:
    """This includes a shell between torchrun and the rank, as in a SLURM job. Nothing else ends these ranks."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os, time\n"
        "from megappo.config.schema import RuntimeSettings\n"
        "from megappo.runtime.process import start_runtime\n"
        "with start_runtime(RuntimeSettings(threads_per_rank=1)) as runtime:\n"
        f"    open(f'{tmp_path}/began-{{runtime.rank}}', 'w').write(str(os.getpid()))\n"
        "    time.sleep(600)\n"
    )
    shell = ["--no-python", "bash", "-c", 'export MEGAPPO_AGENT_PID=$PPID; "$0" "$@"; exit $?', sys.executable]
    meeting = [
        "--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--rdzv-id={tmp_path.name}", "--local-addr=127.0.0.1",
    ]  # fmt: skip
    start = [sys.executable, "-m", "megappo.runtime.torchrun", *meeting, "--nproc-per-node", "2"]
    paths = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with (tmp_path / "said").open("w") as output:
        command = [*start, *(shell if between else []), str(worker)]
        agent = subprocess.Popen(command, cwd=ROOT, env=os.environ | paths, stdout=output, stderr=output)
    begun = [tmp_path / f"began-{rank}" for rank in (0, 1)]
    assert wait_until(lambda: all(path.exists() and path.read_text() for path in begun), 120, every_seconds=0.2)
    agent.kill()
    agent.wait()
    ranks = [int(path.read_text()) for path in begun]
    assert wait_until(lambda: not any(psutil.pid_exists(rank) for rank in ranks), 15, every_seconds=0.2)
    assert f"torchrun, process {agent.pid} on " in (tmp_path / "said").read_text()


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_start_without_cuda_prints_no_warning(tmp_path: Path) -> None:
    """The compiler of CUDA may be installed on machines without a GPU."""
    done = subprocess.run(
        [sys.executable, "-c", "import megappo.ppo.run"], cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_HOME": str(tmp_path)}, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.waits
def test_busy_port_of_the_head_is_an_error() -> None:
    """Otherwise ranks join the rendezvous of another program and read its pickles."""

    def conf(host: str, port: int, *more: str, **variables: str) -> str:
        line = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{port}", *more, "x.py"]
        configuration: str = with_head(parse_args(line), variables).rdzv_conf
        return configuration

    free = closed_port()
    assert conf("127.0.0.1", free) == "is_host=true"
    assert conf("192.0.2.1", free) == "is_host=false"  # an address that is reserved for documentation
    assert conf("127.0.0.1", free, "--rdzv-conf", "is_host=0") == "is_host=0"
    with listening() as taken:
        port = taken.getsockname()[1]
        line = rf"no process can listen at the head 127.0.0.1:{port}, which is this machine \(Address already in use\)"
        with pytest.raises(ConfigError, match=line + "; choose another port"):
            conf("127.0.0.1", port)
        assert conf("127.0.0.1", port, MEGAPPO_IS_HEAD="no") == "is_host=false"
        assert conf("192.0.2.1", port) == "is_host=false"
