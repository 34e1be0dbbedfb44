"""`megappo serve`: one SGLang server for trainers elsewhere, with the arguments that megappo's own servers get.

For a server on several machines, each machine has a `megappo serve`, which runs a part of it. Parts start and end
together.

The server is started again when it dies or hangs, and ends with all its processes when this process is told to stop or
is killed. SIGINT and SIGHUP stop at once. SIGTERM, which a scheduler sends to engines and trainers together, stops
after `linger_seconds`, in which the trainers may still need answers. SIGUSR1 and SIGUSR2 are ignored: they are for the
trainers.
"""

from __future__ import annotations

import argparse
import math
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from megappo.commands import add_config_arguments, seconds_option, whole_option
from megappo.config import Config, ConfigError, load_config
from megappo.config.model_files import load_architecture, role_folder
from megappo.config.rules.servers import server_rules
from megappo.engines.sglang.client import ServerFailure
from megappo.engines.sglang.fleet import KEY_VARIABLE
from megappo.engines.sglang.keeper import POLL_SECONDS, keep_running
from megappo.engines.sglang.rendezvous import MultiNodeRendezvous, ServerPart
from megappo.engines.sglang.server import Server, start_server
from megappo.engines.sglang.spec import ServerSpec
from megappo.errors import RunError
from megappo.observe.messages import tell
from megappo.plan.inputs import NO_FLOAT32, unserved
from megappo.preflight.inputs import read_tokens
from megappo.preflight.resolved import resolve_here
from megappo.runtime.device import device_bytes, runs_on_cuda
from megappo.runtime.keys import key_of
from megappo.runtime.sglang_cpu import require_sglang
from megappo.runtime.store import free_port, listening_problem
from megappo.runtime.waiting import wait_until

_JOIN_SECONDS = 5.0


@dataclass(frozen=True)
class Service:
    """One server and where it listens."""

    spec: ServerSpec
    port: int
    key: str = field(repr=False)
    index: int
    """Number of the server among the engines of a run; names its log."""
    linger_seconds: float
    node: int = 0
    """Number of this machine's part."""
    meet: tuple[str, int] | None = None
    """Where parts meet; None: the server stands on this machine alone."""


class StopRequest:
    """The stop that signals have asked for."""

    def __init__(self, linger_seconds: float) -> None:
        self._linger, self._deadline = linger_seconds, math.inf

    def receive(self, number: int, _frame: FrameType | None = None) -> None:
        """A signal handler; a scheduler may repeat SIGTERM, which prolongs nothing."""
        linger = self._linger if number == signal.SIGTERM else 0.0
        self._deadline = min(self._deadline, time.monotonic() + linger)

    @property
    def due(self) -> bool:
        """Whether to stop now."""
        return time.monotonic() >= self._deadline

    def wait(self, seconds: float) -> None:
        """Sleep so long, or until it is due."""
        wait_until(lambda: self.due, seconds, every_seconds=min(seconds, POLL_SECONDS))


@contextmanager
def _signals(stop: StopRequest) -> Iterator[None]:
    before = {n: signal.signal(n, stop.receive) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    before |= {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGUSR1, signal.SIGUSR2)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What follows `megappo serve`."""
    parser.add_argument("--host", help="interface to listen on (default: rollout.sglang.host)")
    parser.add_argument("--port", default="30000", help="port, 0: a free one (default: %(default)s)")
    parser.add_argument("--index", default="0", help="number that names its log (default: %(default)s)")
    parser.add_argument("--linger", default="0", metavar="SECONDS", help="go on so long after SIGTERM (default: 0)")
    parser.add_argument("--part", default="0", help="of a server on several machines, number of this one's part")
    parser.add_argument("--meet", metavar="HOST:PORT", help="and where its parts meet, on the machine of part 0")
    parser.add_argument("--ranks", action="store_true", help="print machines of a server and devices on each, instead")
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """`megappo serve`: serve until told to stop.

    Port 0 takes a free one. Raises ConfigError for settings that cannot be served and an address that cannot be
    listened on, and RunError where the server dies too often.
    """
    config = load_config(arguments.config, arguments.overrides)
    if arguments.ranks:
        print(config.rollout.servers.nodes, config.rollout.servers.node_ranks)
        return
    service = make_service(
        resolve_here(config),
        host=arguments.host,
        port=whole_option("--port", arguments.port, 0, 65535),
        index=whole_option("--index", arguments.index, 0, 2**31 - 1),
        linger_seconds=seconds_option("--linger", arguments.linger, 1e6),
    )
    service = replace(service, **_parts(arguments, service.spec.settings.nodes))
    stop = StopRequest(service.linger_seconds)
    with _signals(stop):
        _supervise(service, stop)


def _parts(arguments: argparse.Namespace, nodes: int) -> dict[str, Any]:
    """Which part is served, and where parts meet. Raises ConfigError where that does not fit the settings."""
    node = whole_option("--part", arguments.part, 0, nodes - 1)
    if (arguments.meet is None) != (nodes == 1):
        rule = "--meet is for more than one" if nodes == 1 else "their parts need --part N and --meet HOST:PORT"
        raise ConfigError(f"rollout.sglang.nodes is {nodes}, {rule}")
    if arguments.meet is None:
        return {}
    address, _, port = arguments.meet.rpartition(":")
    if not address or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--meet is '{arguments.meet}', must be HOST:PORT of part 0's machine")
    return {"node": node, "meet": (address, int(port))}


def make_service(config: Config, *, host: str | None, port: int, index: int, linger_seconds: float) -> Service:
    """The server of these settings, checked. Raises as `run` does."""
    if not config.rollout.has_servers:
        raise ConfigError(f"rollout.engine is '{config.rollout.engine}', serve needs sglang; set rollout.engine=sglang")
    require_sglang()
    actor, on_cuda = load_architecture(config.model.path, config.model), runs_on_cuda(config.runtime)
    problems = list(server_rules(config, actor))
    if why := unserved(config, actor, on_cuda=on_cuda):
        dtype = "set model.dtype to bfloat16, or " if why == NO_FLOAT32 else ""
        problems.append(f"SGLang cannot serve this model: {why}; {dtype}name another model")
    if problems:
        raise ConfigError(problems)
    host = host or config.rollout.servers.host or "127.0.0.1"
    check_address(host, port)
    folder, stops = role_folder(config, "actor", weights=False), read_tokens(config, training=False).stop_token_ids
    spec = ServerSpec.of(config, folder, stops, on_cuda=on_cuda, device_bytes=device_bytes())
    # How many sequences it is asked for at once, only its clients know.
    spec = replace(spec, host=host, memory_saver=False, seed=index, cache=replace(spec.cache, sequences=None))
    key = key_of(KEY_VARIABLE) or kept_key(spec.log_directory)
    return Service(_placed(spec), port or free_port(host), key, index, linger_seconds)


def kept_key(folder: Path) -> str:
    """The key of the servers of a run that were given none, in a file that only its owner reads; made by the first.

    Raises ConfigError for a file that others read too.
    """
    path = folder / "key"
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        descriptor, made = tempfile.mkstemp(dir=folder)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(16))
        with suppress(FileExistsError):  # another server made the key first
            os.link(made, path)
        os.unlink(made)
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"others can read {path}, which holds the servers' key; remove it, and a new one is made")
    tell(f"{KEY_VARIABLE} is empty, so the key is the one in {path}; export {KEY_VARIABLE}=$(cat {path})")
    return path.read_text()


def check_address(host: str, port: int) -> None:
    """Raises ConfigError where nothing can listen."""
    problem = listening_problem(host, port)
    if problem is not None:
        raise ConfigError(
            f"nothing can listen on --host {host} --port {port} ({problem}); choose another port, or an address of "
            "this machine"
        )


def _placed(spec: ServerSpec) -> ServerSpec:
    """The specification with its GPUs, or without CUDA with its cores."""
    import torch

    if not torch.cuda.is_available():
        return replace(spec, cores=tuple(sorted(os.sched_getaffinity(0))))
    first, ranks, count = spec.settings.first_device or 0, spec.settings.node_ranks, torch.cuda.device_count()
    if first + ranks > count:
        raise ConfigError(
            f"rollout.sglang.tensor_parallel {spec.settings.tensor_parallel} on {spec.settings.nodes} machines, from "
            f"first_device {first} on, needs {first + ranks} GPUs, this machine has {count}; set rollout.sglang.nodes"
        )
    return replace(spec, devices=tuple(range(first, first + ranks)))


def _supervise(service: Service, stop: StopRequest) -> None:
    """Keep the server running until told to stop. Raises RunError where it is given up."""
    settings, rendezvous = service.spec.settings, _rendezvous_of(service, stop)

    def start(restarts: int) -> Server | None:
        part = _begun(rendezvous, restarts, stop)
        if rendezvous is not None and part is None:
            return None
        return start_server(service.spec, service.index, 0, restarts + 1, port=service.port, key=service.key, part=part)

    # A bucket of a weight sync may keep it from answering for as long as the trainer waits for it.
    keep_running(start, stop, settings.sync_timeout_seconds + settings.health_timeout_seconds)


def _rendezvous_of(service: Service, stop: StopRequest) -> MultiNodeRendezvous | None:
    """The rendezvous of this part with the others, if there are any. Raises RunError where part 0 cannot be found."""
    if service.meet is None:
        return None
    settings, found, (address, port) = service.spec.settings, list[MultiNodeRendezvous](), service.meet
    if service.node == 0:
        try:
            return MultiNodeRendezvous.host(address, port, settings)
        except OSError as error:
            raise RunError(f"parts of a server cannot meet at --meet {address}:{port} ({error})") from None

    def joined() -> bool:
        with suppress(ServerFailure):
            found.append(MultiNodeRendezvous.join(address, port, service.node, settings, _JOIN_SECONDS))
        return bool(found) or stop.due

    if not wait_until(joined, settings.start_timeout_seconds, every_seconds=POLL_SECONDS):
        raise RunError(f"part 0 of the server does not listen at --meet {address}:{port}; start it there")
    return found[0] if found else None


def _begun(rendezvous: MultiNodeRendezvous | None, start: int, stop: StopRequest) -> ServerPart | None:
    """The part for the next start; None: told to stop before that start was announced, or there are no parts. Raises
    RunError where part 0 is gone."""
    if rendezvous is None:
        return None
    if rendezvous.node == 0:
        rendezvous.call(start)
        return ServerPart(rendezvous, start)
    try:
        wait_until(lambda: stop.due or rendezvous.is_called(start), math.inf, every_seconds=POLL_SECONDS)
    except ServerFailure as failure:
        raise RunError(f"{failure}, so this part of it ends") from None
    return None if stop.due else ServerPart(rendezvous, start)
