"""SGLang servers in the planner: the servers of a run and the memory of each of their ranks.

A rank of a server with tensor parallelism t has the following memory, with e bytes per element:

    weights     e N / t, N the model's weights; norms and routers are whole; key and value matrices are repeated if t
                exceeds their heads; heads and embedding are split over an attention group if there are several groups
    keys,       2 e layers max(heads / t, 1) head_dim per token with the key-value heads, or e layers latent; the number
    values      of tokens is max_total_tokens, or as large as memory_fraction of the device allows next to the weights
    workspace   a chunk of 8192 prompt tokens through its widest layer, or float32 logits of the running sequences;
                4 bytes for each of the chunk's experts in each layer, if routing is replayed

A server allocates the memory for keys and values when it starts, independent of its load.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from megappo.config import Config, resolve
from megappo.families.declaration import ArchitectureConfig
from megappo.plan.bytes.sizes import attention_parameters, model_sizes, whole_parameters

_PREFILL_TOKENS = 8192
"""Default of `--chunked-prefill-size` in SGLang 0.5.23 on GPUs of 60 to 160 GB (arg_groups/memory_hook.py)."""
_STATES_TO_CACHE = 0.9
"""Ratio of the memory for states of linear attention to the memory for keys and values (default of
`--mamba-full-memory-ratio` in SGLang 0.5.23)."""


@dataclass(frozen=True)
class Servers:
    """Servers of a run."""

    count: int
    tensor_parallel: int
    colocated: bool
    """Whether the servers share the trainers' devices."""
    shares_machine: bool
    """Whether the servers share the machine of the trainer ranks, without CUDA."""
    sleeps: bool
    """Whether a server releases its memory for training between rollouts."""
    ahead: bool
    """Whether servers generate during updates."""
    static_bytes: float
    """Bytes of a device for weights, keys and values; 0 if the number of tokens is set instead."""
    max_total_tokens: int | None
    deterministic: bool
    """Whether a response depends only on its prompt and seed. Deterministic inference is slower on GPUs."""
    most_sequences: int
    """Largest number of sequences that all ranks together have in flight at one server."""
    notes_experts: bool = False
    """Whether a server returns the chosen experts of each token. The value is relevant only for a model with
    experts."""
    sliced: bool = False
    """Whether each rank of a server receives a separate slice of the weights in a weight sync."""
    reached_from_everywhere: bool = False
    """Whether ranks of every machine can feed a server."""
    nodes: int = 1
    """Number of machines of one server."""
    attention_groups: int = 1
    """Number of attention groups among the ranks of a server (DP attention of SGLang)."""

    @property
    def attention_ranks(self) -> int:
        """Number of ranks of a server that share the attention heads."""
        return self.tensor_parallel // self.attention_groups

    @property
    def ranks(self) -> int:
        """Number of devices of all servers."""
        return self.count * self.tensor_parallel

    def own_ranks(self, world_size: int) -> int:
        """Return the number of devices that servers have in addition to the devices of `world_size` trainer ranks."""
        if self.has_own_devices:
            return self.ranks
        return 0 if self.shares_machine else max(0, self.ranks - world_size)

    @property
    def has_own_devices(self) -> bool:
        """Whether servers have separate devices."""
        return not (self.colocated or self.shares_machine)


def find_servers(config: Config, world_size: int, *, on_cuda: bool, device_bytes: float) -> Servers | None:
    """Return the servers of a configuration, or None with the embedded engine."""
    rollout = resolve(config, on_cuda=on_cuda).rollout
    if not rollout.capabilities.separate_processes:
        return None
    settings = rollout.server_settings
    return Servers(
        count=settings.count_servers(world_size, on_cuda=on_cuda),
        tensor_parallel=settings.tensor_parallel,
        colocated=settings.placement == "colocated",
        shares_machine=not on_cuda and not settings.urls,
        sleeps=config.rollout.servers_sleep(on_cuda=on_cuda),
        ahead=bool(config.rollout.ahead),
        static_bytes=settings.memory_fraction * device_bytes if on_cuda else 0.0,
        max_total_tokens=settings.cache_tokens(on_cuda=on_cuda),
        deterministic=config.rollout.servers_are_deterministic(on_cuda=on_cuda),
        most_sequences=settings.max_inflight_sequences * world_size,
        notes_experts=config.algorithm.router_replay is not False,
        sliced=settings.takes_slices,
        reached_from_everywhere=settings.reached_from_everywhere,
        nodes=settings.nodes,
        attention_groups=settings.data_parallel_attention,
    )


def server_weights(arch: ArchitectureConfig, tensor_parallel: int, attention_groups: int = 1) -> float:
    """Return the number of weights on one rank of a server, in elements."""
    whole, heads = whole_parameters(arch), tensor_parallel // attention_groups
    kv_heads = map(arch.kv_heads_of, arch.attention_layers)
    copies = [1 / min(heads, count) - 1 / heads for count in kv_heads]
    repeated = 2 * arch.hidden_size * sum(map(operator.mul, arch.key_widths, copies))
    repeated += attention_parameters(arch) * (1 / heads - 1 / tensor_parallel)
    return (model_sizes(arch)[0] - whole) / tensor_parallel + whole + repeated


def token_bytes(arch: ArchitectureConfig, attention_ranks: int, element_bytes: int) -> float:
    """Return the bytes of one token's keys and values on one of the `attention_ranks` ranks. Each rank has the whole
    latents."""
    if arch.latent is not None:
        return float(element_bytes * arch.cached_width)
    of_layers = (max(arch.kv_heads_of(n) / attention_ranks, 1) * arch.head_dim_of(n) for n in arch.attention_layers)
    return 2.0 * element_bytes * sum(of_layers)


def cache_tokens(arch: ArchitectureConfig, servers: Servers, element_bytes: int) -> float:
    """Return the number of tokens in the cache of a server, or in the cache of each attention group. Return 0 if the
    weights leave no room for a cache."""
    limit = float("inf") if servers.max_total_tokens is None else float(servers.max_total_tokens)
    if not servers.static_bytes:
        return limit
    weights = server_weights(arch, servers.tensor_parallel, servers.attention_groups)
    room = servers.static_bytes - element_bytes * weights
    if arch.delta_net is not None:
        room /= 1 + _STATES_TO_CACHE
    return max(0.0, min(limit, room / token_bytes(arch, servers.attention_ranks, element_bytes)))


def running_sequences(
    arch: ArchitectureConfig, servers: Servers, element_bytes: int, *, requested: int, mean_tokens: float
) -> float:
    """Return the number of sequences that a server decodes at the same time, out of `requested` requested sequences."""
    room = servers.attention_groups * cache_tokens(arch, servers, element_bytes) / mean_tokens
    return max(1.0, min(float(requested), float(servers.most_sequences), room))


def server_workspace(arch: ArchitectureConfig, servers: Servers, element_bytes: int, sequences: float) -> float:
    """Return the bytes of a server rank in addition to weights, keys and values."""
    prefill = (
        element_bytes * _PREFILL_TOKENS * (3 * arch.ffn_hidden_size / servers.tensor_parallel + 4 * arch.hidden_size)
    )
    noted = _PREFILL_TOKENS * noted_bytes(arch, servers)
    return max(prefill, 4.0 * 2 * sequences * arch.vocab_size) + noted


def noted_bytes(arch: ArchitectureConfig, servers: Servers) -> float:
    """Return the bytes in which a server rank records a token's experts. The record is on the device while the token
    is computed. The record is then in host memory as long as the keys and values of the token are cached."""
    return 4.0 * arch.layers * arch.experts_per_token if servers.notes_experts else 0.0
