"""Rules between sections: each broken rule is the only reported problem, with its remedy."""

from __future__ import annotations

import pytest

from megappo.config import ConfigError, derive, load_config
from tests.support.config import EXPERTS, NO_CRITIC, SHAPE
from tests.support.places import BASE

# Broken rules of a model with experts.
BROKEN_EXPERTS: list[tuple[int, tuple[str, ...], list[str]]] = [
    (3, ("actor.layout.expert_parallel=3",), ["expert_parallel 3 does not divide the 8 experts", "nearest is 2 or 4"]),
    (2, ("actor.layout.expert_parallel=4",), ["expert_parallel 4 does not divide the 2 ranks of", "nearest is 2"]),
    (
        2,
        ("actor.layout={tensor_parallel: 2, sequence_parallel: false}",),
        ["tensor_parallel 2 of the actor model with experts needs sequence_"],
    ),
]
# World size, overrides, and parts of the only problem.
BROKEN: list[tuple[int, tuple[str, ...], list[str]]] = [
    (1, ("critic=null",), ["algorithm.estimator 'gae' needs a critic", "add the section", "grpo, reinforce_plus"]),
    (1, ("algorithm.estimator=grpo",), ["critic is given but", "'grpo'", "critic=null"]),
    (1, ("algorithm.estimator=reinforce_plus_plus",), ["critic is given but", "set algorithm.estimator to gae"]),
    (1, (*NO_CRITIC, "rollout.samples_per_prompt=1"), ["samples_per_prompt is 1", "'grpo'", "set at least 2"]),
    (1, (*NO_CRITIC, "algorithm.lam={actor: 0.9}"),
     ["algorithm.lam differs between actor and critic", "'grpo' uses one lambda", "set one number, or set"]),
    (
        1,
        (*("rollout.dynamic_sampling={}", "rollout.samples_per_prompt=1"),
         *("actor.minibatch_sequences=8", "critic.minibatch_sequences=8")),
        ["dynamic_sampling compares", "at least 2"],
    ),
    (1, ("reward.overlong={buffer_tokens: 70}", "rollout.max_response_tokens=64"),
     ["reward.overlong.buffer_tokens 70 is above rollout.max_response_tokens 64", "lower it"]),
    (1, ("rollout.servers.kind=sglang", "rollout.ahead=1", "algorithm.old_logprob=corrected", "rollout.generation=a:b"),
     ["rollout.generation is given, but rollout.ahead is 1", "set rollout.ahead to 0"]),
    (1, ("rollout.servers.kind=sglang", "rollout.ahead=2", "algorithm.old_logprob=corrected"),
     ["rollout.ahead 2 is above rollout.max_lag 1, its default with", "set max_lag to at least 2, or ahead to 1"]),
    (1, ("algorithm.router_replay=true",), ["router_replay is true, but the actor model has no experts; remove it"]),
    (1, ("critic.router_aux_loss_coef=0.1",), ["critic.router_aux_loss_coef 0.1, but the critic", "set it to 0"]),
    (1, ("reference=null",), ["algorithm.kl_in_reward needs a reference", "add `reference: {}`"]),
    (1, ("reference=null", "algorithm.kl_in_reward=null", "algorithm.kl_in_loss.coef=1"), ["kl_in_loss needs a ref"]),
    (1, ("algorithm.kl_in_reward=null",), ["reference is given but no KL term", "reference=null"]),
    (1, ("data.validation=null",), ["there is no validation data", "add data.validation"]),
    (1, ("checkpoint.keep_best=eval/reward_mean", "checkpoint.every_steps=4"),
     ["no step before the last has both an evaluation (evaluation.every_steps 5)", "every_steps to 5"]),
    (1, ("checkpoint.keep_best=eval/reward_mean", "evaluation=null"),
     ["checkpoint.keep_best is 'eval/reward_mean', but the run has no evaluation; add evaluation"]),
    (1, ("reference.refresh_every_steps=3", "actor.lora={rank: 2, alpha: 4}"), ["actor.lora trains only adapters"]),
    (1, ("run.max_hours=2", "checkpoint=null"), ["run.max_hours 2 stops the run with a checkpoint", "remove one of"]),
    (1, ("critic.warmup_steps=11",), ["critic.warmup_steps 11 is above run.steps 10", "set 10 to train only the"]),
    (1, ("reward={function: model, model_path: nowhere}",), ["reward.model_path 'nowhere' is not a folder"]),
    (2, ("actor.layout.first_rank=2",), ["first_rank 2 is outside the world of 2 ranks", "set at most 1"]),
    (2, ("actor.layout.ranks=3",), ["first_rank 0 + ranks 3 = 3", "actor.layout.ranks to 2", "start 3 processes"]),
    (3, ("actor.layout.tensor_parallel=2",), ["tensor_parallel 2 x pipeline_parallel 1 = 2", "3 ranks", "are 1 x 1"]),
    (4, ("actor.layout.context_parallel=3",), ["context_parallel 3 does not divide its 4 ranks", "nearest is 2 or 4"]),
    (6, ("actor.layout.context_parallel=2", "actor.layout.tensor_parallel=2"),
     ["context_parallel 2 x tensor_parallel 2 x pipeline_parallel 1 = 4", "6 ranks", "layouts are 1 x 1"]),
    (4, ("actor.layout.context_parallel=2", "actor.microbatch_budget_tokens=129", "rollout.max_response_tokens=66"),
     ["actor.microbatch_budget_tokens 129", "set at least 132"]),
    (4, ("critic.layout.pipeline_parallel=3",), ["critic.layout", "does not divide its 4 ranks", "nearest layouts"]),
    (4, ("actor.layout.ranks=2", "critic.layout.ranks=2"), ["ranks 2-3 of the world", "idle", "start 2 processes"]),
    (3, ("actor.layout.first_rank=1", "critic.layout.first_rank=2"), ["rank 0 of the world", "lower its first_rank"]),
    (4, ("actor.layout.tensor_parallel=4",), ["tensor_parallel 4", "2 (KV heads)", "the nearest is 2"]),
    (3, ("actor.layout.tensor_parallel=3",), ["4 (heads) or 2 (KV heads) of the actor", "the nearest is 2"]),
    (4, ("critic.layout.tensor_parallel=4",), ["critic.layout.tensor_parallel 4", "critic model"]),
    (1, ("actor.layout.sequence_parallel=true",), ["sequence_parallel needs tensor_parallel above 1", "to 2"]),
    (1, ("actor.recompute=selective", "actor.recompute_modules=[moe]"),
     ["actor.recompute_modules has moe", "layers of the actor model", "write mlp"]),
    (1, ("critic.recompute=selective", "critic.recompute_modules=[]"), ["critic.recompute is selective", "to none"]),
    (1, ("actor.layout.virtual_pipeline_chunks=2",), ["virtual_pipeline_chunks 2 needs pipeline_parallel above 1"]),
    (8, ("actor.layout.pipeline_parallel=8",), ["8 chunks are more than the 4 layers", "are 4 x 1 or 3 x 1"]),
    (2, ("actor.layout.pipeline_parallel=2", "actor.layout.virtual_pipeline_chunks=3"),
     ["x virtual_pipeline_chunks 3 = 6 chunks", "4 layers", "2 x 2"]),
    (2, ("actor.layout={pipeline_parallel: 2, pipeline_layers: [2, 1, 1]}",),
     ["actor.layout.pipeline_layers [2, 1, 1] has 3 entries", "x virtual_pipeline_chunks 1 = 2 chunks; give 2"]),
    (2, ("critic.layout={pipeline_parallel: 2, virtual_pipeline_chunks: 2, pipeline_layers: [3, 1]}",),
     ["critic.layout.pipeline_layers [3, 1] has 2 entries", "= 4 chunks; give 4, or set it to auto"]),
    (2, ("actor.layout={pipeline_parallel: 2, pipeline_layers: [3, 2]}",),
     ["actor.layout.pipeline_layers [3, 2] has 5 layers, must have the 4 of the actor model"]),
    (2, ("actor.layout.tensor_parallel=2", "model.pad_vocab_to_multiple_of=3"),
     ["pad_vocab_to_multiple_of 3 pads the vocabulary to 99", "nearest is 2 or 4"]),
    (1, ("actor.minibatch_sequences=5",), ["5 does not divide the step's 16 samples", "prompts_per_step 8", "4 or 8"]),
    (1, ("critic.minibatch_sequences=32",), ["critic.minibatch_sequences 32 does not divide", "the nearest is 16"]),
    (8, ("actor.minibatch_sequences=4",), ["4 is below the 8 data parallel replicas", "the nearest is 8"]),
    (1, ("actor.minibatches=17",), ["actor.minibatches 17 leaves 0 of the step's 16 samples", "set at most 16"]),
    (8, ("critic.minibatches=3",), ["critic.minibatches 3 leaves 5 of the step's 16 samples", "set at most 2"]),
    (1, ("actor.optimizer={learning_rate: 1, schedule: wsd, decay_ratio: 0.6, warmup_ratio: 0.5}",),
     ["actor.optimizer.decay_ratio 0.6 starts the decay before the end of the warm-up of 10 of 20 updates"]),
    (1, ("actor.microbatch_budget_tokens=127",), ["actor.microbatch_budget_tokens 127", "set at least 128"]),
    (1, ("critic.microbatch_budget_tokens=127",), ["critic.microbatch_budget_tokens 127", "set at least 128"]),
    (1, ("evaluation.max_response_tokens=200",), ["64 + evaluation.max_response_tokens 200 = 264", "to at most 192"]),
    (1, ("actor.optimizer.warmup_updates=20",), ["warmup_updates 20", "20 updates of the actor", "set at most 19"]),
    (1, ("critic.optimizer.warmup_updates=20",), ["20 updates of the critic", "set at most 19"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("world", "overrides", "fragments"), BROKEN, ids=lambda v: v[-1] if isinstance(v, tuple) else ""
)
def test_broken_rules(world: int, overrides: tuple[str, ...], fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        derive(load_config(BASE, overrides), world, SHAPE)
    matching = [problem for problem in caught.value.problems if all(word in problem for word in fragments)]
    assert len(matching) == 1, caught.value.problems
    others = set(caught.value.problems) - set(matching)
    assert not others or world in (3, 4, 8), others


@pytest.mark.parametrize(
    ("world", "overrides", "fragments"), BROKEN_EXPERTS, ids=lambda v: v[-1] if isinstance(v, tuple) else ""
)
def test_broken_rules_of_experts(world: int, overrides: tuple[str, ...], fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        derive(load_config(BASE, overrides), world, EXPERTS)
    assert [problem for problem in caught.value.problems if all(word in problem for word in fragments)]
