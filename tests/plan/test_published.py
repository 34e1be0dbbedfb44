"""Choices of the planner, published runs, and samples that a run saves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import published_runs
from megappo.config import load_config
from megappo.plan.bytes.memory import RankMemory, rank_memory
from megappo.plan.choices import choices
from megappo.plan.costs import StageCost, step_costs
from megappo.plan.engines import other_engine
from megappo.plan.hardware.machines import MACHINES
from megappo.plan.inputs import Models, make_setup
from megappo.plan.planner import read_models
from megappo.plan.stopping import stopping
from tests.support.configurations import write_short
from tests.support.places import ROOT

OPEN = {
    "rollout.servers.kind": "sglang", "rollout.prompts_per_step": "256", "data.max_prompt_tokens": "1024",
    "rollout.max_response_tokens": "1024", "critic": "{}",
    "actor.optimizer.learning_rate": "1e-06", "actor.minibatches": "4", "actor.microbatch_budget_tokens": "8192",
    "actor.optimizer.distributed": "true",
    "critic.optimizer.learning_rate": "5e-06", "critic.minibatches": "4", "critic.microbatch_budget_tokens": "8192",
    "critic.optimizer.distributed": "true",
}  # fmt: skip


@pytest.fixture
def short(tmp_path: Path) -> Path:
    return write_short(tmp_path)


def chosen(path: Path, *overrides: str, ranks: int = 8, on_cuda: bool = True) -> dict[str, str]:
    return {choice.setting: choice.value for choice in choices(load_config(path, overrides), ranks, on_cuda=on_cuda)}


def test_all_open_settings_are_listed(short: Path) -> None:
    assert chosen(short) == OPEN
    on_one = {key: value for key, value in OPEN.items() if not key.endswith(("distributed", "kind"))}
    assert chosen(short, ranks=1, on_cuda=False) == on_one | {"rollout.engine": "transformers"}
    raised = chosen(short, "rollout.max_response_tokens=9000", "actor.layout.tensor_parallel=2")
    assert raised["actor.microbatch_budget_tokens"] == raised["critic.microbatch_budget_tokens"] == "10240"
    assert raised["actor.layout.sequence_parallel"] == "true" and "critic.layout.sequence_parallel" not in raised


def test_chosen_values_can_be_set_explicitly(short: Path) -> None:
    """Each chosen value gives the same settings as an override, and is then no longer listed."""
    long = "rollout.max_response_tokens=9000"
    overrides = [f"{key}={value}" for key, value in chosen(short, long).items()]
    assert chosen(short, long, *overrides) == {}
    explicit, default = load_config(short, [long, *overrides]), load_config(short, [long])
    for name, role in default.trained.items():
        shares = role.optimizer.model_copy(update={"distributed": True})
        assert explicit.trained[name] == role.model_copy(update={"minibatches": 4, "optimizer": shares})


def test_plan_command_explains_choices(short: Path, output_of: Callable[..., str]) -> None:
    command = ["plan", str(short), "--machine", "h100", "--gpus", "8", "actor.layout.tensor_parallel=2"]
    lines = output_of(*command).splitlines()
    choices_text = lines[lines.index("chosen for settings that the configuration omits:") + 1 :]
    message = "  actor.layout.sequence_parallel=true: 2 ranks share the activations between tensor parallel regions"
    assert message in choices_text
    message = "  actor.optimizer.distributed=true: 4 ranks have the same weights and share the optimizer's state"
    assert message in choices_text
    assert "  critic={}: algorithm.estimator gae needs one" in choices_text
    assert len(choices_text) == len(OPEN) + 1
    content = json.loads(output_of(*command, "--json"))["choices"]
    assert [f"  {c['setting']}={c['value']}: {c['why']}" for c in content] == choices_text


RESULT = ROOT / "benchmarks" / "results" / "2026-11-21-plan-published.md"


def test_table_is_current() -> None:
    shown = [line for line in RESULT.read_text().splitlines() if line.startswith("|")]
    assert shown == list(published_runs.table())


def test_documents_match_the_table() -> None:
    """The documents contain the least and the greatest ratio of planned to published seconds."""
    ratios = [float(line.split("|")[-2]) for line in list(published_runs.table())[2:]]
    for document in (ROOT / "megappo" / "plan" / "README.md", ROOT / "benchmarks" / "README.md"):
        assert f"{min(ratios)} to {max(ratios)} times" in document.read_text(), document


@pytest.mark.parametrize("run", published_runs.RUNS, ids=lambda r: r.name)
def test_predictions_are_within_a_factor_of_two(run: published_runs.Published) -> None:
    plan = published_runs.plan_of(run)
    assert 0.5 < plan.step_seconds / run.step_seconds < 2
    assert (plan.gpus, plan.gpus + plan.server_gpus) == (run.trainers, run.gpus)
    assert 90 < run.prompt_tokens < 150  # all runs use the same data set


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
