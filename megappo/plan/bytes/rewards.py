"""Device memory of rewards: a frozen model on every rank or in a separate process, and the servers of judges.

A judge server with tensor parallelism t splits the N weights of its folder over its ranks. With e bytes per element,
each rank has e N / t bytes of weights. Keys and values take the rest of `memory_fraction` of the GPU. Without CUDA,
the number of tokens is `max_total_tokens`.
"""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from megappo.config import ConfigError
from megappo.config.sections.judge import JudgeServerSettings
from megappo.config.sections.reward import MODEL_SERVER, RewardSettings, server_name
from megappo.files.folder_texts import read_object
from megappo.models.hub import cached_folder
from megappo.models.model_files import model_folder
from megappo.models.weight_files import counted_files
from megappo.plan.bytes.sizes import DTYPE_BYTES, format_size

_DECLARED = "megappo.plan.bytes.declared"


@dataclass(frozen=True)
class RewardServerMemory:
    """Memory of each rank of a reward server that the run starts, in bytes."""

    name: str
    ranks: int
    weights: float
    kv_cache: float

    @property
    def total(self) -> float:
        """Bytes of weights, keys and values together."""
        return self.weights + self.kv_cache


@lru_cache(maxsize=8)
def reward_parameters(path: str | None) -> int:
    """Return the number of weights of a reward model. The number is read from the headers of the safetensors files in
    the folder or in the hub cache. For a model that is only on the hub, the number follows from its configuration.
    Return 0 if `path` is None.

    Raises ConfigError for an invalid safetensors file or index.
    """
    from safetensors import SafetensorError, safe_open

    if path is None:
        return 0
    folder = Path(path) if Path(path).is_dir() else cached_folder(path)
    if folder is None:
        return _declared_parameters(model_folder(path, weights=False, key="reward.model_path"))
    total = 0
    try:
        files = counted_files(folder)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    for file in files:
        try:
            with safe_open(file, framework="numpy") as opened:
                total += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise ConfigError(
                f"{file} of a reward model is not a complete safetensors file ({error}); copy the file again"
            ) from error
    return total


def _declared_parameters(folder: Path) -> int:
    """Return the number of weights of the model that transformers would build from the configuration in `folder`.

    The model is built in a separate process, because this process may have hidden torch from transformers
    (`megappo.runtime.packages`).
    """
    command = [sys.executable, "-m", _DECLARED, str(folder.absolute())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        error_lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(
            f"reward.model_path {folder}: its config.json does not describe a classification model ({error_lines[-1]})"
        )
    return int(done.stdout)


def reward_bytes(reward: RewardSettings, world_size: int, *, on_cuda: bool) -> float:
    """Return the bytes of rewards on one trainer rank. Without CUDA, the value includes a share of the reward
    servers."""
    has_copy = reward.model_server is None and reward.model_remote is None
    own = _model_bytes(reward, on_cuda=on_cuda) if has_copy else 0.0
    if on_cuda:
        return own
    return own + sum(s.ranks * s.total for s in reward_server_memory(reward, 0.0, on_cuda=False)) / world_size


def _model_bytes(reward: RewardSettings, *, on_cuda: bool) -> float:
    return float(reward_parameters(reward.model_path) * DTYPE_BYTES[reward.model_dtype(on_cuda=on_cuda)])


def reward_server_memory(
    reward: RewardSettings, device_bytes: float, *, on_cuda: bool
) -> tuple[RewardServerMemory, ...]:
    """Return the memory of each reward server that the run starts. Raises ConfigError if the weights do not fit on a
    GPU."""
    servers = []
    if reward.model_server is not None and (weights := _model_bytes(reward, on_cuda=on_cuda)):
        if on_cuda and weights >= device_bytes:
            raise ConfigError(
                f"reward.model_path has {format_size(weights)} of weights, but the device of reward.model_server has "
                f"{format_size(device_bytes)}; use a smaller model, or a judge server with several devices"
            )
        servers.append(RewardServerMemory(MODEL_SERVER, 1, weights, 0.0))
    for name, judge in reward.judges.items():
        if judge.server is not None:
            servers.append(_judge_memory(reward, name, device_bytes, on_cuda=on_cuda))
    return tuple(servers)


def _judge_memory(reward: RewardSettings, name: str, device_bytes: float, *, on_cuda: bool) -> RewardServerMemory:
    judge = reward.judges[name]
    server = judge.server
    assert server is not None
    e = DTYPE_BYTES[reward.model_dtype(on_cuda=on_cuda)]
    weights = e * reward_parameters(judge.model) / server.tensor_parallel
    if on_cuda:
        static = server.memory_fraction * device_bytes
        if weights >= static:
            key = f"{reward.key_of(name)}.server"
            raise ConfigError(
                f"{key}.memory_fraction {server.memory_fraction:g} gives the server {format_size(static)} of each "
                f"device, but weights take {format_size(weights)}; raise it, or {key}.tensor_parallel "
                f"{server.tensor_parallel}"
            )
        cache = static - weights
    else:
        cache = e * _numbers_of_tokens(judge.model, server)
    return RewardServerMemory(server_name(name), server.tensor_parallel, weights, cache)


def _numbers_of_tokens(folder: str, server: JudgeServerSettings) -> float:
    """Return the number of elements of keys and values of all tokens on a rank of the server. The sizes come from the
    standard fields of config.json, because the family of a judge need not be supported for training."""
    model_config = read_object(Path(folder) / "config.json")
    model_config = model_config.get("text_config", model_config)
    heads = model_config.get("num_attention_heads", 1)
    width = model_config.get("head_dim") or model_config.get("hidden_size", 0) // heads
    kv_heads = max(1.0, (model_config.get("num_key_value_heads") or heads) / server.tensor_parallel)
    tokens = server.as_servers.cache_tokens(on_cuda=False) or 0
    return 2.0 * tokens * model_config.get("num_hidden_layers", 0) * kv_heads * width
