"""Rules for models with experts: layouts and replay of the engine's routing."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.config.rules.role_spec import RoleSpec
from megappo.config.schema import Config
from megappo.errors import divisors, nearest_numbers
from megappo.families.architecture import ModelShape


def layout_rules(role: RoleSpec, model_name: str) -> Iterator[str]:
    """Check the layout of a model with experts. Ranks must divide the experts evenly, and each rank must route its own
    tokens."""
    layout, experts, key = role.layout, role.shape.experts, f"{role.name}.layout"
    ep = layout.expert_parallel
    if ep > 1 and not experts:
        yield f"{key}.expert_parallel {ep}, but the {model_name} model has no experts; set it to 1"
    elif experts % ep:
        nearest = nearest_numbers(ep, divisors(experts))
        yield (
            f"{key}.expert_parallel {ep} does not divide the {experts} experts of the {model_name} model; "
            f"the nearest is {nearest}"
        )
    weight = role.settings.router_aux_loss_coef
    if weight and not experts and model_name == role.name:
        yield f"{role.name}.router_aux_loss_coef {weight:g}, but the {model_name} model has no experts; set it to 0"
    if experts and layout.tensor_parallel > 1 and not layout.shards_sequences:
        yield (
            f"{key}.tensor_parallel {layout.tensor_parallel} of the {model_name} model with experts needs "
            "sequence_parallel, so that each rank routes its own tokens; remove sequence_parallel: false"
        )


def replay_rules(config: Config, shape: ModelShape) -> Iterator[str]:
    """Check that the actor has experts and that the engine reports them if routing is replayed."""
    rollout = config.rollout
    if config.algorithm.router_replay and not shape.experts:
        yield "algorithm.router_replay is true, but the actor model has no experts; remove it"
    elif config.algorithm.router_replay and rollout.is_custom and not rollout.capabilities.routing:
        yield (
            f"algorithm.router_replay is true, but the engine '{rollout.engine_name}' does not report which experts "
            "computed a token; remove the setting, or set `routing` in its capabilities"
        )
