"""The oracle of a PPO step for a model folder, and comparisons of its numbers and weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.adapters import adapters_of, merged_weights, put_adapters
from tests.support.models import stored_parameters
from tests.support.oracle import Sample, Settings, ValueModel, changed_routing, ppo_step
from tests.support.scenarios import ENGINE, LOSS_TOLERANCE, TOLERANCE, reference_of, routing_of


def oracle_step(
    folder: Path, step_samples: list[dict[str, Any]], settings: Settings, minibatches: dict[str, list[list[int]]],
    adapters: Path | None = None, *, frozen: str | None = None,
) -> tuple[dict[str, Any], Any, ValueModel | None]:  # fmt: skip
    """Compute the step and return the measured numbers, the actor, and the critic (None if the estimator has no
    critic).

    `adapters` is a folder with the trained parameters of actor and critic. `frozen` is a pattern of parameters of the
    critic that are not trained.
    """
    actor, reference, trunk = (
        AutoModelForCausalLM.from_pretrained(
            p, dtype=torch.float32, experts_implementation="eager", attn_implementation="eager"
        )
        for p in (folder, reference_of(folder), folder)
    )
    if adapters is not None:
        put_adapters(actor, adapters)
        put_adapters(trunk, adapters)
    head = torch.nn.Linear(32, 1)
    drawn = torch.randn(1, 32, generator=torch.Generator().manual_seed(5)) * 0.3
    head.weight.data.copy_(drawn)
    head.bias.data.zero_()
    critic = ValueModel(trunk, head)
    for name, parameter in critic.trunk.named_parameters():
        if frozen is not None and re.search(frozen, name):
            parameter.requires_grad_(False)
    samples = [
        Sample(
            torch.tensor(s["tokens"]), s["response"], s["score"], s.get("engine", ENGINE), routing_of(s),
            s.get("group", 0), s.get("turn_rewards"),
        )
        for s in step_samples
    ]  # fmt: skip
    changed = changed_routing(actor, samples) if any(sample.routing is not None for sample in samples) else None
    of_critic = critic if settings.estimator == "gae" else None
    drawn_for = minibatches["actor"], minibatches.get("critic", [])
    measured = ppo_step(actor, reference, of_critic, samples, settings, *drawn_for)
    return {**measured, "changed": changed}, actor, of_critic


def close(mine: torch.Tensor, truth: torch.Tensor, what: str, path: float = 0.0) -> None:
    error = relative_error(mine, truth, path=path)
    assert error < TOLERANCE, f"{what}: relative error {error:.2e}"


def relative_error(mine: torch.Tensor, truth: torch.Tensor, *, path: float = 0.0) -> float:
    """Return the relative error of the whole tensor. `path` is the total length of the updates, which replaces the
    norm if it is larger. A single number, such as a bias that starts at 0, may return close to its start, but the
    rounding error of each step depends on the size of the step."""
    return float((mine.double() - truth.double()).norm() / truth.double().norm().clamp(min=max(path, 1e-6)))


def stored_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights by their names in files, including the head of a value model."""
    if not isinstance(model, ValueModel):
        return dict(stored_parameters(model))
    of_trunk = {f"model.{name}": parameter for name, parameter in stored_parameters(model.trunk)}
    return {**of_trunk, **dict(model.head.named_parameters(prefix="head"))}


def check_step(
    result: dict[str, Any], out: Path, step_samples: list[dict[str, Any]], measured: dict[str, Any], actor: Any,
    critic: ValueModel | None, *, base: Path | None = None,
) -> None:  # fmt: skip
    """Check that every number and every updated weight of the step equals the oracle. `base` is the model without
    adapters."""
    models = {"actor": actor} | ({} if critic is None else {"critic": critic})
    for key in ("old_logprob", "advantages", *(() if critic is None else ("values", "returns"))):
        mine = torch.cat([torch.tensor(result["samples"][str(i)][key]) for i in range(len(step_samples))])
        close(mine, torch.cat(measured[key]), key)
    check_gauges(result["metrics"], measured)
    for role in models:
        updates = measured[role]
        assert result["metrics"][f"{role}/updates"] == len(updates) > 0
        counts = [u.pop("count") for u in updates]
        for metric in updates[0]:
            truth = sum(u[metric] for u in updates) / len(updates)
            if metric in ("clipfrac", "ppo_kl", "entropy"):  # means over tokens instead of updates
                truth = sum(u[metric] * n for u, n in zip(updates, counts, strict=True)) / sum(counts)
            tolerance, least = (LOSS_TOLERANCE, 0.0) if metric == "loss" else (TOLERANCE, 1e-6)
            # The tolerance is the sum over updates, because losses of several updates may cancel.
            within = max(least, tolerance * sum(abs(u[metric]) for u in updates) / len(updates))
            assert result["metrics"][f"{role}/{metric}"] == pytest.approx(truth, rel=0, abs=within), metric
    if measured["changed"] is not None:
        assert measured["changed"] > 0.5
        assert result["metrics"]["mismatch/router_changed"] == pytest.approx(measured["changed"], rel=1e-9)
    for role, model in models.items():
        trained = load_file(out / f"{role}.safetensors")
        weights = stored_weights(model) if base is None else merged_weights(base, model)
        paths = {name: getattr(p, "path", 0.0) for name, p in model.named_parameters()}
        assert base is None or load_file(out / f"{role}-adapters.safetensors").keys() == adapters_of(model).keys()
        for name, tensor in weights.items():
            mapped = name.replace("trunk.", "model.")
            close(trained[mapped], tensor.detach(), f"{role} {mapped}", paths.get(name, 0.0))
        for name, tensor in adapters_of(model).items() if base is not None else ():
            close(load_file(out / f"{role}-adapters.safetensors")[name], tensor, f"{role} {name}")


def check_gauges(metrics: dict[str, float], measured: dict[str, Any]) -> None:
    """Check the metrics of the critic, which compare the values before the first update with the returns of lambda 1,
    and the spread of the advantages before whitening."""
    raw = float(measured["raw_advantages"].double().std(unbiased=False))
    assert metrics["advantage/std_raw"] == pytest.approx(raw, rel=TOLERANCE)
    if "values" not in measured:
        return
    values, returns = (torch.cat(measured[name]).double() for name in ("values", "returns_to_go"))
    unexplained = float((returns - values).var() / returns.var())
    assert metrics["critic/explained_variance"] == pytest.approx(1 - unexplained, abs=TOLERANCE * max(1, unexplained))
    assert metrics["critic/value_mean"] == pytest.approx(float(values.mean()), abs=TOLERANCE)
