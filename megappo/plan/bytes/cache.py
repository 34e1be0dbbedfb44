"""Size of the key-value cache of a server, and a check that the longest sequence fits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megappo.config import Config, ConfigError
from megappo.families.declaration import ArchitectureConfig
from megappo.plan.bytes.servers import cache_tokens, running_sequences, server_weights, token_bytes
from megappo.plan.bytes.sizes import format_size
from megappo.plan.inputs import Workload, workload


@dataclass(frozen=True)
class PlannedCache:
    """Key-value cache of a server."""

    tokens: int | None
    """Largest number of tokens in the cache; None if unknown, for example for servers that are started separately."""
    longest_tokens: int
    """Tokens of the longest requested sequence, which is the smallest sufficient cache."""
    sequences: int | None = None
    """Largest number of sequences that the server decodes at the same time, counted at their start; None if the
    requests are unknown."""


def server_cache(config: Config, arch: ArchitectureConfig, *, on_cuda: bool, device_bytes: float) -> PlannedCache:
    """Return the key-value cache of each server of a configuration. The size is independent of the time at which the
    server starts.

    By default, SGLang derives the size from the free memory at its start, which depends on the trainers on the same
    device. `device_bytes` is the memory of the server's device, or 0 on a CPU and for an unknown device. Raises
    ConfigError as `check_cache` does.
    """
    work = workload(config, 1, on_cuda=on_cuda, device_bytes=device_bytes)
    return check_cache(arch, work, config.rollout.server_settings.memory_fraction)


def check_cache(arch: ArchitectureConfig, work: Workload, memory_fraction: float) -> PlannedCache:
    """Return the cache of each server for a workload. Raises ConfigError if the longest sequence does not fit."""
    servers = work.servers
    assert servers is not None
    e, tp = work.engine_dtype_bytes, servers.tensor_parallel
    tokens = cache_tokens(arch, servers, e)
    if tokens >= work.cache_tokens:
        requested = -(-work.batch_sequences // servers.count)
        sequences = running_sequences(arch, servers, e, requested=requested, mean_tokens=work.prompt_tokens + 1)
        return PlannedCache(int(tokens) if math.isfinite(tokens) else None, work.cache_tokens, math.ceil(sequences))
    if servers.max_total_tokens is not None and servers.max_total_tokens < work.cache_tokens:
        raise ConfigError(
            f"rollout.servers.max_total_tokens {servers.max_total_tokens} is below the longest prompt and response, "
            f"{work.cache_tokens} tokens; set it to at least that number"
        )
    needed = e * server_weights(arch, tp, servers.attention_groups)
    needed += work.cache_tokens * token_bytes(arch, servers.attention_ranks, e)
    raise ConfigError(
        f"rollout.servers.memory_fraction {memory_fraction:g} gives a server {format_size(servers.static_bytes)} of "
        f"each device, but weights and the longest sequence take {format_size(needed)}; raise it, or "
        f"rollout.servers.tensor_parallel {tp}"
    )
