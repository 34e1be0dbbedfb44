"""Public alternatives of our kernels, with one signature per task.

Shape legend: T tokens, H hidden size, V vocabulary, B samples; (B, T) is samples by response tokens.

A peer is imported when its list is requested. A peer that cannot run is listed with the reason. No code of a peer is
copied: a wrapper contains only a call and the conversion to the common signature. The two loops "as published"
reimplement the algorithms of verl and slime, so that they are available without these packages.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

Scores = tuple[Tensor, Tensor | None]
Head = Callable[..., Scores]
"""Function (hidden_TH, weight_VH, labels_T, temperature, *, entropy: bool) -> (logprob_T, entropy_T or None)."""
LogitsOperator = Callable[[Tensor, Tensor], Tensor]
Advantages = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Peer:
    """One alternative. Either `run` or `why_not` is None."""

    name: str
    version: str
    devices: frozenset[str]
    """Supported devices of "cpu" and "cuda", whether or not this machine has them."""
    why_not: str | None
    """Reason why the peer cannot run on this machine."""
    run: Callable[..., Any] | None
    notes: str
    """Differences between the computation of the peer and the task."""


def _devices(needs: str) -> frozenset[str]:
    return frozenset({"cuda"} if needs in ("cuda", "sm_90") else {"cpu"} if needs == "cpu" else {"cpu", "cuda"})


def _lacking(needs: str) -> str | None:
    """Return why this machine cannot run peers that need "compiler", "cuda" or "sm_90", or None."""
    if needs == "compiler" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        return "torch.compile needs a C++ compiler"
    if "cpu" not in _devices(needs) and not torch.cuda.is_available():
        return "needs CUDA"
    if needs == "sm_90" and torch.cuda.get_device_capability() != (9, 0):
        return "needs a GPU of compute capability 9.0"
    return None


def _peer(name: str, distribution: str, load: Callable[[], Callable[..., Any]], notes: str, needs: str = "") -> Peer:
    """Build a peer. `load` imports the package and returns `run`; it is called only if the machine meets `needs`."""
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = ""
    run, why_not = None, _lacking(needs)
    if why_not is None:
        try:
            run = load()
        except (ImportError, AttributeError, RuntimeError) as error:
            why_not = f"cannot be imported: {error}" if version else f"not installed: {error}"
    elif not version:
        why_not = "not installed"
    return Peer(name, version or ("source" if run else "none"), _devices(needs), why_not, run, notes)


# -- Log-probabilities from hidden states --


def torch_head(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, temperature: float, *, entropy: bool) -> Scores:
    """Compute (logprob_T, entropy_T or None) in nats, float32, by torch with the full float32 logits."""
    logp_TV = torch.log_softmax((hidden_TH @ weight_VH.T).float() / temperature, dim=-1)
    logprob_T = logp_TV.gather(-1, labels_T[:, None]).squeeze(-1)
    return logprob_T, -(logp_TV.exp() * logp_TV).sum(-1) if entropy else None


def _verl(module: str) -> ModuleType:
    """Import a module of verl. The kernels of verl require only torch, but its packages import Ray. If Ray is
    missing, the packages are registered without running their __init__."""
    try:
        import_module("verl.utils")
    except ImportError:
        for name in ("verl", "verl.utils"):
            spec = find_spec(name) if name not in sys.modules else None
            if spec is not None and spec.submodule_search_locations is not None:
                package = ModuleType(name)
                package.__path__ = list(spec.submodule_search_locations)
                package.__spec__ = spec
                sys.modules[name] = package
    return import_module(f"verl.{module}")


def _verl_triton_head() -> Head:
    _verl("utils.kernel.kernels")  # the next module imports it only in a call
    kernel = _verl("utils.kernel.linear_cross_entropy").linear_cross_entropy
    return lambda hidden, weight, labels, temperature, entropy: kernel(
        hidden, weight, labels, float(temperature), "none"
    )


def _verl_torch_head() -> Head:
    fused = _verl("utils.experimental.torch_functional").FusedLinearForPPO()
    return lambda hidden, weight, labels, temperature, entropy: fused(hidden, weight, labels, temperature=temperature)


def _liger_scaled_head(sm90: bool) -> Head:
    if sm90:
        # The dispatcher imports this module on its first call. The import here detects a missing CuTe DSL. The check
        # of the targets would synchronise with the device, unlike all other peers.
        os.environ.setdefault("LIGER_SCALED_CE_SM90_VALIDATE_TARGETS", "0")
        import_module("liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90")
    scaled = getattr(import_module("liger_kernel.ops"), "LigerFusedLinearScaledCrossEntropyFunction", None)
    if scaled is None:
        raise ImportError("this liger-kernel has no LigerFusedLinearScaledCrossEntropyFunction; install 0.8.5")

    def run(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, temperature: float, *, entropy: bool) -> Scores:
        out = scaled.apply(hidden_TH, weight_VH, labels_T, float(temperature), -100, 1, entropy)
        return (-out[0], out[1]) if entropy else (-out, None)

    return run


def _cross_entropy_head(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Head:
    """Build a head from a token loss without temperature: logits / temperature = (hidden / temperature) @ weight.T."""

    def run(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, temperature: float, *, entropy: bool) -> Scores:
        scaled_TH = hidden_TH if temperature == 1.0 else hidden_TH / temperature
        return -loss(scaled_TH, weight_VH, labels_T).float(), None

    return run


def _liger_triton_head() -> Head:
    linear = import_module("liger_kernel.ops").LigerFusedLinearCrossEntropyFunction
    fixed = (None, None, -100, 0.0, 0.0, "none")  # bias, class weights, ignore_index, z-loss, smoothing, reduction
    return _cross_entropy_head(lambda hidden, weight, labels: linear.apply(hidden, weight, labels, *fixed)[0])


def _cce_head(**options: Any) -> Head:
    linear = import_module("cut_cross_entropy").linear_cross_entropy
    return _cross_entropy_head(partial(linear, reduction="none", **options))


def _slime_head() -> Head:
    operator = import_module("slime.utils.ppo_utils").calculate_log_probs_and_entropy

    def run(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, temperature: float, *, entropy: bool) -> Scores:
        logits_TV = (hidden_TH @ weight_VH.T).float() / temperature
        logprob_T1, entropy_T = operator(logits_TV, labels_T, None, with_entropy=entropy)
        return logprob_T1.squeeze(-1), entropy_T

    return run


_FULL = "Full logits, rounded to the dtype of hidden."
_RESET = "Call torch.compiler.reset() between shapes: torch compiles a function at most eight times."
_NO_ENTROPY = "No entropy. Hidden states are divided by the temperature, which rounds them for other values than 1."
_HALF = "Hidden in bfloat16 or float16."
_CLONED = "Float32 logits are cloned, because the peer overwrites them."
_SLIME = "Add a checkout of THUDM/slime to PYTHONPATH; the package `slime` of PyPI is another project."

_ENTROPY_ON_REQUEST = ("torch", "torch.compile", "Liger scaled CE", "slime")


def _heads() -> list[Peer]:
    """Return the heads of libraries. `run` is a Head."""
    liger, cce = "liger-kernel", "cut-cross-entropy"
    return [
        _peer("verl linear_cross_entropy", "verl", _verl_triton_head,
              "Entropy is always computed; H must be a multiple of 128; contiguous gradients are asserted. In 0.9.1 "
              "the maximum of a row starts at 0 in the last reduction, so very negative logits result in inf; the "
              "gradient of hidden is summed over slices of the vocabulary in the dtype of hidden.", "cuda"),
        _peer("verl FusedLinearForPPO", "verl", _verl_torch_head,
              "Chunks of 512 tokens; logits, entropy and the sum of weight gradients have the dtype of hidden. "
              "Entropy is always computed. Older versions also round log-probabilities."),
        _peer("Liger scaled CE (SM90)", liger, partial(_liger_scaled_head, True),
              "bfloat16 only; entropy and the sum of weight gradients over waves of 1,024 tokens are bfloat16. The "
              "check of the targets is off. Requires nvidia-cutlass-dsl and apache-tvm-ffi.", "sm_90"),
        _peer("Liger scaled CE (torch fallback)", liger, partial(_liger_scaled_head, False),
              "The same call without Hopper: chunks of 512 tokens; logits, entropy and the sum of weight gradients "
              "have the dtype of hidden.", "cpu"),
        _peer("Liger fused linear CE", liger, _liger_triton_head,
              f"{_NO_ENTROPY} With a loss per token, backward recomputes the logits; the host reads the number of "
              "targets. The gradient of weight is summed in the dtype of weight.", "cuda"),
        _peer("cut-cross-entropy", cce, _cce_head, f"{_NO_ENTROPY} {_HALF} Backward leaves out "
              "blocks of small probability (filter_eps 'high'), so gradients are approximate.", "cuda"),
        _peer("cut-cross-entropy, unfiltered", cce, partial(_cce_head, filter_eps=None),
              f"{_NO_ENTROPY} {_HALF} Only backward differs from the filtered version.", "cuda"),
        _peer("cut-cross-entropy (torch_compile)", cce, partial(_cce_head, impl="torch_compile"),
              f"{_NO_ENTROPY} The torch.compile implementation, with full logits.", "compiler"),
        _peer("slime log-prob and entropy", "slime", _slime_head, f"{_FULL} {_SLIME}"),
    ]  # fmt: skip


def head_forward_peers() -> list[Peer]:
    """Return the peers of the forward pass of the output head.

    `run(hidden_TH, weight_VH, labels_T, temperature)` returns (logprob_T, entropy_T or None) in nats under
    softmax(hidden @ weight.T / temperature). `hidden_TH` and `weight_VH` are contiguous and have one dtype, bfloat16
    or float32 (see notes). `labels_T` is int64. `logprob_T` is float32. Entropy has the dtype of the peer. Entropy
    is None for peers with "no entropy" in the name, and for peers without entropy in the notes.
    """
    compiled = partial(torch.compile, torch_head, dynamic=False)
    heads = [
        _peer("torch", "torch", lambda: torch_head, _FULL),
        _peer("torch.compile", "torch", compiled, f"{_FULL} {_RESET}", "compiler"),
        *_heads(),
    ]
    peers = []
    for peer in heads:
        peers.append(replace(peer, run=peer.run and partial(peer.run, entropy=True)))
        if peer.name.startswith(_ENTROPY_ON_REQUEST):
            bare = peer.run and partial(peer.run, entropy=False)
            peers.append(replace(peer, name=f"{peer.name}, no entropy", run=bare))
    return peers


# -- The PPO loss from hidden states --


def ppo_loss(
    logprob_T: Tensor, entropy_T: Tensor | None, old_logprob_T: Tensor, advantages_T: Tensor, weights_T: Tensor,
    clip_low: float, clip_high: float, entropy_coef: float,
) -> Tensor:  # fmt: skip
    """Compute the clipped objective as a float32 scalar loss: sum of weight * (-min(...) - entropy_coef * entropy).

    Raises ValueError for an entropy coefficient without an entropy.
    """
    ratio_T = (logprob_T - old_logprob_T).exp()
    clipped_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_T = -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    if entropy_coef != 0.0:
        if entropy_T is None:
            raise ValueError(f"entropy_coef is {entropy_coef}, but this peer computes no entropy; use 0")
        loss_T = loss_T - entropy_coef * entropy_T
    return (weights_T * loss_T).sum()


def _with_torch_loss(head: Head) -> Callable[..., Tensor]:
    return lambda hidden, weight, labels, old, advantages, weights, temperature, low, high, coef: ppo_loss(
        *head(hidden, weight, labels, temperature, entropy=coef != 0.0), old, advantages, weights, low, high, coef
    )


def _liger_grpo_loss() -> Callable[..., Tensor]:
    loss = import_module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss

    def run(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, *others: Any) -> Tensor:
        old_logprob_T, advantages_T, weights_T, temperature, clip_low, clip_high, entropy_coef = others
        if entropy_coef != 0.0:
            raise ValueError(f"entropy_coef is {entropy_coef}, but this peer computes no entropy; use 0")
        tokens = len(labels_T)
        # Each token is a sample of length 1 with its own advantage and weight. "dr_grpo" divides by samples *
        # max_completion_length = T; the weights contain the inverse factor.
        module = loss(
            beta=0.0, compiled=hidden_TH.is_cuda, use_ref_model=False, chunk_size=tokens, epsilon_low=clip_low,
            epsilon_high=clip_high, loss_type="dr_grpo", max_completion_length=1, temperature=temperature,
        )  # fmt: skip
        return module(
            hidden_TH[:, None], weight_VH, labels_T[:, None], torch.ones_like(weights_T)[:, None], advantages_T,
            old_per_token_logps=old_logprob_T[:, None], vllm_is_ratio=(weights_T * tokens)[:, None],
        )[0]  # fmt: skip

    return run


def head_training_peers() -> list[Peer]:
    """Return the peers of the PPO loss of the output head, with gradients.

    `run(hidden_TH, weight_VH, labels_T, old_logprob_T, advantages_T, weights_T, temperature, clip_low, clip_high,
    entropy_coef)` returns the scalar of `ppo_loss`. Its `.backward()` computes the gradients of `hidden_TH` and
    `weight_VH`. These two tensors are as in `head_forward_peers` and require gradients. `labels_T` is int64; other
    tensors are float32. Entropy is computed only for a nonzero `entropy_coef`, unless the notes differ. Peers
    without entropy raise ValueError for a nonzero `entropy_coef`.
    """
    plain = _with_torch_loss(torch_head)
    compiled = partial(torch.compile, plain, dynamic=False)
    return [
        _peer("torch", "torch", lambda: plain, _FULL),
        _peer("torch.compile", "torch", compiled, f"{_FULL} Head and loss in one graph. {_RESET}", "compiler"),
        _peer("Liger fused linear GRPO", "liger-kernel", _liger_grpo_loss,
              "No entropy. Gradients are computed in forward, in float32 matrix products over tiles of 2,048 tokens by "
              "4,096 vocabulary rows; backward compares the incoming gradient with 1 on the host. All tokens are in "
              "one chunk, which is the fastest layout."),
        *(replace(p, name=f"{p.name} + torch loss", run=p.run and _with_torch_loss(p.run)) for p in _heads()),
    ]  # fmt: skip


# -- Log-probabilities from logits --


def _megatron_group() -> Any:
    """Return Megatron's tensor parallel group. Without process groups, initialise a world with this process."""
    parallel_state = import_module("megatron.core.parallel_state")
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    return parallel_state.get_tensor_model_parallel_group()


def close_groups() -> None:
    """Destroy the process groups, including the world that Megatron's peers initialise on their first call."""
    if dist.is_initialized():
        if "megatron.core.parallel_state" in sys.modules:
            import_module("megatron.core.parallel_state").destroy_model_parallel()
        dist.destroy_process_group()


def _torch_logits(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    return torch.log_softmax(logits_TV.float(), dim=-1).gather(-1, labels_T[:, None]).squeeze(-1)


def _megatron_logits(fused: bool) -> LogitsOperator:
    if fused:
        operator = import_module("megatron.core.fusions.fused_cross_entropy").fused_vocab_parallel_cross_entropy
    else:
        operator = import_module("megatron.core.tensor_parallel.cross_entropy").vocab_parallel_cross_entropy

    def run(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
        group = _megatron_group()
        own_TV = logits_TV.clone() if logits_TV.dtype == torch.float32 else logits_TV
        return -operator(own_TV, labels_T, group) if fused else -operator(own_TV, labels_T)

    return run


def _slime_logits() -> LogitsOperator:
    operator = import_module("slime.utils.ppo_utils").calculate_log_probs_and_entropy
    return lambda logits_TV, labels_T: operator(logits_TV, labels_T, None)[0].squeeze(-1)


def _liger_logits() -> LogitsOperator:
    operator = import_module("liger_kernel.ops").LigerVocabParallelCEFunction
    return lambda logits_TV, labels_T: (
        -operator.apply(logits_TV[:, None], labels_T[:, None], None, -100, 0.0, "pytorch", "global").squeeze(-1)
    )


def _quack_logits() -> LogitsOperator:
    operator = import_module("quack.cross_entropy").cross_entropy
    return lambda logits_TV, labels_T: -operator(logits_TV, labels_T, reduction="none")


def logits_peers() -> list[Peer]:
    """Return the peers that use existing logits.

    `run(logits_TV, labels_T)` returns logprob_T in nats, differentiable with respect to `logits_TV` (contiguous,
    float32 or bfloat16). The dtype is float32, unless the notes differ. `labels_T` is int64. Peers do not change the
    logits. Megatron's peers initialise process groups on their first call; `close_groups` destroys the groups.
    """
    return [
        _peer("torch", "torch", lambda: _torch_logits, ""),
        _peer("torch.compile", "torch", partial(torch.compile, _torch_logits, dynamic=False), _RESET, "compiler"),
        _peer("Megatron vocab_parallel_cross_entropy", "megatron-core", partial(_megatron_logits, False), _CLONED),
        _peer("Megatron fused_vocab_parallel_cross_entropy", "megatron-core", partial(_megatron_logits, True),
              f"{_CLONED} The gradient is rounded to bfloat16.", "compiler"),
        _peer("verl logprobs_from_logits", "verl", lambda: _verl("utils.torch_functional").logprobs_from_logits,
              "Without flash-attn, a Python loop over rows launches at least one kernel per row, and log-probabilities "
              "of bfloat16 logits are bfloat16. With flash-attn, backward overwrites the logits."),
        _peer("slime calculate_log_probs_and_entropy", "slime", _slime_logits, _SLIME),
        _peer("Liger vocab-parallel CE", "liger-kernel", _liger_logits,
              "Stores a float32 buffer with the size of the logits for backward.", "cuda"),
        _peer("quack cross_entropy", "quack-kernels", _quack_logits, "", "cuda"),
    ]  # fmt: skip


# -- Advantages --


@torch.no_grad()
def _verl_loop(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float) -> Advantages:
    """Compute GAE as in verl: one column at a time, from the last to the first. A masked column returns its input."""
    next_value_B = torch.zeros_like(values_BT[:, 0])
    advantage_B = torch.zeros_like(next_value_B)
    columns = []
    for t in range(rewards_BT.shape[1] - 1, -1, -1):
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        candidate_B = delta_B + gamma * lam * advantage_B
        next_value_B = values_BT[:, t] * mask_BT[:, t] + (1 - mask_BT[:, t]) * next_value_B
        advantage_B = candidate_B * mask_BT[:, t] + (1 - mask_BT[:, t]) * advantage_B
        columns.append(advantage_B)
    advantages_BT = torch.stack(columns[::-1], dim=1)
    return advantages_BT, advantages_BT + values_BT


@torch.no_grad()
def _slime_chunked(rewards_BT: Tensor, values_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float) -> Advantages:
    """Compute discounted sums in chunks of 128 columns by one product with a Toeplitz matrix, and a carry per chunk."""
    (samples, columns), size = rewards_BT.shape, 128
    following_BT = functional.pad(values_BT[:, 1:], (0, 1))
    reversed_BT = (rewards_BT + gamma * following_BT - values_BT).flip(1)
    padded_BT = functional.pad(reversed_BT, (0, -columns % size))
    step_C = torch.arange(size, device=rewards_BT.device)
    lag_CC = step_C[None, :] - step_C[:, None]
    decay_CC = torch.where(lag_CC >= 0, (gamma * lam) ** lag_CC.clamp(min=0).to(rewards_BT.dtype), 0.0)
    carried_C = (gamma * lam) ** (step_C + 1).to(rewards_BT.dtype)
    local_BNC = (padded_BT.reshape(-1, size) @ decay_CC).view(samples, -1, size)
    carry_B = torch.zeros_like(rewards_BT[:, 0])
    chunks = []
    for n in range(local_BNC.shape[1]):
        chunks.append(local_BNC[:, n] + carry_B[:, None] * carried_C)
        carry_B = chunks[-1][:, -1]
    advantages_BT = torch.cat(chunks, dim=1)[:, :columns].flip(1)
    return advantages_BT, advantages_BT + values_BT


def _slime_gae() -> Callable[..., Advantages]:
    operator = import_module("slime.utils.ppo_utils").chunked_gae
    return lambda rewards_BT, values_BT, mask_BT, gamma, lam: operator(rewards_BT, values_BT, gamma, lam)


def gae_peers() -> list[Peer]:
    """Return the peers of generalised advantage estimation.

    `run(rewards_BT, values_BT, mask_BT, gamma, lam)` returns (advantages_BT, returns_BT), without whitening unless
    the notes differ. All tensors are float32, or all are float64. `mask_BT` contains 0 and 1. Results at masked
    positions differ between peers.
    """
    return [
        Peer("verl loop (as published)", "as of verl 0.9.1", _devices(""), None, _verl_loop, "Without the whitening."),
        Peer("slime chunked (as published)", "as of 2026-08", _devices(""), None, _slime_chunked, "Ignores the mask."),
        _peer("verl compute_gae_advantage_return", "verl",
              lambda: _verl("trainer.ppo.core_algos").compute_gae_advantage_return,
              "Advantages are whitened over the mask. verl imports Ray, tensordict, omegaconf and other packages."),
        _peer("slime chunked_gae", "slime", _slime_gae, f"Ignores the mask. {_SLIME}"),
    ]  # fmt: skip
