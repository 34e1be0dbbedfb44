"""Paths in settings and arguments, and custom functions in a file, with the form `path/to/file.py:function`."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest

from megappo.cli import parse
from megappo.config import load_config
from megappo.config.base import Settings
from megappo.config.load import save_config
from megappo.data.sources import read_records
from megappo.environments.registry import make_environment
from megappo.errors import ConfigError
from megappo.plan.hardware.machine_file import find_machine
from megappo.plugins import load_function, own_files
from megappo.ppo.assembly.methods import check_methods
from megappo.rewards.processes.workers import RewardPool, RewardRequest
from tests.support.places import BASE

JUDGE = "reward.function=null", "reward.judge.server={}", "reward.judge.choices={yes: 1, no: 0}"
PROMPT = "reward.judge.prompt='{answer}'"
PATHS: dict[str, tuple[str, ...]] = {
    "run.directory": (), "runtime.offload_directory": (), "model.path": (), "model.tokenizer": (),
    "actor.start_from": (), "critic.path": (), "reference.path": (), "data.train.source": (),
    "data.validation.source": (), "data.mixture.one.source": ("data.train=null",),
    "data.validation_sets.one.source": (), "rollout.save_to": (), "rollout.load_from": (),
    "rollout.replay_arrivals": ("rollout.ahead=2",), "rollout.servers.environment.HF_HOME": ("rollout.servers={}",),
    "rollout.servers.arguments.speculative-draft-model-path": ("rollout.servers={}",),
    "reward.model_path": ("reward.function=model",), "reward.judge.model": (*JUDGE, PROMPT),
    "reward.judge.prompt_file": (*JUDGE, "reward.judge.model=judge"),
}  # fmt: skip
"""Settings that are paths, and the overrides that each setting requires."""
WITHOUT_SERVER = ("reward.function=null", "reward.judge.url=http://localhost:1", "reward.judge.choices={yes: 1, no: 0}")


def value_at(config: Settings, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.mark.parametrize("key", PATHS)
def test_tilde_is_the_home_folder(key: str, home: Path) -> None:
    config = load_config(BASE, [*PATHS[key], f"{key}=~/there/one"])
    assert str(value_at(config, key)) == f"{home}/there/one"


@pytest.mark.parametrize("key", PATHS)
def test_variable_in_a_path_is_refused(key: str, home: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(BASE, [*PATHS[key], f"{key}=${{SCRATCH}}/one"])
    (problem,) = refused.value.problems
    assert problem.startswith(f"{key}: '${{SCRATCH}}/one' has the variable ${{SCRATCH}}, but variables in paths are")
    assert problem.endswith("let the shell expand the variable on the command line, outside of single quotes")


@pytest.mark.parametrize("text", ["/data/$USER/x", "$HOME", "runs_$JOB", "/a/$(hostname)/b", "${OUT"])
def test_every_form_of_a_variable_is_refused(text: str, home: Path) -> None:
    with pytest.raises(ConfigError, match="has the variable"):
        load_config(BASE, [f"run.directory={text}"])


def test_dollar_sign_in_an_existing_folder_is_no_variable(tmp_path: Path) -> None:
    folder = tmp_path / "a$b"
    with pytest.raises(ConfigError, match=r"has the variable \$b"):
        load_config(BASE, [f"run.directory={folder}/run"])
    folder.mkdir()
    assert load_config(BASE, [f"run.directory={folder}/run"]).run.path == folder / "run"
    with pytest.raises(ConfigError, match=r"has the variable \$c"):
        load_config(BASE, [f"run.directory={folder}/run-$c"])


def test_an_unknown_user_is_refused(home: Path) -> None:
    with pytest.raises(ConfigError, match="begins with ~nobody-here, but this machine has no such user; write"):
        load_config(BASE, ["run.directory=~nobody-here/x"])


def test_home_of_another_user() -> None:
    assert str(load_config(BASE, ["run.directory=~root/x"]).run.directory) == f"{Path('~root').expanduser()}/x"


@pytest.mark.parametrize("path", ["costs-$.jsonl", "a~b/c.jsonl", "./~x.jsonl"])
def test_other_names_are_not_changed(path: str, home: Path) -> None:
    train = load_config(BASE, [f"data.train.source={path}"]).data.train
    assert train is not None and train.source == path


def test_a_folder_behind_datasets_is_expanded(home: Path) -> None:
    train = load_config(BASE, ["data.train.source=datasets:~/sums:train"]).data.train
    assert train is not None and train.source == f"datasets:{home}/sums:train"


def test_name_on_a_remote_server_is_no_path(home: Path) -> None:
    overrides = (*WITHOUT_SERVER, PROMPT, "reward.judge.model=~maker/newest")
    judge = load_config(BASE, overrides).reward.judge
    assert judge is not None and judge.model == "~maker/newest"


def test_files_of_functions_and_templates_are_expanded(home: Path) -> None:
    (home / "mine.py").write_text("def score(*, response):\n    return 1.0\n")
    (home / "chat.jinja").write_text("{{ messages }}")
    config = load_config(BASE, ["reward.function=~/mine.py:score", "data.chat_template=~/chat.jinja"])
    assert config.reward.function == f"{home}/mine.py:score"
    assert config.data.chat_template == "{{ messages }}"
    assert load_function("~/mine.py:score", "reward.function")(response="") == 1.0
    with pytest.raises(ConfigError, match=r"reward\.function: '\$HOME/mine\.py:score' has the variable \$HOME"):
        load_function("$HOME/mine.py:score", "reward.function")
    with pytest.raises(ConfigError, match=r"data\.chat_template: '\$HOME/chat\.jinja' has the variable \$HOME"):
        load_config(BASE, ["data.chat_template=$HOME/chat.jinja"])


def test_a_saved_configuration_has_the_whole_path(home: Path, tmp_path: Path) -> None:
    config = load_config(BASE, ["run.directory=~/run"])
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


def test_configurations_and_machines_at_home(home: Path) -> None:
    (home / "run.yaml").write_text(BASE.read_text())
    (home / "more.yaml").write_text("run: {steps: 3}\n")
    config = load_config("~/run.yaml", ["~/more.yaml"])
    assert config.run.files == (f"{home}/run.yaml", f"{home}/more.yaml")
    with pytest.raises(ConfigError, match=r"the configuration: '\$HOME/run\.yaml' has the variable \$HOME"):
        load_config("$HOME/run.yaml")
    with pytest.raises(ConfigError, match=f"there is no file {home}/gpu.yaml"):
        find_machine("~/gpu.yaml")


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "PATH"], ["train", "--replay=PATH"], ["plan", "PATH"], ["eval", "a.yaml", "--weights=PATH"],
        ["report", "a", "PATH"], ["report", "a", "--html=PATH"], ["report", "a", "--png=PATH"], ["inspect", "PATH"],
        ["export", "PATH", "out"], ["export", "run", "PATH"], ["data", "prepare", "gsm8k", "PATH"],
        ["data", "prepare", "gsm8k", "out", "--from=PATH"], ["init", "--output=PATH"], ["init", "--data=PATH"],
        ["init", "--model=PATH"],
    ],
)  # fmt: skip
def test_path_arguments_are_expanded(arguments: list[str], home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = vars(parse([word.replace("PATH", "~/x.yaml") for word in arguments])).values()
    assert f"{home}/x.yaml" in values or ["a", f"{home}/x.yaml"] in values
    with pytest.raises(SystemExit) as ended:
        parse([word.replace("PATH", "$HOME/x.yaml") for word in arguments])
    assert ended.value.code == 2
    assert "'$HOME/x.yaml' has the variable $HOME" in " ".join(capsys.readouterr().err.split())


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
        ["reward={function: mine.py:reward, workers: 1}", "data.train={source: mine.py:prompts}",
         "rollout.environment={name: mine.py:Once}", "algorithm.policy_loss=mine.py:loss", "algorithm.dual_clip=null"],
    )  # fmt: skip
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
