"""Models with random weights, samples, and a trainer for steps on models.

Nothing is downloaded. Shapes come from configs/models, weights from a seed.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from megappo.config import Config, derive_run, load_config
from megappo.engines.base import BatchEngine
from megappo.engines.protocol import Completion, GenerateRequest, SamplingParams, SyncReport
from megappo.models.model_files import read_architecture
from megappo.observe.ends import End
from megappo.ppo.assembly.components import RunComponents, assemble
from megappo.ppo.reports.reporting import Reporter
from megappo.ppo.trainer import Trainer
from megappo.preflight.resolved import resolve_for_device
from megappo.runtime.process import start_runtime
from megappo.types import Prompt, Rollouts
from tests.gpu.acceptance.registry import Place
from tests.support.models import write_model
from tests.support.places import ROOT

MODELS = {"0.6B": "Qwen3-0.6B", "1.5B": "Qwen2.5-1.5B", "30B-A3B": "Qwen3-30B-A3B"}
"""Names in the table, and folders of configs/models."""
DENSE = ("0.6B", "1.5B")
_TINY = {"0.6B": "qwen3", "1.5B": "qwen2", "30B-A3B": "qwen3_moe"}
TINY_LAYERS = 2


@dataclass(frozen=True)
class Size:
    """Size of the samples of a step."""

    samples: int
    prompt: int
    """Prompt tokens."""
    response: int
    """Tokens of the longest response."""


class NoEngine(BatchEngine):
    """An engine without a model. The samples exist already, so generation needs no memory."""

    def __init__(self, **_options: Any) -> None:
        super().__init__()

    def update_weights(self, named_tensors: Any, version: int) -> SyncReport:
        """Ignore the weights."""
        self.version = version
        return SyncReport(())

    def generate(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> Iterator[tuple[int, Completion]]:
        """Raise an error, because the steps do not generate."""
        raise RuntimeError("the samples of this step are given; nothing is generated")


def model_folder(
    place: Place, name: str, *, layers: int | None = None, noise: float = 0.0, vocabulary: int | None = None
) -> Path:
    """Write the folder of a model with random bfloat16 weights once. `noise` adds random numbers to the weights, and
    `vocabulary` changes the vocabulary size."""
    folder = Path(place.scratch) / "models" / f"{name}-{layers or 'all'}-{noise:g}-{vocabulary or 'all'}"
    if (folder / "model.safetensors").exists():
        return folder
    if place.tiny:
        changes = {"max_position_embeddings": 1024, "tie_word_embeddings": name != "30B-A3B"}
        changes |= {"vocab_size": vocabulary} if vocabulary else {}
        return write_model(folder, _TINY[name], 11, noise=noise, num_hidden_layers=layers or TINY_LAYERS, **changes)
    content = json.loads((ROOT / "configs/models" / MODELS[name] / "config.json").read_text())
    content["num_hidden_layers"] = layers or content["num_hidden_layers"]
    if vocabulary:
        content |= {
            "vocab_size": vocabulary,
            "bos_token_id": None,
            "eos_token_id": None,
        }  # the smaller vocabulary lacks these tokens
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    g = torch.Generator(device=place.device).manual_seed(11)
    tensors = {}
    for tensor_name, shape in stored_shapes(folder).items():
        drawn = torch.randn(shape, generator=g, device=place.device)
        spread = (
            0.06 if "embed" in tensor_name else 0.02
        )  # logits with a spread above zero, so the distribution is not uniform
        tensor = 0.1 * drawn if len(shape) == 1 else spread * drawn
        tensor += 1.0 if tensor_name.endswith("norm.weight") else 0.0
        if noise:
            tensor += noise * tensor.std() * torch.randn(shape, generator=g, device=place.device)
        tensors[tensor_name] = tensor.bfloat16().cpu()
    partial = folder / "partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.rename(folder / "model.safetensors")
    return folder


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a model by their names in files."""
    from megappo.families.parameters import tensor_shapes

    return {name: tuple(shape) for name, shape in tensor_shapes(read_architecture(folder)).items()}


def settings(place: Place, folder: Path, size: Size, dtype: str) -> dict[str, Any]:
    """Return settings of a run with existing samples. Actor and critic have one update with all samples."""
    role = {
        "minibatch_sequences": size.samples,
        "microbatch_budget_tokens": size.samples * (size.prompt + size.response),
    }
    return {
        "run": {"name": "acceptance", "steps": 1000, "seed": 5, "directory": f"{place.scratch}/run"},
        "runtime": {"device": place.device, "threads_per_rank": 1 if place.tiny else None},
        "model": {"path": str(folder), "dtype": dtype, "tokenizer": str(ROOT / "configs/models/tiny_arithmetic")},
        "actor": {**role, "optimizer": {"learning_rate": 1e-6}},
        "critic": {**role, "optimizer": {"learning_rate": 1e-6}},
        "data": {
            "train": {"source": "megappo.data.arithmetic:sums", "options": {"max_operand": 3}},
            "apply_chat_template": False, "max_prompt_tokens": max(size.prompt, 8),
        },
        "rollout": {
            "engine": "tests.gpu.acceptance.workload:NoEngine", "prompts_per_step": size.samples,
            "max_response_tokens": size.response,
        },
        "reward": {"function": "exact"},
        "algorithm": {"mismatch_stop_nats": 1e6},
        "logging": {"console": "quiet", "tensorboard": False},
    }  # fmt: skip


ACTOR_ONLY = ("critic=null", "algorithm.estimator=reinforce_plus_plus")


def make_config(place: Place, content: dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of a run from settings and overrides."""
    return resolve_for_device(load_config(write_settings(place, content), list(overrides)))


def write_settings(place: Place, content: dict[str, Any]) -> Path:
    """Write the settings to a file."""
    path = Path(place.scratch) / "settings.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@contextmanager
def trainer(config: Config, kind: type[Reporter] = Reporter) -> Iterator[Trainer]:
    """Yield the trainer of a run with one process, and release its memory afterwards."""
    with start_runtime(config.runtime) as runtime:
        parts: RunComponents = assemble(config, derive_run(config, runtime.world_size), runtime)
        made = Trainer(parts, kind(config, parts.derived, runtime))
        try:
            yield made
        finally:
            parts.close()
            vars(made).clear()  # the name in the caller outlives the block and would keep the models alive
    del parts
    empty_cache()


def empty_cache() -> None:
    """Release device memory of unreferenced objects."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def samples(size: Size, folder: Path, *, ragged: bool) -> list[dict[str, Any]]:
    """Return samples with random tokens. Ragged samples have between a quarter and all of the length."""
    g = torch.Generator().manual_seed(4)
    vocab = read_architecture(folder).vocab_size
    drawn_samples = []
    for _ in range(size.samples):
        share = 0.25 + 0.75 * float(torch.rand((), generator=g)) if ragged else 1.0
        prompt, response = (max(1, round(share * n)) for n in (size.prompt, size.response))
        tokens = torch.randint(2, vocab, (prompt + response,), generator=g).tolist()
        drawn_samples.append({"tokens": tokens, "response": response, "score": float(torch.randn((), generator=g))})
    return drawn_samples


def rollouts(batch: Sequence[dict[str, Any]]) -> tuple[Rollouts, torch.Tensor]:
    """Return the samples as rollouts of an engine, and their scores. Positions without tokens are NaN."""
    lengths = torch.tensor([s["response"] for s in batch])
    mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    logprob = torch.full(mask.shape, float("nan")).masked_fill(mask, -1.0)
    count, ids = len(batch), torch.arange(len(batch))
    rollout = Rollouts(
        prompts=tuple(Prompt(i, tuple(s["tokens"][: -s["response"]]), "", None, {}) for i, s in enumerate(batch)),
        sample_ids_B=ids, group_ids_B=ids, sequences=tuple(torch.tensor(s["tokens"]) for s in batch),
        response_lengths_B=lengths, engine_logprob_BR=logprob, response_mask_BR=mask, ends=(End.COMPLETE,) * count,
        weight_versions_B=torch.ones(count, dtype=torch.int64), responses=("",) * count, raw_responses=("",) * count,
        special_tokens_B=torch.zeros(count, dtype=torch.int64),
    )  # fmt: skip
    return rollout, torch.tensor([s["score"] for s in batch])
