"""Several configuration files, of which later ones override earlier ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from megappo.cli import main
from megappo.config import ConfigError, derive, load_config, save_config
from megappo.config.derive import describe
from tests.support.config import SHAPE
from tests.support.places import BASE


def layer(folder: Path, text: str, name: str = "layer.yaml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_later_files_override_single_settings(tmp_path: Path) -> None:
    base = load_config(BASE)
    first = layer(tmp_path, "actor: {optimizer: {learning_rate: 3.0e-4}}\nreference: {}\n", "first.yaml")
    second = layer(tmp_path, "actor: {epochs: 3, optimizer: {}}\nalgorithm: {gamma: 0.5}\n", "second.yml")
    config = load_config(BASE, ["algorithm.gamma=0.25", first, "actor.epochs=7", second, "actor.optimizer.beta1=0.5"])
    optimizer = base.actor.optimizer.model_copy(update={"learning_rate": 3.0e-4, "beta1": 0.5})
    assert config.actor.optimizer == optimizer, "an empty section removes no settings"
    assert (config.actor.epochs, config.algorithm.gamma) == (3, 0.5)
    assert config.reference is not None and config.critic == base.critic
    assert load_config(BASE, [second, "actor.epochs=7"]).actor.epochs == 7


def test_run_record_lists_the_files_in_order(tmp_path: Path) -> None:
    """The saved settings of a run load as equal settings, including the names of files, also with another file on
    top."""
    first, second = (layer(tmp_path, f"actor: {{epochs: {n}}}", f"{n}.yaml") for n in (2, 3))
    config = load_config(BASE, [second, "actor.epochs=9", first])
    assert config.run.files == (str(BASE), second, first) and config.actor.epochs == 2
    save_config(config, tmp_path / "run" / "config.yaml")
    assert load_config(tmp_path / "run" / "config.yaml") == config
    assert load_config(tmp_path / "run" / "config.yaml", [second]).run.files == (str(BASE), second, first, second)
    shown = dict(describe(config, derive(config, 1, SHAPE)))
    assert shown["settings"] == f"{BASE}, then {second}, then {first}"


def test_mapping_with_custom_names_is_one_value(tmp_path: Path) -> None:
    other = layer(tmp_path, "reward: {function: 'm:f', options: {b: 2}}")
    config = load_config(BASE, ["reward.function=m:f", "reward.options={a: 1}", other])
    assert config.reward.options == {"b": 2}


def test_length_replaces_the_alternative_length(tmp_path: Path) -> None:
    run = load_config(BASE, [layer(tmp_path, "run: {epochs: 2}")]).run
    assert (run.steps, run.epochs) == (None, 2)


def test_functions_are_searched_next_to_their_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    overlay = layer(tmp_path, "reward: {function: 'mine.py:f'}")
    assert load_config(BASE, [overlay]).reward.function == f"{tmp_path / 'mine.py'}:f"


def test_layer_can_remove_the_critic(tmp_path: Path) -> None:
    config = load_config(BASE, [layer(tmp_path, "critic: null\nalgorithm: {estimator: grpo}")])
    assert config.critic is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("actor: {epoch: 2}", "actor.epoch is not a setting; did you mean actor.epochs?"),
        ("[1]", "layer.yaml holds [1], must be sections"),
        ("", "layer.yaml is empty"),
        ("actor: 3", "actor is 3"),
    ],
)
def test_mistakes_in_a_layer_are_reported(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(BASE, [layer(tmp_path, text)])
    assert sentence in str(caught.value)


def test_missing_layer_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(BASE), str(tmp_path / "nowhere.yaml"), "--machine", "cpu", "--gpus", "2"]) == 2
    assert f"there is no file {tmp_path / 'nowhere.yaml'}" in capsys.readouterr().err
