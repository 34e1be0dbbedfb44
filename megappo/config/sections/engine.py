"""Built-in engines with their capabilities, and the settings of servers (`rollout.servers`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from megappo.config.base import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Processes,
    Ranks,
    Seconds,
    Settings,
    SettingValue,
    Text,
)
from megappo.errors import ConfigError, expanded_values
from megappo.plugins import check_choice, load_function


@dataclass(frozen=True)
class EngineCapabilities:
    """Properties of an engine that the settings of a run depend on.

    The class or the factory of a custom engine has an instance as its attribute `capabilities`. An engine without the
    attribute has no capability.
    """

    routing: bool = False
    """Whether answers can contain the experts of each token (`algorithm.router_replay`)."""
    prefix_cache: bool = False
    """Whether the keys and values of a prompt are reused for later prompts with the same prefix."""
    keeps_requests: bool = False
    """Whether unfinished requests can continue after a weight sync (`rollout.servers.pause`)."""
    separate_processes: bool = False
    """Whether servers generate. Servers can fail and restart, and answer a probe after each weight sync."""
    concurrent: bool = False
    """Whether the engine generates while the trainer computes. `rollout.ahead` of 1 or more needs this capability."""


@dataclass(frozen=True)
class BuiltInEngine:
    """An engine of megappo."""

    factory: str
    """Import path of the `megappo.engines.protocol.EngineFactory`."""
    label: str
    """Name in sentences."""
    capabilities: EngineCapabilities
    check: str | None = None
    """Import path of a function of `ServerSettings` that raises RunError if the servers cannot run on this machine."""


IN_PROCESS = {
    "transformers": BuiltInEngine(
        "megappo.engines.transformers_engine:embedded_engine", "the embedded engine", EngineCapabilities(routing=True)
    ),
}
"""Values of `rollout.engine`."""
SERVERS = {
    "sglang": BuiltInEngine(
        "megappo.engines.sglang.engine:served_engine",
        "SGLang",
        EngineCapabilities(
            routing=True, prefix_cache=True, keeps_requests=True, separate_processes=True, concurrent=True
        ),
        check="megappo.engines.sglang.servers.gpus:check_machine",
    ),
}
"""Values of `rollout.servers.kind`."""
SERVER_PACKAGES = ("sglang",)
"""Python packages of servers, whose versions a checkpoint records."""
ENGINES = IN_PROCESS | SERVERS
DEFAULT_ENGINE, DEFAULT_SERVERS = "transformers", "sglang"
"""Engine without CUDA and kind of the servers with CUDA, if the settings select neither."""
CPU_TOKENS = 65536
"""Default number of tokens in the key-value cache of a server on a CPU."""
LEAST_REQUEST_SECONDS = 1800.0
"""Minimum seconds without an answer before a server's progress is checked. The plan can require a longer time."""


def _variables(value: SettingValue) -> SettingValue | dict[str, Any]:
    """Convert numbers in a mapping to text, because environment variables are text."""
    if not isinstance(value, dict):
        return value
    return {name: str(item) if type(item) in (int, float) else item for name, item in value.items()}


Variables = Annotated[dict[str, Annotated[str, AfterValidator(expanded_values)]], BeforeValidator(_variables)]
ServerArguments = dict[str, Annotated[Any, AfterValidator(expanded_values)]]
"""Command-line arguments of a server, with the names of its program."""
Urls = Annotated[tuple[Text, ...], Field(strict=False)]


class ServerSettings(Settings):
    kind: Text = DEFAULT_SERVERS
    """Program of the servers: `sglang`, or a custom engine that runs as servers (`file.py:Class` or
    `package.module:Class`)."""
    placement: Literal["colocated", "disaggregated"] = "colocated"
    """Devices of the servers. `colocated`: the trainers' devices, with weight syncs by shared memory or CUDA IPC.
    `disaggregated`: separate devices or machines, with weight syncs by broadcast groups (NCCL or gloo). Each rank that
    feeds a server has one group."""
    count: Ranks | None = None
    """Number of servers to start. Default: as many servers as fit on the ranks if colocated on GPUs, else 1."""
    tensor_parallel: Ranks = 1
    """Number of ranks of each server (TP)."""
    expert_parallel: Ranks = 1
    """Number of shares of the experts of each layer (SGLang's EP). Each share has TP / EP ranks, which split the
    matrices of its experts. The number divides `tensor_parallel`."""
    data_parallel_attention: Ranks = 1
    """Number of groups of a server's ranks (SGLang's DP attention). Each group serves separate requests and has all
    attention heads, which suits models with fewer key-value heads than ranks. The number divides `tensor_parallel`."""
    nodes: Ranks = 1
    """Number of machines of each server that the run starts. Every machine has the same number of the server's ranks.
    The number divides `tensor_parallel`."""
    urls: Urls = ()
    """Addresses of running servers, such as http://10.0.0.5:30000 (disaggregated). The run then starts no servers. The
    environment variable MEGAPPO_SGLANG_API_KEY contains the key of the servers, if they need a key."""
    first_device: NonNegativeInt | None = None
    """First GPU of the servers on this machine. Default: the first GPU of the trainers if colocated, otherwise the
    first GPU after the trainers."""
    memory_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.6
    """Share of a GPU's total memory for weights, keys and values of a server, regardless of the free memory."""
    max_total_tokens: PositiveInt | None = None
    """Number of tokens in a server's key-value cache. Default: the number from memory_fraction, on a CPU 65536."""
    threads: Processes | None = None
    """CPU threads of each server rank without CUDA. Default: the machine's cores divided by its server ranks."""
    host: Text | None = None
    """Interface of the servers that the run starts. Every request needs the key of the run. Default: loopback, or on
    each machine the interface towards the other machines if the trainers have several machines."""
    sync_address: Text | None = None
    """Address at which servers reach the ranks of the first machine. Only these ranks then feed servers. Default: the
    address of each machine towards a server, and ranks of all machines feed servers."""
    deterministic: bool | None = None
    """Whether a response depends only on its prompt and seed, and not on other requests (SGLang's deterministic
    inference). False is faster on GPUs and ignores seeds. Default: true on a CPU and with `when_stopped: keep`."""
    sleep: bool = True
    """Whether colocated servers on GPUs release their memory to the trainer between rollouts."""
    verify: bool = True
    """Whether to verify each sync with checksums of all engine parameters and with log-probabilities of a probe."""
    probe: bool = True
    """Whether `verify` includes the log-probabilities of a probe. If false, checksums are the only verification."""
    pause: Literal["abort", "retract", "in_place"] = "abort"
    """Treatment of running requests when weights change, with an `ahead` of at least 2. `abort`: requests return their
    partial responses and are sent again. `retract`: servers keep the requests without keys and values of older
    weights. `in_place`: servers keep both. The last two exclude `probe`, because requests continue before a probe is
    answered."""
    probe_tolerance_nats: PositiveFloat | None = None
    """Maximum difference of the probe. Default: 1e-3 with float32 on both sides, otherwise 0.5."""
    max_inflight_sequences: PositiveInt = 512
    """Maximum number of sequences that a rank has at a server."""
    max_restarts: NonNegativeInt = 5
    """Maximum number of restarts of a server in the whole run. The run stops if a server needs another restart."""
    sync_attempts: PositiveInt = 3
    """Number of attempts of a weight sync of a server before the run stops."""
    start_timeout_seconds: Seconds = 600.0
    """Maximum time from the start of a server to its first answer."""
    request_timeout_seconds: Seconds | None = None
    """Time without an answer to a request after which the server's progress is checked. A server without progress is
    restarted. Default: four times the planned duration of a rollout, at least 1800."""
    stall_timeout_seconds: Seconds = 60.0
    """Time without any answer to open requests after which a server gets a health check. A server that fails the check
    is restarted."""
    health_timeout_seconds: Seconds = 60.0
    """Maximum time for the answer to a health check."""
    sync_timeout_seconds: Seconds = 300.0
    """Maximum time of a request of a weight sync."""
    arguments: ServerArguments = Field(default_factory=dict)
    """Additional arguments of the servers that the run starts, with SGLang's names: `{chunked-prefill-size: 4096}`."""
    environment: Variables = Field(default_factory=dict)
    """Additional environment variables of the servers that the run starts, such as `{SGLANG_LOG_GC: 1}`. The servers
    do not get the run's variables that begin with `SGLANG_`."""

    @field_validator("kind")
    @classmethod
    def _kind_is_known(cls, kind: str) -> str:
        check_choice(kind, SERVERS)
        return kind

    @property
    def is_built_in(self) -> bool:
        """Whether megappo starts the servers and knows their options and limits."""
        return self.kind in SERVERS

    def count_servers(self, world_size: int, *, on_cuda: bool) -> int:
        """Return the number of servers: the number of `urls`, or the number that a run of `world_size` ranks starts."""
        on_trainers = on_cuda and self.placement == "colocated"
        own = max(1, world_size // self.tensor_parallel) if on_trainers else 1
        return len(self.urls) or self.count or own

    def count_problem(self, world_size: int, *, on_cuda: bool) -> str | None:
        """Return a sentence if the GPUs of `world_size` ranks have no room for `count` servers, otherwise None."""
        if not on_cuda or self.placement != "colocated" or self.count is None:
            return None
        most = max(1, world_size // self.tensor_parallel)
        if self.count <= most:
            return None
        return (
            f"rollout.servers.count {self.count} x tensor_parallel {self.tensor_parallel} is "
            f"{self.count * self.tensor_parallel} GPUs, but colocated servers share the GPUs of {world_size} ranks; "
            f"set count to at most {most}, or remove count"
        )

    @property
    def takes_slices(self) -> bool:
        """Whether each rank of a server receives its own slices and loads the slices unchanged. Parameters then need
        the layout of the fingerprints. `arguments` can change the layout if fingerprints are not compared."""
        even = self.expert_parallel == self.data_parallel_attention == 1
        return self.placement == "colocated" and self.tensor_parallel > 1 and self.verify and even

    @property
    def keeps_requests(self) -> bool:
        """Whether servers keep running requests during a weight sync."""
        return self.pause != "abort"

    @property
    def probes(self) -> bool:
        """Whether servers answer a probe after a sync."""
        return self.verify and self.probe

    @property
    def reached_from_everywhere(self) -> bool:
        """Whether ranks of every machine can feed a server, not only the ranks of the first machine."""
        return bool(self.urls) and self.sync_address is None

    @property
    def attention_ranks(self) -> int:
        """Number of ranks of a server that serve the same requests. The number is 1 if there are more groups than
        ranks, which the rules reject."""
        return max(1, self.tensor_parallel // self.data_parallel_attention)

    @property
    def node_ranks(self) -> int:
        """Number of ranks of a server on each of its machines."""
        return max(1, self.tensor_parallel // self.nodes)

    def cache_tokens(self, *, on_cuda: bool) -> int | None:
        """Return the number of tokens in a server's key-value cache. None means the number from `memory_fraction`."""
        return self.max_total_tokens or (None if on_cuda else CPU_TOKENS)

    def broken_rules(self) -> Iterator[str]:
        if self.urls and self.placement == "colocated":
            yield "urls name external servers, which cannot be colocated; set placement: disaggregated"
        if self.urls and self.count is not None:
            yield f"count {self.count} starts own servers, but urls name external servers; set count to null"
        if self.urls and self.nodes > 1:
            yield f"nodes {self.nodes} is for own servers, but urls name external servers; remove nodes"
        for url in self.urls:
            if not url.startswith("http://"):
                yield f"'{url}' in urls must look like http://HOST:PORT"


def find_capabilities(name: str, setting: str) -> EngineCapabilities:
    """Return the capabilities of a built-in engine, or of a custom engine that `setting` names by its import path.

    Raises ConfigError if the engine cannot be imported, or if its attribute `capabilities` has another type.
    """
    if name in ENGINES:
        return ENGINES[name].capabilities
    try:
        factory = load_function(name, setting)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    capabilities = getattr(factory, "capabilities", EngineCapabilities())
    if not isinstance(capabilities, EngineCapabilities):
        kind = type(capabilities).__name__
        raise ConfigError(f"{setting} '{name}' has capabilities of type {kind}, must be megappo.api.EngineCapabilities")
    return capabilities
