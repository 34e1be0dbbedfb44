"""A resumed run removes records of the steps that it repeats, with recording on or off."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megappo.config import load_config
from megappo.config.rules.arrivals import read_index
from megappo.config.rules.experience import saved_steps
from megappo.observe.metrics import MetricsLog
from megappo.ppo.later_steps import forget_after
from tests.support.places import BASE
from tests.support.saved import save_step, two_samples

pytestmark = pytest.mark.usefixtures("world_of_one")


def parts(run: Path, *overrides: str, steps: int = 9) -> Any:
    config = load_config(BASE, [f"run.directory={run}", *overrides])
    runtime = SimpleNamespace(is_main=True, rank=0, world_size=1)
    return SimpleNamespace(config=config, runtime=runtime, derived=SimpleNamespace(steps=steps))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with arrivals and experience of steps 1 to 4. Step 3 was trained twice."""
    run, arrivals = tmp_path / "run", tmp_path / "run" / "arrivals"
    for step in range(1, 5):
        save_step(run / "experience", step, two_samples(0))
        (arrivals / f"step-{step:06d}").mkdir(parents=True)
    lines = [json.dumps({"step": step, "metrics": {"x": step}}) for step in (1, 2, 3, 3, 4)]
    (arrivals / "steps.jsonl").write_text("\n".join([*lines, '{"step": 5, "cut']))
    return run


def recorded(run: Path) -> tuple[list[int], list[str], list[int]]:
    """The steps in the index of arrivals, the names of the folders of arrivals, and the steps with experience."""
    folders = sorted(path.name for path in (run / "arrivals").glob("step-*"))
    return list(read_index(run / "arrivals")), folders, list(saved_steps(run / "experience"))


@pytest.mark.parametrize("overrides", [(), ("rollout.ahead=1",), ("logging.save_experience={}",)])
def test_later_steps_are_dropped_with_recording_off(run: Path, overrides: tuple[str, ...]) -> None:
    if overrides and "experience" in overrides[0]:
        for path in (run / "experience").glob("*/step.json"):
            path.write_text(path.read_text().replace("/runs/a", str(run)))
    forget_after(2, parts(run, *overrides))
    assert recorded(run) == ([1, 2], ["step-000001", "step-000002"], [1, 2])
    forget_after(0, parts(run, *overrides))
    assert recorded(run) == ([], [], [])


def test_records_that_the_run_reads_remain(run: Path, tmp_path: Path) -> None:
    before = recorded(run)
    forget_after(2, parts(run, steps=2))
    assert recorded(run) == before == ([1, 2, 3, 4], [f"step-{n:06d}" for n in range(1, 5)], [1, 2, 3, 4])
    reads = (f"rollout.load_from={run / 'experience'}", f"rollout.replay_arrivals={run / 'arrivals'}")
    forget_after(2, parts(run, *reads))
    assert recorded(run) == before
    with pytest.raises(ValueError, match="has experience of /runs/a; set a different folder"):
        forget_after(2, parts(tmp_path / "other", f"rollout.save_to={run / 'experience'}"))
    assert recorded(run) == before


def test_tensorboard_events_of_later_steps_are_ignored_with_tensorboard_off(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path, "r", {})
    for step in range(1, 5):
        log.log(step, {"reward/mean": 0.25})
    log.close()
    log = MetricsLog(tmp_path, "r", {}, tensorboard=False)
    log.truncate_after(2)
    log.log(3, {"reward/mean": 0.5})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.25)]
