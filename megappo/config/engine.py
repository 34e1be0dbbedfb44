"""Settings of the SGLang servers (`rollout.sglang`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from megappo.config.base import (
    Given,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Processes,
    Ranks,
    Seconds,
    Settings,
    Text,
)
from megappo.errors import expanded_values

ENGINES = {
    "transformers": "megappo.engines.transformers_engine:embedded_engine",
    "sglang": "megappo.engines.sglang.engine:served_engine",
}
"""Names for `rollout.engine`, and the import path of what makes each; see `megappo.engines.protocol.EngineFactory`."""
CPU_TOKENS = 65536
"""Tokens whose keys and values a server on a CPU holds where no number is set."""
LEAST_REQUEST_SECONDS = 1800.0
"""Seconds after which a server that owes an answer is asked whether it still works; longer where the plan says so."""


def _variables(given: Given) -> Given | dict[str, Any]:
    """Numbers in the given mapping as text, which environment variables need."""
    if not isinstance(given, dict):
        return given
    return {name: str(value) if type(value) in (int, float) else value for name, value in given.items()}


Variables = Annotated[dict[str, Annotated[str, AfterValidator(expanded_values)]], BeforeValidator(_variables)]
ServerArguments = dict[str, Annotated[Any, AfterValidator(expanded_values)]]
"""Command-line arguments of a server, with the names that SGLang uses."""
Urls = Annotated[tuple[Text, ...], Field(strict=False)]


class SGLangSettings(Settings):
    placement: Literal["colocated", "disaggregated"] = "colocated"
    """`colocated`: on the trainers' devices, weights by shared memory or CUDA IPC. `disaggregated`: on devices or
    machines of their own, weights by broadcast groups (NCCL or gloo), one with each rank that feeds a server."""
    engines: Ranks | None = None
    """Servers to start; default: colocated on GPUs as many as the ranks hold, else 1."""
    tensor_parallel: Ranks = 1
    """Ranks of each server (TP)."""
    expert_parallel: Ranks = 1
    """Shares into which each layer's experts are divided (SGLang's EP). TP / EP ranks hold each share and split the
    matrices of its experts among themselves; divides `tensor_parallel`."""
    data_parallel_attention: Ranks = 1
    """Groups of a server's ranks that each attend to requests of their own and hold all heads (SGLang's DP attention):
    for models with fewer key and value heads than ranks. Divides `tensor_parallel`."""
    nodes: Ranks = 1
    """Machines of each own server, each with as many of its ranks; divides `tensor_parallel`."""
    urls: Urls = ()
    """Servers that run already, such as http://10.0.0.5:30000, instead of own ones (disaggregated). Their key, if they
    want one, is read from the environment variable MEGAPPO_SGLANG_API_KEY."""
    first_device: NonNegativeInt | None = None
    """First GPU of the servers on this machine; default: the trainers' (colocated), or the first after them."""
    memory_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.6
    """Share of a GPU's total memory for weights, keys and values of a server, whatever is free when it starts."""
    max_total_tokens: PositiveInt | None = None
    """Tokens whose keys and values a server holds; default: what memory_fraction allows, on a CPU 65536."""
    threads: Processes | None = None
    """CPU threads of each server rank, without CUDA; default: the machine's cores over all of them."""
    host: Text | None = None
    """Interface that own servers listen on; every request needs the key of the run. Default: loopback, and where the
    trainers have several machines, on each the one that leads to the others."""
    sync_address: Text | None = None
    """Address of the first machine at which servers reach its ranks; only its ranks feed servers then. Default: each
    machine's address towards a server, and ranks of all machines feed servers."""
    deterministic: bool | None = None
    """A response depends on its prompt and seed, not on what else the server computes (SGLang's deterministic
    inference); false is faster on GPUs and ignores seeds. Default: true on a CPU and with `when_stopped: keep`."""
    sleep: bool = True
    """Colocated servers on GPUs give their memory to the trainer between rollouts."""
    verify: bool = True
    """Compare a checksum of every engine parameter with the source after each sync, and the log-probabilities of a
    probe."""
    probe: bool = True
    """With `verify`: also compare the log-probabilities of a probe; false: checksums alone prove a sync."""
    pause: Literal["abort", "retract", "in_place"] = "abort"
    """What happens to running requests when weights change, with `rollout.ahead` of 2 and more. `abort`: they return
    what they have and are sent again. `retract`, `in_place`: servers keep them, and continue without keys and values of
    the older weights, or with them; not with `probe`, as they continue before any probe is answered."""
    probe_tolerance_nats: PositiveFloat | None = None
    """Largest gap of the probe; default: 1e-3 with float32 on both sides, 0.5 otherwise."""
    max_inflight_sequences: PositiveInt = 512
    """Most sequences that one rank keeps at one server."""
    max_restarts: NonNegativeInt = 5
    """Restarts of one server, over the whole run, after which the run stops."""
    sync_attempts: PositiveInt = 3
    """Times a weight sync of a server is tried before the run stops."""
    start_timeout_seconds: Seconds = 600.0
    """Longest time from a server's start to its first answer."""
    request_timeout_seconds: Seconds | None = None
    """A server that owes an answer for longer is asked whether it still makes tokens, and restarted where it makes
    none; default: four times what the plan says that a rollout takes, at least 1800."""
    stall_timeout_seconds: Seconds = 60.0
    """A server that owes answers and gives none for so long is sent a health check, and restarted where it does not
    answer that."""
    health_timeout_seconds: Seconds = 60.0
    """Longest time for the answer to a health check."""
    sync_timeout_seconds: Seconds = 300.0
    """Longest time for one request of a weight sync."""
    arguments: ServerArguments = Field(default_factory=dict)
    """More arguments for own servers, by SGLang's names: `{chunked-prefill-size: 4096}`."""
    environment: Variables = Field(default_factory=dict)
    """More variables for own servers' processes, which get none of the run's own that begin with `SGLANG_`:
    `{SGLANG_LOG_GC: 1}`."""

    def count(self, world_size: int, *, on_cuda: bool) -> int:
        """Number of servers: those of `urls`, or what a run of so many ranks starts."""
        on_trainers = on_cuda and self.placement == "colocated"
        own = max(1, world_size // self.tensor_parallel) if on_trainers else 1
        return len(self.urls) or self.engines or own

    def count_problem(self, world_size: int, *, on_cuda: bool) -> str | None:
        """Why so many servers have no room on the GPUs of a run of so many ranks; None where they have."""
        if not on_cuda or self.placement != "colocated" or self.engines is None:
            return None
        most = max(1, world_size // self.tensor_parallel)
        if self.engines <= most:
            return None
        return (
            f"rollout.sglang.engines {self.engines} x tensor_parallel {self.tensor_parallel} is "
            f"{self.engines * self.tensor_parallel} GPUs, but colocated servers stand on those of the {world_size} "
            f"ranks; set engines to at most {most}, or remove it"
        )

    @property
    def takes_slices(self) -> bool:
        """Whether each rank of a server receives its own slices, which are loaded as they are. Parameters must then be
        laid out as fingerprints expect; `arguments` may change that where fingerprints are not compared."""
        even = self.expert_parallel == self.data_parallel_attention == 1
        return self.placement == "colocated" and self.tensor_parallel > 1 and self.verify and even

    @property
    def holds(self) -> bool:
        """Whether servers keep running requests while their weights change."""
        return self.pause != "abort"

    @property
    def probes(self) -> bool:
        """Whether servers answer a probe after a sync."""
        return self.verify and self.probe

    @property
    def reached_from_everywhere(self) -> bool:
        """Whether every machine's ranks can feed a server, not only those of the first."""
        return bool(self.urls) and self.sync_address is None

    @property
    def attention_ranks(self) -> int:
        """Ranks of a server that attend to the same requests; one where there are more groups than ranks, which
        the rules refuse."""
        return max(1, self.tensor_parallel // self.data_parallel_attention)

    @property
    def node_ranks(self) -> int:
        """Ranks of a server on each of its machines."""
        return max(1, self.tensor_parallel // self.nodes)

    def held_tokens(self, *, on_cuda: bool) -> int | None:
        """Tokens whose keys and values a server holds; None for as many as `memory_fraction` allows."""
        return self.max_total_tokens or (None if on_cuda else CPU_TOKENS)

    def broken_rules(self) -> Iterator[str]:
        if self.urls and self.placement == "colocated":
            yield "urls name servers elsewhere, which are not colocated; set placement: disaggregated"
        if self.urls and self.engines is not None:
            yield f"engines {self.engines} starts own servers, urls names others; remove engines, or set it to null"
        if self.urls and self.nodes > 1:
            yield f"nodes {self.nodes} is for own servers, and urls name others; remove nodes"
        for url in self.urls:
            if not url.startswith("http://"):
                yield f"'{url}' in urls must look like http://HOST:PORT"
