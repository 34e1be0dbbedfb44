"""Rules for a role's minibatches, and for learning rate schedules, which depend on the number of minibatches."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.config.rules.role_spec import RoleSpec
from megappo.config.schema import Config
from megappo.errors import divisors, nearest_numbers


def batch_rules(config: Config, role: RoleSpec, world_size: int) -> Iterator[str]:
    """Check that a role's minibatches and microbatches fit the samples of a step."""
    batch, grid = config.rollout.batch_sequences, role.layout.grid(world_size)
    dp = grid.dp
    size, key = role.settings.minibatch_sequences, f"{role.name}.minibatch_sequences"
    valid = [d for d in divisors(batch) if d >= dp]
    nearest = f"the nearest is {nearest_numbers(size or 0, valid)}" if valid else "raise rollout.prompts_per_step"
    if size is None:
        yield from _count_rules(role, batch, dp)
    elif size < dp:
        yield f"{key} {size} is below the {dp} data parallel replicas, which each need a sample; {nearest}"
    elif batch % size:
        yield (
            f"{key} {size} does not divide the step's {batch} samples (rollout.prompts_per_step "
            f"{config.rollout.prompts_per_step} x samples_per_prompt {config.rollout.samples_per_prompt}); {nearest}, "
            f"or set {role.name}.minibatches"
        )
    longest = grid.padded(config.max_sequence_tokens)
    if role.settings.microbatch_budget_tokens < longest:
        yield (
            f"{role.name}.microbatch_budget_tokens {role.settings.microbatch_budget_tokens} is below the longest "
            f"sample (data.max_prompt_tokens {config.data.max_prompt_tokens} + rollout.max_response_tokens "
            f"{config.rollout.max_response_tokens}); set at least {longest}"
        )


def _count_rules(role: RoleSpec, batch: int, dp: int) -> Iterator[str]:
    """Check that `minibatches` gives each data parallel replica at least one sample per minibatch."""
    count = role.settings.minibatch_count(batch)
    if batch // count < dp:
        remedy = f"set at most {batch // dp}" if batch >= dp else "raise rollout.prompts_per_step"
        yield (
            f"{role.name}.minibatches {count} leaves {batch // count} of the step's {batch} samples per minibatch, but "
            f"each of the {dp} data parallel replicas needs a sample; {remedy}"
        )


def warmup_rules(role: RoleSpec, total_updates: int) -> Iterator[str]:
    """Check that the learning rate reaches its peak before the decay begins."""
    settings = role.settings.optimizer
    warmup, key = settings.warmup_updates, f"{role.name}.optimizer"
    if warmup and warmup >= total_updates:
        yield (
            f"{key}.warmup_updates {warmup} must be below the run's {total_updates} updates of the {role.name}; set at "
            f"most {max(0, total_updates - 1)}"
        )
    elif settings.schedule == "wsd" and settings.warmup(total_updates) + settings.decay(total_updates) > total_updates:
        yield (
            f"{key}.decay_ratio {settings.decay_ratio:g} starts the decay before the end of the warm-up of "
            f"{settings.warmup(total_updates)} of {total_updates} updates; lower decay_ratio or warmup_updates"
        )
