"""Paths in settings and arguments: `~` is expanded, a variable is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megappo.cli import parse
from megappo.config import load_config
from megappo.config.base import Settings
from megappo.config.load import save_config
from megappo.errors import ConfigError
from megappo.plan.machine_file import find_machine
from megappo.plugins import load_function
from tests.support.places import BASE

JUDGE = "reward.function=null", "reward.judge.server={}", "reward.judge.choices={yes: 1, no: 0}"
PROMPT = "reward.judge.prompt='{answer}'"
PATHS: dict[str, tuple[str, ...]] = {
    "run.directory": (),
    "runtime.offload_directory": (),
    "model.path": (),
    "model.tokenizer": (),
    "actor.start_from": (),
    "critic.path": (),
    "reference.path": (),
    "data.train.source": (),
    "data.validation.source": (),
    "data.mixture.one.source": ("data.train=null",),
    "data.validation_sets.one.source": (),
    "rollout.save_to": (),
    "rollout.load_from": (),
    "rollout.replay_arrivals": ("rollout.ahead=2",),
    "rollout.sglang.environment.HF_HOME": ("rollout.sglang={}",),
    "rollout.sglang.arguments.speculative-draft-model-path": ("rollout.sglang={}",),
    "reward.model_path": ("reward.function=model",),
    "reward.judge.model": (*JUDGE, PROMPT),
    "reward.judge.prompt_file": (*JUDGE, "reward.judge.model=judge"),
}
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
        ["train", "PATH"],
        ["train", "--replay=PATH"],
        ["plan", "PATH"],
        ["eval", "a.yaml", "--weights=PATH"],
        ["report", "a", "PATH"],
        ["report", "a", "--html=PATH"],
        ["report", "a", "--png=PATH"],
        ["inspect", "PATH"],
        ["export", "PATH", "out"],
        ["export", "run", "PATH"],
        ["data", "prepare", "gsm8k", "PATH"],
        ["data", "prepare", "gsm8k", "out", "--from=PATH"],
        ["init", "--output=PATH"],
        ["init", "--data=PATH"],
        ["init", "--model=PATH"],
    ],
)
def test_path_arguments_are_expanded(arguments: list[str], home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = vars(parse([word.replace("PATH", "~/x.yaml") for word in arguments])).values()
    assert f"{home}/x.yaml" in values or ["a", f"{home}/x.yaml"] in values
    with pytest.raises(SystemExit) as ended:
        parse([word.replace("PATH", "$HOME/x.yaml") for word in arguments])
    assert ended.value.code == 2
    assert "'$HOME/x.yaml' has the variable $HOME" in " ".join(capsys.readouterr().err.split())
