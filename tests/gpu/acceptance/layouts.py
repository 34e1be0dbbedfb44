"""One PPO step with everything on, on every rank of a job, in each way to spread two small models over them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megappo.runtime.objects import all_gather_objects, attempt
from megappo.runtime.process import Runtime
from tests.gpu.acceptance.ppo_step import Stepped, compared, oracle_overrides, oracle_settings, run_oracle
from tests.gpu.acceptance.registry import Place
from tests.gpu.acceptance.table import Row, failed, skipped
from tests.gpu.acceptance.workload import Size, samples, settings, write_settings
from tests.support.models import write_model
from tests.support.workers.ppo_step_worker import run

SHAPE = {"hidden_size": 64, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8}
"""Heads and experts for up to eight ranks."""
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4}


def samples_of(ranks: int) -> int:
    """Enough for as many replicas as there are ranks, up to 16, with two minibatches."""
    return min(32, max(12, 4 * ranks))


def layouts(ranks: int) -> dict[str, tuple[str, list[str]]]:
    """Name: (family, overrides) of the layouts that a number of ranks allows, both roles alike unless named."""
    widest = max(n for n in (1, 2, 4, 8) if ranks % n == 0)
    found: dict[str, tuple[str, dict[str, Any]]] = {f"DP{ranks}": ("qwen3", {})}
    if widest > 1:
        found[f"TP{widest} with sequence parallelism"] = (
            "qwen3", {"tensor_parallel": widest, "sequence_parallel": True},
        )  # fmt: skip
        found["PP2"] = ("qwen3", {"pipeline_parallel": 2})
        found[f"EP{widest}"] = ("qwen3_moe", {"expert_parallel": widest})
    if widest > 2:
        found["TP2 x PP2"] = ("qwen3", {"tensor_parallel": 2, "pipeline_parallel": 2})
    distributed = [f"{role}.optimizer.distributed=true" for role in ("actor", "critic")]
    return {
        name: (family, distributed + [f"{r}.layout.{k}={v}" for r in ("actor", "critic") for k, v in layout.items()])
        for name, (family, layout) in found.items()
    }


def against_oracle(place: Place, runtime: Runtime) -> Iterator[Row]:
    """Each layout beside the one-process oracle. Every rank takes part; rank 0 gets the rows."""
    if runtime.world_size == 1:
        yield skipped("layouts", "one rank has only one")
        return
    for number, (name, (family, overrides)) in enumerate(layouts(runtime.world_size).items()):
        folder = replace(place, scratch=f"{place.scratch}/{number}")
        work: partial[list[Row]] = partial(list, _layout(folder, runtime, name, family, overrides))
        rows, problem = attempt(work, (Exception,))
        problems = {rank: found for rank, found in enumerate(all_gather_objects(problem)) if found}
        yield from (failed(name, f"rank {rank}: {found}") for rank, found in problems.items())
        yield from rows or ()


def _layout(place: Place, runtime: Runtime, name: str, family: str, overrides: list[str]) -> Iterator[Row]:
    root, count = Path(place.scratch), samples_of(runtime.world_size)
    size = Size(count, 8, 24)
    folder, reference = root / "model", root / "reference"
    if runtime.is_main:
        root.mkdir(parents=True)
        for path, noise in ((folder, 0.0), (reference, 0.02)):
            write_model(path, family, 11, noise=noise, **SHAPE, **(EXPERTS if family == "qwen3_moe" else {}))
    dist.barrier()
    o = oracle_settings(SHAPE["hidden_size"], sum(t.numel() for t in load_file(folder / "model.safetensors").values()))
    given = samples(size, folder, ragged=True)
    content = settings(place, folder, size, "float32")
    content["actor"]["microbatch_budget_tokens"] = content["critic"]["microbatch_budget_tokens"] = 64
    words = [*oracle_overrides(o, SHAPE["hidden_size"], reference, count // 2), *overrides]
    if runtime.is_main:
        write_settings(place, content)
    dist.barrier()
    found, out = root / "found.json", root / "out"
    run({"config": str(root / "settings.yaml"), "overrides": words, "samples": given, "out": str(out)}, runtime, found)
    if runtime.is_main:
        mine = _stepped(json.loads(found.read_text()), out, count)
        truth, weights = run_oracle(place, folder, reference, given, o, mine)
        yield from compared(name, load_file(folder / "model.safetensors"), mine, truth, weights)


def _stepped(found: dict[str, Any], out: Path, count: int) -> Stepped:
    """What the ranks have left in files, in the order of the samples."""
    per_sample = [found["samples"][str(i)] for i in range(count)]
    critic = load_file(out / "critic.safetensors")
    return Stepped(
        {name: torch.cat([torch.tensor(s[name]) for s in per_sample]) for name in per_sample[0]},
        found["metrics"],
        found["minibatches"],
        {"actor": load_file(out / "actor.safetensors"), "critic": critic},
    )
