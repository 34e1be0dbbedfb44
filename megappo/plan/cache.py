"""The size of a server's key and value cache, and whether the longest sequence fits into it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megappo.config import Config, ConfigError
from megappo.families.architecture import ArchitectureConfig
from megappo.plan.inputs import Workload, workload
from megappo.plan.servers import cache_tokens, running_sequences, server_weights, token_bytes
from megappo.plan.sizes import size_words


@dataclass(frozen=True)
class PlannedCache:
    """Keys and values of a server."""

    tokens: int | None
    """Most tokens that the cache holds at the same time; None: not known here, as for servers that somebody else
    starts."""
    longest_tokens: int
    """Tokens of the longest sequence that the server is asked for; a smaller cache could not serve it."""
    sequences: int | None = None
    """Most sequences that the server decodes at the same time, counted when they begin; None where its requests are not
    known."""


def server_cache(config: Config, arch: ArchitectureConfig, *, on_cuda: bool, device_bytes: float) -> PlannedCache:
    """The key and value cache of each server of a configuration, the same whenever the server starts.

    SGLang would size the cache by the memory that is free when it starts, which beside trainers is what they leave at
    that moment. `device_bytes`: memory of the server's device; 0 on a CPU, and where it is not known. Raises as
    `check_cache` does.
    """
    work = workload(config, 1, on_cuda=on_cuda, device_bytes=device_bytes)
    return check_cache(arch, work, config.rollout.servers.memory_fraction)


def check_cache(arch: ArchitectureConfig, work: Workload, memory_fraction: float) -> PlannedCache:
    """The cache of each server that does this work. Raises ConfigError where its longest sequence has no room."""
    servers = work.servers
    assert servers is not None
    e, tp = work.engine_dtype_bytes, servers.tensor_parallel
    tokens = cache_tokens(arch, servers, e)
    if tokens >= work.cache_tokens:
        wanted = -(-work.batch_sequences // servers.count)
        sequences = running_sequences(arch, servers, e, wanted=wanted, mean_tokens=work.prompt_tokens + 1)
        return PlannedCache(int(tokens) if math.isfinite(tokens) else None, work.cache_tokens, math.ceil(sequences))
    if servers.max_total_tokens is not None and servers.max_total_tokens < work.cache_tokens:
        raise ConfigError(
            f"rollout.sglang.max_total_tokens {servers.max_total_tokens} is below the longest prompt and response, "
            f"{work.cache_tokens} tokens; set at least that"
        )
    needed = e * server_weights(arch, tp, servers.attention_groups)
    needed += work.cache_tokens * token_bytes(arch, servers.attention_ranks, e)
    raise ConfigError(
        f"rollout.sglang.memory_fraction {memory_fraction:g} gives a server {size_words(servers.static_bytes)} of "
        f"each device, weights and the longest sequence take {size_words(needed)}; raise it, or "
        f"rollout.sglang.tensor_parallel {tp}"
    )
