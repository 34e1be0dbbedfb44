"""One PPO step of real shapes: in float32 against the oracle, in bfloat16 with time measurements."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megappo.config import Config
from megappo.families.parameters import multiplied_parameters
from megappo.megatron.placed import PlacedBatch
from megappo.observe.timing.throughput import peak_flops, training_flops_per_token
from megappo.plan.here import this_machine
from megappo.plan.planner import make_plan, read_models
from megappo.ppo.trainer import Trainer
from megappo.types import Experience
from tests.gpu.acceptance.machine import matrix_rate
from tests.gpu.acceptance.registry import Place
from tests.gpu.acceptance.table import Row, Skip, measured, skipped, within
from tests.gpu.acceptance.workload import (
    ACTOR_ONLY,
    DENSE,
    Size,
    empty_cache,
    make_config,
    model_folder,
    rollouts,
    samples,
    settings,
    trainer,
)
from tests.support.oracle import Sample, Settings, ValueModel, ppo_step
from tests.support.workers.ppo_step_worker import critic_weights

NUMBERS = 1e-3
"""Bound of relative errors of log-probabilities, values, advantages and metrics, for float32 in all layers."""
UPDATES = 2e-2
"""Bound of the relative error of all weight changes after four updates, in which some tokens may be on different
sides of a clip."""


def check_fits(config: Config) -> None:
    """Check that a run fits into the memory of this machine. Raises Skip if the plan does not fit."""
    machine = this_machine()
    if machine.is_cuda:
        # The plan does not support a custom engine. The embedded engine replaces the engine for the plan.
        rollout = config.rollout.model_copy(update={"engine": "transformers", "servers": None, "dtype": "bfloat16"})
        planned = config.model_copy(update={"rollout": rollout})
        plan = make_plan(planned, read_models(planned, None).models, machine, 1)
        if not plan.fits:
            raise Skip(plan.verdict)


# Comparison with the oracle


def oracle_settings(hidden: int, parameters: int) -> Settings:
    """Return settings with all features. The epsilon of Adam has the size of a gradient, so the steps are not the
    signs of rounding errors."""
    return Settings(
        temperature=0.8, gamma=0.98, lam=0.9, kl_reward_coef=0.05, kl_loss_coef=0.1, clip_low=0.1, clip_high=0.15,
        dual_clip=1.5, value_clip=0.05, entropy_coef=0.02, aggregation="token-mean", clip_grad_norm=0.5,
        actor_lr=1e-3 * (32 / hidden), critic_lr=1e-3 * (32 / hidden), weight_decay=0.1,
        adam_eps=0.5 / parameters**0.5,
    )  # fmt: skip


def oracle_overrides(o: Settings, hidden: int, reference: Path, minibatch: int) -> list[str]:
    """Return the same settings as overrides of a run."""
    values: dict[str, Any] = {f"algorithm.{n}": getattr(o, n) for n in
                             ("gamma", "lam", "clip_low", "clip_high", "dual_clip", "entropy_coef")}  # fmt: skip
    for role, rate in (("actor", o.actor_lr), ("critic", o.critic_lr)):
        values |= {
            f"{role}.epochs": 2, f"{role}.minibatch_sequences": minibatch, f"{role}.optimizer.learning_rate": rate,
            f"{role}.optimizer.weight_decay": o.weight_decay, f"{role}.optimizer.clip_grad_norm": o.clip_grad_norm,
            f"{role}.optimizer.eps": o.adam_eps,
        }  # fmt: skip
    values |= {"rollout.temperature": o.temperature, "critic.value_clip": o.value_clip, "reference.path": reference}
    kinds = [
        f"algorithm.kl_in_reward={{kind: kl, coef: {o.kl_reward_coef}}}",
        f"algorithm.kl_in_loss={{kind: low_var_kl, coef: {o.kl_loss_coef}}}",
        f"critic.value_head_std={head_spread(hidden)!r}",
    ]
    return [
        f"{name}={value!r}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items()
    ] + kinds


def head_spread(hidden: int) -> float:
    """Return the standard deviation of the weights of the value head, which results in values with a spread of about
    1."""
    return float(hidden**-0.5)


@dataclass(frozen=True)
class Stepped:
    """Results of a step of the trainer. The tensors are in host memory."""

    samples: dict[str, Tensor]
    metrics: dict[str, float]
    minibatches: dict[str, list[list[int]]]
    weights: dict[str, dict[str, Tensor]]


def one_step(t: Trainer, batch: list[dict[str, Any]]) -> tuple[PlacedBatch, Experience]:
    """Score samples and update critic and actor."""
    rollout, scores_B = rollouts(batch)
    t.step = 1
    placed, scored = t.forward(rollout, scores_B)
    experience = t.estimate_advantages(scored)
    t.update_critic(placed, experience)
    t.update_actor(placed, experience)
    assert placed.actor is not None
    return placed.actor, experience


def stepped(t: Trainer, batch: list[dict[str, Any]]) -> Stepped:
    """Run a step and return its numbers in the order of the samples."""
    _, experience = one_step(t, batch)
    scored, mask = experience.scored, experience.scored.rollouts.response_mask_BR
    fields = {"old_logprob": scored.old_logprob_BR, "values": scored.values_BR,
              "advantages": experience.advantages_BR, "returns": experience.returns_BR}  # fmt: skip
    return Stepped(
        {name: values_BR[mask] for name, values_BR in fields.items() if values_BR is not None},
        dict(t.metrics),
        {role: [sorted(m) for m in t.minibatches(role)] for role in ("actor", "critic")},
        {"actor": {name: tensor.to("cpu", copy=True) for name, tensor in t.parts.weights},
         "critic": {name: tensor.cpu() for name, tensor in critic_weights(t, t.parts.runtime).items()}},
    )  # fmt: skip


def run_oracle(
    place: Place, folder: Path, reference: Path, batch: list[dict[str, Any]], o: Settings, mine: Stepped
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Run the same step with transformers and return the measured numbers and the weights."""
    actor, ref, trunk = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").to(place.device)
        for path in (folder, reference, folder)
    )
    hidden = actor.config.hidden_size
    head = torch.nn.Linear(hidden, 1, device=place.device)
    drawn = torch.randn(1, hidden, generator=torch.Generator().manual_seed(5)) * head_spread(hidden)
    head.weight.data.copy_(drawn)
    head.bias.data.zero_()
    critic = ValueModel(trunk, head)
    todo = [Sample(torch.tensor(s["tokens"], device=place.device), s["response"], s["score"], 0.0) for s in batch]
    measured_step = ppo_step(actor, ref, critic, todo, o, mine.minibatches["actor"], mine.minibatches["critic"])
    weights = {
        "actor": {name: p.detach().cpu() for name, p in actor.named_parameters()},
        "critic": {name.replace("trunk.", "model."): p.detach().cpu() for name, p in critic.named_parameters()},
    }
    return measured_step, weights


def against_oracle(place: Place) -> Iterator[Row]:
    """Run a step with all features in float32 for each model that fits."""
    for name in DENSE:
        try:
            yield from _against_oracle(place, name)
        except Skip as reason:
            yield skipped(f"{name}, float32", str(reason))
        except torch.cuda.OutOfMemoryError as error:
            yield skipped(f"{name}, float32", f"out of memory: {str(error).splitlines()[0]}")
        empty_cache()


def _against_oracle(place: Place, name: str) -> Iterator[Row]:
    size = Size(8, 6, 10) if place.tiny else Size(8, 48, 96)
    folder, reference = model_folder(place, name), model_folder(place, name, noise=0.02)
    shapes = stored_parameters(folder)
    hidden = shapes["model.norm.weight"].shape[0]
    o = oracle_settings(hidden, sum(p.numel() for p in shapes.values()))
    batch = samples(size, folder, ragged=True)
    overrides = oracle_overrides(o, hidden, reference, size.samples // 2)
    config = make_config(place, settings(place, folder, size, "float32"), overrides)
    check_fits(config)
    with trainer(config) as t:
        mine = stepped(t, batch)
    empty_cache()
    measured_step, weights = run_oracle(place, folder, reference, batch, o, mine)
    yield from compared(f"{name}, float32", shapes, mine, measured_step, weights)


def compared(
    what: str, shapes: Mapping[str, Tensor], mine: Stepped, oracle_numbers: Mapping[str, Any],
    weights: Mapping[str, Mapping[str, Tensor]],
) -> Iterator[Row]:  # fmt: skip
    """Compare a step with the numbers and weights of the oracle. `shapes` are the initial weights."""
    errors = {key: relative(values, torch.cat(oracle_numbers[key]).cpu()) for key, values in mine.samples.items()}
    yield within(f"{what}: scores and advantages", errors, NUMBERS)
    for role in ("actor", "critic"):
        yield within(f"{what}: {role}'s metrics", metric_errors(role, mine, oracle_numbers), NUMBERS)
        start = {n: p for n, p in shapes.items() if n in weights[role]}
        yield _changes(f"{what}: {role}'s weights after 4 updates", start, mine.weights[role], weights[role])


def stored_parameters(folder: Path) -> dict[str, Tensor]:
    """Load the tensors of a folder in float32."""
    from safetensors.torch import load_file

    return {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}


def relative(mine: Tensor, truth: Tensor) -> float:
    """Return the norm of the error divided by the norm of the truth."""
    truth = truth.double().detach()
    return float((mine.detach().double() - truth).norm() / truth.norm().clamp(min=1e-12))


def metric_errors(role: str, mine: Stepped, oracle_numbers: Mapping[str, Any]) -> dict[str, float]:
    """Return the relative errors of the logged metrics, which are means over tokens or over updates."""
    updates, errors = oracle_numbers[role], {}
    tokens = [u["count"] for u in updates]
    for metric in updates[0].keys() - {"count"}:
        weights = tokens if metric in ("clipfrac", "ppo_kl", "entropy") else [1] * len(updates)
        truth = sum(u[metric] * w for u, w in zip(updates, weights, strict=True)) / sum(weights)
        # A token at the edge of a clip changes the fraction by a full token.
        scale = 1.0 if metric == "clipfrac" else max(abs(truth), 1e-2)
        errors[metric] = abs(mine.metrics[f"{role}/{metric}"] - truth) / scale
    return errors


def _changes(what: str, start: Mapping[str, Tensor], mine: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> Row:
    """Compare the changes of all tensors by the updates."""
    squares = sizes = 0.0
    for name, before in start.items():
        expected, got = truth[name].double() - before.double(), mine[name].double() - before.double()
        squares, sizes = squares + float((got - expected).square().sum()), sizes + float(expected.square().sum())
    size = (sizes / sum(float(b.double().square().sum()) for b in start.values())) ** 0.5
    return within(what, {"changes": (squares / sizes) ** 0.5}, UPDATES, share_of_weights=size)


# Time measurements


@dataclass(frozen=True)
class Speed:
    """Speed of an update of the actor."""

    seconds: float
    forward_seconds: float
    tokens: int
    flops_per_token: float
    peak_bytes: int

    def summary(self, place: Place) -> str:
        """Return seconds, rate, and the share of the peak rate in the data sheet, if known."""
        peak = peak_flops(torch.cuda.get_device_name()) if place.device == "cuda" else None
        rate = self.tokens * self.flops_per_token / self.seconds
        share = "" if peak is None else f", MFU {rate / peak:.1%}"
        return f"update {self.seconds:.3g} s, {self.tokens / self.seconds:.0f} tokens/s{share}"


def update_speed(place: Place, t: Trainer, size: Size, folder: Path, repeat: int) -> Speed:
    """Return the median over updates of the same samples, after one warm-up update."""
    rollout, scores_B = rollouts(samples(size, folder, ragged=False))
    forwards, updates = [], []
    for number in range(repeat + 1):
        t.step = number + 1
        start = now(t)
        placed, scored = t.forward(rollout, scores_B)
        middle = now(t)
        experience = t.estimate_advantages(scored)
        begin = now(t)
        t.update_actor(placed, experience)
        forwards.append(middle - start)
        updates.append(now(t) - begin)
    arch = t.parts.actor.arch
    length = size.prompt + size.response
    flops = training_flops_per_token(
        multiplied_parameters(arch), layers=arch.layers, heads=arch.heads, head_dim=arch.head_dim,
        sequence_tokens=length,
    )  # fmt: skip
    peaks = [t.reporter.stage_peaks[stage] for stage in ("forward", "update_actor")]
    peak = round(1e9 * max(peaks)) if place.device == "cuda" else 0
    return Speed(statistics.median(updates[1:]), statistics.median(forwards[1:]), size.samples * length, flops, peak)


def now(t: Trainer) -> float:
    """Return the time after synchronisation with the device."""
    t.parts.runtime.synchronize()
    return time.perf_counter()


def speed(place: Place) -> Iterator[Row]:
    """Measure updates of 64 sequences of 1,024 tokens in packs of 16,384 tokens with default settings."""
    size = Size(4, 8, 24) if place.tiny else Size(64, 256, 768)
    rate = matrix_rate(place)
    for name in DENSE:
        folder = model_folder(place, name)
        budget = f"actor.microbatch_budget_tokens={64 if place.tiny else 16384}"
        with trainer(make_config(place, settings(place, folder, size, "bfloat16"), [*ACTOR_ONLY, budget])) as t:
            timed = update_speed(place, t, size, folder, 1 if place.tiny else 3)
        share = timed.tokens * timed.flops_per_token / timed.seconds / rate
        yield measured(
            f"{name}, bfloat16", f"{timed.summary(place)}, {share:.1%} of the measured matrix rate; forward "
            f"{timed.forward_seconds:.3g} s; peak {timed.peak_bytes / 1e9:.1f} GB",
            seconds=timed.seconds, tokens_per_second=timed.tokens / timed.seconds, share_of_matrix_rate=share,
            model_flops_per_second=timed.tokens * timed.flops_per_token / timed.seconds,
            forward_seconds=timed.forward_seconds, peak_bytes=timed.peak_bytes,
        )  # fmt: skip
        empty_cache()
