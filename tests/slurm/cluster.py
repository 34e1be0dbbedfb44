"""SLURM cluster of three virtual nodes on this machine, with separate daemons, ports and folders."""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megappo.network.store import free_ports

DAEMONS = ("munged", "slurmctld", "slurmd")
_START_SECONDS = 60
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
KillWait=20
OverTimeLimit=10
SchedulerParameters=sched_interval=2,bf_interval=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=8000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=8000 State=UNKNOWN
NodeName=n3 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs=2 RealMemory=8000 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=all Nodes=n1,n2,n3 MaxTime=INFINITE State=UP PriorityTier=1
"""


def unavailable_reason() -> str | None:
    """Return the reason why SLURM cannot be started on this machine, or None if SLURM can be started."""
    missing = [name for name in DAEMONS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"{', '.join(missing)} not installed; as root: apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "the SLURM daemons of the test are started by root only"
    return None


@dataclass(frozen=True)
class Cluster:
    """Running SLURM cluster."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that connect the commands to this cluster."""
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
        return variables | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _path()}

    def run(self, *command: str, **options: object) -> str:
        """Run a command and return its output. Raises AssertionError with the output if the command fails."""
        settings: dict[str, object] = {"timeout": 60, "env": self.environment} | options
        done = subprocess.run(command, capture_output=True, text=True, check=False, **settings)  # type: ignore[call-overload]
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return str(done.stdout)

    def state(self, job: int) -> dict[str, str]:
        """Return the fields of `scontrol show job`, by name."""
        fields = self.run("scontrol", "--oneliner", "show", "job", str(job)).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def wait(self, job: int, *states: str, seconds: float = 300) -> dict[str, str]:
        """Wait until a job is in one of the states. After a timeout, raises AssertionError with the log of the job."""
        deadline = time.monotonic() + seconds
        while (fields := self.state(job))["JobState"] not in states:
            assert time.monotonic() < deadline, f"job {job} is {fields['JobState']}: {self.log(fields)}"
            time.sleep(0.5)
        return fields

    def cancel_all(self) -> None:
        """Cancel all jobs that are queued, suspended, requeued or running."""
        if self.run("squeue", "--noheader", "--states=PENDING,RUNNING,SUSPENDED,CONFIGURING"):
            self.run("scancel", f"--user={getpass.getuser()}")

    def log(self, state: dict[str, str]) -> str:
        """Return the end of the output of a job."""
        path = Path(state["StdOut"])
        return path.read_text()[-6000:] if path.exists() else "no output"


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _await(what: str, ready: str, check: list[str], cluster: Cluster) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        done = subprocess.run(check, env=cluster.environment, capture_output=True, text=True, timeout=30, check=False)
        if ready in done.stdout:
            return
        assert time.monotonic() < deadline, f"{what} did not start: {done.stdout}{done.stderr}"
        time.sleep(0.3)


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in reversed(processes):
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def virtual_nodes(folder: Path) -> Iterator[Cluster]:
    """Start a cluster with all its files in `folder`. Jobs and daemons end with the context."""
    # munged refuses a folder that other users can write to. The path of a socket can have at most 107 characters.
    for name in ("state", "n1", "n2", "n3"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    host = socket.gethostname().split(".")[0]
    first = free_ports("127.0.0.1", 4)
    user, ports = getpass.getuser(), range(first, first + 4)
    text = _CONFIGURATION.format(folder=folder, host=host, user=user, ports=ports)
    (folder / "slurm.conf").write_text(text)
    cluster = Cluster(folder)
    processes: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        with (folder / f"{command[0]}-{len(processes)}.out").open("wb") as out:
            processes.append(subprocess.Popen(command, env=cluster.environment, stdout=out, stderr=out))

    try:
        files = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
        start("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
        _await("munged", "munge.socket", ["ls", str(folder)], cluster)
        start("slurmctld", "-D")
        for node in ("n1", "n2", "n3"):
            start("slurmd", "-D", "-N", node)
        _await("SLURM", "3 idle", ["sinfo", "--noheader", "--format=%D %t"], cluster)
        yield cluster
        cluster.cancel_all()
        _await("the end of all jobs", "3 idle", ["sinfo", "--noheader", "--format=%D %t"], cluster)
    finally:
        _stop(processes)
