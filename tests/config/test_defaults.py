"""Defaults of settings, and explicit settings that do not change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megappo.config import Config, ConfigError, derive_run, load_config
from megappo.config.algorithm import AlgorithmSettings
from megappo.config.derive import describe
from megappo.config.environment import ToolSettings
from megappo.config.schema import RewardSettings
from megappo.observe.metrics import read_metrics
from megappo.plan.inputs import make_setup
from megappo.plan.machines import MACHINES
from megappo.plan.planner import make_plan, read_models
from megappo.rewards.workers import worker_count
from tests.support.configurations import write_short
from tests.support.harness import start
from tests.support.places import TINY


@pytest.fixture
def short(tmp_path: Path) -> Path:
    return write_short(tmp_path)


def rates(config: Config) -> list[float]:
    return [role.optimizer.learning_rate for role in config.trained.values()]


def test_defaults_of_a_short_file(short: Path) -> None:
    config = load_config(short)
    assert config.run.path == Path("runs/first_try") and rates(config) == [1e-6, 5e-6]
    assert config.max_sequence_tokens == 2048 and config.rollout.batch_sequences == 256
    derived = derive_run(config, 8)
    assert derived.critic is not None
    assert [role.updates_per_step for role in (derived.actor, derived.critic)] == [4, 4]
    assert config.actor.minibatch_sizes(256) == [64] * 4 and config.actor.minibatch_sizes(3) == [1, 1, 1]


@pytest.mark.parametrize(
    ("machine", "ranks", "engine"), [("h100", 8, "sglang"), ("h100", 1, "sglang"), ("cpu", 1, "transformers")]
)
def test_plan_of_a_short_file_fits(short: Path, machine: str, ranks: int, engine: str) -> None:
    """The engine is the default engine of the machine."""
    config = load_config(short, [f"rollout.engine={engine}"])
    plan = make_plan(config, read_models(config, None).models, MACHINES[machine], ranks)
    assert plan.fits, plan.verdict


def test_explicit_settings_do_not_change(short: Path) -> None:
    overrides = [
        "run.name=own", "actor.optimizer={schedule: linear, learning_rate: 3e-7}", "critic.optimizer.schedule=cosine",
        "actor.minibatch_sequences=128", "critic.minibatches=1", "rollout.prompts_per_step=128",
    ]  # fmt: skip
    config = load_config(short, overrides)
    assert config.run.name == "own" and rates(config) == [3e-7, 5e-6]
    assert config.critic is not None
    sizes = [role.minibatch_sizes(config.rollout.batch_sequences) for role in config.trained.values()]
    assert sizes == [[128], [128]]
    with pytest.raises(ConfigError, match="'gae' needs a critic; add the section critic"):
        derive_run(load_config(short, ["critic=null"]), 1)
    alone = load_config(short, ["algorithm.estimator=grpo", "rollout.samples_per_prompt=4"])
    assert alone.critic is None
    derive_run(alone, 1)


@pytest.mark.parametrize(
    ("ranks", "overrides", "shards_sequences", "shards_state"),
    [
        (1, [], False, False),
        (2, [], False, True),
        (2, ["layout.tensor_parallel=2"], True, False),
        (4, ["layout.tensor_parallel=2"], True, True),
        (2, ["layout.context_parallel=2"], False, True),
        (2, ["layout.pipeline_parallel=2"], False, False),
        (4, ["layout={tensor_parallel: 2, sequence_parallel: false}", "optimizer.distributed=false"], False, False),
        (1, ["optimizer.distributed=true"], False, True),
    ],
)
def test_ranks_with_the_same_state_shard_it(
    short: Path, ranks: int, overrides: list[str], shards_sequences: bool, shards_state: bool
) -> None:
    """Tensor parallel ranks shard the activations between their regions. Replicas and context parallel ranks shard the
    state of the optimizer. The plan and the table before a run report both."""
    config = load_config(short, [f"{role}.{word}" for role in ("actor", "critic") for word in overrides])
    derived = derive_run(config, ranks)
    rows = dict(describe(config, derived))
    setup = make_setup(config, read_models(config, None).models, ranks, on_cuda=True)
    for name, role in (("actor", setup.actor), ("critic", setup.critic)):
        assert role is not None
        assert (role.sequence_parallel, role.distributed_optimizer) == (shards_sequences, shards_state)
        assert (role.gathers_in_forward, "sequence parallel" in rows[name]) == (shards_state, shards_sequences)
        assert ("distributed optimizer" in rows[name]) == shards_state


def test_default_microbatch_has_room_for_the_longest_sample(short: Path) -> None:
    """An explicit budget without room for the longest sample is refused."""
    long = "rollout.max_response_tokens=16000"
    config = load_config(short, [long])
    assert [role.microbatch_budget_tokens for role in config.trained.values()] == [17408, 17408]
    derive_run(config, 4)
    for overrides in (["actor.layout={tensor_parallel: 2, context_parallel: 2}"], ["critic={}"]):
        derive_run(load_config(short, [long, *overrides]), 4)
    assert load_config(short).actor.microbatch_budget_tokens == 8192
    with pytest.raises(ConfigError, match=r"critic.microbatch_budget_tokens 8192 is below the longest sample"):
        derive_run(load_config(short, [long, "critic.microbatch_budget_tokens=8192"]), 4)
    for wrong in ("rollout.max_response_tokens=long", "data={}", "actor=3", "critic=[]"):
        with pytest.raises(ConfigError):
            load_config(short, [wrong])


@pytest.mark.parametrize(
    ("cores", "ranks", "settings", "workers"),
    [
        (2, 1, {}, 1), (2, 2, {}, 1), (16, 1, {}, 8), (16, 4, {}, 2), (192, 8, {}, 8), (1, 1, {}, 1),
        (192, 8, {"batch": True}, 1), (2, 2, {"workers": 5}, 5),
    ],
)  # fmt: skip
def test_reward_workers_follow_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, settings: dict[str, object], workers: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(cores)))
    reward = RewardSettings.model_validate({"function": "exact", **settings})
    launched = {"WORLD_SIZE": str(ranks), "RANK": "0", "LOCAL_WORLD_SIZE": str(ranks)}
    assert worker_count(reward, launched if ranks > 1 else {}) == workers


@pytest.mark.slow
@pytest.mark.waits
def test_short_file_trains(short: Path) -> None:
    """The tokenizer of the tiny model has no chat template, and the model has a short context."""
    write_short(short.parent, f"{TINY}, init: random")
    overrides = ["data.apply_chat_template=false", "data.max_prompt_tokens=8", "rollout.max_response_tokens=3"]
    done = start("megappo", "train", short, f"run.directory={short.parent / 'run'}", *overrides, processes=1)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    lines = read_metrics(short.parent / "run" / "metrics.jsonl")[-2:]
    assert [(line["step"], line["actor/updates"], line["critic/updates"]) for line in lines] == [(1, 4, 4), (2, 4, 4)]


@pytest.mark.parametrize(
    ("loss", "band", "edges"),
    [
        ("cispo", None, (1.0, 4.0)),
        ("cispo", {"low": 0.25}, (0.25, 4.0)),
        ("cispo", {"high": 2.5}, (1.0, 2.5)),
        ("gspo", {"low": 0.25, "high": 2.5}, (0.25, 2.5)),
        ("clip", None, None),
    ],
)
def test_missing_edge_of_the_band_is_the_loss_default(
    loss: str, band: dict[str, float] | None, edges: tuple[float, float] | None
) -> None:
    assert AlgorithmSettings.model_validate({"policy_loss": loss, "band": band}).band_edges == edges


def test_model_programs_are_confined_by_default() -> None:
    assert ToolSettings().confined and ToolSettings(workers=1).confined and not ToolSettings(confined=False).confined
