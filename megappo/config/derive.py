"""Computes and checks all numbers that follow from the settings, the models and the world size."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from megappo.config.grid import Grid, format_ranks
from megappo.config.role_models import load_architectures
from megappo.config.rules import experts, trained_weights
from megappo.config.rules.algorithm import algorithm_rules, kl_target_notes
from megappo.config.rules.batches import batch_rules, warmup_rules
from megappo.config.rules.experience import experience_rules
from megappo.config.rules.in_flight import in_flight_rules
from megappo.config.rules.layouts import coverage_rules, parallel_rules, placement_rules, vocabulary_rules
from megappo.config.rules.metrics import keep_best_rules
from megappo.config.rules.role_spec import RoleSpec
from megappo.config.rules.rollout import (
    engine_rules,
    environment_rules,
    length_rules,
    response_length_rules,
    sampling_rules,
    stop_token_rules,
)
from megappo.config.rules.sections import section_rules
from megappo.config.rules.servers import server_rules
from megappo.config.schema import Config
from megappo.config.sections.data import DataSettings
from megappo.config.sections.engine import DEFAULT_ENGINE, DEFAULT_SERVERS, ENGINES, IN_PROCESS
from megappo.config.sections.reward import reward_rules
from megappo.config.sections.roles import CriticSettings
from megappo.config.templates import template_rules
from megappo.errors import ConfigError
from megappo.families.architecture import ModelShape, padded_vocab_size

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class RoleNumbers:
    """Ranks, sizes and update counts of a trained role."""

    grid: Grid
    vpp: int
    padded_vocab_size: int
    """Number of embedding rows, summed over tensor parallel ranks."""
    minibatches_per_step: int
    """Number of updates in one epoch of a step."""
    updates_per_step: int
    """Minibatches x epochs. `algorithm.target_kl` may end the actor's updates earlier."""
    total_updates: int
    """Maximum number of updates in the run. The actor's updates begin after the critic's warm-up steps. The number is 0
    if the length of the run is unknown."""


@dataclass(frozen=True)
class Derived:
    """Numbers that follow from the settings and the number of ranks."""

    world_size: int
    actor: RoleNumbers
    critic: RoleNumbers | None
    notes: tuple[str, ...]
    """Notes on valid but unusual settings, one sentence each."""
    known_steps: int | None = None
    """Number of PPO steps. None means that the run is measured in `run.epochs` and the data were not read."""
    prompts: int | None = None
    """Number of training prompts. None means that the prompts were not counted."""

    @property
    def steps(self) -> int:
        """Number of PPO steps. The length of the run must be known."""
        assert self.known_steps is not None, "derive needs the number of prompts"
        return self.known_steps


def resolve(config: Config, *, on_cuda: bool) -> Config:
    """Return the settings with the engine that follows from the device."""
    return config.model_copy(update={"rollout": config.rollout.with_engine(on_cuda=on_cuda)})


def derive(
    config: Config,
    world_size: int,
    actor_shape: ModelShape,
    critic_shape: ModelShape | None = None,
    reference_shape: ModelShape | None = None,
    *,
    prompts: int | None = None,
) -> Derived:
    """Check every rule between sections and compute the run's numbers.

    Args:
        config: settings of the run.
        world_size: number of ranks.
        actor_shape: shape of the actor's model.
        critic_shape: shape of the critic's model; None: same as the actor's.
        reference_shape: shape of the reference's model; None: same as the actor's.
        prompts: number of training prompts; without it, the number of steps for `run.epochs` is unknown.

    Raises ConfigError with one sentence per problem.
    """
    steps = _steps(config, prompts)
    shapes = {"actor": actor_shape, "critic": critic_shape or actor_shape}
    roles = [RoleSpec(name, settings, shapes[name]) for name, settings in config.trained.items()]
    problems = list(_problems(config, world_size, roles, reference_shape, steps))
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    numbers = {r.name: role_numbers(config, r, world_size, _trained_steps(config, r, steps)) for r in roles}
    return Derived(
        world_size=world_size,
        actor=numbers["actor"],
        critic=numbers.get("critic"),
        notes=(*_notes(config, roles, world_size), *kl_target_notes(config)),
        known_steps=steps,
        prompts=prompts,
    )


def _steps(config: Config, prompts: int | None) -> int | None:
    """Return the number of steps in which every prompt is used at least `run.epochs` times, or None if the prompts were
    not counted."""
    if config.run.epochs is None or prompts is None:
        return config.run.steps
    return math.ceil(Fraction(str(config.run.epochs)) * prompts / config.rollout.prompts_per_step)


def derive_run(config: Config, world_size: int, prompts: int | None = None) -> Derived:
    """Call `derive` with the shapes of the models that the settings name.

    Raises ConfigError also if `run.epochs` is set and the number of training prompts is unknown.
    """
    if config.run.epochs is not None and prompts is None:
        raise ConfigError(f"run.epochs {config.run.epochs:g} is no number of steps before data are read; set run.steps")
    return check_run(config, world_size, prompts)


def check_run(config: Config, world_size: int, prompts: int | None = None) -> Derived:
    """Check all rules as `derive_run` does, before the data are read. Without the number of training prompts, some
    numbers of the result are unknown."""
    shapes = load_architectures(config)
    return derive(config, world_size, shapes["actor"], shapes.get("critic"), shapes.get("reference"), prompts=prompts)


def _problems(
    config: Config, world_size: int, roles: list[RoleSpec], reference_shape: ModelShape | None, steps: int | None
) -> Iterator[str]:
    """Yield all violated rules. Rules that need a role's replicas are skipped if the role's ranks are invalid."""
    yield from algorithm_rules(config)
    yield from section_rules(config, steps)
    yield from keep_best_rules(config, steps, {role.name: role.shape.experts for role in roles})
    yield from template_rules(config)
    yield from response_length_rules(config)
    yield from reward_rules(config.reward)
    yield from trained_weights.base_rules(config)
    for role in roles:
        yield from trained_weights.target_rules(role)
        yield from trained_weights.freeze_rules(role)
    placed = {role.name: list(placement_rules(role, world_size)) for role in roles}
    for role_problems in placed.values():
        yield from role_problems
    if not any(placed.values()):
        yield from coverage_rules(roles, world_size)
    shaped = {role.name: role for role in roles}
    if reference_shape is not None:
        shaped["reference"] = RoleSpec("actor", config.actor, reference_shape)
    for name, role in shaped.items():
        yield from parallel_rules(role, name)
    yield from vocabulary_rules(config, shaped.values())
    yield from stop_token_rules(config, {name: role.shape for name, role in shaped.items()})
    different = {n: r.shape for n, r in shaped.items() if n == "actor" or r.shape != roles[0].shape}
    yield from length_rules(config, different)
    yield from engine_rules(config)
    yield from sampling_rules(config)
    yield from in_flight_rules(config, roles[0].shape)
    yield from experience_rules(config, steps)
    yield from environment_rules(config)
    yield from server_rules(config, roles[0].shape)
    yield from experts.replay_rules(config, roles[0].shape)
    for role in roles:
        if placed[role.name]:
            continue
        batch_problems = list(batch_rules(config, role, world_size))
        yield from batch_problems
        if not batch_problems:
            updates = _trained_steps(config, role, steps) * role.settings.updates(config.rollout.batch_sequences)
            if updates:
                yield from warmup_rules(role, updates)


def _trained_steps(config: Config, role: RoleSpec, steps: int | None) -> int:
    """Return the number of steps that update a role, or 0 if the number is unknown. The actor is not updated during the
    critic's warm-up steps."""
    if role.name == "actor" and config.pretrains_critic:
        return 0
    waits = config.critic.warmup_steps if role.name == "actor" and config.critic is not None else 0
    return max(0, (steps or 0) - waits)


def role_numbers(config: Config, role: RoleSpec, world_size: int, steps: int) -> RoleNumbers:
    """Return the numbers of a valid role that is updated in `steps` steps."""
    settings, batch, tp = role.settings, config.rollout.batch_sequences, role.layout.tensor_parallel
    return RoleNumbers(
        grid=role.layout.grid(world_size),
        vpp=role.layout.virtual_pipeline_chunks,
        padded_vocab_size=padded_vocab_size(role.shape.vocab_size, tp, config.model.pad_vocab_to_multiple_of),
        minibatches_per_step=len(settings.minibatch_sizes(batch)),
        updates_per_step=settings.updates(batch),
        total_updates=steps * settings.updates(batch),
    )


def _notes(config: Config, roles: list[RoleSpec], world_size: int) -> Iterator[str]:
    prompts = config.rollout.prompts_per_step
    if config.rollout.engine in IN_PROCESS and prompts < world_size and config.rollout.load_from is None:
        yield (
            f"{world_size - prompts} of {world_size} ranks have nothing to generate: every rank has an engine, and "
            f"rollout.prompts_per_step is {prompts}"
        )
    if config.rollout.is_custom:
        known = ENGINES[DEFAULT_ENGINE if config.rollout.servers is None else DEFAULT_SERVERS]
        yield f"memory and time of {config.rollout.engine_text} are planned as for {known.label}"
    if config.old_names:
        yield f"{'; '.join(config.old_names)}: use the current names"
    if config.data.evaluated and config.evaluation is None:
        key = "data.validation" if config.data.validation is not None else "data.validation_sets"
        yield f"{key} is used only by `megappo eval`, because the section evaluation is missing"
    for role in roles:
        pp, vpp = role.layout.pipeline_parallel, role.layout.virtual_pipeline_chunks
        if vpp > 1:
            yield (
                f"{role.name}: the interleaved schedule (virtual_pipeline_chunks {vpp}) runs microbatches in "
                f"multiples of pipeline_parallel {pp}"
            )


def describe(config: Config, derived: Derived) -> list[tuple[str, str]]:
    """Return rows of (name, description) that describe the run at the start of the log."""
    rollout, run, has_steps = config.rollout, config.run, derived.known_steps is not None
    rows = [
        ("run", f"{run.name}: {_format_length(config, derived)}, seed {run.seed}, in {run.path}"),
        *([("settings", ", then ".join(run.files))] if len(run.files) > 1 else []),
        *_model_rows(config, derived),
        ("data", f"{_format_sources(config.data)}, reward {config.reward.summary}"),
        (
            "step",
            f"{rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples = "
            + f"{rollout.batch_sequences} sequences of at most {config.max_sequence_tokens} tokens",
        ),
        ("rollout", f"{_format_engine(config)}, temperature {rollout.temperature:g}"),
        *_episode_rows(config),
        *_role_rows("actor", config, derived.actor, has_steps=has_steps),
    ]
    if derived.critic is not None:
        rows += _role_rows("critic", config, derived.critic, has_steps=has_steps)
    rows.append(("algorithm", _format_algorithm(config)))
    if config.evaluation is not None:
        evaluated = "; ".join(description for _, description in _evaluated_rows(config))
        rows.append(("evaluation", f"{evaluated}; every {config.evaluation.every_steps} steps"))
    return rows + [("note", note) for note in derived.notes]


def describe_evaluation(config: Config, derived: Derived) -> list[tuple[str, str]]:
    """Return the rows of `describe` that apply to `megappo eval`."""
    return [
        *_model_rows(config, derived),
        *_evaluated_rows(config),
        ("reward", config.reward.summary),
        ("rollout", _format_engine(config)),
        *_episode_rows(config),
    ]


def _model_rows(config: Config, derived: Derived) -> Iterator[tuple[str, str]]:
    yield "model", f"{config.model.path} ({config.model.init}, {config.model.dtype})"
    yield "world", f"{derived.world_size} rank{'s' if derived.world_size > 1 else ''}, device {config.runtime.device}"


def _evaluated_rows(config: Config) -> list[tuple[str, str]]:
    """Return a row for each validation set, with its prompts and its sampling settings."""
    own_limit = config.evaluation.max_response_tokens if config.evaluation is not None else None
    most_tokens, rows = own_limit or config.rollout.max_response_tokens, []
    for name, source in config.data.evaluated.items():
        prompts = f"the first {source.limit} prompts of " if source.limit is not None else ""
        how = f"at temperature {source.temperature:g}" if source.temperature else "greedy"
        count = "1 answer" if source.samples == 1 else f"{source.samples} answers"
        pass_at = "".join(f", pass@{k}" for k in source.pass_at)
        description = (
            f"{prompts}{source.source}: {count} to each prompt, {how}, of at most {most_tokens} tokens{pass_at}"
        )
        rows.append((name or "validation", description))
    return rows


def _format_sources(data: DataSettings) -> str:
    """Format the training sources, with their shares if there are several."""
    if data.mixture is None:
        return ", ".join(source.source for source in data.sources.values())
    total = sum(source.weight for source in data.mixture.values())
    return ", ".join(f"{s.weight / total:.1%} {name} ({s.source})" for name, s in sorted(data.mixture.items()))


def _episode_rows(config: Config) -> list[tuple[str, str]]:
    episodes = config.rollout.episodes
    if episodes is None:
        return []
    return [
        ("episodes", f"{episodes.name}, at most {episodes.max_turns} turns and {episodes.max_calls} calls of tools")
    ]


def _format_length(config: Config, derived: Derived) -> str:
    """Format the length as `2 epochs of 400 prompts = 16 steps`, without the steps if the data were not read."""
    if config.run.epochs is None:
        return f"{derived.steps} steps"
    epochs = f"{config.run.epochs:g} epoch{'' if config.run.epochs == 1 else 's'}"
    if derived.known_steps is None:
        return f"{epochs} of the data"
    return f"{epochs} of {derived.prompts} prompts = {derived.steps} steps"


def _format_engine(config: Config) -> str:
    rollout, servers = config.rollout, config.rollout.server_settings
    if rollout.load_from is not None:
        return f"no engine: samples of {rollout.load_from}"
    if not rollout.capabilities.separate_processes:
        return f"{rollout.engine_name} on every rank"
    if servers.urls:
        where = f"{len(servers.urls)} external servers"
    else:
        count = "as many servers as fit" if servers.count is None else f"{servers.count} servers"
        where = f"{count}, TP {servers.tensor_parallel}, {servers.placement}"
    ahead = f", {rollout.ahead} steps of prompts in flight" if rollout.in_flight else ", one step ahead"
    return f"{rollout.engine_name}, {where}" + (ahead if rollout.ahead else "")


def print_rows(rows: Iterable[tuple[str, str]], console: Console | None = None) -> None:
    """Print rows of (name, description) as a table. The default console writes to stdout."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, title="megappo", title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, description in rows:
        table.add_row(name, Text(description))
    (console or Console(file=sys.stdout)).print(table)  # rich detects the encoding of a file only if the file is given


def _role_rows(name: str, config: Config, numbers: RoleNumbers, *, has_steps: bool) -> list[tuple[str, str]]:
    """Return rows with a role's layout and updates. `has_steps` tells whether the number of steps is known."""
    settings, grid = config.trained[name], numbers.grid
    layout = f"ranks {format_ranks(grid.ranks)}: TP {grid.tp} x PP {grid.pp} x DP {grid.dp}"
    other_sizes = {"CP": grid.cp, "EP": grid.ep, "VPP": numbers.vpp}
    layout += "".join(f", {word} {size}" for word, size in other_sizes.items() if size > 1)
    layout += ", sequence parallel" if settings.layout.shards_sequences else ""
    layout += ", distributed optimizer" if settings.optimizer.shards_state(grid) else ""
    lora = settings.lora
    layout += f", adapters of rank {lora.rank}" if lora is not None else ""
    if isinstance(settings, CriticSettings) and settings.freeze:
        layout += f", frozen: {' and '.join(settings.freeze)}"
    optimizer = settings.optimizer
    sizes = " or ".join(map(str, sorted(set(settings.minibatch_sizes(config.rollout.batch_sequences)))))
    updates = (
        f"{settings.epochs} epochs x {numbers.minibatches_per_step} minibatches of {sizes} = "
        f"{numbers.updates_per_step} per step{f', {numbers.total_updates} in all' if has_steps else ''}; learning rate "
        f"{optimizer.learning_rate:g} {optimizer.schedule}, warm-up "
    )
    if has_steps or optimizer.warmup_updates:
        updates += str(optimizer.warmup(numbers.total_updates))
    else:
        updates += f"{optimizer.warmup_ratio:g} of all updates"
    return [
        (name, f"{layout}, vocabulary padded to {numbers.padded_vocab_size}"),
        (f"{name} updates", updates),
    ]


def _format_algorithm(config: Config) -> str:
    algorithm = config.algorithm
    at = ", by turns" if algorithm.discount_at == "turn" else ""
    parts = [f"{algorithm.estimator} (gamma {algorithm.gamma:g}, lambda {algorithm.lam.summary}{at})"]
    if algorithm.policy_loss == "penalty":
        parts.append(f"adaptive penalty towards {algorithm.penalty.target:g} nats per token")
    else:
        settings = [f"{key} {value:g}" for key, value in algorithm.loss_settings.items()]
        parts.append(f"policy loss {algorithm.policy_loss}" + (f" ({', '.join(settings)})" if settings else ""))
    if algorithm.kl_in_reward is not None:
        kl = algorithm.kl_in_reward
        aim = f" towards {kl.target_nats:g} nats per {kl.per}" if kl.controller == "adaptive" else ""
        parts.append(f"KL in reward {kl.coef:g} ({kl.kind}, {kl.controller}{aim})")
    if algorithm.kl_in_loss is not None:
        parts.append(f"KL in loss {algorithm.kl_in_loss.coef:g} ({algorithm.kl_in_loss.kind})")
    parts.append(f"old logprobs {algorithm.old_logprob}")
    return ", ".join(parts)
