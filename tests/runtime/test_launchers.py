"""Ranks from the variables of torchrun, SLURM and MPI."""

from __future__ import annotations

import datetime
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from megappo.config import ConfigError
from megappo.errors import RunError
from megappo.network.store import address_towards, another_connection, free_port, listening_store
from megappo.runtime.device import device_index
from megappo.runtime.launchers import (
    Ranks,
    adopt_launcher,
    first_host,
    job_of,
    launcher_of,
    left_variables,
    may_print,
    read_ranks,
    seconds_since_start,
    seconds_to_end,
    tasks_per_node,
)
from megappo.runtime.ranks.meeting import await_all
from tests.support.worlds import environment

SLURM = {
    "SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "12", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8,4", "SLURM_STEP_NODELIST": "localhost,gpu[02-03]", "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-1",
}  # fmt: skip
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def adopted(environment: dict[str, str]) -> dict[str, str]:
    environment = dict(environment)
    adopt_launcher(environment)
    return environment


def test_slurm() -> None:
    variables = adopted(SLURM)
    assert launcher_of(SLURM) == "slurm"
    assert read_ranks(variables) == Ranks(9, 12, 1, 4)
    assert variables["MASTER_ADDR"] == "localhost"
    assert 10000 <= int(variables["MASTER_PORT"]) < 30000
    assert adopted(SLURM | {"SLURM_PROCID": "0"})["MASTER_PORT"] == variables["MASTER_PORT"]
    assert adopted(SLURM | {"SLURM_JOB_ID": "78"})["MASTER_PORT"] != variables["MASTER_PORT"]
    assert adopted(SLURM | {"SLURM_STEP_RESV_PORTS": "12001-12002"})["MASTER_PORT"] == "12001"
    with_master = adopted(SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert (with_master["MASTER_ADDR"], with_master["MASTER_PORT"]) == ("head", "1234")


def test_batch_script_is_not_a_rank() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7", "SLURM_NODELIST": "n1"}
    assert launcher_of(batch) == "none"
    assert adopted(batch) == batch


def test_torchrun_inside_srun_has_priority() -> None:
    environment = SLURM | {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    assert adopted(environment) == environment


@pytest.mark.waits
def test_unknown_first_machine_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment = SLURM | {"SLURM_STEP_NODELIST": "no-such-host-[1-2]"}
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="'no-such-host-1', has no known address; set MASTER_ADDR"):
        adopted(environment)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho NodeName=$4 NodeAddr=127.0.0.9 NodeHostName=x\n")
    scontrol.chmod(0o755)
    assert adopted(environment)["MASTER_ADDR"] == "127.0.0.9"


def test_mpi() -> None:
    variables = adopted(OPEN_MPI)
    assert read_ranks(variables) == Ranks(1, 2, 1, 2)
    assert variables["MASTER_ADDR"] == "127.0.0.1"
    assert variables["MASTER_PORT"] == adopted(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0"})["MASTER_PORT"]
    with pytest.raises(ConfigError, match="set MASTER_ADDR to its name, for example mpirun -x MASTER_ADDR=node1"):
        adopted(HYDRA)
    assert read_ranks(adopted(HYDRA | {"MASTER_ADDR": "node1"})) == Ranks(3, 4, 1, 2)


def test_jobs_of_different_users_have_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs on one machine differ by the process that started the ranks, jobs on several machines by the command. The
    ports differ, too."""
    nameless = {name: value for name, value in OPEN_MPI.items() if name != "PMIX_NAMESPACE"}
    elsewhere = HYDRA | {"MASTER_ADDR": "node1"}

    def met() -> list[tuple[str, str]]:
        places = (SLURM, OPEN_MPI, nameless, elsewhere)
        return [(variables["MASTER_PORT"], job_of(variables)) for variables in map(adopted, places)]

    mine = met()
    assert mine == met() and len({port for port, _ in mine}) == len(mine) and "10000" not in dict(mine)
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert not {port for port, _ in mine} & {port for port, _ in met()}
    assert not {job for _, job in mine} & {job for _, job in met()}
    monkeypatch.setattr(os, "getuid", lambda: uid)
    parent = os.getppid()
    monkeypatch.setattr(os, "getppid", lambda: parent + 1)
    assert [one == other for one, other in zip(mine, met(), strict=True)] == [True, True, False, True]
    monkeypatch.setattr(sys, "argv", ["megappo", "train", "another.yaml"])
    assert [one == other for one, other in zip(mine, met(), strict=True)] == [True, True, False, False]


def test_duration_since_process_start() -> None:
    """The duration includes the imports at the start."""
    passed = time.time() - psutil.Process().create_time()
    assert seconds_since_start() == pytest.approx(passed, abs=1.0)


IMPORTS = """
from megappo.runtime.memory.allocator import put_off_collections
put_off_collections()
from megappo.config.schema import RuntimeSettings
from megappo.runtime.process import start_runtime
"""


@pytest.mark.slow
@pytest.mark.waits
def test_rank_of_another_job_is_refused() -> None:
    """The rank of the other job connects to the port of our rank 0."""
    code = IMPORTS + "with start_runtime(RuntimeSettings(threads_per_rank=1, collective_timeout_seconds=120)): pass\n"
    variables = environment() | OPEN_MPI | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    ours, other = (
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=variables | {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank, "PMIX_NAMESPACE": job},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, job in (("0", "ours"), ("1", "theirs"))
    )
    try:
        errors = other.communicate(timeout=120)[1]
    finally:
        ours.kill()
        ours.communicate()
    uid = os.getuid()
    assert f"(the store belongs to the job '{uid} ours', this is '{uid} theirs'); set MASTER_ADDR and" in errors


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n[1-2]", "n1"), ("gpu[007,9-12],login", "gpu007"), ("a,b", "a"), ("r[1-2]n[3,5]", "r1n3"), ("", "")],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_tasks_per_node() -> None:
    assert tasks_per_node("8(x2),4") == [8, 8, 4]
    with pytest.raises(ConfigError, match=r"must look like 8\(x2\),4"):
        tasks_per_node("many")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE is 4, but RANK is not set"),
        ({"WORLD_SIZE": "4", "RANK": "4"}, "RANK is 4, must be below WORLD_SIZE 4"),
        ({"WORLD_SIZE": "4", "RANK": "one"}, "RANK is 'one', must be a whole number"),
    ],
)
def test_impossible_ranks(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_ranks(environment)


def test_devices_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    assert device_index(Ranks(9, 16, 1, 8), visible=8) == 1
    assert device_index(Ranks(9, 16, 1, None), visible=2) == 1
    with pytest.raises(RunError, match="8 ranks are on this machine, which has 4 visible CUDA devices; start at"):
        device_index(Ranks(0, 16, 0, 8), visible=4)
    with pytest.raises(RunError, match="has 1 visible CUDA device;"):
        device_index(Ranks(1, 2, 1, 2), visible=1)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")  # --gpus-per-task=1: each rank sees only its own device
    assert device_index(Ranks(1, 2, 1, 2), visible=1) == 0


def named_by_an_address() -> list[str]:
    """Return a command prefix that gives this machine a name for a non-loopback interface, if this is permitted."""
    address = address_towards("192.0.2.1", 9)
    before = ["unshare", "--uts", "sh", "-c", f'hostname {address} && exec "$@"', "-"]
    may = (
        shutil.which("unshare") and subprocess.run([*before, "true"], capture_output=True, check=False).returncode == 0
    )
    return before if may else []


@pytest.mark.slow
@pytest.mark.waits
def test_two_mpi_processes_connect() -> None:
    """The ranks are started like with mpirun and run a collective. No socket is open to other machines, for any name
    of this machine."""
    code = (
        f"{IMPORTS}import os, psutil, torch, torch.distributed as dist\n"
        "with start_runtime(RuntimeSettings(threads_per_rank=1)) as runtime:\n"
        "    total = torch.tensor(float(runtime.rank + 1)); dist.all_reduce(total)\n"
        "    sockets = [s for s in psutil.Process().net_connections() if s.status == psutil.CONN_LISTEN]\n"
        "    print(runtime.rank, runtime.world_size, runtime.local_rank, int(total), *{s.laddr.ip for s in sockets})\n"
    )
    variables = environment() | OPEN_MPI
    variables.pop("GLOO_SOCKET_IFNAME", None)
    job = {"PMIX_NAMESPACE": f"test-{os.getpid()}"}
    processes = [
        subprocess.Popen(
            [*named_by_an_address(), sys.executable, "-c", code],
            env=variables | job | {"OMPI_COMM_WORLD_RANK": str(r), "OMPI_COMM_WORLD_LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for r in (0, 1)
    ]
    outputs = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert outputs == ["0 2 0 3 127.0.0.1", "1 2 1 3 127.0.0.1"]


@pytest.mark.waits
def test_missing_ranks_are_reported() -> None:
    seconds = datetime.timedelta(seconds=1)
    store = dist.PrefixStore("", listening_store("127.0.0.1", 0, 4, seconds))

    def of_rank_1() -> None:
        with pytest.raises(RunError):
            await_all(another_connection(store), Ranks(1, 4, 1, 4), seconds)

    other = threading.Thread(target=of_rank_1)
    other.start()
    with pytest.raises(RunError, match="ranks 2, 3 of 4 did not connect within 1 seconds; see their logs"):
        await_all(store, Ranks(0, 4, 0, 4), seconds)
    other.join()


@pytest.mark.waits
@pytest.mark.parametrize(
    ("address", "on_one_machine", "interface"),
    [
        ("127.0.0.1", False, "127.0.0.1"),
        ("localhost", False, "127.0.0.1"),
        ("this-machine", True, "127.0.0.1"),
        ("this-machine", False, "::"),  # other machines can resolve this name to another address
        ("two-interfaces", False, "::"),  # or to the second address
        ("two-interfaces", True, "127.0.0.1"),
        ("192.0.2.1", False, "::"),  # not an address of this machine
    ],
)
def test_listening_address_of_a_store(
    monkeypatch: pytest.MonkeyPatch, address: str, on_one_machine: bool, interface: str
) -> None:
    known, served = socket.getaddrinfo, dist.TCPStore
    names = {"this-machine": ["127.0.0.1"], "two-interfaces": ["127.0.0.1", "127.0.0.2"]}
    reached = dict.fromkeys([*names, "192.0.2.1"], "127.0.0.1")
    seconds = datetime.timedelta(seconds=5)

    def resolve(host: str, *arguments: Any, **more: Any) -> list[Any]:
        return [place for name in names.get(host, [host]) for place in known(name, *arguments, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)

    def reach(host: str, *arguments: Any, **more: Any) -> dist.TCPStore:
        return served(reached.get(host, host), *arguments, **more)

    monkeypatch.setattr(dist, "TCPStore", reach)
    store = listening_store(address, 0, 2, seconds, on_one_machine=on_one_machine)
    sockets = [s for s in psutil.Process().net_connections() if s.status == psutil.CONN_LISTEN]
    assert [s.laddr.ip for s in sockets if s.laddr.port == store.port] == [interface]
    other = served("127.0.0.1", store.port, 2, False, seconds)
    other.set("met", "here")
    assert store.get("met") == b"here"


def test_end_time_of_a_slurm_job() -> None:
    now = time.time()
    assert seconds_to_end({"SLURM_JOB_END_TIME": f"{now + 3600:.0f}"}) == pytest.approx(3600, abs=5)
    assert seconds_to_end({"SLURM_JOB_END_TIME": f"{now - 1:.0f}"}) == 0  # the time is after the start of this process
    for text in ("", "NONE", "-1", "9" * 12):
        assert seconds_to_end({"SLURM_JOB_END_TIME": text}) is None
    assert seconds_to_end({}) is None


def test_end_time_before_the_start_is_ignored() -> None:
    """The run ignores the variable and reports its name."""
    environment = {"SLURM_JOB_END_TIME": f"{time.time() - seconds_since_start() - 60:.0f}"}
    assert seconds_to_end(environment) is None
    (sentence,) = left_variables(environment)
    assert re.match(r"SLURM_JOB_END_TIME is \d+, a time before this run started, .*; unset it", sentence)
    for end in (f"{time.time() + 60:.0f}", "NONE", "", "4102444800000"):
        assert not list(left_variables({"SLURM_JOB_END_TIME": end}))


OF_DAEMON = {
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
}  # fmt: skip
"""Variables of a step with one daemon of an MPI launcher per node."""


@pytest.mark.parametrize("mpi", [OPEN_MPI, HYDRA], ids=["open-mpi", "intel-mpi"])
@pytest.mark.parametrize("step", [OF_DAEMON, SLURM], ids=["daemons", "one-step"])
def test_mpirun_inside_a_step_has_priority(mpi: dict[str, str], step: dict[str, str]) -> None:
    """The ranks of mpirun inherit variables of SLURM from the daemons, or from the step of the shell."""
    environment = step | mpi
    assert launcher_of(environment) == "mpi"
    master = {"MASTER_ADDR": "node1"}
    assert read_ranks(adopted(environment | master)) == read_ranks(adopted(mpi | master))


def test_srun_with_pmi_is_slurm() -> None:
    """`srun --mpi=pmi2` sets the rank and size of PMI, but not the local rank."""
    environment = SLURM | {"PMI_RANK": "9", "PMI_SIZE": "12", "PMI_FD": "5"}
    assert launcher_of(environment) == "slurm" and read_ranks(adopted(environment)) == Ranks(9, 12, 1, 4)


def test_ranks_of_a_heterogeneous_step() -> None:
    """SLURM describes the whole step or only the later component. In this case, the ranks are unknown."""
    whole = OF_DAEMON | {"SLURM_HET_SIZE": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2"}
    whole |= {"SLURM_STEP_TASKS_PER_NODE": "2,1", "MASTER_ADDR": "n1"}
    assert read_ranks(adopted(whole)) == Ranks(2, 3, 0, 1)
    alone = whole | {"SLURM_STEP_TASKS_PER_NODE": "1"}
    with pytest.raises(ConfigError, match=r"a later component of a heterogeneous step.*\(srun --het-group=0\)"):
        adopted(alone)


def test_rank_of_a_pod_prints() -> None:
    """RANK can be the index of a pod. With LOCAL_RANK, only the first rank of a launcher prints."""
    assert may_print({}) and may_print({"RANK": "0", "LOCAL_RANK": "0"}) and may_print({"RANK": "1", "WORLD_SIZE": "2"})
    assert not may_print({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"})
