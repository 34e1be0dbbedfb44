"""Checks of the network: rendezvous of the ranks, agreement of clocks, and the speed of each process group of the
settings."""

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
from megappo.network.store import listening_problem
from megappo.runtime.launchers import Ranks
from megappo.runtime.ranks.groups import WantedGroups, allow_connections, join_world, make_groups
from megappo.runtime.ranks.meeting import meet
from megappo.runtime.ranks.objects import all_gather_objects
from megappo.runtime.waiting import wait_until

MEET_SECONDS = 60
# Rank 0 joins immediately. Other ranks may wait MEET_SECONDS for the port of rank 0.
_TIMEOUT = datetime.timedelta(seconds=2 * MEET_SECONDS)
_CONNECT_SECONDS = 5.0
_CLOCK_SECONDS = 0.5
_SLOWEST_SHARE = 0.5
"""Share of the median bandwidth of its kind below which a group is slow."""
_ROUNDS = 5
_SMALL_ROUNDS = 20
_LEAST_BYTES_PER_SECOND = {"cuda": 10e9, "cpu": 50e6}
"""Bandwidth in bytes per second below which any group is slow. A PCIe card and an Ethernet of 1 Gb/s are faster."""
_MESSAGE_BYTES = {"cuda": 256 << 20, "cpu": 8 << 20}


@dataclass(frozen=True)
class GroupKind:
    """Process groups of one kind that communicate at the same time in a step."""

    name: str
    groups: tuple[tuple[int, ...], ...]
    point_to_point: bool = False
    """Whether adjacent ranks send to each other, as in a pipeline. Otherwise, the group all-reduces."""


@dataclass(frozen=True)
class Measured:
    """Measured speed of a process group."""

    seconds: float
    """Latency: time of one small message in seconds."""
    bytes_per_second: float
    """Bandwidth of large messages. For an all-reduce, the bus bandwidth is 2 (n-1)/n bytes / seconds."""


def group_kinds(derived: Derived | None, world_size: int) -> list[GroupKind]:
    """Return every kind of group with more than one rank. Kinds with the same ranks are measured once."""
    kinds = [GroupKind("world", (tuple(range(world_size)),))]
    roles = {"actor": derived.actor, "critic": derived.critic} if derived is not None else {}
    for name, numbers in roles.items():
        if numbers is not None:
            kinds += _of_role(name, numbers)
    distinct: dict[tuple[object, ...], GroupKind] = {}
    for kind in kinds:
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
        title = f"{name} {kind} {len(groups[0])}"
        yield GroupKind(title, tuple(map(tuple, groups)), point_to_point=kind == "PP")


def rendezvous_finding(ranks: Ranks) -> Finding | None:
    """Return a finding if the address or port of rank 0 cannot be used, otherwise None."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    remedy = "set MASTER_ADDR to an address of rank 0 that the other machines can reach"
    if not address or not port.isdigit():
        text = f"MASTER_ADDR is '{address}' and MASTER_PORT '{port}'"
        return broken("rendezvous", text, "start with torchrun, srun or mpirun, or set both")
    try:
        socket.getaddrinfo(address, int(port))
    except OSError as error:
        return broken("rendezvous", f"MASTER_ADDR '{address}' has no address ({error.strerror})", remedy)
    if ranks.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        problem = listening_problem("0.0.0.0", int(port))  # rank 0 opens the port unless torchrun did
        text = f"port {port} cannot be opened: {problem}"
        return broken("rendezvous", text, "set MASTER_PORT to a free port") if problem is not None else None
    return _connect(address, int(port), remedy)


def _connect(address: str, port: int, remedy: str) -> Finding | None:
    """Wait on the other ranks until the port of rank 0 is open. Return a finding if the port is not open within
    `MEET_SECONDS`."""
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
    text = f"{address}:{port} does not answer within {MEET_SECONDS} seconds ({problems[-1]})"
    return broken("rendezvous", text, f"{remedy}, open the port in the firewall, and start rank 0")


def join(ranks: Ranks) -> Finding | None:
    """Join the process group in the same way as a run. Return a finding if this fails."""
    try:
        allow_connections()
        store, _ = meet(ranks, _TIMEOUT)
        join_world("cuda" if torch.cuda.is_available() else "cpu", ranks, _TIMEOUT, store)
        dist.barrier()
    except (RuntimeError, OSError, RunError) as error:  # errors of gloo, torch's DistError, errors of `meet`
        remedy = "check that all ranks were started and that all ports are open between machines"
        return broken("rendezvous", f"rank {ranks.rank} could not join the other ranks ({reason(error)})", remedy)
    return None


def clock_finding(machine: str) -> Finding:
    """Return a finding on the difference between the clocks of the machines, within the accuracy of a barrier. All
    ranks must call this function."""
    machines = all_gather_objects(machine)
    rounds = []
    for _ in range(_ROUNDS):
        dist.barrier()
        clocks = [torch.zeros(1, dtype=torch.float64) for _ in machines]
        dist.all_gather(clocks, torch.tensor([time.time()], dtype=torch.float64))
        rounds.append(torch.cat(clocks))
    times = min(rounds, key=lambda clocks_of_round: float(clocks_of_round.max() - clocks_of_round.min()))
    best = float(times.max() - times.min())
    worst_machine = machines[int((times - times.median()).abs().argmax())]
    if best > _CLOCK_SECONDS:
        text = f"clocks differ by {best:.1f} seconds, and {worst_machine} differs most"
        return slow("clock", text, "synchronize them with NTP (chronyc makestep)")
    return fine("clock", f"clocks agree within {best * 1e3:.1f} ms")


def group_findings(kinds: Sequence[GroupKind], device: torch.device) -> Iterator[Finding]:
    """Yield findings on the speed of every kind of group. All ranks must call this function and get the same
    findings."""
    own = make_groups([WantedGroups(kind.name, kind.groups) for kind in kinds], device.type, _TIMEOUT)
    for kind, group in zip(kinds, own, strict=True):
        yield judge(kind, _measure(kind, group, device), device.type)


def _measure(kind: GroupKind, own: dist.ProcessGroup | None, device: torch.device) -> dict[tuple[int, ...], Measured]:
    """Measure all groups of a kind at the same time, as in training. The slowest rank of each group determines the
    result. `own` is the group of this rank."""
    mine = (0.0, 0.0)
    if own is not None:
        members = dist.get_process_group_ranks(own)
        exchange = _shift if kind.point_to_point else _sum
        small, large = torch.ones(1, device=device), torch.ones(_MESSAGE_BYTES[device.type] // 4, device=device)
        exchange(large, own, members)  # the first call opens connections
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


def _shift(tensor: Tensor, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
    """Send the tensor from each rank to the next rank, in parallel for all pairs."""
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
    """Return the median time of one exchange in seconds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        exchange(tensor, group, ranks)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        tensor.fill_(1.0)
    return statistics.median(times)


def judge(kind: GroupKind, measured: dict[tuple[int, ...], Measured], device: str) -> Finding:
    """Return a finding on the slowest group, compared with the other groups of its kind and with the least bandwidth
    of any link."""
    slowest = min(measured, key=lambda ranks: measured[ranks].bytes_per_second)
    rate, typical = measured[slowest].bytes_per_second, statistics.median(m.bytes_per_second for m in measured.values())
    latency = max(m.seconds for m in measured.values())
    count = f"{len(measured)} groups" if len(measured) > 1 else "1 group"
    text = f"{kind.name} ({count}): {rate / 1e9:.2f} GB/s, {latency * 1e6:.0f} us"
    if rate < _SLOWEST_SHARE * typical:
        text += f" in the slowest (ranks {format_ranks(slowest)}), {typical / 1e9:.2f} GB/s in the median"
        return slow("group", text, "compare the links and the load of these machines")
    if rate < _LEAST_BYTES_PER_SECOND[device]:
        least = _LEAST_BYTES_PER_SECOND[device] / 1e9
        remedy = (
            "keep tensor parallelism within a machine; check NCCL_SOCKET_IFNAME and InfiniBand with NCCL_DEBUG=INFO"
        )
        return slow("group", f"{text}, below {least:g} GB/s", remedy)
    return fine("group", text)
