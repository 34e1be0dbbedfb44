"""Connects the ranks of a run: all ranks connect to one store, and each machine chooses a network interface."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import MutableMapping, Sequence

import torch.distributed as dist

from megappo.errors import RunError, first_of, one_line
from megappo.network.interfaces import ANY_PORT, GLOO_INTERFACE, LOOPBACK, interface_of
from megappo.network.resolver import names_from_files
from megappo.network.store import Place, address_towards, addresses_of, another_connection, is_loopback_ip, store_at
from megappo.observe.terminal.messages import show_message
from megappo.runtime.launchers import Ranks, job_of
from megappo.runtime.waiting import wait_until

_USUAL_SECONDS = 60.0
"""Time after which rank 0 prints the missing ranks."""
_COUNT, _ALL = "megappo/connected", "megappo/all-connected"
_JOB_KEY, _JOB_PATIENCE = "megappo/job", datetime.timedelta(seconds=60)
"""Key with the name of rank 0's job, and the time that other ranks wait for the key."""
_CONNECT_SECONDS, _POLL_SECONDS = 5.0, 0.2


def meet(ranks: Ranks, patience: datetime.timedelta) -> tuple[dist.Store, dist.Store]:
    """Wait until all ranks are connected to the store at `MASTER_ADDR` and `MASTER_PORT`. Then choose the interface of
    gloo.

    Returns two connections to the store. Raises RunError with the numbers of missing ranks. Raises DistError or OSError
    if this rank cannot connect to the store.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    places = addresses_of(address, port)
    if ranks.rank > 0 or _agent_serves():
        places = [_answering(places, patience)]
    with names_from_files():
        store = _store(address, places, ranks, patience)
        other_connection = another_connection(store)
        await_all(store, ranks, patience)
    choose_interface(os.environ, ranks, store)
    return store, other_connection


def choose_interface(environment: MutableMapping[str, str], ranks: Ranks, store: dist.Store) -> None:
    """Set the interface on which gloo listens, because gloo has no authentication. An interface that is already set is
    kept. A collective of the ranks at the store.

    If all ranks are on this machine, the interface is loopback. Otherwise the interface is on the route to
    `MASTER_ADDR` or has this address. If `MASTER_ADDR` is a loopback address on this machine, the interface is on the
    route to a rank on a different machine.
    """
    is_one_machine = ranks.world_size in (1, ranks.local_world_size)
    own = "" if is_one_machine else _address_towards(environment["MASTER_ADDR"])
    store.set(_address_of(ranks.rank), own)
    if is_one_machine:
        environment.setdefault(GLOO_INTERFACE, LOOPBACK)
    if GLOO_INTERFACE in environment:
        return
    if not own:
        others = (store.get(_address_of(rank)).decode() for rank in range(ranks.world_size))
        own = next((_address_towards(other) for other in others if other), "")
    if (interface := interface_of(own)) is not None:
        environment[GLOO_INTERFACE] = interface


def _address_towards(host: str) -> str:
    """Source address of packets to a host; "" if the host cannot be reached or the address is a loopback address."""
    try:
        own = address_towards(host, ANY_PORT)
    except OSError:
        return ""
    return "" if is_loopback_ip(own) else own


def _address_of(rank: int) -> str:
    return f"megappo/address-{rank}"


def _agent_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _answering(places: Sequence[Place], patience: datetime.timedelta) -> Place:
    """Return the first address that accepts a connection, or the first address if none accepts one in time."""
    if len({place[0] for _, _, place in places}) == 1:
        return places[0]
    answering: list[Place] = []

    def answers() -> bool:
        for family, kind, place in places:
            with socket.socket(family, kind) as probe:
                probe.settimeout(_CONNECT_SECONDS)
                if probe.connect_ex(place) == 0:
                    answering.append((family, kind, place))
                    return True
        return False

    wait_until(answers, patience.total_seconds(), every_seconds=_POLL_SECONDS)
    return answering[0] if answering else places[0]


def _store(address: str, places: Sequence[Place], ranks: Ranks, patience: datetime.timedelta) -> dist.Store:
    """Connect to the store of the agent of torchrun. Without such a store, rank 0 serves a new store."""
    host, port = str(places[0][2][0]), int(places[0][2][1])
    if _agent_serves():
        of_agent = dist.TCPStore(host, port, ranks.world_size, is_master=False, timeout=patience)
        prefix = f"/worker/attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/default_pg"  # one for each start
        return dist.PrefixStore(prefix, of_agent)
    if ranks.rank == 0:
        alone = ranks.local_world_size == ranks.world_size
        served = store_at(address, places, ranks.world_size, patience, on_one_machine=alone)
        served.set(_JOB_KEY, job_of(os.environ))
    else:
        served = dist.TCPStore(host, port, ranks.world_size, is_master=False, timeout=patience)
        served.wait([_JOB_KEY], min(patience, _JOB_PATIENCE))
        if (job := served.get(_JOB_KEY).decode(errors="replace")) != job_of(os.environ):
            raise OSError(f"the store belongs to the job '{one_line(job)}', this is '{one_line(job_of(os.environ))}'")
    return dist.PrefixStore(f"default_pg {job_of(os.environ)}", served)


def await_all(store: dist.Store, ranks: Ranks, patience: datetime.timedelta) -> None:
    """Wait until all ranks are connected to the store. Raises RunError with the numbers of missing ranks.

    After a minute, rank 0 prints the missing ranks.
    """
    store.set(_connected(ranks.rank), socket.gethostname())
    if store.add(_COUNT, 1) == ranks.world_size:
        store.set(_ALL, "yes")
    for seconds in (min(_USUAL_SECONDS, patience.total_seconds()), patience.total_seconds()):
        try:
            return store.wait([_ALL], datetime.timedelta(seconds=seconds))
        except dist.DistStoreError:
            missing = [rank for rank in range(ranks.world_size) if not store.check([_connected(rank)])]
            whom = f"{'rank' if len(missing) == 1 else 'ranks'} {first_of(missing, 8)} of {ranks.world_size}"
            if ranks.rank == 0 and seconds < patience.total_seconds():
                show_message(f"waiting for {whom} to start")
    raise RunError(
        f"{whom} did not connect within {patience.total_seconds():g} seconds; see their logs, and check that their "
        "machines are up and can connect to this machine"
    )


def _connected(rank: int) -> str:
    return f"megappo/connected-{rank}"
