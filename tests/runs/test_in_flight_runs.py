"""Runs with prompts that are always in flight: training, and resumes after kills and stops."""

from __future__ import annotations

from pathlib import Path

import pytest

from megappo.observe.metric_docs import documented
from megappo.observe.metrics import read_metrics
from tests.support.attempts import assert_same_run, attempts, killed_at, timeless, train
from tests.support.config import TWO_TURNS
from tests.support.harness import succeed
from tests.support.in_flight import numbers_by_seed

pytestmark = [pytest.mark.slow, pytest.mark.waits]

ENGINE = ("rollout.engine=tests.support.ticking:TickingEngine", "algorithm.old_logprob=corrected")
TWO = (*ENGINE, "rollout.ahead=2", "rollout.max_lag=3")
SHORT = ("run.steps=6", "checkpoint.every_steps=1", "checkpoint.keep_last=9")
SELECTED = ("rollout.dynamic_sampling={max_rounds: 2}", "data.curriculum={right_above: -1}")
HALF_AS_FAST = ["actor.optimizer.learning_rate=5.0e-4", "critic.optimizer.learning_rate=1.0e-3"]
FOUR = ("rollout.ahead=4", "rollout.max_lag=4")


def replayed(run: Path) -> tuple[str, ...]:
    """Return settings that train on the recorded arrivals of a run. The engine answers only evaluations."""
    return ("rollout.engine=transformers", *TWO[1:], f"rollout.replay_arrivals={run / 'arrivals'}")


def assert_replayed(recorded: Path, again: Path) -> None:
    """Check that metrics, weights and texts are bitwise equal."""
    assert timeless(recorded / "metrics.jsonl") == timeless(again / "metrics.jsonl")
    for name in ("final/model.safetensors", "samples.jsonl"):
        assert (recorded / name).read_bytes() == (again / name).read_bytes()


def test_recorded_and_killed_runs_repeat_exactly(tmp_path: Path) -> None:
    """The engine returns the same answers at the same times, so a killed run equals an uninterrupted run. The kills
    follow the sampling of a step with several rounds, and precede answers under new weights. The record of a run
    trains a run without this engine to the same bits, also after a kill, and on one rank."""
    killed, again, alone = (tmp_path / name for name in ("killed", "again", "alone"))
    recorded = (*TWO, *SHORT, *SELECTED, "rollout.record_arrivals=true")
    one = ("actor.layout={}", "critic.layout={}", "run.steps=3")
    attempts(
        tmp_path, train(tmp_path / "whole", *TWO, *SHORT, *SELECTED),
        killed_at(killed, 4, "update_actor", 1, *recorded), killed_at(killed, 5, "sync", 0, *recorded),
        train(killed, *recorded), train(alone, *recorded, *one, processes=1),
        killed_at(again, 3, "update_actor", 1, *SHORT, *SELECTED, *replayed(killed)),
        train(again, *SHORT, *SELECTED, *replayed(killed)),
        train(tmp_path / "alone_again", *SHORT, *SELECTED, *replayed(alone), *one, processes=1),
    )  # fmt: skip
    assert_same_run(tmp_path / "whole", killed, 6)
    assert_replayed(killed, again)
    assert_replayed(alone, tmp_path / "alone_again")
    lines = read_metrics(killed / "metrics.jsonl")[1:]
    assert {name for line in lines for name in line if documented(name) is None} == {"step"}
    assert all(line["rollout/lag_max"] <= 3 and line["rollout/dropped"] == 0 for line in lines)
    assert max(line["rollout/lag_max"] for line in lines) > 1
    assert any(line["rollout/partial"] > 0 for line in lines)
    assert any(0 < line["rollout/several_versions"] < 1 for line in lines)
    assert any(line["group/rounds"] > 1 and line["group/spread"] > 0 for line in lines)
    assert any(line["curriculum/resting"] > 0 for line in lines)


ROUNDS = (*ENGINE, "run.steps=4", "checkpoint.every_steps=1", "rollout.dynamic_sampling={}", "reward.function=exact",
          "evaluation=null", "data.validation=null")  # fmt: skip


@pytest.mark.parametrize("ahead", [0, 1])
def test_later_rounds_sample_with_the_first_weights(tmp_path: Path, ahead: int) -> None:
    """Most steps need several rounds. After the first round of a step with older weights of the
    actor, the run is killed. The resumed run samples the second round with the same weights and equals an
    uninterrupted run."""
    settings = (*ROUNDS, f"rollout.ahead={ahead}")
    killed = tmp_path / "killed"
    attempts(
        tmp_path,
        train(tmp_path / "whole", *settings),
        killed_at(killed, 3, "update_actor", 1, *settings, after_checkpoint=2),
        killed_at(killed, 4, "reward", 0, *settings, after_checkpoint=3),
        train(killed, *settings),
    )
    assert_same_run(tmp_path / "whole", killed, 4)
    lines = read_metrics(killed / "metrics.jsonl")[-4:]
    assert [line["rollout/lag"] for line in lines] == [0, *[ahead] * 3]
    assert all(line["group/rounds"] > 1 for line in lines[2:])


@pytest.mark.parametrize(
    ("before", "after"),
    [((), ("actor.layout={pipeline_parallel: 2}",)), (("rollout.dynamic_sampling=null",), ())],
    ids=["layout", "rounds"],
)
def test_rounds_without_older_weights_record_their_version(
    tmp_path: Path, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    """The older weights cannot be restored on another layout, and a checkpoint of a run with one round per step does
    not contain them. Later rounds then sample with the current weights of the actor."""
    settings, run = (*ROUNDS, "rollout.ahead=1"), tmp_path / "run"
    attempts(
        tmp_path,
        killed_at(run, 3, "update_actor", 1, *settings, *before, after_checkpoint=2),
        train(run, *settings, *after),
    )
    line = next(line for line in read_metrics(run / "metrics.jsonl") if line["step"] == 3)
    assert line["group/rounds"] > 1 and 0 < line["rollout/lag"] < 1
    assert line["mismatch/own_weights"] < 1e-4 < line["mismatch/mean"]


def test_stopped_run_keeps_finished_samples(tmp_path: Path) -> None:
    """A run with `rollout.ahead=1` is killed. It continues with prompts in flight, is stopped, and continues on one
    rank. The first run has finished the samples of the second step. Every sample after the second step is finished
    exactly once, and the steps train on all finished samples."""
    run, log = tmp_path / "stopped", tmp_path / "finished"
    settings = (*TWO, *SHORT, f"rollout.engine_options={{log: {log}}}")
    stop = {"rank": 1, "step": 3, "at": "rollout", "signal": "SIGUSR1"}
    output = attempts(
        tmp_path,
        killed_at(run, 2, "update_actor", 0, *ENGINE, "rollout.ahead=1", *SHORT),
        train(run, *settings, expect="85", kill=stop),
        train(run, *settings, "actor.layout={}", "critic.layout={}", processes=1),
    )
    assert "stopped after step 2 with a checkpoint" in " ".join(output.split())
    seeds = [int(line) for rank in (0, 1) for line in Path(f"{log}-{rank}").read_text().splitlines()]
    numbers = numbers_by_seed(run_seed=1, samples=60 * 8)
    probes = 2 + 1  # one request per rank in each resumed run
    assert len(seeds) == sum(seed in numbers for seed in seeds) + probes
    finished = [numbers[seed] for seed in seeds if seed in numbers]
    assert sorted(finished) == list(range(2 * 10 * 8, 6 * 10 * 8))
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(7))
    assert sum(line["rollout/dropped"] for line in lines[2:]) == 0


def test_kills_and_stops_with_episodes_in_flight(tmp_path: Path) -> None:
    """A resumed run keeps the finished episodes, restarts the others, and trains on complete steps."""
    run = tmp_path / "run"
    settings = (
        "rollout.engine=tests.support.talking:TalkingEngine", "algorithm.old_logprob=corrected", "rollout.ahead=2",
        "rollout.max_lag=2", "run.steps=4", "checkpoint.every_steps=1", *TWO_TURNS, "data.validation=null",
        "evaluation=null",
    )  # fmt: skip
    stop = {"rank": 1, "step": 3, "at": "update_actor", "signal": "SIGTERM"}
    attempts(
        tmp_path,
        killed_at(run, 2, "update_critic", 0, *settings),
        train(run, *settings, expect="85", kill=stop),
        train(run, *settings),
    )
    lines = read_metrics(run / "metrics.jsonl")[-4:]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line["rollout/lag_max"] <= 2 and line["rollout/dropped"] == 0
        assert line["episode/turns"] == 2 and line["episode/failures"] == 0
    assert lines[0]["episode/begun_anew"] == 0 and any(line["rollout/lag"] > 0 for line in lines)


@pytest.mark.parametrize(
    ("steps", "reward", "rates"),
    [
        pytest.param(40, 0.35, [*HALF_AS_FAST, "actor.optimizer.schedule=constant"], marks=pytest.mark.exhaustive),
        pytest.param(200, 0.95, HALF_AS_FAST, marks=pytest.mark.learning),
    ],
)
def test_learning_four_steps_behind(tmp_path: Path, steps: int, reward: float, rates: list[str]) -> None:
    """The quickstart learns its task with half of its learning rates and answers that are up to four syncs old. The
    final reward is close to that of a synchronous run with the same settings; the short case requires a part of this
    progress."""
    arguments = ["train", "configs/quickstart.yaml", f"run.directory={tmp_path / 'run'}", *ENGINE, *FOUR]
    arguments += [f"run.steps={steps}", *rates]
    succeed("megappo", *arguments, processes=2, timeout_seconds=590)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert max(line["rollout/lag_max"] for line in lines[1:]) == 4
    assert sum(line["rollout/lag"] for line in lines[1:]) / len(lines[1:]) > 1
    assert sum(line["reward/mean"] for line in lines[-5:]) / 5 > reward
