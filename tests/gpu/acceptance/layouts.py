"""One PPO step with all features on every rank of a job, for each layout of two small models."""

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

from megappo.runtime.process import Runtime
from megappo.runtime.ranks.objects import all_gather_objects, attempt
from tests.gpu.acceptance.ppo_step import Stepped, compared, oracle_overrides, oracle_settings, run_oracle
from tests.gpu.acceptance.registry import Place
from tests.gpu.acceptance.table import Row, failed, skipped
from tests.gpu.acceptance.workload import Size, samples, settings, write_settings
from tests.support.models import write_model
from tests.support.workers.ppo_step_worker import run

SHAPE = {"hidden_size": 64, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8}
"""Sizes for up to eight tensor or expert parallel ranks."""
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4}


def samples_of(ranks: int) -> int:
    """Return a number of samples for up to 16 data replicas with two minibatches."""
    return min(32, max(12, 4 * ranks))


def layouts(ranks: int) -> dict[str, tuple[str, list[str]]]:
    """Return name: (family, overrides) of the layouts for a number of ranks. Actor and critic have the same layout."""
    widest = max(n for n in (1, 2, 4, 8) if ranks % n == 0)
    layouts_of: dict[str, tuple[str, dict[str, Any]]] = {f"DP{ranks}": ("qwen3", {})}
    if widest > 1:
        layouts_of[f"TP{widest} with sequence parallelism"] = (
            "qwen3", {"tensor_parallel": widest, "sequence_parallel": True},
        )  # fmt: skip
        layouts_of["PP2"] = ("qwen3", {"pipeline_parallel": 2})
        layouts_of[f"EP{widest}"] = ("qwen3_moe", {"expert_parallel": widest})
    if widest > 2:
        layouts_of["TP2 x PP2"] = ("qwen3", {"tensor_parallel": 2, "pipeline_parallel": 2})
    distributed = [f"{role}.optimizer.distributed=true" for role in ("actor", "critic")]
    return {
        name: (family, distributed + [f"{r}.layout.{k}={v}" for r in ("actor", "critic") for k, v in layout.items()])
        for name, (family, layout) in layouts_of.items()
    }


def against_oracle(place: Place, runtime: Runtime) -> Iterator[Row]:
    """Compare each layout with the one-process oracle. Every rank must call this function; rank 0 yields the rows."""
    if runtime.world_size == 1:
        yield skipped("layouts", "needs several ranks")
        return
    for number, (name, (family, overrides)) in enumerate(layouts(runtime.world_size).items()):
        folder = replace(place, scratch=f"{place.scratch}/{number}")
        work: partial[list[Row]] = partial(list, _layout(folder, runtime, name, family, overrides))
        rows, problem = attempt(work, (Exception,))
        problems = {
            rank: problem_of_rank for rank, problem_of_rank in enumerate(all_gather_objects(problem)) if problem_of_rank
        }
        yield from (failed(name, f"rank {rank}: {problem_of_rank}") for rank, problem_of_rank in problems.items())
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
    step_samples = samples(size, folder, ragged=True)
    content = settings(place, folder, size, "float32")
    content["actor"]["microbatch_budget_tokens"] = content["critic"]["microbatch_budget_tokens"] = 64
    overrides_of_step = [*oracle_overrides(o, SHAPE["hidden_size"], reference, count // 2), *overrides]
    if runtime.is_main:
        write_settings(place, content)
    dist.barrier()
    result_file, out = root / "found.json", root / "out"
    run(
        {
            "config": str(root / "settings.yaml"),
            "overrides": overrides_of_step,
            "samples": step_samples,
            "out": str(out),
        },
        runtime,
        result_file,
    )
    if runtime.is_main:
        mine = _stepped(json.loads(result_file.read_text()), out, count)
        truth, weights = run_oracle(place, folder, reference, step_samples, o, mine)
        yield from compared(name, load_file(folder / "model.safetensors"), mine, truth, weights)


def _stepped(result: dict[str, Any], out: Path, count: int) -> Stepped:
    """Read the results of the ranks from files, in the order of the samples."""
    per_sample = [result["samples"][str(i)] for i in range(count)]
    critic = load_file(out / "critic.safetensors")
    return Stepped(
        {name: torch.cat([torch.tensor(s[name]) for s in per_sample]) for name in per_sample[0]},
        result["metrics"],
        result["minibatches"],
        {"actor": load_file(out / "actor.safetensors"), "critic": critic},
    )
