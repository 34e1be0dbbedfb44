"""SGLang servers as the planner sees them: which there are, and what a rank of one holds.

A rank of a server with tensor parallelism t holds, with e bytes per element:

    weights     e N / t, N the model's weights; norms and routers whole, key and value matrices as often as t exceeds
                their heads; heads and embedding over the ranks of a group where several groups attend apart
    keys,       2 e layers max(heads / t, 1) head_dim per token, heads those of keys and values, or e layers latent, for
    values      as many tokens as fit into memory_fraction of the device beside the weights, or max_total_tokens
    workspace   a chunk of 8192 prompt tokens through its widest layer, or float32 logits of the running sequences;
                4 bytes for each of the chunk's experts in each layer, where routing is replayed

What is reserved for keys and values is taken when a server starts, whatever it is asked.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from megappo.config import Config, resolve
from megappo.families.architecture import ArchitectureConfig
from megappo.plan.sizes import attention_parameters, model_sizes, whole_parameters

_PREFILL_TOKENS = 8192
"""SGLang 0.5.23's default of `--chunked-prefill-size` on GPUs of 60 to 160 GB (arg_groups/memory_hook.py)."""
_STATES_BESIDE_CACHE = 0.9
"""Ratio of the memory for states of linear attention to that for keys and values: the default of SGLang 0.5.23's
`--mamba-full-memory-ratio`."""


@dataclass(frozen=True)
class Servers:
    """The servers of a run."""

    count: int
    tensor_parallel: int
    colocated: bool
    """Whether the servers share the trainers' devices."""
    shares_machine: bool
    """Whether, without CUDA, the servers are on the machine that the trainers' ranks share."""
    sleeps: bool
    """Whether a server gives its memory to the trainers between rollouts."""
    ahead: bool
    """Whether servers generate while the trainers update."""
    static_bytes: float
    """Bytes of a device for weights, keys and values; 0 where a number of tokens is set instead."""
    max_total_tokens: int | None
    deterministic: bool
    """Whether a server computes a response from its prompt and seed alone, which costs speed on GPUs."""
    most_sequences: int
    """Most sequences that all ranks together keep at one server."""
    notes_experts: bool = False
    """Whether a server returns which experts computed each token; counts only for a model with experts."""
    sliced: bool = False
    """Whether each rank of a server receives its own slices in a weight sync."""
    reached_from_everywhere: bool = False
    """Whether ranks of every machine can feed a server."""
    nodes: int = 1
    """Machines over which a server's ranks are spread."""
    attention_groups: int = 1
    """Groups of a server's ranks with attention of their own (SGLang's DP attention)."""

    @property
    def attention_ranks(self) -> int:
        """Ranks of a server over which the heads of attention are spread."""
        return self.tensor_parallel // self.attention_groups

    @property
    def ranks(self) -> int:
        """Devices of all servers."""
        return self.count * self.tensor_parallel

    def own_ranks(self, world_size: int) -> int:
        """Devices of all servers on which no rank of a run of so many trains."""
        if self.beside:
            return self.ranks
        return 0 if self.shares_machine else max(0, self.ranks - world_size)

    @property
    def beside(self) -> bool:
        """Whether they generate on devices of their own."""
        return not (self.colocated or self.shares_machine)


def find_servers(config: Config, world_size: int, *, on_cuda: bool, device_bytes: float) -> Servers | None:
    """The servers of a configuration; None with the embedded engine."""
    if not resolve(config, on_cuda=on_cuda).rollout.has_servers:
        return None
    settings = config.rollout.servers
    return Servers(
        count=settings.count(world_size, on_cuda=on_cuda),
        tensor_parallel=settings.tensor_parallel,
        colocated=settings.placement == "colocated",
        shares_machine=not on_cuda and not settings.urls,
        sleeps=config.rollout.servers_sleep(on_cuda=on_cuda),
        ahead=bool(config.rollout.ahead),
        static_bytes=settings.memory_fraction * device_bytes if on_cuda else 0.0,
        max_total_tokens=settings.held_tokens(on_cuda=on_cuda),
        deterministic=config.rollout.servers_are_deterministic(on_cuda=on_cuda),
        most_sequences=settings.max_inflight_sequences * world_size,
        notes_experts=config.algorithm.router_replay is not False,
        sliced=settings.takes_slices,
        reached_from_everywhere=settings.reached_from_everywhere,
        nodes=settings.nodes,
        attention_groups=settings.data_parallel_attention,
    )


def server_weights(arch: ArchitectureConfig, tensor_parallel: int, attention_groups: int = 1) -> float:
    """Weights on one rank of a server, in elements."""
    whole, heads = whole_parameters(arch), tensor_parallel // attention_groups
    kv_heads = map(arch.kv_heads_of, arch.attention_layers)
    copies = [1 / min(heads, held) - 1 / heads for held in kv_heads]
    repeated = 2 * arch.hidden_size * sum(map(operator.mul, arch.key_widths, copies))
    repeated += attention_parameters(arch) * (1 / heads - 1 / tensor_parallel)
    return (model_sizes(arch)[0] - whole) / tensor_parallel + whole + repeated


def token_bytes(arch: ArchitectureConfig, attention_ranks: int, element_bytes: int) -> float:
    """Bytes of one token's keys and values on one of the ranks over which a server's heads are spread; latents are
    whole on each rank."""
    if arch.latent is not None:
        return float(element_bytes * arch.cached_width)
    of_layers = (max(arch.kv_heads_of(n) / attention_ranks, 1) * arch.head_dim_of(n) for n in arch.attention_layers)
    return 2.0 * element_bytes * sum(of_layers)


def cache_tokens(arch: ArchitectureConfig, servers: Servers, element_bytes: int) -> float:
    """Tokens whose keys and values a server holds, or each of its groups; 0 where the weights leave no room."""
    limit = float("inf") if servers.max_total_tokens is None else float(servers.max_total_tokens)
    if not servers.static_bytes:
        return limit
    weights = server_weights(arch, servers.tensor_parallel, servers.attention_groups)
    room = servers.static_bytes - element_bytes * weights
    if arch.delta_net is not None:
        room /= 1 + _STATES_BESIDE_CACHE
    return max(0.0, min(limit, room / token_bytes(arch, servers.attention_ranks, element_bytes)))


def running_sequences(
    arch: ArchitectureConfig, servers: Servers, element_bytes: int, *, wanted: int, mean_tokens: float
) -> float:
    """Sequences that a server decodes at the same time, of the `wanted` ones that it is asked for."""
    room = servers.attention_groups * cache_tokens(arch, servers, element_bytes) / mean_tokens
    return max(1.0, min(float(wanted), float(servers.most_sequences), room))


def server_workspace(arch: ArchitectureConfig, servers: Servers, element_bytes: int, sequences: float) -> float:
    """Bytes that a rank of a server needs beside weights, keys and values."""
    prefill = (
        element_bytes * _PREFILL_TOKENS * (3 * arch.ffn_hidden_size / servers.tensor_parallel + 4 * arch.hidden_size)
    )
    noted = _PREFILL_TOKENS * noted_bytes(arch, servers)
    return max(prefill, 4.0 * 2 * sequences * arch.vocab_size) + noted


def noted_bytes(arch: ArchitectureConfig, servers: Servers) -> float:
    """Bytes in which a rank of a server records a token's experts: on the device while it computes the token, then in
    the host's memory as long as the token's keys and values are cached."""
    return 4.0 * arch.layers * arch.experts_per_token if servers.notes_experts else 0.0
