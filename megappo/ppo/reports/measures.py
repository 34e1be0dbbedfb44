"""Metrics of a step that belong to no single stage. The numbers are identical on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megappo.config.sections.algorithm import AlgorithmSettings
from megappo.data.mixture import MixedPrompts
from megappo.engines.protocol import SyncReport
from megappo.environments.metrics import episode_metrics
from megappo.errors import RunError
from megappo.families.adapters import multiplied_adapters
from megappo.families.flops import recurrence_flops
from megappo.families.parameters import multiplied_parameters
from megappo.megatron.layers.router import EXTRA_COUNTS
from megappo.megatron.placed import PlacedBatch
from megappo.megatron.roles import Role
from megappo.observe.ends import End
from megappo.observe.timing.throughput import mfu, training_flops_per_token
from megappo.ppo.assembly.components import RunComponents
from megappo.runtime.process import Runtime
from megappo.runtime.ranks.objects import all_gather_objects
from megappo.runtime.ranks.tally import Tally
from megappo.types import Experience, Rollouts
from megappo_kernels.objectives import kl_estimate


class MismatchError(RunError):
    """The log-probabilities of engine and trainer differ by more than `algorithm.mismatch_stop_nats`."""


def rollout_metrics(rollouts: Rollouts, runtime: Runtime, newest_version: int) -> dict[str, float]:
    """Return lengths and counts of the step over all ranks.

    `newest_version`: version of the actor weights, or their version after the next sync.
    """
    tally, responses = Tally(), rollouts.response_lengths_B
    tally.mean("response/length", responses)
    tally.maximum("response/length_max", responses)
    tally.mean("response/truncated", rollouts.truncated_B)
    is_total_B = torch.tensor([end is End.POSITION_LIMIT for end in rollouts.ends], dtype=torch.bool)
    tally.mean("response/position_limit", is_total_B)
    tally.mean("response/special_tokens", rollouts.special_tokens_B)
    tally.mean("prompt/length", rollouts.lengths_B - responses)
    if rollouts.token_versions_BR is None:
        tally.mean("rollout/lag", newest_version - rollouts.weight_versions_B)
    else:
        lag_BR, mask_BR = newest_version - rollouts.token_versions_BR, rollouts.response_mask_BR
        tally.mean("rollout/lag", lag_BR, mask_BR)
        tally.maximum("rollout/lag_max", lag_BR, mask_BR)
        tally.mean("rollout/several_versions", (lag_BR != lag_BR[:, :1]).masked_fill(~mask_BR, False).any(-1))
    tally.total("step_tokens", float(rollouts.lengths_B.sum()))
    tally.total("step_samples", float(len(responses)))
    return tally.reduce(runtime.device)


def source_metrics(rollouts: Rollouts, scores_B: Tensor, parts: RunComponents) -> dict[str, float]:
    """Return `source/NAME/*` for each data source with prompts in the step. Empty without a mixture."""
    if not isinstance(parts.train_prompts, MixedPrompts):
        return {}
    tally, total_rewards_B = Tally(), rollouts.total_rewards_B(scores_B)
    for name in parts.train_prompts.names:
        mask_B = torch.tensor([prompt.source == name for prompt in rollouts.prompts], dtype=torch.bool)
        tally.total(f"{name}/prompts", float(mask_B.sum()) / parts.config.rollout.samples_per_prompt)
        tally.mean(f"{name}/reward_mean", total_rewards_B, mask_B & rollouts.scored_B)
        tally.mean(f"{name}/response_length", rollouts.response_lengths_B, mask_B)
    numbers = tally.reduce(parts.runtime.device)
    return {f"source/{name}": value for name, value in numbers.items() if numbers[f"{name.split('/')[0]}/prompts"]}


def environment_metrics(rollouts: Rollouts, parts: RunComponents) -> dict[str, float]:
    """Return `episode/*`, `turn/*` and `tool/*` of a step. Empty without an environment."""
    if parts.config.rollout.episodes is None:
        return {}
    episodes = rollouts.episodes.of_samples if rollouts.episodes is not None else ()  # None on a rank without samples
    return episode_metrics(episodes, rollouts.response_lengths_B.tolist())


def balance_metrics(batches: Iterable[PlacedBatch]) -> dict[str, float]:
    """Return `balance/imbalance` over all forward passes and updates of the batches."""
    plans = [plan for batch in batches for plan in (batch.forward_plan, *batch.update_plans)]
    busiest, mean = sum(plan.busiest_flops for plan in plans), sum(plan.mean_flops for plan in plans)
    return {"balance/imbalance": busiest / mean - 1}


def check_mismatch(
    trainer_logprob_BR: Tensor,
    rollouts: Rollouts,
    algorithm: AlgorithmSettings,
    runtime: Runtime,
    newest_version: int,
) -> dict[str, float]:
    """Return `mismatch/*`: differences between engine and trainer log-probabilities, in nats per token.

    `newest_version` is the version of the actor weights. Tokens of older versions also differ because of training, so
    they indicate no engine error. Raises MismatchError if the mean over tokens of the newest version exceeds
    `algorithm.mismatch_stop_nats`. Empty if no token counts on any rank, because all episodes have failed.
    """
    mask_BR = rollouts.response_mask_BR
    trainer, engine = (x.masked_fill(~mask_BR, 0.0) for x in (trainer_logprob_BR, rollouts.engine_logprob_BR))
    gap = trainer - engine
    tally = Tally()
    tally.mean("mismatch/mean", gap.abs(), mask_BR)
    tally.maximum("mismatch/max", gap.abs(), mask_BR)
    # KL(engine || trainer), because the engine sampled the responses
    tally.mean("mismatch/k3", kl_estimate(engine - trainer, "k3"), mask_BR)
    tally.mean("mismatch/truncated", (gap > math.log(algorithm.correction.cap)).float(), mask_BR)
    of_tokens_BR, of_samples_B1 = rollouts.token_versions_BR, rollouts.weight_versions_B[:, None]
    own_BR = mask_BR & ((of_samples_B1 if of_tokens_BR is None else of_tokens_BR) == newest_version)
    tally.mean("mismatch/own_weights", gap.abs(), own_BR)
    tally.total("own", float(own_BR.sum()))
    tally.total("others", float((mask_BR & ~own_BR).sum()))
    numbers = tally.reduce(runtime.device)
    own, others = numbers.pop("own"), numbers.pop("others")
    if not (own or others):
        return {}
    mean = numbers["mismatch/mean"]
    if math.isfinite(mean):  # a NaN or infinite mean stops the run for any weight version
        mean = numbers["mismatch/own_weights"] if own else 0.0
    if not others:
        del numbers["mismatch/own_weights"]
    if not mean <= algorithm.mismatch_stop_nats:
        raise MismatchError(
            f"engine and trainer log-probabilities differ by {mean:.3g} nats per token, above "
            f"algorithm.mismatch_stop_nats {algorithm.mismatch_stop_nats}; the engine does not hold the actor's "
            "weights, or computes in a type too coarse (rollout.dtype)"
        )
    return numbers


def policy_kl(new_logprob_BR: Tensor, experience: Experience, runtime: Runtime) -> float:
    """Return KL(old || new) in nats per token (k3 estimator), over all tokens of the policy loss on all ranks."""
    mask_BR = experience.loss_mask_BR
    old, new = (x.masked_fill(~mask_BR, 0.0) for x in (experience.scored.old_logprob_BR, new_logprob_BR))
    tally = Tally()
    tally.mean("kl", kl_estimate(old - new, "k3"), mask_BR)
    return tally.reduce(runtime.device)["kl"]


def routing_metrics(role: Role, runtime: Runtime) -> dict[str, float]:
    """Return router metrics of a role's last forward pass over all ranks. Empty without experts."""
    name, experts = role.placement.name, role.arch.experts
    if not experts:
        return {}
    report = role.routing_report().to(runtime.device)
    dist.all_reduce(report)
    of_layers = report[list(role.arch.expert_layers)]
    loads_LE, replayed_L2 = of_layers.double().cpu().split([experts, EXTRA_COUNTS], dim=1)
    known, changed = replayed_L2.sum(0).tolist()
    if not loads_LE.any():
        return {}
    numbers = {
        f"{name}/experts_max_load": float((loads_LE.amax(1) / loads_LE.mean(1)).max()),
        f"{name}/experts_unused": float((loads_LE == 0).double().mean()),
    }
    if known:
        routed = float(loads_LE.sum()) / role.arch.experts_per_token
        numbers |= {"mismatch/router_changed": changed / known, "mismatch/router_replayed": known / routed}
    return numbers


def sync_metrics(parts: RunComponents, seconds: float, report: SyncReport, version: int) -> dict[str, float]:
    """Return `sync/*` of a weight sync. Each duration is the maximum over all ranks. A collective of the world.

    `seconds`: duration of the whole sync on this rank.
    """
    metrics = {"sync/seconds": max(all_gather_objects(seconds))}
    metrics |= {f"sync/{name}_seconds": longest for name, longest in report.phases().items()}
    if transfer := report.transfer_seconds:
        speed = parts.weights.total_bytes / 1e9 / transfer
        metrics |= {"sync/transfer_seconds": transfer, "sync/gigabytes_per_second": speed}
    return metrics | {"sync/version": float(version)}


def restart_metrics(parts: RunComponents) -> dict[str, float]:
    """Return the total `engine/restarts`. Empty with an engine in the process.

    Servers are restarted by weight syncs and by rollouts.
    """
    engine = parts.engine
    return {"engine/restarts": float(engine.usage.restarts)} if engine.capabilities.separate_processes else {}


def actor_mfu(parts: RunComponents, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return `mfu` of the actor updates in a finished step. Empty if the peak of the device is unknown, as on a CPU."""
    if "time/update_actor" not in metrics:
        return {}
    arch = parts.actor.arch
    per_token = training_flops_per_token(
        multiplied_parameters(arch),
        layers=len(arch.attention_layers),
        heads=arch.heads,
        head_dim=arch.multiplied_head_dim,
        sequence_tokens=metrics["step_tokens"] / metrics["step_samples"],
    )
    per_token += 3 * recurrence_flops(arch)
    lora = parts.actor.options.lora
    if lora is not None:  # the backward pass computes gradients of adapters, not of base weights
        per_token += 6 * multiplied_adapters(arch, lora) - 2 * multiplied_parameters(arch)
    share = mfu(
        metrics["step_tokens"] * parts.config.actor.epochs / metrics["time/update_actor"],
        per_token,
        devices=len(parts.actor.placement.grid.ranks),
        device_name=parts.runtime.device_name,
    )
    return {} if share is None else {"mfu": share}


def distributed_numbers(experience: Experience) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's values for the distributions of each step, by their names in `observe.distributions`.

    The values belong to samples or to tokens of the model.
    """
    scored, rollouts = experience.scored, experience.scored.rollouts
    yield "reward", rollouts.total_rewards_B(scored.scores_B)
    yield "response length", rollouts.response_lengths_B
    of_tokens = {
        "advantage": experience.advantages_BR,
        "return": experience.returns_BR,
        "value": scored.values_BR,
        "kl": experience.kl_BR,
        "ratio to the engine": (scored.old_logprob_BR - rollouts.engine_logprob_BR).exp(),
    }
    for name, numbers_BR in of_tokens.items():
        if numbers_BR is not None:
            yield name, numbers_BR[rollouts.response_mask_BR]
