"""Servers that a run starts for its judges and its reward model."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

from megappo.config import Config
from megappo.config.sections.judge import JudgeServerSettings
from megappo.config.sections.own_server import OwnServerSettings, RewardModelServerSettings
from megappo.config.sections.reward import MODEL_SERVER, server_name
from megappo.engines.sglang.servers.fleet import EVERYWHERE, address_among, machine_here
from megappo.engines.sglang.servers.keeper import keep_running
from megappo.engines.sglang.servers.server import Server, named_in_url, start_server
from megappo.engines.sglang.servers.spec import ServerSpec
from megappo.engines.sglang.version import require_sglang
from megappo.errors import RunError
from megappo.files.json_values import JSONValue
from megappo.models.model_files import model_folder
from megappo.network.store import free_port
from megappo.plan.bytes.cache import PlannedCache
from megappo.rewards.http import ScoreServer
from megappo.rewards.judge import judge_client
from megappo.rewards.model import check_folder
from megappo.runtime.process import Runtime
from megappo.runtime.ranks.objects import agreed, all_gather_objects

_END_SECONDS = 60.0


class _EndEvent(threading.Event):
    """Event that implements `Ending` for `keep_running`."""

    @property
    def due(self) -> bool:
        return self.is_set()


class _RunningServer:
    """Server and the thread that keeps the server running."""

    def __init__(self, spec: ServerSpec, port: int, key: str) -> None:
        self._spec, self._port, self._key = spec, port, key
        self._problem: str | None = None
        self.ending = _EndEvent()
        """Request of the end of the server."""
        self._thread = threading.Thread(target=self._keep, name="megappo-reward-server", daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        try:
            keep_running(self._start, self.ending, self._spec.settings.health_timeout_seconds)
        except (RunError, OSError) as error:
            self._problem = str(error)

    def _start(self, restarts: int) -> Server:
        return start_server(self._spec, 0, 0, restarts + 1, port=self._port, key=self._key)

    def check(self) -> None:
        """Raise RunError if the server has failed permanently."""
        if self._problem is not None:
            user = "the reward model" if self._spec.called == MODEL_SERVER else "a judge"
            raise RunError(f"{user}'s server cannot be kept running: {self._problem}")

    def wait(self) -> None:
        """Wait until all processes of the server have ended, after `ending` is set."""
        self._thread.join(_END_SECONDS)


@dataclass(frozen=True)
class OwnServers:
    """Servers that the run starts for its rewards."""

    clients: Mapping[str, ScoreServer] = field(default_factory=dict)
    """Clients of the servers, by the names in `RewardSettings.own_servers`. All ranks have the same clients."""
    running: Sequence[_RunningServer] = ()
    """Servers that this rank has started."""

    def check(self) -> None:
        """Raise RunError if a server of this rank has failed permanently."""
        for server in self.running:
            server.check()

    def close(self) -> None:
        """End the servers of this rank and all their processes."""
        for server in self.running:
            server.ending.set()
        for server in self.running:
            server.wait()


@dataclass(frozen=True)
class _ModelServerSpec(ServerSpec):
    """Specification of the process with the reward model, which runs `megappo.rewards.model_server`, not SGLang."""

    program: ClassVar[str] = "megappo.rewards.model_server"
    batch_tokens: int = 0

    def arguments(self, port: int, key: str) -> dict[str, JSONValue]:
        """Return the configuration of `megappo.rewards.model_server`."""
        return {
            "model-path": str(self.model_folder),
            "dtype": self.dtype,
            "device": "cuda" if self.devices else "cpu",
            "host": self.host,
            "port": port,
            "api-key": key,
            "batch-tokens": self.batch_tokens,
            "trust-remote-code": self.trust_remote_code,
        }


def start_reward_servers(config: Config, runtime: Runtime) -> OwnServers:
    """Start the reward servers of the run without waiting for them, each on the first rank of its machine. A collective
    of the world if there are any.

    Raises ValueError on every rank if a server cannot be started, if SGLang is missing on one rank, or if
    `reward.model_path` is not a reward model.
    """
    servers = config.reward.own_servers
    if not servers:
        return OwnServers()
    folders = agreed(lambda: {name: _folder(config, name) for name in servers}, (RunError, ValueError, OSError))
    hosts = all_gather_objects(machine_here())
    mine, machines = hosts[runtime.rank], list(dict.fromkeys(hosts))
    address = address_among(hosts, mine) if len(machines) > 1 else "127.0.0.1"

    def started() -> tuple[dict[str, ScoreServer], list[_RunningServer]]:
        clients, running = {}, []
        for name, (key, server) in servers.items():
            if server.machine >= len(machines):
                raise RunError(f"{key}.machine is {server.machine}, must be below {len(machines)} (number of machines)")
            if hosts.index(machines[server.machine]) != runtime.rank:
                continue
            host = server.host or address
            reached = address if host in EVERYWHERE else host
            gpus = own_gpus(config, server, key, hosts.count(mine)) if runtime.on_cuda else ()
            spec = replace(_spec(config, name, folders[name], gpus), host=host, address=reached)
            port, secret = free_port(host), secrets.token_hex(16)
            clients[name] = _client(config, name, f"http://{named_in_url(reached)}:{port}", secret)
            running.append(_RunningServer(spec, port, secret))
        return clients, running

    # Raises on every rank if one rank fails, so that no rank waits in the following gather.
    clients, running = agreed(started, (RunError, OSError))
    return OwnServers({n: client for of_rank in all_gather_objects(clients) for n, client in of_rank.items()}, running)


def _folder(config: Config, name: str) -> Path:
    """Return the folder of a server's model. Raises RunError if SGLang is missing for a judge, and ValueError if the
    folder is not a reward model."""
    reward = config.reward
    if name != MODEL_SERVER:
        require_sglang()
        return Path(reward.judges[name].model).absolute()
    assert reward.model_path is not None, "a validator requires model_path"
    folder = model_folder(reward.model_path, key="reward.model_path").absolute()
    check_folder(str(folder), trust_remote_code=config.model.trust_remote_code)
    return folder


def _spec(config: Config, name: str, folder: Path, gpus: tuple[int, ...]) -> ServerSpec:
    key, server = config.reward.own_servers[name]
    settings, tokens, on_cuda = server.as_servers, None, bool(gpus)
    make: Callable[..., ServerSpec] = ServerSpec
    if isinstance(server, JudgeServerSettings):
        tokens = settings.cache_tokens(on_cuda=on_cuda)
        if on_cuda:  # no other process uses these GPUs, so SGLang's share of the free memory at its start is sufficient
            arguments = {"mem-fraction-static": server.memory_fraction, **server.arguments}
            settings = settings.model_copy(update={"arguments": arguments})
    elif isinstance(server, RewardModelServerSettings):
        make = partial(_ModelServerSpec, batch_tokens=server.batch_tokens)
    return make(
        model_folder=folder,
        dtype=config.reward.model_dtype(on_cuda=on_cuda),
        settings=settings,
        stop_token_ids=(),
        trust_remote_code=config.model.trust_remote_code and name == MODEL_SERVER,
        log_directory=config.run.path.absolute() / "engines",
        cache=PlannedCache(tokens, 0),
        devices=gpus,
        cores=() if on_cuda else tuple(sorted(os.sched_getaffinity(0))),
        called=server_name(name),
        key=key,
    )


def _client(config: Config, name: str, url: str, key: str) -> ScoreServer:
    server = config.reward.own_servers[name][1]
    if isinstance(server, RewardModelServerSettings):
        client = ScoreServer(url, server.timeout_seconds, concurrency=1)
    else:
        client = replace(judge_client(config.reward.judges[name]), url=f"{url}/v1")
    return replace(client, key=key, starting_seconds=server.start_timeout_seconds)


def own_gpus(config: Config, server: OwnServerSettings, key: str, local_ranks: int) -> tuple[int, ...]:
    """Return the GPUs of a server by their numbers among the GPUs visible to this process.

    `local_ranks` is the number of training ranks on the machine. Raises RunError if there are too few GPUs, or if
    trainers or rollout servers use the GPUs.
    """
    first = local_ranks if server.first_device is None else server.first_device
    last, count = first + server.ranks - 1, torch.cuda.device_count()
    placed = f"{key} would use the GPUs {first} to {last}"
    if last >= count:
        raise RunError(f"{placed}, but a rank sees {count} GPUs; start fewer ranks, or set first_device or machine")
    if first < local_ranks:
        raise RunError(f"{placed}, but {local_ranks} ranks train there; set first_device to {local_ranks} or more")
    rollout = config.rollout.server_settings
    if config.rollout.broadcasts and not rollout.urls and not server.machine:
        begin = local_ranks if rollout.first_device is None else rollout.first_device
        end = begin + (rollout.count or 1) * rollout.node_ranks
        if first < end and last >= begin:
            raise RunError(f"{placed}, but rollout servers use {begin} to {end - 1}; set first_device to {end}")
    return tuple(range(first, last + 1))
