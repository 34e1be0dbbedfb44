"""What rewards hold on devices: a frozen model on every rank or in a process of its own, and the servers of judges.

A rank of a judge's server with tensor parallelism t holds, with e bytes per element, e N / t of the N weights in its
folder, and keys and values in the rest of `memory_fraction` of its GPU; without CUDA those of `max_total_tokens`.
"""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from megappo.config import ConfigError
from megappo.config.folder_texts import read_object
from megappo.config.hub import cached_folder
from megappo.config.judge import JudgeServerSettings
from megappo.config.model_files import model_folder
from megappo.config.reward import RewardSettings
from megappo.plan.sizes import DTYPE_BYTES, size_words
from megappo.reshard.files import counted_files

_DECLARED = "megappo.plan.declared"


@dataclass(frozen=True)
class RewardServerMemory:
    """Bytes of each rank of a server that the run starts for its rewards."""

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
    """Weights of a reward model, by the headers of the safetensors files in its folder or in the hub's cache; of one
    that is on the hub alone, by its configuration. 0 without a path. Raises ConfigError for a file that is none, and
    for an index that is none."""
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
            raise ConfigError(f"{file} of a reward is no whole safetensors file ({error}); copy it anew") from error
    return total


def _declared_parameters(folder: Path) -> int:
    """Weights of the model that transformers would build from a folder's configuration, by a process of its own: this
    one may have kept torch from transformers (`megappo.runtime.packages`)."""
    command = [sys.executable, "-m", _DECLARED, str(folder.absolute())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(f"reward.model_path {folder}: its config.json is of no model that classifies ({said[-1]})")
    return int(done.stdout)


def reward_bytes(reward: RewardSettings, world_size: int, *, on_cuda: bool) -> float:
    """Bytes of rewards on one trainer rank; without CUDA its share of the rewards' servers too."""
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
    """Memory of each server that the run starts for its rewards. Raises ConfigError where weights leave a GPU no
    room."""
    found = []
    if reward.model_server is not None and (weights := _model_bytes(reward, on_cuda=on_cuda)):
        if on_cuda and weights >= device_bytes:
            raise ConfigError(
                f"reward.model_path has {size_words(weights)} of weights, the one device of reward.model_server "
                f"{size_words(device_bytes)}; use a smaller model, or have a judge's server hold one on several"
            )
        found.append(RewardServerMemory("reward model", 1, weights, 0.0))
    for name, judge in reward.judges.items():
        if judge.server is not None:
            found.append(_judge_memory(reward, name, device_bytes, on_cuda=on_cuda))
    return tuple(found)


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
                f"{key}.memory_fraction {server.memory_fraction:g} gives it {size_words(static)} of each device, "
                f"weights take {size_words(weights)}; raise it, or {key}.tensor_parallel {server.tensor_parallel}"
            )
        cache = static - weights
    else:
        cache = e * _numbers_of_tokens(judge.model, server)
    return RewardServerMemory("judge" if name == "judge" else f"judge {name}", server.tensor_parallel, weights, cache)


def _numbers_of_tokens(folder: str, server: JudgeServerSettings) -> float:
    """Elements of keys and values of all tokens that a rank of the server holds, by the fields that transformers writes
    into config.json: a judge may be of a family that megappo does not train."""
    told = read_object(Path(folder) / "config.json")
    told = told.get("text_config", told)
    heads = told.get("num_attention_heads", 1)
    width = told.get("head_dim") or told.get("hidden_size", 0) // heads
    kv_heads = max(1.0, (told.get("num_key_value_heads") or heads) / server.tensor_parallel)
    tokens = server.as_servers.held_tokens(on_cuda=False) or 0
    return 2.0 * tokens * told.get("num_hidden_layers", 0) * kv_heads * width
