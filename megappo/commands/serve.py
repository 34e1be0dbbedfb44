"""`megappo serve`: one SGLang server for trainers on other machines, with the same arguments as megappo's own servers.

For a server on several machines, each machine runs `megappo serve` for its part of the server. All parts start and end
together.

The server is restarted after a crash or a hang. All its processes end when this process is stopped or killed.
SIGINT and SIGHUP stop the server at once. A scheduler sends SIGTERM to engines and trainers at the same time. SIGTERM
therefore stops the server after `linger_seconds`, because trainers may still need answers. SIGUSR1 and SIGUSR2 are
signals for trainers and are ignored.
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
from megappo.config.role_models import load_architecture, role_folder
from megappo.config.rules.servers import server_rules
from megappo.engines.sglang.client import ServerFailure
from megappo.engines.sglang.servers.fleet import KEY_VARIABLE
from megappo.engines.sglang.servers.keeper import POLL_SECONDS, keep_running
from megappo.engines.sglang.servers.rendezvous import MultiNodeRendezvous, ServerPart
from megappo.engines.sglang.servers.server import Server, start_server
from megappo.engines.sglang.servers.spec import ServerSpec
from megappo.engines.sglang.version import require_sglang
from megappo.errors import RunError
from megappo.network.keys import key_of
from megappo.network.store import free_port, listening_problem
from megappo.observe.terminal.messages import show_message
from megappo.plan.inputs import NO_FLOAT32, unserved
from megappo.preflight.inputs import read_tokens
from megappo.preflight.resolved import resolve_for_device
from megappo.runtime.device import device_bytes, runs_on_cuda
from megappo.runtime.waiting import wait_until

_JOIN_SECONDS = 5.0


@dataclass(frozen=True)
class Service:
    """One server and its address."""

    spec: ServerSpec
    port: int
    key: str = field(repr=False)
    index: int
    """Number of the server among the engines of a run. The number is part of the log's name."""
    linger_seconds: float
    node: int = 0
    """Number of the part on this machine."""
    meet: tuple[str, int] | None = None
    """Address where the parts meet. None means that the server runs only on this machine."""


class StopRequest:
    """Stop that signals have requested."""

    def __init__(self, linger_seconds: float) -> None:
        self._linger, self._deadline = linger_seconds, math.inf

    def receive(self, number: int, _frame: FrameType | None = None) -> None:
        """Handle a signal. Schedulers may repeat SIGTERM, but the first deadline remains."""
        linger = self._linger if number == signal.SIGTERM else 0.0
        self._deadline = min(self._deadline, time.monotonic() + linger)

    @property
    def due(self) -> bool:
        """Whether to stop now."""
        return time.monotonic() >= self._deadline

    def wait(self, seconds: float) -> None:
        """Sleep for `seconds`, or until the stop is due."""
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
    """Add the arguments of `megappo serve`."""
    parser.add_argument("--host", help="interface to listen on (default: rollout.servers.host)")
    parser.add_argument("--port", default="30000", help="port; 0 selects a free port (default: %(default)s)")
    parser.add_argument("--index", default="0", help="number in the name of the log (default: %(default)s)")
    parser.add_argument("--linger", default="0", metavar="SECONDS", help="time to continue after SIGTERM (default: 0)")
    parser.add_argument("--part", default="0", help="number of this machine's part, for a server on several machines")
    parser.add_argument("--meet", metavar="HOST:PORT", help="address of the rendezvous on the machine of part 0")
    parser.add_argument("--ranks", action="store_true", help="only print the machines of a server and devices on each")
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Serve until a signal requests a stop. Port 0 selects a free port.

    Raises ConfigError for settings that cannot be served and for an unusable address. Raises RunError if the server
    fails too often.
    """
    config = load_config(arguments.config, arguments.overrides)
    if arguments.ranks:
        print(config.rollout.server_settings.nodes, config.rollout.server_settings.node_ranks)
        return
    service = make_service(
        resolve_for_device(config),
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
    """Return the part of this machine and the meeting address. Raises ConfigError if they do not fit the settings."""
    node = whole_option("--part", arguments.part, 0, nodes - 1)
    if (arguments.meet is None) != (nodes == 1):
        rule = "--meet is for more than one" if nodes == 1 else "their parts need --part N and --meet HOST:PORT"
        raise ConfigError(f"rollout.servers.nodes is {nodes}, {rule}")
    if arguments.meet is None:
        return {}
    address, _, port = arguments.meet.rpartition(":")
    if not address or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--meet is '{arguments.meet}', must be HOST:PORT of part 0's machine")
    return {"node": node, "meet": (address, int(port))}


def make_service(config: Config, *, host: str | None, port: int, index: int, linger_seconds: float) -> Service:
    """Check the settings and return their server. Raises the errors of `run`."""
    if config.rollout.is_custom or not config.rollout.capabilities.separate_processes:
        raise ConfigError(f"{config.rollout.engine_text} cannot be served; set rollout.servers.kind=sglang")
    require_sglang()
    actor, on_cuda = load_architecture(config.model.path, config.model), runs_on_cuda(config.runtime)
    problems = list(server_rules(config, actor))
    if why := unserved(config, actor, on_cuda=on_cuda):
        dtype = "set model.dtype to bfloat16, or " if why == NO_FLOAT32 else ""
        problems.append(f"SGLang cannot serve this model: {why}; {dtype}name another model")
    if problems:
        raise ConfigError(problems)
    host = host or config.rollout.server_settings.host or "127.0.0.1"
    check_address(host, port)
    folder, stops = role_folder(config, "actor", weights=False), read_tokens(config, training=False).stop_token_ids
    spec = ServerSpec.of(config, folder, stops, on_cuda=on_cuda, device_bytes=device_bytes())
    # The number of concurrent sequences depends on the clients.
    spec = replace(spec, host=host, memory_saver=False, seed=index, cache=replace(spec.cache, sequences=None))
    key = key_of(KEY_VARIABLE) or shared_key(spec.log_directory)
    return Service(_placed(spec), port or free_port(host), key, index, linger_seconds)


def shared_key(folder: Path) -> str:
    """Return the key of a run's servers if the environment has none. The first server creates the key in a file that
    only its owner can read.

    Raises ConfigError if others can read the file.
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
    show_message(f"{KEY_VARIABLE} is empty, so the key is the one in {path}; export {KEY_VARIABLE}=$(cat {path})")
    return path.read_text()


def check_address(host: str, port: int) -> None:
    """Raise ConfigError if no server can listen on the address."""
    problem = listening_problem(host, port)
    if problem is not None:
        raise ConfigError(
            f"nothing can listen on --host {host} --port {port} ({problem}); choose another port, or an address of "
            "this machine"
        )


def _placed(spec: ServerSpec) -> ServerSpec:
    """Return the specification with its GPUs, or with its cores if CUDA is unavailable."""
    import torch

    if not torch.cuda.is_available():
        return replace(spec, cores=tuple(sorted(os.sched_getaffinity(0))))
    first, ranks, count = spec.settings.first_device or 0, spec.settings.node_ranks, torch.cuda.device_count()
    if first + ranks > count:
        raise ConfigError(
            f"rollout.servers.tensor_parallel {spec.settings.tensor_parallel} on {spec.settings.nodes} machines from "
            f"first_device {first} needs {first + ranks} GPUs, but this machine has {count}; set rollout.servers.nodes"
        )
    return replace(spec, devices=tuple(range(first, first + ranks)))


def _supervise(service: Service, stop: StopRequest) -> None:
    """Keep the server running until a stop is due. Raises RunError if the server fails too often."""
    settings, rendezvous = service.spec.settings, _rendezvous_of(service, stop)

    def start(restarts: int) -> Server | None:
        part = _begun(rendezvous, restarts, stop)
        if rendezvous is not None and part is None:
            return None
        return start_server(service.spec, service.index, 0, restarts + 1, port=service.port, key=service.key, part=part)

    # During a bucket of a weight sync, the server may not answer until the trainer's timeout.
    keep_running(start, stop, settings.sync_timeout_seconds + settings.health_timeout_seconds)


def _rendezvous_of(service: Service, stop: StopRequest) -> MultiNodeRendezvous | None:
    """Return the rendezvous with the other parts, or None for a single part. Raises RunError if part 0 cannot be
    reached."""
    if service.meet is None:
        return None
    settings, joined_rendezvous, (address, port) = service.spec.settings, list[MultiNodeRendezvous](), service.meet
    if service.node == 0:
        try:
            return MultiNodeRendezvous.host(address, port, settings)
        except OSError as error:
            raise RunError(f"parts of a server cannot meet at --meet {address}:{port} ({error})") from None

    def joined() -> bool:
        with suppress(ServerFailure):
            joined_rendezvous.append(MultiNodeRendezvous.join(address, port, service.node, settings, _JOIN_SECONDS))
        return bool(joined_rendezvous) or stop.due

    if not wait_until(joined, settings.start_timeout_seconds, every_seconds=POLL_SECONDS):
        raise RunError(f"part 0 of the server does not listen at --meet {address}:{port}; start it there")
    return joined_rendezvous[0] if joined_rendezvous else None


def _begun(rendezvous: MultiNodeRendezvous | None, start: int, stop: StopRequest) -> ServerPart | None:
    """Return the part for the next start, or None if a stop is due before the start or there are no parts. Raises
    RunError if part 0 has ended."""
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
