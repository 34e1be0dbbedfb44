"""Resumed runs: moved files, removed records of repeated steps, and responses of another number of ranks."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megappo.checkpoint.changes import Changes, compare_settings
from megappo.checkpoint.files import Marker
from megappo.config import Config, load_config
from megappo.config.rules.arrivals import read_index
from megappo.engines.protocol import Completion
from megappo.errors import ConfigError
from megappo.observe.metrics import MetricsLog
from megappo.observe.saved_samples import saved_steps
from megappo.ppo.records import checkpoints
from megappo.ppo.records.checkpoints import Boundary
from megappo.ppo.records.later_steps import forget_after
from megappo.ppo.rollout.in_flight_state import KEY, State, read_state, written_state
from megappo.ppo.rollout.tickets import Group
from megappo.ppo.training_run import TrainingRun
from tests.ppo.test_experience import resumed
from tests.support.events import scalars
from tests.support.places import BASE
from tests.support.saved import save_step, two_samples

pytestmark = pytest.mark.usefixtures("world_of_one")


CODE = "def score(*, response):\n    return 1.0\n"
FUNCTIONS = (
    "reward.function", "algorithm.estimator", "algorithm.policy_loss", "rollout.generation", "data.train.source",
    "rollout.environment.name",
)  # fmt: skip


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The folder of an experiment: a configuration and a file with functions."""
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "mine.py").write_text(CODE)
    shutil.copy(BASE, folder / "run.yaml")
    return folder


def config_in(folder: Path, key: str, *overrides: str) -> Config:
    own = ["reference=null", "algorithm.kl_in_reward=null", f"{key}=mine.py:score"]
    return load_config(folder / "run.yaml", [*own, *overrides])


def sentences_of(before: Config, now: Config, monkeypatch: pytest.MonkeyPatch, code: str | None = CODE) -> list[str]:
    """Messages on changes from a run that continues with `now`; `code` is the content of the file at the checkpoint."""
    (path,) = (value for value in _texts(before.model_dump(mode="json")) if value.endswith("mine.py:score"))
    digest = {} if code is None else {path.rpartition(":")[0]: hashlib.sha256(code.encode()).hexdigest()}
    return [s for s in resumed(before, now, monkeypatch, more={"own_files": digest}).sentences if "changed" in s]


def _texts(settings: object) -> list[str]:
    inner = settings.values() if isinstance(settings, dict) else settings if isinstance(settings, list) else ()
    return [settings] if isinstance(settings, str) else [text for value in inner for text in _texts(value)]


@pytest.mark.parametrize("key", FUNCTIONS)
def test_a_run_continues_in_a_moved_folder(key: str, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = config_in(old, key)
    new = old.rename(old.with_name("new"))
    now = config_in(new, key)
    assert str(new / "mine.py") in str(now.model_dump())
    assert sentences_of(before, now, monkeypatch) == []
    assert sentences_of(before, now, monkeypatch, code=None) == []  # a checkpoint of an older version
    (new / "mine.py").write_text("def score(*, response):\n    return 2.0\n")
    changed = [f"changed since then: the content of {new / 'mine.py'}"]
    assert sentences_of(before, now, monkeypatch) == changed


def test_a_copied_file_is_accepted_and_an_edited_file_is_refused(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = config_in(old, "reward.function")
    new = Path(shutil.copytree(old, old.with_name("new")))
    assert sentences_of(before, config_in(new, "reward.function"), monkeypatch) == []
    (new / "mine.py").write_text("def score(*, response):\n    return 2.0\n")
    message = r"other settings \(reward\.function: '.*/old/mine\.py:score' -> '.*/new/mine\.py:score'"
    with pytest.raises(ConfigError, match=message):
        sentences_of(before, config_in(new, "reward.function"), monkeypatch)


def test_a_renamed_file_is_accepted_and_another_function_is_refused(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = config_in(old, "reward.function")
    (old / "mine.py").rename(old / "yours.py")
    renamed = config_in(old, "reward.function", "reward.function=yours.py:score")
    assert sentences_of(before, renamed, monkeypatch) == []
    with pytest.raises(ConfigError, match="other settings"):
        other = config_in(old, "reward.function", "reward.function=yours.py:other")
        sentences_of(before, other, monkeypatch)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("reward.function=mne.py:score", "reward.function 'mne.py:score': there is no file .*/mne.py; create it, or"),
        ("algorithm.estimator=mne.py:score", "algorithm.estimator 'mne.py:score': there is no file"),
        ("data.train.source=trian.jsonl", "data source 'trian.jsonl' does not exist"),
        ("data.train.source=trian-*.parquet", "no file has a name like 'trian-\\*.parquet'"),
        ("model.tokenizer=/nowhere/tokens", "model.tokenizer '/nowhere/tokens': there is no such folder"),
        ("actor.start_from=/nowhere/run", "/nowhere/run does not exist"),
        ("actor.start_from=/nowhere/run@12", "/nowhere/run does not exist"),
    ],
)
def test_a_wrong_name_is_reported_first(
    override: str, sentence: str, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = config_in(old, "rollout.generation")
    now = config_in(old, "rollout.generation", override, "run.seed=99", "actor.lora={rank: 2, alpha: 4}")
    with pytest.raises(ConfigError, match=sentence) as refused:
        resumed(before, now, monkeypatch)
    assert "other settings" not in str(refused.value)


def test_the_origin_of_the_weights_can_be_removed(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint contains the weights, so the run can continue without `actor.start_from`."""
    config = config_in(old, "reward.function", "actor.start_from=/nowhere/run")
    assert sentences_of(config, config, monkeypatch) == []


@pytest.mark.parametrize("key", ["model.path", "model.tokenizer", "actor.start_from", "reference.path"])
def test_absolute_and_relative_paths_of_a_folder_are_equal(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "other"):
        (tmp_path / name).mkdir()
    before, now, other, missing = (
        load_config(BASE, ["reference={}", f"{key}={path}"]).model_dump(mode="json")
        for path in (tmp_path / "model", "./model", "other", "missing")
    )
    assert compare_settings(before, now, (1, 1)) == Changes((), ())
    assert len(compare_settings(before, other, (1, 1)).dangerous) == 1
    assert len(compare_settings(before, missing, (1, 1)).dangerous) == 1


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
    log = MetricsLog(tmp_path, "r", {})
    for step in range(1, 5):
        log.log(step, {"reward/mean": 0.25})
    log.close()
    log = MetricsLog(tmp_path, "r", {}, tensorboard=False)
    log.truncate_after(2)
    log.log(3, {"reward/mean": 0.5})
    log.close()
    assert scalars(tmp_path, "reward/mean") == [(1, 0.25), (2, 0.25)]


CURSOR = {"fingerprint": "f", "seed": 1, "shuffle": True}


@pytest.mark.parametrize("ranks", [1, 3, 7])
def test_ranks_share_files_and_get_all_responses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """Each file of the five earlier ranks is read by one rank. All ranks get the responses of all five in order."""
    names = [f"responses-{n:05d}.pt" for n in range(5)]
    contents = {name: {1: {"numbers_B": torch.tensor([n])}} for n, name in enumerate(names)}
    files: dict[str, Any] = dict.fromkeys(["shards.distcp", *reversed(names), "random-00000.pt"])
    marker = Marker(1, files, {"trainer": {"cursor": CURSOR}})
    read, shares = list[str](), list[dict[str, Any]]()

    def load(path: Path) -> Any:
        read.append(path.name)
        return contents[path.name]

    monkeypatch.setattr(checkpoints, "load_values", load)

    def gathered(own: dict[str, Any]) -> list[dict[str, Any]]:
        """Collect the shares in the first pass. Return all shares in the second pass."""
        if len(shares) < ranks:
            shares.append(own)
        return shares if len(shares) == ranks else [contents]

    monkeypatch.setattr(checkpoints, "all_gather_objects", gathered)

    def load_responses(rank: int) -> list[Any]:
        parts: Any = SimpleNamespace(
            runtime=SimpleNamespace(rank=rank, world_size=ranks),
            cursor=SimpleNamespace(state_dict=lambda: CURSOR),
            trained=(),
        )
        return checkpoints.Resumed(parts, tmp_path, marker, {}).kept_responses()

    for rank in range(ranks):
        load_responses(rank)
    assert sorted(read) == names
    for rank in range(ranks):
        assert [of_rank[1]["numbers_B"].tolist() for of_rank in load_responses(rank)] == [[n] for n in range(5)]


def test_state_of_a_stopped_step_is_saved() -> None:
    """A source of samples without a state keeps the state and the cursor of the boundary."""
    before, now = ({KEY: {"returned": torch.tensor([number])}} for number in (1, 2))
    boundary = Boundary(cast(Any, {"step": 4, "cursor": 0}), {}, before)
    for pending, saves_cursor in ((now, True), ({}, False)):
        responses = SimpleNamespace(
            pause=lambda stops: None,
            state_dict=lambda step, pending=pending: pending if step == 5 else None,
            saves_cursor=saves_cursor,
            cursor_state=lambda: 1,
        )
        parts, trainer = SimpleNamespace(curriculum=None), SimpleNamespace(responses=responses)
        run: Any = SimpleNamespace(trainer=trainer, boundary=boundary, parts=parts)
        stopped = TrainingRun.boundary_when_stopped(run)
        assert stopped.responses[KEY] is (pending or before)[KEY] and stopped.responses.keys() == {KEY}
        assert stopped.trainer == {"step": 4, "cursor": int(saves_cursor)}


def test_checkpoint_restores_state_exactly() -> None:
    answers = {
        4: Completion((3, 4, 1), (-0.1, -1 / 3, -2.0), False, 2, stretches=((2, 1), (3, 2))),
        9: Completion((3,), (-0.7,), False, 3, broken_off=True),
    }
    state = State([(Group(2, 17, 2, True), 5, 1), (Group(4, 3, 3), 0, 0)], [8, 8], 5, 1, answers)
    assert read_state(written_state(state, (4, 2))) == (state, (4, 2))
    nothing = State([], [], 0, 0, {})
    assert read_state(written_state(nothing, (4, 2))) == (nothing, (4, 2))
