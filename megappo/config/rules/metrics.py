"""Rules for settings that name a metric, and which metrics a configuration logs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple

from megappo.algo.estimators import NAMES, builtin
from megappo.config.schema import Config
from megappo.config.sections.engine import EngineCapabilities
from megappo.errors import nearest_choices
from megappo.observe.metric_docs import METRICS

Experts = Mapping[str, int]
"""Number of experts in the models of roles, as far as known."""
_STAGES = ("rollout", "reward", "forward", "advantages", "update_critic", "update_actor", "sync")
"""Stages of a step, which have `time/STAGE` and `memory/STAGE/peak_gigabytes`."""
_NEAREST = 3
_HAS_SERVERS, _HAS_CACHE = attrgetter("separate_processes"), attrgetter("prefix_cache")


class _Condition(NamedTuple):
    """Condition under which a run logs a metric."""

    needs: str
    """Readable name of a setting or of a part of a run."""
    applies: Callable[[Config, Experts], bool]
    in_step: Callable[[Config, int, int], bool] = lambda _config, _step, _steps: True
    """Function of (config, step, steps of the run) that returns whether the step logs the metric."""


def _has(needs: str, applies: Callable[[Config], object]) -> _Condition:
    return _Condition(needs, lambda config, _experts: bool(applies(config)))


def _experts_of(role: str) -> _Condition:
    def applies(config: Config, experts: Experts) -> bool:
        return role in config.trained and experts.get(role, 1) > 0

    return _Condition(f"a model of the {role} with experts", applies)


def _uneven_experts_of(role: str) -> _Condition:
    def applies(config: Config, experts: Experts) -> bool:
        settings = config.trained.get(role)
        return settings is not None and settings.router_aux_loss_coef > 0 and experts.get(role, 1) > 0

    return _Condition(f"{role}.router_aux_loss_coef", applies)


def _is_after_warmup(config: Config, step: int, _steps: int) -> bool:
    return config.critic is None or step > config.critic.warmup_steps


def _is_evaluated(config: Config, step: int, steps: int) -> bool:
    return config.evaluation is not None and config.evaluation.is_due(step, steps)


def _is_compared(config: Config, step: int, _steps: int) -> bool:
    return config.algorithm.compares_in(step)


def _follows_checkpoint(config: Config, step: int, steps: int) -> bool:
    return config.checkpoint is not None and step > 1 and config.checkpoint.is_due(step - 1, steps)


def _follows_export(config: Config, step: int, _steps: int) -> bool:
    every = None if config.checkpoint is None else config.checkpoint.huggingface_every_steps
    return every is not None and step > 1 and (step - 1) % every == 0


def _samples(config: Config) -> bool:
    """Return whether the run scores new responses instead of loaded ones."""
    return config.rollout.load_from is None


def _may_have(config: Config, capability: Callable[[EngineCapabilities], bool]) -> bool:
    """Return whether the run samples with an engine that has a capability. Without `resolve`, the engine is unknown."""
    is_known = config.rollout.engine_name is not None
    return _samples(config) and (not is_known or capability(config.rollout.capabilities))


def _compares_samples(config: Config) -> bool:
    name = config.algorithm.estimator
    return name not in NAMES or builtin(name).compares_samples


def _replays_routing(config: Config, experts: Experts) -> bool:
    return config.algorithm.replays_routing(experts.get("actor", 1))


_COMPUTED = _has("rewards that this run computes (rollout.load_from: null)", _samples)
_ACTOR = _has("a trained actor (critic.pretraining: null)", lambda c: not c.pretrains_critic)
_SHAPED = _has(
    "reward.scale, reward.clip or a similar setting", lambda c: c.reward.is_shaped and not c.pretrains_critic
)
_IN_FLIGHT = _has("rollout.ahead of at least 2", lambda c: c.rollout.in_flight and _samples(c))
_SERVERS = _has("rollout.servers", lambda c: _may_have(c, _HAS_SERVERS))
_EPISODES = _has("rollout.environment", lambda c: c.rollout.episodes is not None)
_MIXED = _has("data.mixture", lambda c: c.data.mixture and not c.pretrains_critic)
_CURRICULUM = _has("data.curriculum", lambda c: c.data.curriculum is not None)
_CRITIC = _has("a critic", lambda c: c.critic is not None)
_NORMALIZED = _has("reward.normalize", lambda c: c.reward.normalize and not c.pretrains_critic)
_ROUTED = _Condition("an actor with experts and algorithm.router_replay", _replays_routing, _is_compared)
_PROBED = _has(
    "servers that are probed (rollout.servers.probe)",
    lambda c: _may_have(c, _HAS_SERVERS) and c.rollout.server_settings.probes,
)
_ACTOR_EXPERTS = _experts_of("actor")._replace(in_step=_is_compared)
_PENALTY = _has("algorithm.policy_loss: penalty", lambda c: c.algorithm.policy_loss == "penalty")
_EVALUATION = _has("evaluation and the data of that set", lambda c: c.evaluation)._replace(in_step=_is_evaluated)
_CONDITIONS: Mapping[str, _Condition] = {
    "reward/NAME": _COMPUTED,
    "reward/group_spread": _has("an estimator that compares samples, such as grpo", _compares_samples),
    "reward/overlong": _has("reward.overlong", lambda c: c.reward.overlong and not c.pretrains_critic),
    "reward/given": _SHAPED,
    "reward/running_mean": _NORMALIZED,
    "reward/running_std": _NORMALIZED,
    "reward/clipped": _has("reward.clip", lambda c: c.reward.clip and not c.pretrains_critic),
    "source/": _MIXED,
    "source/NAME/right": _CURRICULUM,
    "curriculum/": _CURRICULUM,
    "group/": _has("rollout.dynamic_sampling", lambda c: c.rollout.dynamic_sampling and _samples(c)),
    "critic/": _CRITIC,
    "critic/held_out_explained_variance": _has("critic.pretraining", lambda c: c.pretrains_critic),
    "critic/experts_max_load": _experts_of("critic"),
    "critic/experts_unused": _experts_of("critic"),
    "critic/router_aux_loss": _uneven_experts_of("critic"),
    "actor/": _ACTOR._replace(in_step=_is_after_warmup),
    "actor/experts_max_load": _ACTOR_EXPERTS,
    "actor/experts_unused": _ACTOR_EXPERTS,
    "actor/router_aux_loss": _uneven_experts_of("actor")._replace(in_step=_is_after_warmup),
    "actor/penalty_coef": _PENALTY._replace(in_step=_is_after_warmup),
    "actor/final_kl": _PENALTY._replace(in_step=_is_after_warmup),
    "kl/": _has("a reference", lambda c: c.reference is not None and not c.pretrains_critic),
    "rollout/lag_max": _IN_FLIGHT,
    "rollout/several_versions": _IN_FLIGHT,
    "rollout/in_flight": _IN_FLIGHT,
    "rollout/waiting": _IN_FLIGHT,
    "rollout/dropped": _IN_FLIGHT,
    "rollout/partial": _IN_FLIGHT,
    "rollout/cache_hit_rate": _has(
        "an engine with a prefix cache that generates (rollout.servers)",
        lambda c: _may_have(c, _HAS_CACHE) and not c.rollout.replays_arrivals,
    ),
    "episode/": _EPISODES,
    "episode/begun_anew": _has("rollout.environment and rollout.ahead of at least 2",
                               lambda c: c.rollout.episodes and c.rollout.in_flight and _samples(c)),
    "turn/": _EPISODES,
    "tool/": _EPISODES,
    "mismatch/": _ACTOR._replace(in_step=_is_compared),
    "mismatch/own_weights": _IN_FLIGHT._replace(in_step=_is_compared),
    "mismatch/router_changed": _ROUTED,
    "mismatch/router_replayed": _ROUTED,
    "correction/": _has("algorithm.old_logprob: corrected", lambda c: c.algorithm.old_logprob == "corrected"),
    "sync/": _SERVERS,
    "sync/probe_gap": _PROBED,
    "sync/probe_seconds": _PROBED,
    **dict.fromkeys(("sync/seconds", "sync/version"), _has("a sync", lambda _: True)),
    **dict.fromkeys(("sync/transfer_seconds", "sync/gigabytes_per_second"), _has("an engine", _samples)),
    "engine/": _SERVERS,
    "time/reward": _COMPUTED,
    "time/update_critic": _CRITIC,
    "time/update_actor": _ACTOR._replace(in_step=_is_after_warmup),
    "time/evaluate": _has("evaluation", lambda c: c.evaluation)._replace(in_step=_is_evaluated),
    "time/checkpoint": _has("checkpoint", lambda c: c.checkpoint)._replace(in_step=_follows_checkpoint),
    "time/export": _has(
        "checkpoint.huggingface_every_steps", lambda c: c.checkpoint and c.checkpoint.huggingface_every_steps
    )._replace(in_step=_follows_export),
    "mfu": _has("a GPU", lambda c: c.runtime.device != "cpu" and not c.pretrains_critic)._replace(
        in_step=_is_after_warmup
    ),
    "memory/reward/": _COMPUTED,
    "memory/update_critic/": _CRITIC,
    "memory/update_actor/": _ACTOR._replace(in_step=_is_after_warmup),
    "eval/": _EVALUATION,
}  # fmt: skip
"""Conditions of metrics. A key is a prefix of the name in `METRICS`, and the longest matching prefix is used. If no
prefix matches, every run logs the metric."""


def logged_metrics(config: Config, experts: Experts) -> list[str]:
    """Return the names of the metrics that a run with these settings logs, except for the metrics of tools."""
    return [name for name, of in _names(config) if _condition(of).applies(config, experts)]


def keep_best_rules(config: Config, steps: int | None, experts: Experts | None = None) -> Iterator[str]:
    """Rules on `checkpoint.keep_best`: the run logs the metric in steps that write a checkpoint.

    Args:
        config: settings of the run.
        steps: number of steps of the run; None: unknown.
        experts: number of experts in the models of roles; the rule assumes experts for a role that is missing.
    """
    checkpoint, experts = config.checkpoint, experts or {}
    if checkpoint is None or (keep_best := checkpoint.keep_best) is None:
        return
    name = keep_best.removeprefix("-")
    of = _documented(name, config)
    logged = logged_metrics(config, experts)
    likely = [known for known in (f"{name}/mean", f"{name}_mean") if known in logged]
    near = ", ".join(f"'{known}'" for known in dict.fromkeys([*likely, *nearest_choices(name, logged, _NEAREST)]))
    if of is None:
        yield (
            f"checkpoint.keep_best is '{keep_best}', must be a metric of the run (a `-` in front: lowest is best); "
            f"the nearest are {near}"
        )
        return
    condition = _condition(of)
    if not condition.applies(config, experts):
        needs = f"which is logged only with {condition.needs}; change the settings"
        if of.startswith("eval/"):
            needs = "but the run has no evaluation; add evaluation"
        yield f"checkpoint.keep_best is '{keep_best}', {needs}, or choose a different metric; the nearest are {near}"
    elif steps is not None:
        yield from _step_rules(config, keep_best, condition, steps)


def _step_rules(config: Config, keep_best: str, condition: _Condition, steps: int) -> Iterator[str]:
    """Rules: a step with a checkpoint logs the metric. A checkpoint contains only the metrics of one step."""
    checkpoint, evaluation = config.checkpoint, config.evaluation
    assert checkpoint is not None
    if condition is _EVALUATION and evaluation is not None:
        periods = [every for every in (checkpoint.every_steps, checkpoint.keep_every_steps) if every is not None]
        if all(math.lcm(every, evaluation.every_steps) >= steps for every in periods):
            yield (
                f"checkpoint.keep_best is '{keep_best}', and no step before the last has both an evaluation "
                f"(evaluation.every_steps {evaluation.every_steps}) and a checkpoint (checkpoint.every_steps "
                f"{checkpoint.every_steps}); set checkpoint.every_steps to {evaluation.every_steps}"
            )
    elif not any(checkpoint.is_due(n, steps) and condition.in_step(config, n, steps) for n in range(1, steps + 1)):
        yield (
            f"checkpoint.keep_best is '{keep_best}', which no step with a checkpoint logs (run.steps {steps}, "
            f"checkpoint.every_steps {checkpoint.every_steps}); set checkpoint.every_steps to 1, or choose a "
            "different metric"
        )


def _condition(documented: str) -> _Condition:
    fitting = [start for start in _CONDITIONS if documented.startswith(start)]
    return _CONDITIONS[max(fitting, key=len)] if fitting else _has("", lambda _: True)


def _documented(name: str, config: Config) -> str | None:
    """Return the entry of `METRICS` for a metric, or None if the metric is unknown."""
    if re.fullmatch(r"tool/[^/]+/(calls|failures|seconds)", name):
        return "tool/"
    return dict(_names(config)).get(name)


def _names(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (name, entry in `METRICS`) for all metrics. Placeholders are replaced by the names of functions, judges,
    sources, validation sets and stages of the run."""
    sets = config.data.validation_sets or {}
    filled: dict[str, Iterable[str]] = {
        "reward/NAME": config.reward.functions,
        "reward/NAME/unreadable": config.reward.judges,
        "reward/NAME/seconds": config.reward.judges,
        **{f"source/NAME/{of}": config.data.mixture or {} for of in _endings("source/NAME/")},
        **{f"eval/NAME/{of}": sets for of in _endings("eval/NAME/")},
    }
    for name in METRICS:
        if name == "eval/NAME/pass@K":
            yield from ((f"eval/{of}/pass@{k}", name) for of, settings in sets.items() for k in settings.pass_at)
        elif name == "memory/NAME/peak_gigabytes":
            yield from ((key := name.replace("NAME", stage), key) for stage in _STAGES)
        elif name in filled:
            yield from ((name.replace("NAME", of), name) for of in filled[name])
        elif "NAME" not in name and (not name.startswith("eval/") or config.data.validation is not None):
            yield name, name


def _endings(start: str) -> list[str]:
    return [name.removeprefix(start) for name in METRICS if name.startswith(start)]
