"""A small model on a small cluster with odd sizes, which expose wrong sums, products and rounding in formulas."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

from megappo.config import load_config
from megappo.config.grid import Grid
from megappo.families import qwen3, qwen3_moe
from megappo.families.blocks import QueryKeyNorms
from megappo.families.declaration import ArchitectureConfig
from megappo.plan.bytes.servers import Servers
from megappo.plan.hardware.machines import Machine
from megappo.plan.inputs import RoleSetup, Workload
from megappo.plan.planner import read_models
from tests.support.places import ROOT

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, LAYERS = 37, 9, 3, 5, 51, 101, 6
PADDED_VOCAB = 102
EXPERTS, PER_TOKEN = 12, 3
PROMPT, RESPONSE = 11, 19
INFINITE = float("inf")


@cache
def _qwen3() -> ArchitectureConfig:
    config = load_config(ROOT / "configs" / "qwen3_0.6b_1gpu_gsm8k.yaml")
    return read_models(config, ROOT / "configs" / "models").models.actor


def arch(*, qk_norm: bool = True, **changes: Any) -> ArchitectureConfig:
    """Return a dense model with a separate output matrix."""
    sizes = {"hidden_size": HIDDEN, "layers": LAYERS, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    sizes |= {"ffn_hidden_size": FFN, "vocab_size": VOCAB, "tied_embeddings": False}
    family = qwen3_moe.FAMILY if "experts" in changes else qwen3.FAMILY
    if not qk_norm:
        blocks = tuple(block for block in family.blocks if not isinstance(block, QueryKeyNorms))
        family = dataclasses.replace(family, model_type="plain", blocks=blocks)
    declared = {"family": family.model_type, "declaration": family}
    return dataclasses.replace(_qwen3(), **{**sizes, **declared, **changes})


def with_experts(**changes: Any) -> ArchitectureConfig:
    """Return the same model with experts in every layer."""
    return arch(**{"experts": EXPERTS, "experts_per_token": PER_TOKEN, **changes})


def role(
    model: ArchitectureConfig | None = None, *, tp: int = 3, pp: int = 2, dp: int = 4, ep: int = 1, cp: int = 1,
    first_rank: int = 5, **changes: Any,
) -> RoleSetup:  # fmt: skip
    """Return an actor on ranks 5 to 28: TP 3, PP 2 with one chunk, and four replicas with up to seven of 26
    sequences."""
    base = RoleSetup(
        name="actor", arch=model or arch(), vpp=1, sequence_parallel=False, recompute="none",
        grid=Grid(range(first_rank, first_rank + tp * cp * pp * dp), tp, pp, ep, cp), distributed_optimizer=False,
        microbatch_budget_tokens=77, minibatch_sequences=26, updates_per_step=3, padded_vocab=PADDED_VOCAB,
        dtype_bytes=2,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def work(**changes: Any) -> Workload:
    """Return a step of 104 samples of 30 tokens on 29 ranks with the embedded engine."""
    base = Workload(
        world_size=29, batch_sequences=104, prompt_tokens=PROMPT, response_tokens=RESPONSE, sequences_per_rank=13,
        generate_batch_sequences=5, sync_bucket_bytes=1000, engine_dtype_bytes=2, on_cuda=True, cache_sequences=5,
        cache_tokens=30, reward_bytes=0.0,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def servers(**changes: Any) -> Servers:
    """Return five servers of two ranks each on the devices of the trainer."""
    base = Servers(
        count=5, tensor_parallel=2, colocated=True, shares_machine=False, sleeps=True, ahead=False,
        static_bytes=2e6, max_total_tokens=None, deterministic=False, most_sequences=1000,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def machine(**changes: Any) -> Machine:
    """Return a machine with seven devices per node. All rates are infinite, except the changed ones and one of 1e12."""
    base = Machine(
        "odd", "odd", INFINITE, INFINITE, 1e12, INFINITE, INFINITE, INFINITE, devices_per_node=7, is_cuda=True
    )
    return dataclasses.replace(base, **changes)
