"""Custom functions in a file, with the form `path/to/file.py:function`."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from megappo.config import load_config
from megappo.data.sources import read_records
from megappo.environments.registry import make_environment
from megappo.errors import ConfigError
from megappo.plugins import load_function, own_files
from megappo.ppo.methods import check_methods
from megappo.rewards.workers import RewardPool, RewardRequest
from tests.support.places import BASE

MINE = """
import helpers_of_mine

CALLS = []

def reward(*, response, answer):
    CALLS.append(response)
    return helpers_of_mine.ONE * float(response == answer)

def prompts():
    yield {"prompt": "1+1=", "answer": "2"}

def loss(*, logprob, advantages):
    return -logprob * advantages

class Once:
    async def run(self, session):
        return 1.0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a configuration, a file of functions, and a module that the file imports."""
    made = tmp_path / "experiment"
    made.mkdir()
    (made / "run.yaml").write_text(BASE.read_text())
    (made / "mine.py").write_text(MINE)
    (made / "helpers_of_mine.py").write_text("ONE = 1.0\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "helpers_of_mine", raising=False)
    return made


def reward_of(folder: Path, name: str) -> str | None:
    return load_config(folder / "run.yaml", [f"reward.function={name}"]).reward.function


def test_files_are_searched_next_to_the_configuration_first(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").write_text(MINE)
    (tmp_path / "mine.py").write_text("raise SystemExit('the file next to the configuration comes first')")
    assert reward_of(folder, "mine.py:reward") == f"{folder / 'mine.py'}:reward"
    assert reward_of(folder, "here.py:reward") == f"{tmp_path / 'here.py'}:reward"
    assert reward_of(folder, f"{folder / 'mine.py'}:reward") == f"{folder / 'mine.py'}:reward"
    assert reward_of(folder, "nowhere.py:reward") == "nowhere.py:reward"
    assert reward_of(folder, "math_verify") == "math_verify"


def test_file_as_a_key_is_resolved(folder: Path) -> None:
    config = load_config(folder / "run.yaml", ["logging.loggers={'mine.py:Once': {a: 1}}"])
    assert config.logging.loggers == {f"{folder / 'mine.py'}:Once": {"a": 1}}
    assert list(own_files(config.model_dump(mode="json"))) == [str(folder / "mine.py")]


@pytest.mark.waits
def test_rewards_prompts_losses_and_environments_come_from_a_file(folder: Path) -> None:
    config = load_config(
        folder / "run.yaml",
        [
            "reward={function: mine.py:reward, workers: 1}",
            "data.train={source: mine.py:prompts}",
            "rollout.environment={name: mine.py:Once}",
            "algorithm.policy_loss=mine.py:loss",
            "algorithm.dual_clip=null",
        ],
    )
    assert config.data.train is not None and [r.answer for r in read_records(config.data.train)] == ["2"]
    assert config.rollout.environment is not None
    assert type(make_environment(config.rollout.environment)).__name__ == "Once"
    check_methods(config)
    pool = RewardPool(config.reward)
    try:
        requests = [RewardRequest("1+1=", response, response, "2", {}) for response in ("2", "3")]
        assert pool.run(requests).scores.tolist() == [1.0, 0.0]
    finally:
        pool.close()
    digest = hashlib.sha256(MINE.encode()).hexdigest()
    assert own_files(config.model_dump(mode="json")) == {str(folder / "mine.py"): digest}


def test_file_is_run_once_in_a_process(folder: Path) -> None:
    first, second = (load_function(f"{folder / 'mine.py'}:reward", "reward.function") for _ in range(2))
    assert first is second


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("nowhere.py:reward", r"nowhere.py:reward': there is no file .*/nowhere.py; create it, or correct the path"),
        ("mine.py:rewrad", "has no function 'rewrad'; did you mean '.*mine.py:reward'"),
        ("broken.py:f", r"broken.py' failed \(ZeroDivisionError"),
        ("lacking.py:f", r"lacking.py:f' cannot be imported \(No module named 'not_there'\); install the modules"),
        ("mine.py:", "write package.module:function or path/to/file.py:function"),
    ],
)
def test_mistakes_in_a_file_are_reported(path: str, sentence: str, folder: Path) -> None:
    (folder / "broken.py").write_text("1 / 0")
    (folder / "lacking.py").write_text("import not_there")
    known = set(sys.modules)
    with pytest.raises(ValueError, match=sentence):
        load_function(f"{folder}/{path}", "reward.function")
    assert not any(name.startswith(("broken_", "lacking_")) for name in set(sys.modules) - known)


def test_mistake_in_the_configuration_is_reported_as_such(folder: Path) -> None:
    with pytest.raises(ConfigError, match="must be an import path; write package.module:function or path/to/file.py:"):
        load_config(folder / "run.yaml", ["rollout.generation=mine"])
