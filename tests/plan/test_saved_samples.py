"""Plans of training on saved samples, without generation. Value pretraining trains only the critic."""

from __future__ import annotations

import pytest

from megappo.config import load_config
from megappo.plan.costs import StageCost, step_costs
from megappo.plan.engines import other_engine
from megappo.plan.inputs import Models, make_setup
from megappo.plan.machines import MACHINES
from megappo.plan.memory import RankMemory, rank_memory
from megappo.plan.planner import read_models
from megappo.plan.stopping import stopping
from tests.support.places import ROOT

CONFIG = ROOT / "configs" / "qwen3_8b_8gpu_math.yaml"
MACHINE = MACHINES["h100"]
LOADED = ("rollout.load_from=saved", "evaluation=null", "actor.offload=false", "critic.offload=false")


@pytest.fixture(scope="module")
def models() -> Models:
    return read_models(load_config(CONFIG), ROOT / "configs" / "models").models


def planned(models: Models, *overrides: str) -> tuple[RankMemory, dict[str, StageCost], float]:
    """Return the memory of the single kind of rank, the costs of stages, and the bytes of a checkpoint."""
    config = load_config(CONFIG, ["rollout.engine=transformers", *overrides])
    share = MACHINE.per_rank(8)
    setup = make_setup(config, models, 8, on_cuda=True, device_bytes=share.memory_bytes)
    (ranks,), stages = rank_memory(setup), step_costs(setup, share)
    stop = stopping(setup, stages, share, 1.0)
    return ranks, {stage.name: stage for stage in stages}, stop.checkpoint_bytes


def test_saved_samples_need_no_engine(models: Models) -> None:
    """Trainers need the same memory and time. The engine and its weight sync need none."""
    with_engine, stages, checkpoint = planned(models, *LOADED[1:])
    loaded, left, same = planned(models, *LOADED)
    assert with_engine.engine.total > 0 and with_engine.sync > 0 and stages["rollout"].seconds > 0
    assert (loaded.engine.total, loaded.engine.idle, loaded.sync) == (0, 0, 0)
    assert loaded.roles == with_engine.roles and same == checkpoint
    resting = sum(role.at_rest for role in loaded.roles)
    assert loaded.stages["rollout"] == loaded.stages["sync"] == resting
    for name in ("forward", "update_critic", "update_actor"):
        assert left[name] == stages[name]
        assert loaded.stages[name] == pytest.approx(with_engine.stages[name] - with_engine.engine.idle)
    assert (left["rollout"].seconds, left["sync"].seconds) == (0, 0)
    config = load_config(CONFIG, list(LOADED))
    other = other_engine(config, models, MACHINE, 8)
    assert other.overrides == () and other.sentence == "no engine is needed: samples are loaded from saved"


def test_value_pretraining_trains_only_the_critic(models: Models) -> None:
    """The actor has its weights and computes nothing. There is no reference."""
    both, stages, of_both = planned(models, *LOADED)
    alone, left, of_critic = planned(models, *LOADED, "critic.pretraining={}")
    before, after = ({role.role: role for role in ranks.roles} for ranks in (both, alone))
    assert before.keys() == {"actor", "critic", "reference"} and after.keys() == {"actor", "critic"}
    assert after["critic"] == before["critic"]
    actor = after["actor"]
    assert (actor.weights, actor.parameters) == (before["actor"].weights, before["actor"].parameters)
    assert (actor.gradients, actor.optimizer, actor.update, actor.scoring) == (0, 0, 0, 0)
    assert "update_actor" not in left and "update_actor" not in alone.stages
    assert left["update_critic"] == stages["update_critic"] and 0 < left["forward"].seconds < stages["forward"].seconds
    assert alone.stages["forward"] == pytest.approx(sum(r.at_rest for r in alone.roles) + after["critic"].scoring)
    assert 0.4 * of_both < of_critic < 0.6 * of_both
