"""Checks of the network: whether ranks meet, whether their clocks agree, and how fast each process group of the
settings is."""

from __future__ import annotations

import datetime
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.config import Derived, RoleNumbers
from megappo.config.grid import format_ranks
from megappo.doctor.findings import Finding, broken, fine, slow
from megappo.errors import RunError, reason
from megappo.runtime.groups import WantedGroups, allow_connections, join_world, make_groups
from megappo.runtime.launchers import Ranks
from megappo.runtime.meeting import meet
from megappo.runtime.objects import all_gather_objects
from megappo.runtime.store import listening_problem
from megappo.runtime.waiting import wait_until

MEET_SECONDS = 60
# Rank 0 joins at once, while the others may wait MEET_SECONDS for its port.
_TIMEOUT = datetime.timedelta(seconds=2 * MEET_SECONDS)
_CONNECT_SECONDS = 5.0
_CLOCK_SECONDS = 0.5
_SLOWEST_SHARE = 0.5
"""A group is slow below this share of the median bandwidth of its kind."""
_ROUNDS = 5
_SMALL_ROUNDS = 20
_LEAST_BYTES_PER_SECOND = {"cuda": 10e9, "cpu": 50e6}
"""Bandwidth below which any group counts as slow: a PCIe card does more, and so does an Ethernet of 1 Gb/s."""
_MESSAGE_BYTES = {"cuda": 256 << 20, "cpu": 8 << 20}


@dataclass(frozen=True)
class GroupKind:
    """Process groups of one kind, which communicate at the same time in a step."""

    name: str
    groups: tuple[tuple[int, ...], ...]
    point_to_point: bool = False
    """Whether neighbours send to each other, as pipeline stages do; otherwise the group all-reduces."""


@dataclass(frozen=True)
class Measured:
    """The measured speed of a process group."""

    seconds: float
    """Latency: seconds of one small message."""
    bytes_per_second: float
    """Bandwidth of large messages; for an all-reduce the bus bandwidth 2 (n-1)/n bytes / seconds."""


def group_kinds(derived: Derived | None, world_size: int) -> list[GroupKind]:
    """Every kind of group with more than one rank; the same ranks are measured once."""
    found = [GroupKind("world", (tuple(range(world_size)),))]
    roles = {"actor": derived.actor, "critic": derived.critic} if derived is not None else {}
    for name, numbers in roles.items():
        if numbers is not None:
            found += _of_role(name, numbers)
    distinct: dict[tuple[object, ...], GroupKind] = {}
    for kind in found:
        if len(kind.groups[0]) > 1:
            key = (kind.groups, kind.point_to_point)
            known = distinct.get(key)
            distinct[key] = replace(kind, name=f"{known.name}, {kind.name}") if known else kind
    return list(distinct.values())


def _of_role(name: str, numbers: RoleNumbers) -> Iterator[GroupKind]:
    grid = numbers.grid
    kinds = {"TP": grid.tensor_groups, "CP": grid.context_groups, "PP": grid.pipeline_groups}
    kinds |= {"DP" if grid.cp == 1 else "DP x CP": grid.data_groups, "EP": grid.expert_groups}
    for kind, groups in kinds.items():
        words = f"{name} {kind} {len(groups[0])}"
        yield GroupKind(words, tuple(map(tuple, groups)), point_to_point=kind == "PP")


def rendezvous_finding(ranks: Ranks) -> Finding | None:
    """A finding where rank 0's address or port cannot be used; None where it can be tried."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    remedy = "set MASTER_ADDR to rank 0's machine, as the others reach it"
    if not address or not port.isdigit():
        words = f"MASTER_ADDR is '{address}' and MASTER_PORT '{port}'"
        return broken("rendezvous", words, "start with torchrun, srun or mpirun, or set both")
    try:
        socket.getaddrinfo(address, int(port))
    except OSError as error:
        return broken("rendezvous", f"MASTER_ADDR '{address}' has no address ({error.strerror})", remedy)
    if ranks.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        problem = listening_problem("0.0.0.0", int(port))  # rank 0 opens it, unless torchrun has
        words = f"port {port} cannot be opened: {problem}"
        return broken("rendezvous", words, "set MASTER_PORT to a free one") if problem is not None else None
    return _connect(address, int(port), remedy)


def _connect(address: str, port: int, remedy: str) -> Finding | None:
    """Wait until rank 0's port listens, on the other ranks; a finding where it does not within `MEET_SECONDS`."""
    problems = [""]

    def answers() -> bool:
        try:
            socket.create_connection((address, port), timeout=_CONNECT_SECONDS).close()
        except OSError as error:
            problems.append(error.strerror or str(error))
            return False
        return True

    if wait_until(answers, MEET_SECONDS, every_seconds=1.0):
        return None
    words = f"{address}:{port} does not answer within {MEET_SECONDS} seconds ({problems[-1]})"
    return broken("rendezvous", words, f"{remedy}, open the port in the firewall, and start rank 0")


def join(ranks: Ranks) -> Finding | None:
    """Join the process group in the same way as a run. Returns a finding if this fails."""
    try:
        allow_connections()
        store, _ = meet(ranks, _TIMEOUT)
        join_world("cuda" if torch.cuda.is_available() else "cpu", ranks, _TIMEOUT, store)
        dist.barrier()
    except (RuntimeError, OSError, RunError) as error:  # gloo's own errors, torch's DistError, and those of `meet`
        remedy = "check that all ranks were started and that machines reach each other on all ports"
        return broken("rendezvous", f"rank {ranks.rank} did not meet the others ({reason(error)})", remedy)
    return None


def clock_finding(machine: str) -> Finding:
    """How far the machines' clocks are apart, to the accuracy of a barrier. A collective of the world."""
    machines = all_gather_objects(machine)
    rounds = []
    for _ in range(_ROUNDS):
        dist.barrier()
        clocks = [torch.zeros(1, dtype=torch.float64) for _ in machines]
        dist.all_gather(clocks, torch.tensor([time.time()], dtype=torch.float64))
        rounds.append(torch.cat(clocks))
    times = min(rounds, key=lambda found: float(found.max() - found.min()))
    best = float(times.max() - times.min())
    worst_machine = machines[int((times - times.median()).abs().argmax())]
    if best > _CLOCK_SECONDS:
        words = f"clocks are {best:.1f} seconds apart, {worst_machine}'s the most"
        return slow("clock", words, "set them by NTP (chronyc makestep)")
    return fine("clock", f"clocks agree within {best * 1e3:.1f} ms")


def group_findings(found: Sequence[GroupKind], device: torch.device) -> Iterator[Finding]:
    """The speed of every kind; a collective of the world, findings are the same on all ranks."""
    own = make_groups([WantedGroups(kind.name, kind.groups) for kind in found], device.type, _TIMEOUT)
    for kind, group in zip(found, own, strict=True):
        yield judge(kind, _measure(kind, group, device), device.type)


def _measure(kind: GroupKind, own: dist.ProcessGroup | None, device: torch.device) -> dict[tuple[int, ...], Measured]:
    """Measure all groups of a kind at the same time, as in training; the slowest rank of each group counts. `own`: this
    rank's group."""
    mine = (0.0, 0.0)
    if own is not None:
        members = dist.get_process_group_ranks(own)
        exchange = _neighbours if kind.point_to_point else _sum
        small, large = torch.ones(1, device=device), torch.ones(_MESSAGE_BYTES[device.type] // 4, device=device)
        exchange(large, own, members)  # connections are made in the first call
        dist.all_reduce(small, group=own)
        mine = (
            _seconds(exchange, small, own, members, _SMALL_ROUNDS),
            _seconds(exchange, large, own, members, _ROUNDS),
        )
    everyone = all_gather_objects(mine)
    n_bytes = _MESSAGE_BYTES[device.type]
    result = {}
    for ranks in kind.groups:
        share = 1.0 if kind.point_to_point else 2 * (len(ranks) - 1) / len(ranks)
        seconds = max(everyone[rank][1] for rank in ranks)
        result[ranks] = Measured(max(everyone[rank][0] for rank in ranks), share * n_bytes / seconds)
    return result


Exchange = Callable[[Tensor, dist.ProcessGroup, Sequence[int]], None]


def _sum(tensor: Tensor, group: dist.ProcessGroup, _ranks: Sequence[int]) -> None:
    dist.all_reduce(tensor, group=group)


def _neighbours(tensor: Tensor, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """Send the tensor from each rank to the next one, all pairs at once."""
    place = list(ranks).index(dist.get_rank())
    steps = []
    arrived = torch.empty_like(tensor)
    if place + 1 < len(ranks):
        steps.append(dist.P2POp(dist.isend, tensor, ranks[place + 1], group))
    if place > 0:
        steps.append(dist.P2POp(dist.irecv, arrived, ranks[place - 1], group))
    for work in dist.batch_isend_irecv(steps):
        work.wait()


def _seconds(exchange: Exchange, tensor: Tensor, group: dist.ProcessGroup, ranks: Sequence[int], rounds: int) -> float:
    """Median seconds of one exchange."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        exchange(tensor, group, ranks)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
        tensor.fill_(1.0)
    return statistics.median(found)


def judge(kind: GroupKind, measured: dict[tuple[int, ...], Measured], device: str) -> Finding:
    """Compare the slowest group with the others of its kind, and with what any link should do."""
    slowest = min(measured, key=lambda ranks: measured[ranks].bytes_per_second)
    rate, typical = measured[slowest].bytes_per_second, statistics.median(m.bytes_per_second for m in measured.values())
    latency = max(m.seconds for m in measured.values())
    count = f"{len(measured)} groups" if len(measured) > 1 else "1 group"
    words = f"{kind.name} ({count}): {rate / 1e9:.2f} GB/s, {latency * 1e6:.0f} us"
    if rate < _SLOWEST_SHARE * typical:
        words += f" in the slowest (ranks {format_ranks(slowest)}), {typical / 1e9:.2f} GB/s in the middle one"
        return slow("group", words, "compare these machines' links and what else runs on them")
    if rate < _LEAST_BYTES_PER_SECOND[device]:
        least = _LEAST_BYTES_PER_SECOND[device] / 1e9
        remedy = (
            "keep tensor parallelism within a machine; check NCCL_SOCKET_IFNAME and InfiniBand with NCCL_DEBUG=INFO"
        )
        return slow("group", f"{words}, below {least:g} GB/s", remedy)
    return fine("group", words)
