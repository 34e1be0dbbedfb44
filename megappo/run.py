"""A run from beginning to end."""

from __future__ import annotations

from megappo.assembly import Parts, assemble
from megappo.config import Config, Derived
from megappo.evaluation import evaluate_policy
from megappo.export import save_shards, write_hf_folder
from megappo.model_files import model_folder
from megappo.reporting import Reporter, reporting
from megappo.runtime import start_runtime
from megappo.trainer import Trainer


def train(config: Config, derived: Derived) -> None:
    """Train as the configuration says; every rank calls this."""
    with start_runtime(config.runtime) as runtime, reporting(config, derived, runtime) as reporter:
        parts = assemble(config, derived, runtime)
        try:
            reporter.message(_data_line(parts))
            Trainer(parts, reporter).train()
            _save(parts, reporter)
        finally:
            parts.close()


def evaluate(config: Config, derived: Derived) -> dict[str, float]:
    """Score the model on `data.validation` with greedy decoding; every rank calls this."""
    with start_runtime(config.runtime) as runtime:
        parts = assemble(config, derived, runtime, training=False)
        try:
            parts.engine.update_weights(parts.weights, 1)
            metrics = evaluate_policy(parts)
        finally:
            parts.close()
        if runtime.is_main:
            for name, value in metrics.items():
                print(f"{name}: {value:.4f}")
    return metrics


def _data_line(parts: Parts) -> str:
    data = parts.train_prompts
    return f"{len(data)} training prompts, {data.dropped} dropped and {data.truncated} cut as too long"


def _save(parts: Parts, reporter: Reporter) -> None:
    """The actor's shards, and the whole model in Hugging Face's format."""
    config = parts.config
    save_shards(parts.actor, config.run.path / "weights" / "actor")
    if not config.run.export_final_model:
        return
    out = config.run.path / "final"
    if parts.runtime.is_main:
        write_hf_folder(
            out,
            parts.architecture,
            parts.weights,
            config.model.tokenizer or model_folder(config.model.path),
            trust_remote_code=config.model.trust_remote_code,
        )
        reporter.message(f"the trained actor is in {out}")
    else:
        for _ in parts.weights:
            pass
