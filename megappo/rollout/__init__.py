"""Generation: the protocol of an engine, its implementations, and rollouts made with it."""

from megappo.rollout.engine import Completion, Engine, GenerateRequest, SamplingParams
from megappo.rollout.sampling import (
    RolloutPlan,
    finish_rollout,
    plan_rollout,
    prompts_of_rank,
    resolve_stop_token_ids,
    sample_seed,
)
from megappo.rollout.transformers_engine import TransformersEngine

__all__ = [
    "Completion",
    "Engine",
    "GenerateRequest",
    "RolloutPlan",
    "SamplingParams",
    "TransformersEngine",
    "finish_rollout",
    "plan_rollout",
    "prompts_of_rank",
    "resolve_stop_token_ids",
    "sample_seed",
]
