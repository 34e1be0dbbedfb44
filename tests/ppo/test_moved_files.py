"""A run can continue after its files were moved. A wrong file name is reported before other changes."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from megappo.checkpoint.changes import Changes, compare_settings
from megappo.config import Config, load_config
from megappo.errors import ConfigError
from tests.ppo.test_experience import resumed
from tests.support.places import BASE

CODE = "def score(*, response):\n    return 1.0\n"
FUNCTIONS = (
    "reward.function",
    "algorithm.estimator",
    "algorithm.policy_loss",
    "rollout.generation",
    "data.train.source",
    "rollout.environment.name",
)


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    """One process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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
    with pytest.raises(
        ConfigError, match=r"other settings \(reward\.function: '.*/old/mine\.py:score' -> '.*/new/mine\.py:score'"
    ):
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
