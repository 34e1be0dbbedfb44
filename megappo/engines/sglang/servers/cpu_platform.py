"""Support for the unmodified SGLang wheel on a machine without CUDA.

SGLang finds this module through its entry points: `activate` in group `sglang.srt.platforms`, `register_hooks` in group
`sglang.srt.plugins` (pyproject.toml). On a machine with CUDA, `activate` does not change SGLang, and `register_hooks`
changes only the servers of a run (`server_hooks`). Only this file, `server_hooks`, `slice_loader` and `version` of
megappo run inside an engine.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import multiprocessing
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megappo.engines.sglang.servers.server_hooks import register_sampling_hooks
from megappo.engines.sglang.version import TRIED_VERSION
from megappo.runtime.attributes import replace_attributes
from megappo.runtime.memory.allocator import collect_as_usual, put_off_collections
from megappo.runtime.packages import installed_version, quicken_transformers

if TYPE_CHECKING:
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.topk import StandardTopKOutput

PLATFORM_NAME = "megappo_cpu"
PLUGINS = "sglang.srt.plugins"
ENTRY_POINTS = {
    "sglang.srt.platforms": f"{PLATFORM_NAME} = megappo.engines.sglang.servers.cpu_platform:activate",
    PLUGINS: f"{PLATFORM_NAME} = megappo.engines.sglang.servers.cpu_platform:register_hooks",
}
_MASK = 0xFFFFFFFF


def activate() -> str | None:
    """Return the name of the platform class, or None on a machine with CUDA, where SGLang has its own platform.

    SGLang calls this function before most of its imports. This saves four of the eleven CPU seconds of the start of a
    server. The server does not import flashinfer, which needs CUDA. It does not search permanent imported objects for
    garbage, and transformers searches for fewer packages.
    """
    if torch.cuda.is_available():
        return None
    if os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME:
        sys.modules.setdefault("flashinfer", None)  # type: ignore[arg-type]
        put_off_collections()
        quicken_transformers()
    return "megappo.engines.sglang.servers.cpu_platform.CpuPlatform"


def register_hooks() -> None:
    """Register the hooks of a server that samples for a run. On a CPU, a server of megappo forks its processes, which
    shortens its start.

    SGLang spawns a scheduler for each rank and a detokenizer. Each process spends ten seconds on imports that the
    server has already done. SGLang must spawn, because CUDA does not survive a fork. On a CPU there is no CUDA, and the
    server computes nothing before the fork.
    """
    register_sampling_hooks()
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM_NAME or activate() is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # This function selects "spawn" for all later processes.
    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", _begin, HookType.AFTER)


def _begin(*arguments: Any) -> None:
    """Select "fork" after SGLang has selected "spawn". `arguments`: the arguments of SGLang's function, including the
    settings of the server.

    All nodes of a server check that the same ports are free (server_args.py:872), but only the first node binds them.
    If nodes share a machine, as virtual nodes do, the first node may bind the ports before another node checks them.
    """
    multiprocessing.set_start_method("fork", force=True)
    collect_as_usual()  # before the fork, because a collection in a child would copy memory pages
    if any(getattr(argument, "node_rank", 0) for argument in arguments):
        settings = importlib.import_module("sglang.srt.server_args")
        replace_attributes(settings, wait_port_available=lambda *_port: True)


@functools.cache
def _make_platform() -> type:
    from sglang.srt.arg_groups.choices import DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    from sglang.srt.platforms.cpu import CpuSRTPlatform
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import PlatformCapabilities

    # Attention in plain torch computes each sequence separately, so its result does not depend on the batch.
    if "torch_native" not in DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")

    class CpuPlatform(CpuSRTPlatform):
        """A CPU platform without the compiled kernels of SGLang's CPU build."""

        _enum = PlatformEnum.OOT
        capabilities = PlatformCapabilities()

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def init_backend(self) -> None:
            replace_gpu_code()

    return CpuPlatform


def __getattr__(name: str) -> type:
    """Create the platform class when SGLang needs the class. This module must be importable without SGLang."""
    if name == "CpuPlatform":
        return _make_platform()
    raise AttributeError(f"module {__name__} has no attribute {name}")


def replace_gpu_code() -> None:
    """Replace code without a CPU implementation in the wheel. SGLang calls this function in every process that runs a
    model.

    - `murmur_hash32` (kernels/ops/sampling/murmur_hash.py:112), the noise of seeded sampling, needs the kernels of
      SGLang's CPU build.
    - `adjust_config_with_unaligned_cpu_tp` (update_config.py:226) pads feed-forward sizes for these kernels.
    - `enable_batch_invariant_mode` (batch_invariant_ops.py:1010) registers Triton kernels for the device.
    - `ALLOC_MEMORY_FUNCS` (mem_cache/pool_host/common.py:453) registers host memory for the choices of the routers with
      CUDA, on devices without a separate function.
    - `moe_forward_native` (layers/moe/fused_moe_native.py:71) counts tokens by local expert numbers. Experts of other
      ranks have the number -1.
    - `release_memory_occupation` (weight_updater.py:379) waits for the device type of the torch build, even if the
      machine has no such device.
    """
    version = installed_version("sglang")
    if version != TRIED_VERSION:
        raise RuntimeError(f"SGLang {version} is untested on a CPU; install sglang=={TRIED_VERSION}")
    # If the sampler is already loaded, it has bound the first name; otherwise it binds the name later.
    for module in ("sglang.kernels.ops.sampling.murmur_hash", "sglang.srt.layers.sampler"):
        replace_attributes(importlib.import_module(module), murmur_hash32=murmur_hash32)
    # Plain torch needs no alignment, and padded parameters would not match the parameters of the weight sync.
    runner = importlib.import_module("sglang.srt.model_executor.model_runner")
    replace_attributes(runner, adjust_config_with_unaligned_cpu_tp=lambda model_config, *_args: model_config)
    invariant = importlib.import_module("sglang.srt.batch_invariant_ops")
    replace_attributes(invariant, enable_batch_invariant_mode=enable_batch_invariant_mode)
    pool = importlib.import_module("sglang.srt.mem_cache.pool_host.common")
    pool.ALLOC_MEMORY_FUNCS["cpu"] = _plain_memory
    experts = importlib.import_module("sglang.srt.layers.moe.fused_moe_native")
    forward_local_experts = functools.partial(_forward_local_experts, experts.moe_forward_native)
    replace_attributes(experts, moe_forward_native=forward_local_experts)
    replace_attributes(torch, get_device_module=_get_device_module)
    _replace_gpu_code_of_attention_groups()


def _replace_gpu_code_of_attention_groups() -> None:
    """Replace further code for ranks that attend in groups (data parallel attention).

    - `get_cpu_graph_seq_len_fill_value` (forward_batch_info.py:2014) is the length of a padding sequence. Attention in
      plain torch lacks this function.
    - `_is_cpu` in the same file (:1948) and `memcpy_func` (dp_attention.py:644) belong to SGLang's own CPU build.
    - `all_gather_into_tensor` (parallel_state.py:1372) is an operator only for CUDA.
    """
    backend = importlib.import_module("sglang.srt.layers.attention.torch_native_backend")
    backend.TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _self: 1
    replace_attributes(importlib.import_module("sglang.srt.model_executor.forward_batch_info"), _is_cpu=True)
    attention = importlib.import_module("sglang.srt.layers.dp_attention")
    replace_attributes(attention, memcpy_func=attention.memcpy_cpu)
    groups = importlib.import_module("sglang.srt.distributed.parallel_state").GroupCoordinator
    groups.all_gather_into_tensor = groups._all_gather_into_tensor


@functools.cache
def enable_batch_invariant_mode(enable_bmm: bool = True) -> None:
    """Make each row of a matrix product in this process bitwise independent of the other rows; permanent.

    The libraries of torch's products use different algorithms for few rows (differences of about 1e-7 in float32). To
    avoid these algorithms, products are padded to at least 16 rows. Attention already computes each sequence
    separately, so `enable_bmm` has no effect.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", _mm, "CPU")
    library.impl("addmm", _addmm, "CPU")
    _REGISTERED.append(library)  # torch removes the kernels together with this object


def _plain_memory(dims: tuple[int, ...], dtype: torch.dtype, **_of_gpus: Any) -> Tensor:
    return torch.empty(dims, dtype=dtype)


def _forward_local_experts(
    forward: Callable[..., Tensor], layer: FusedMoE, x: Tensor, chosen: StandardTopKOutput, config: MoeRunnerConfig
) -> Tensor:
    """Return the output of the experts of this rank for tokens.

    The function computes one choice of each token at a time, because SGLang's function needs different experts for each
    token. Choices on other ranks become expert 0 with weight 0.
    """
    if layer.num_local_experts == layer.num_experts:
        return forward(layer, x, chosen, config)
    is_local = chosen.topk_ids >= 0
    weights, ids = (torch.where(is_local, values, 0) for values in (chosen.topk_weights, chosen.topk_ids))
    choices = zip(weights.split(1, dim=1), ids.split(1, dim=1), strict=True)
    return torch.stack(
        [forward(layer, x, chosen._replace(topk_weights=w, topk_ids=i), config) for w, i in choices]
    ).sum(0)


_find_device_module = torch.get_device_module


def _get_device_module(device: torch.device | str | None = None) -> ModuleType:
    """Return torch's device module, by default of the CPU. torch's own default is CUDA if torch was built for CUDA."""
    module: ModuleType = _find_device_module("cpu" if device is None else device)
    return module


_REGISTERED: list[torch.library.Library] = []
_FEWEST_ROWS = 16


def _mm(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    out = left_MK.new_empty(max(_FEWEST_ROWS, len(left_MK)), right_KN.shape[1])
    return torch.mm(_fill_up(left_MK), right_KN, out=out)[: len(left_MK)]  # `out` selects a different operator


def _addmm(bias: Tensor, left_MK: Tensor, right_KN: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    bias = bias.expand(len(left_MK), right_KN.shape[1])
    out = left_MK.new_empty(max(_FEWEST_ROWS, len(left_MK)), right_KN.shape[1])
    torch.addmm(_fill_up(bias), _fill_up(left_MK), right_KN, beta=beta, alpha=alpha, out=out)
    return out[: len(left_MK)]


def _fill_up(rows: Tensor) -> Tensor:
    missing = _FEWEST_ROWS - len(rows)
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing > 0 else rows


def _mix(state: Tensor, key: Tensor) -> Tensor:
    """Compute one round of MurmurHash3 (x86, 32 bit) on int64 tensors with unsigned 32-bit numbers."""
    key = (key * 0xCC9E2D51) & _MASK
    key = ((key << 15) | (key >> 17)) & _MASK
    key = (key * 0x1B873593) & _MASK
    state = state ^ key
    state = ((state << 13) | (state >> 19)) & _MASK
    return (state * 5 + 0xE6546B64) & _MASK


def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """Return the numbers of SGLang's Triton kernel: (n, m) uint32 from n seeds (64 bit), n positions and m columns."""
    wide = seed.view(torch.int64)
    state_N = _mix(torch.zeros_like(wide), wide & _MASK)
    state_N = _mix(state_N, (wide >> 32) & _MASK)
    state_N = _mix(state_N, positions.to(torch.int64) & _MASK)
    state_NM = _mix(state_N[:, None], col_indices.to(torch.int64)[None] & _MASK)
    state_NM = state_NM ^ 16
    state_NM = state_NM ^ (state_NM >> 16)
    state_NM = (state_NM * 0x85EBCA6B) & _MASK
    state_NM = state_NM ^ (state_NM >> 13)
    state_NM = (state_NM * 0xC2B2AE35) & _MASK
    state_NM = state_NM ^ (state_NM >> 16)
    return state_NM.to(torch.uint32)
