"""Starts one SGLang server as a child process and ends it, with everything it made."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import megappo
from megappo.config import Config
from megappo.config.engine import SGLangSettings
from megappo.config.model_files import load_architecture
from megappo.engines.sglang.bond import ServerPart
from megappo.engines.sglang.client import HEALTH, Endpoint, ServerFailure, call
from megappo.engines.sglang.gpus import visible_devices
from megappo.engines.sglang.guard import ServerProcesses, clean_up
from megappo.errors import RunError
from megappo.plan.cache import PlannedCache, server_cache
from megappo.runtime.nccl import own_stack, share_settings
from megappo.runtime.sglang_cpu import ENTRY_POINTS, PLATFORM_NAME
from megappo.runtime.sglang_slices import LOADER, has_loader
from megappo.runtime.store import free_port
from megappo.runtime.waiting import wait_until

STOP_SECONDS = 20.0
_SHARE_OF_FREE_MEMORY = 0.99
"""SGLang's mem_fraction_static: of what is free when a server starts. It is a second limit on keys and values beside
their number of tokens, which we choose, and must not be the lower one."""
_FREEZE_SECONDS = 30.0
_IDLE_SECONDS = 10
_PART_SECONDS = 0.5
WEIGHTS, CACHES = ("weights",), ("kv_cache", "cuda_graph")
"""Parts of a server's memory by SGLang's names; it needs the second ones to generate only."""
_SCRUBBED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR")
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_SCRUBBED_PREFIXES = ("TORCHELASTIC_", "ROLE_", "GROUP_", "MASTER_", "TORCH_NCCL_", "SGLANG_", "TRITON_INTERPRET")


class EngineError(RunError):
    """The engine cannot go on: its servers cannot be started or reached, or refuse what it asks."""


@dataclass(frozen=True)
class ServerSpec:
    """What a server is started with."""

    model_folder: Path
    dtype: str
    settings: SGLangSettings
    stop_token_ids: tuple[int, ...]
    trust_remote_code: bool
    log_directory: Path
    cache: PlannedCache
    devices: tuple[int, ...] = ()
    """GPUs by their number among those that this process sees; none on a CPU."""
    cores: tuple[int, ...] = ()
    """CPU cores that it may use, on a machine without CUDA."""
    memory_saver: bool = False
    """Whether it can give its memory away."""
    deterministic: bool = False
    """Whether a response follows from its prompt and seed."""
    further: Mapping[str, Any] = field(default_factory=dict)
    """What it reads of config.json beside what may stand there."""
    returns_routing: bool = False
    """Whether it says which experts computed a token, where a request asks for it."""
    seed: int = 0
    host: str = "127.0.0.1"
    """Interface that it listens on."""
    address: str = ""
    """Where others find it; by default at `host`."""
    called: str = ""
    """What it is called where it is no server of the engine's, and loads weights and tokenizer of its folder."""
    key: str = "rollout.sglang"
    """Where its settings stand."""
    program: ClassVar[str] = "sglang.launch_server"
    """The module that is run."""

    @classmethod
    def of(
        cls, config: Config, folder: Path, stop_token_ids: tuple[int, ...], *, on_cuda: bool, device_bytes: float = 0.0
    ) -> ServerSpec:
        """What a configuration asks for, before a server has its place. Raises ConfigError as `server_cache` does.

        `device_bytes`: memory of a GPU; servers that somebody else starts have others.
        """
        own_bytes = 0.0 if config.rollout.servers.urls else device_bytes
        arch = load_architecture(folder, config.model)
        return cls(
            model_folder=folder.absolute(),
            dtype=config.model.dtype,
            settings=config.rollout.servers,
            stop_token_ids=stop_token_ids,
            trust_remote_code=config.model.trust_remote_code,
            log_directory=config.run.path.absolute() / "engines",
            further=arch.declaration.further(arch.hf_config),
            cache=server_cache(config, arch, on_cuda=on_cuda, device_bytes=own_bytes),
            memory_saver=config.rollout.servers_sleep(on_cuda=on_cuda),
            deterministic=config.rollout.servers_are_deterministic(on_cuda=on_cuda),
            returns_routing=config.algorithm.replays_routing(arch.experts),
        )

    def arguments(self, port: int, key: str) -> dict[str, Any]:
        """SGLang's arguments as it reads them from a file."""
        found: dict[str, Any] = {
            "model-path": str(self.model_folder),
            "dtype": self.dtype,
            "host": self.host,
            "port": port,
            "api-key": key or None,
            "tensor-parallel-size": self.settings.tensor_parallel,
            "random-seed": self.seed,
            "skip-server-warmup": True,
            "log-level": "warning",
        }
        if not self.called:
            found |= self._of_engine()
        if self.deterministic:
            found |= {"enable-deterministic-inference": True, "sampling-backend": "pytorch"}  # no other takes seeds
        if self.settings.expert_parallel > 1:
            found["ep-size"] = self.settings.expert_parallel
        if self.settings.data_parallel_attention > 1:
            found["attn-dp-size"] = self.settings.data_parallel_attention
        if self.trust_remote_code:
            found["trust-remote-code"] = True
        if self.returns_routing:
            found["enable-return-routed-experts"] = True
        if self.settings.takes_slices and has_loader():
            found["custom-weight-loader"] = [LOADER]
        if self.cache.tokens is not None:
            found["max-total-tokens"] = self.cache.tokens
        if self.devices:
            found["mem-fraction-static"] = _SHARE_OF_FREE_MEMORY
            if self.memory_saver:
                found["enable-memory-saver"] = True
        else:
            found |= {"device": "cpu", "attention-backend": "torch_native", "disable-overlap-schedule": True}
            found["sleep-on-idle"] = True  # or it takes a core of the trainer's while it has nothing to do
        return found | self.settings.arguments

    def _of_engine(self) -> dict[str, Any]:
        """What a server wants whose weights are the actor's."""
        return {
            "load-format": "dummy",  # weights come from the actor only
            "disable-shared-experts-fusion": True,  # each stands where the map says
            "skip-tokenizer-init": True,  # tokens in, tokens out
            "extra-metric-labels": json.dumps(own_stack(os.environ).labels()),  # whom it can form a group with
            # The actor's weights are plain, however those of its folder are stored.
            "json-model-override-args": json.dumps(
                {**self.further, "eos_token_id": list(self.stop_token_ids) or None, "quantization_config": None}
            ),
        }

    def environment(self, scratch: Path, part: ServerPart | None = None) -> dict[str, str]:
        """The server's variables, or those of a part of it: ours without what torchrun set."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in _SCRUBBED and not name.startswith(_SCRUBBED_PREFIXES)
        }
        if self.memory_saver:
            kept |= {name: _without_expandable_segments(kept[name]) for name in _ALLOCATOR_VARIABLES if name in kept}
        share_settings(kept)
        path = [str(Path(megappo.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        kept["TMPDIR"] = str(scratch)  # SGLang leaves its sockets there
        if part is not None:
            kept |= part.bond.environment(part.start)
        else:  # its ranks, all on this machine, meet at a file: torch's store would listen on every interface
            kept["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{scratch}/ranks"
        kept["SGLANG_HEALTH_CHECK_TIMEOUT"] = str(max(1, int(self.settings.health_timeout_seconds)))
        if self.settings.tensor_parallel > 1 and not self.deterministic:
            kept["SYNC_TOKEN_IDS_ACROSS_TP"] = "1"  # ranks that drew other tokens would wait for each other for ever
        if self.devices:
            # The trainers beside the ranks of a server may leave them unequal room.
            kept["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
            kept["CUDA_VISIBLE_DEVICES"] = visible_devices(self.devices, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        else:
            path.insert(0, str(_advertise_platform(scratch)))
            ranks = self.settings.node_ranks
            share = max(1, len(self.cores) // ranks)
            threads = self.settings.threads or share
            kept |= {"SGLANG_PLATFORM": PLATFORM_NAME, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": str(threads)}
            kept["OMP_WAIT_POLICY"] = "passive"  # the trainer's threads want the same cores
            if (
                self.settings.tensor_parallel > 1
            ):  # on one NUMA node SGLang wants to be told which cores belong to which rank
                cores = [self.cores[(r * share + i) % len(self.cores)] for r in range(ranks) for i in range(share)]
                groups = [cores[r * share : (r + 1) * share] for r in range(ranks)]
                kept["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, group)) for group in groups)
        kept["PYTHONPATH"] = os.pathsep.join(p for p in path if p)
        return kept


def _without_expandable_segments(options: str) -> str:
    """torch's allocator options without the one that torch_memory_saver, which gives memory away, refuses."""
    return ",".join(option for option in options.split(",") if option.split(":")[0].strip() != "expandable_segments")


def _advertise_platform(scratch: Path) -> Path:
    """A folder for the import path in which SGLang finds its CPU plugins, also where megappo is not installed."""
    site = scratch / "site"
    if any(PLATFORM_NAME not in importlib.metadata.entry_points(group=group).names for group in ENTRY_POINTS):
        info = site / f"megappo-{megappo.__version__}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: megappo\nVersion: {megappo.__version__}\n")
        lines = "\n".join(f"[{group}]\n{point}" for group, point in ENTRY_POINTS.items())
        (info / "entry_points.txt").write_text(lines)
    return site


@dataclass
class Server:
    """One running server, or a part of it on one of its machines; made by `start_server`."""

    endpoint: Endpoint
    guard: subprocess.Popen[bytes]
    session: int
    """Process id of the server, which leads a session of its own."""
    scratch: Path
    """Its sockets and its key; removed by the guard, last of all."""
    log: Path
    deadline: float
    settings: SGLangSettings
    key: str = "rollout.sglang"
    """Where its settings stand."""
    part: ServerPart | None = None
    """Of a server on several machines; it ends where another part has ended."""
    lost: str | None = None
    """Why another part ended, where this one ended for that."""
    stopped: bool = field(default=False)
    released: set[str] = field(default_factory=set)
    """Parts whose memory it has given away; while there is one, it must not generate, not even for its health."""

    def release(self, parts: Iterable[str]) -> None:
        """Give the memory of `parts` away once it is idle. Raises ServerFailure, and is to be replaced then."""
        if wanted := sorted(set(parts) - self.released):
            self._ask(f"/flush_cache?timeout={_IDLE_SECONDS}", {})  # waits: a release while it is busy kills it
            self.released |= set(wanted)
            self._ask("/release_memory_occupation", {"tags": wanted})

    def resume(self, parts: Iterable[str]) -> None:
        """Take the memory of `parts` back; what was in it is lost. Raises as `release`."""
        if wanted := sorted(set(parts) & self.released):
            self._ask("/resume_memory_occupation", {"tags": wanted})
            self.released -= set(wanted)

    def _ask(self, path: str, body: dict[str, Any]) -> None:
        call(self.endpoint, path, body, timeout_seconds=self.settings.sync_timeout_seconds)

    def __post_init__(self) -> None:
        if self.part is not None:
            threading.Thread(target=self._end_together, args=(self.part,), daemon=True).start()

    def _end_together(self, part: ServerPart) -> None:
        """End with the other parts, which end with this one: a collective would wait for the dead for ever."""

        def is_over() -> bool:
            if not self.running:
                if not self.stopped:
                    self.tell_parts(f"ended; {self.log} ends with: {self.tail()}")
                return True
            self.lost = part.bond.why_ended(part.start)
            if self.lost is not None:
                self._order_end()
            return self.lost is not None

        wait_until(is_over, math.inf, every_seconds=_PART_SECONDS)

    def tell_parts(self, reason: str) -> None:
        """Have the other parts end for a reason, unless one was given already."""
        if self.part is not None:
            here = f"part {self.part.bond.node} of server {self.endpoint.index}, on {socket.gethostname()},"
            self.part.bond.say_ended(self.part.start, f"{here} {reason}")

    @property
    def why_ended(self) -> str:
        """What to tell of a server that runs no longer."""
        return self.lost or f"{self.log} ends with: {self.tail()}"

    def wait_ready(self) -> None:
        """Wait until it answers. Raises ServerFailure with the end of its log where it ends or hangs instead."""
        wait_until(self.is_ready, math.inf, every_seconds=0.2)  # which knows when it is late

    def is_ready(self) -> bool:
        """Whether it answers by now. Raises ServerFailure with the end of its log where it ended or is late."""
        if self.guard.poll() is not None:
            raise ServerFailure(f"{self.endpoint.name} ended while it started; {self.why_ended}")
        with suppress(ServerFailure):
            if self.part is not None and self.part.bond.node > 0:  # which answers nothing else
                call(self.endpoint, HEALTH, timeout_seconds=5.0, method="GET")
                return True
            call(self.endpoint, "/model_info", timeout_seconds=5.0, method="GET")
            # SGLang sends itself this when it starts, now and then before it listens. Without it every weight sync
            # waits half a second for Python's garbage collection, which looks through all that was imported.
            call(self.endpoint, "/freeze_gc", timeout_seconds=_FREEZE_SECONDS)
            return True
        if time.monotonic() > self.deadline:
            raise ServerFailure(
                f"{self.endpoint.name} gave no answer within {self.key}.start_timeout_seconds "
                f"{self.settings.start_timeout_seconds:g}; {self.log} ends with: {self.tail()}"
            )
        return False

    def tail(self, characters: int = 1500) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-characters:].strip() if self.log.exists() else ""

    @property
    def running(self) -> bool:
        """Whether its process is there (it may hang)."""
        return not self.stopped and self.guard.poll() is None

    def stop(self) -> None:
        """End it and what it made; returns when all of that is gone."""
        if self.stopped:
            return
        self.stopped = True
        self._order_end()
        with suppress(subprocess.TimeoutExpired):
            self.guard.wait(STOP_SECONDS)
        if self.guard.poll() != 0:
            self._end_without_guard()

    def _order_end(self) -> None:
        assert self.guard.stdin is not None
        with suppress(OSError):
            self.guard.stdin.close()

    def _end_without_guard(self) -> None:
        """The guard hangs, or it was killed: its keeper ends the server then, unless that is gone too."""
        self.guard.kill()
        self.guard.wait()
        wait_until(lambda: not self.scratch.exists(), STOP_SECONDS, every_seconds=0.05)
        clean_up(ServerProcesses(self.session, str(self.scratch)), set(), str(self.scratch), 0.0)


def named_in_url(host: str) -> str:
    """What this machine calls an interface of its own in a URL."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def start_server(
    spec: ServerSpec,
    index: int,
    sender: int,
    starts: int,
    *,
    port: int | None = None,
    key: str | None = None,
    part: ServerPart | None = None,
) -> Server:
    """Start a server or a part of it, on a free port under a key of its own unless they are given; returns at once."""
    # Short, because the names of sockets in it may not be longer than 107 bytes.
    scratch = Path(tempfile.mkdtemp(prefix="mppo-", dir="/tmp"))
    key = secrets.token_hex(16) if key is None else key
    port = port or free_port(spec.host)
    config = scratch / "server.yaml"
    config.touch(mode=0o600)  # it holds the key, which a command line would show to everybody
    arguments = spec.arguments(port, key) | (part.bond.arguments(part.start) if part is not None else {})
    config.write_text(json.dumps({k: v for k, v in arguments.items() if v is not None}))
    spec.log_directory.mkdir(parents=True, exist_ok=True)
    node = part.bond.node if part is not None else 0
    name = spec.called.replace(" ", "-") or f"engine-{index}"
    log = spec.log_directory / (f"{name}-part-{node}.log" if node else f"{name}.log")
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guard.py")), str(scratch), str(log), "--"]
    command += [sys.executable, "-m", spec.program, "--config", str(config)]
    try:
        guard = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=spec.environment(scratch, part),
            start_new_session=True,
            cwd=scratch,
        )
    except OSError:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    assert guard.stdout is not None
    session = int(guard.stdout.readline())
    url = f"http://{named_in_url(spec.address or spec.host)}:{port}"
    endpoint = Endpoint(index, url, key, sender, starts, spec.called)
    deadline = time.monotonic() + spec.settings.start_timeout_seconds
    return Server(endpoint, guard, session, scratch, log.absolute(), deadline, spec.settings, spec.key, part)
