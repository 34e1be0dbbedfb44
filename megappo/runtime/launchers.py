"""Ranks from the launcher of the processes: torchrun, `srun` or `mpirun`.

All other modules read only the variables of torchrun: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`,
`MASTER_ADDR`, `MASTER_PORT`. If a different launcher started this process, this module sets these variables from the
variables of the launcher. Variables that are already set are never changed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megappo.config.base import LARGEST_WORLD
from megappo.errors import ConfigError, shortened, whole_number
from megappo.runtime.holder import start_ticks

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
EXIT_CODE = "exit_code"
"""Field of torchrun's error file with the exit code of a failed worker."""
_PORTS = range(10000, 30000)  # below Linux's ephemeral ports (from 32768)
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH, Intel MPI
)
"""Rank, world size, local rank and local world size by launcher. `srun --mpi=pmi2` sets the PMI variables of the last
row, but not its MPI_LOCAL variables."""
_MPI_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_KVS", "PMI_PORT")
_SCONTROL_SECONDS = 20
_JOB = "MEGAPPO_JOB"
_JOB_END = "SLURM_JOB_END_TIME"
_LATEST_END = 10**11
"""Largest plausible time in seconds since 1970 (year 5138)."""


@dataclass(frozen=True)
class Ranks:
    """Numbers that torchrun sets for each process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    """Ranks on this machine; None: the launcher does not report the number."""


@dataclass(frozen=True)
class Place(Ranks):
    """Ranks of a process that `srun` or `mpirun` started, with the job and the first machine."""

    job: str
    """Name of the job, the same on all ranks."""
    first_machine: str | None
    """Host name of the machine of rank 0; None: unknown."""


def launcher_of(environment: Mapping[str, str]) -> str:
    """Return the launcher of this process: `torchrun` (or another launcher with its variables), `slurm`, `mpi` or
    `none`."""
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return "torchrun"
    # mpirun starts its daemons with srun, so its ranks also have the variables of a SLURM step.
    if any(environment.keys() >= set(names) for names in _MPI):
        return "mpi"
    # A batch script also has SLURM's job variables but is not a task. Only `srun` sets the variables of a step.
    if "SLURM_STEP_NUM_TASKS" in environment and "SLURM_PROCID" in environment:
        return "slurm"
    if any(names[0] in environment for names in _MPI):
        return "mpi"
    return "none"


def adopt_launcher(environment: MutableMapping[str, str]) -> None:
    """Set torchrun's variables from those of `srun` or `mpirun`, if one of them started this process.

    Raises ConfigError if a variable is not a number, or if the machine of rank 0 is unknown.
    """
    place = find_place(environment)
    if place is None:
        return
    numbers = (place.rank, place.world_size, place.local_rank, place.local_world_size)
    environment.update({name: str(number) for name, number in zip(RANK_VARIABLES, numbers, strict=True)})
    if "MASTER_ADDR" not in environment:
        environment["MASTER_ADDR"] = _master_address(place)
    environment.setdefault(_JOB, f"{os.getuid()} {place.job}")
    if "MASTER_PORT" not in environment:
        environment["MASTER_PORT"] = str(_port(environment, environment[_JOB]))


def job_of(environment: Mapping[str, str]) -> str:
    """Return the name of the job after `adopt_launcher`, which is the same on all ranks; "" if the launcher sets no
    name."""
    return environment.get(_JOB) or environment.get("TORCHELASTIC_RUN_ID", "")


def find_place(environment: Mapping[str, str]) -> Place | None:
    """Return the ranks of this process according to `srun` or `mpirun`; None with torchrun or without a launcher."""
    match launcher_of(environment):
        case "slurm":
            return _slurm_place(environment)
        case "mpi":
            return _mpi_place(environment)
    return None


def is_main(environment: Mapping[str, str]) -> bool:
    """Return whether this process is rank 0 or has no rank in the environment."""
    return environment.get("RANK", "") in ("", "0")


def read_world_size(environment: Mapping[str, str]) -> int:
    """Return the number of ranks, by default 1. Raises ConfigError for an invalid number."""
    size = _number(environment, "WORLD_SIZE", 1)
    if not 1 <= size <= LARGEST_WORLD:
        raise ConfigError(f"WORLD_SIZE is {size}, must be from 1 to {LARGEST_WORLD}; start fewer processes")
    return size


def read_ranks(environment: Mapping[str, str]) -> Ranks:
    """Return the ranks from the variables of torchrun, by default a single process. Raises ConfigError for
    contradictory values."""
    world_size = read_world_size(environment)
    if world_size > 1 and "RANK" not in environment:
        raise ConfigError(f"WORLD_SIZE is {world_size}, but RANK is not set; start with torchrun, srun or mpirun")
    rank = _number(environment, "RANK", 0)
    if rank >= world_size:
        raise ConfigError(f"RANK is {rank}, must be below WORLD_SIZE {world_size}; start with torchrun, srun or mpirun")
    local = _number(environment, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else None
    return Ranks(rank, world_size, _number(environment, "LOCAL_RANK", 0), local)


def write_torchrun_error(environment: Mapping[str, str], sentences: Sequence[str], code: int) -> bool:
    """Write the reason of the end of this worker and its exit code to torchrun's error file. torchrun prints this
    reason at its end instead of a traceback.

    The file contains the exit code because torchrun may kill the worker before the worker exits by itself.

    Returns whether torchrun will print the reason. torchrun prints only the last end of a worker that it restarts, so
    with restarts this function returns False.
    """
    path = environment.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return False
    text = "\n".join(sentences)
    now = time.time_ns() // 10**9  # torch displays the time of each failure; megappo does not use this time
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(now), EXIT_CODE: code}}
    try:
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
    except OSError:
        return False
    return environment.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0"


def note_for_job(environment: Mapping[str, str], name: str, number: int) -> None:
    """Write a number to the folder of the rank logs for launch/slurm/requeue.sh. Does nothing outside of a SLURM job of
    megappo's scripts."""
    folder = environment.get("MEGAPPO_RANK_LOGS")
    if folder is not None:
        with suppress(OSError):  # without the file, the script does not requeue the job
            Path(folder, name).write_text(f"{number}\n", encoding="utf-8")


def seconds_to_end(environment: Mapping[str, str]) -> float | None:
    """Return the seconds until SLURM ends the job, from `SLURM_JOB_END_TIME`.

    launch/slurm/job.sh queries the time if SLURM does not set the variable. Returns None if the time is unknown. An end
    before the start of this process belongs to a different job, and also returns None. Only this function uses the time
    of day, because SLURM provides no other clock.
    """
    end = _job_end(environment)
    if end is None or end < _started_at():
        return None
    return max(0.0, end - time.time())


def left_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each variable of an earlier job that is still set. The run ignores these variables."""
    end = _job_end(environment)
    if end is not None and end < _started_at():
        text = f"{_JOB_END} is {end:.0f}, a time before this run started"
        yield f"{text}, and is ignored, because the variable belongs to an earlier job; unset it"


def _job_end(environment: Mapping[str, str]) -> float | None:
    """Return the end of the job in seconds since 1970, or None if the variable is missing or invalid."""
    end = whole_number(environment.get(_JOB_END, ""))
    return float(end) if end is not None and end < _LATEST_END else None


def _started_at() -> float:
    """Return the start time of this process in seconds since 1970."""
    return time.time() - seconds_since_start()


def may_print(environment: Mapping[str, str]) -> bool:
    """Return whether this process prints the result of a command that does not use ranks.

    With a launcher, only the first process prints. A process without a launcher always prints. In a pod, such a process
    may have a RANK but no LOCAL_RANK.
    """
    return is_main(environment) or "LOCAL_RANK" not in environment


def seconds_since_start() -> float:
    """Return the seconds since the start of this process, including imports."""
    ticks = start_ticks(os.getpid())
    assert ticks is not None, "this process runs"
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def binds_one_device(environment: Mapping[str, str]) -> bool:
    """Return whether the launcher may have restricted each rank to one device (`--gpus-per-task`, `--gpu-bind`)."""
    if "TORCHELASTIC_RUN_ID" in environment:
        return False
    return "SLURM_STEP_NUM_TASKS" in environment or any(names[0] in environment for names in _MPI)


def _slurm_place(environment: Mapping[str, str]) -> Place:
    node = _number(environment, "SLURM_NODEID", 0)
    per_node = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    if node >= len(per_node) and whole_number(environment.get("SLURM_HET_SIZE", "1")) != 1:
        raise ConfigError(
            "this process is in a later component of a heterogeneous step, and SLURM's variables describe only this "
            "component; start all ranks in one component (srun --het-group=0)"
        )
    if node >= len(per_node):
        raise ConfigError(
            f"SLURM_NODEID is {node}, but SLURM_STEP_TASKS_PER_NODE names {len(per_node)} nodes; start with srun"
        )
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
    return Place(
        rank=_number(environment, "SLURM_PROCID"),
        world_size=_number(environment, "SLURM_STEP_NUM_TASKS"),
        local_rank=_number(environment, "SLURM_LOCALID", 0),
        local_world_size=per_node[node],
        job=f"{environment.get('SLURM_JOB_ID', '')}.{environment.get('SLURM_STEP_ID', '')}",
        first_machine=first_host(nodes) or None,
    )


def _mpi_place(environment: Mapping[str, str]) -> Place:
    names = next(names for names in _MPI if names[0] in environment)
    rank, world_size, local_rank, local_world_size = (_number(environment, name) for name in names)
    # All ranks of a job without a name share their parent process on one machine, and the command on several machines.
    nameless = str(os.getppid()) if local_world_size == world_size else " ".join([os.getcwd(), *sys.argv])
    job = next((environment[name] for name in _MPI_JOB if name in environment), nameless)
    return Place(rank, world_size, local_rank, local_world_size, job, first_machine=None)


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    number = whole_number(text)
    if number is None:
        raise ConfigError(
            f"the environment variable {name} is '{shortened(text)}', must be a whole number; start with torchrun, "
            "srun or mpirun"
        )
    return number


def tasks_per_node(text: str) -> list[int]:
    """Return the numbers in SLURM's list, for example [8, 8, 4] for `8(x2),4`. Raises ConfigError for other forms."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ConfigError(
                f"SLURM's tasks per node are '{shortened(text)}', must look like 8(x2),4; start with srun"
            )
        ranks, nodes = whole_number(match[1]), whole_number(match[2] or "1")
        if ranks is None or nodes is None or ranks > LARGEST_WORLD or nodes > LARGEST_WORLD:
            raise ConfigError(
                f"SLURM's tasks per node are '{shortened(text)}', more than {LARGEST_WORLD}; start with srun"
            )
        counts += [ranks] * nodes
    return counts


def first_host(node_list: str) -> str:
    """Return the first host of SLURM's host list, for example gpu03 for `gpu[03-05,9],login`; "" for an empty list."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", node_list)
    assert first is not None
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def _master_address(place: Place) -> str:
    """Return the address of the machine of rank 0 for other ranks."""
    if place.local_world_size == place.world_size:
        return "127.0.0.1"
    if place.first_machine is None:
        raise ConfigError(
            f"mpirun started {place.world_size} ranks on several machines, but does not report the machine of rank 0; "
            "set MASTER_ADDR to its name, for example mpirun -x MASTER_ADDR=node1"
        )
    if _resolves(place.first_machine):
        return place.first_machine
    address = _slurm_address(place.first_machine)
    if address is None:
        raise ConfigError(
            f"the first machine of the job, '{place.first_machine}', has no known address; set MASTER_ADDR to one"
        )
    return address


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def _slurm_address(node: str) -> str | None:
    """Return SLURM's own address of a node whose name cannot be resolved."""
    if shutil.which("scontrol") is None:
        return None
    command: Sequence[str] = ("scontrol", "--oneliner", "show", "node", node)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None
    match = re.search(r"\bNodeAddr=(\S+)", done.stdout)
    return match[1] if match is not None and _resolves(match[1]) else None


def _port(environment: Mapping[str, str], job: str) -> int:
    """Return the port of the store, which all ranks compute without communication: SLURM's reserved port, otherwise a
    hash of the name of the job."""
    reserved = re.match(r"\d+", environment.get("SLURM_STEP_RESV_PORTS", ""))
    if reserved is not None:
        return int(reserved[0])
    return _PORTS[zlib.crc32(job.encode()) % len(_PORTS)]
