"""Several files of settings, one laid over the other."""

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


def test_the_later_one_wins_setting_by_setting(tmp_path: Path) -> None:
    base = load_config(BASE)
    first = layer(tmp_path, "actor: {optimizer: {learning_rate: 3.0e-4}}\nreference: {}\n", "first.yaml")
    second = layer(tmp_path, "actor: {epochs: 3, optimizer: {}}\nalgorithm: {gamma: 0.5}\n", "second.yml")
    config = load_config(BASE, ["algorithm.gamma=0.25", first, "actor.epochs=7", second, "actor.optimizer.beta1=0.5"])
    optimizer = base.actor.optimizer.model_copy(update={"learning_rate": 3.0e-4, "beta1": 0.5})
    assert config.actor.optimizer == optimizer, "an empty section takes nothing away"
    assert (config.actor.epochs, config.algorithm.gamma) == (3, 0.5)
    assert config.reference is not None and config.critic == base.critic
    assert load_config(BASE, [second, "actor.epochs=7"]).actor.epochs == 7


def test_the_record_names_the_files_in_their_order(tmp_path: Path) -> None:
    """What a run writes of its settings gives equal ones, names of files among them, also below another layer."""
    first, second = (layer(tmp_path, f"actor: {{epochs: {n}}}", f"{n}.yaml") for n in (2, 3))
    config = load_config(BASE, [second, "actor.epochs=9", first])
    assert config.run.files == (str(BASE), second, first) and config.actor.epochs == 2
    save_config(config, tmp_path / "run" / "config.yaml")
    assert load_config(tmp_path / "run" / "config.yaml") == config
    assert load_config(tmp_path / "run" / "config.yaml", [second]).run.files == (str(BASE), second, first, second)
    shown = dict(describe(config, derive(config, 1, SHAPE)))
    assert shown["settings"] == f"{BASE}, then {second}, then {first}"


def test_a_mapping_of_ones_own_names_is_one_value(tmp_path: Path) -> None:
    other = layer(tmp_path, "reward: {function: 'm:f', options: {b: 2}}")
    config = load_config(BASE, ["reward.function=m:f", "reward.options={a: 1}", other])
    assert config.reward.options == {"b": 2}


def test_a_length_takes_the_place_of_the_other(tmp_path: Path) -> None:
    run = load_config(BASE, [layer(tmp_path, "run: {epochs: 2}")]).run
    assert (run.steps, run.epochs) == (None, 2)


def test_functions_of_a_layer_stand_beside_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    given = layer(tmp_path, "reward: {function: 'mine.py:f'}")
    assert load_config(BASE, [given]).reward.function == f"{tmp_path / 'mine.py'}:f"


def test_a_critic_that_a_layer_removes(tmp_path: Path) -> None:
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
def test_a_mistake_in_a_layer_is_a_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(BASE, [layer(tmp_path, text)])
    assert sentence in str(caught.value)


def test_a_layer_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(BASE), str(tmp_path / "nowhere.yaml"), "--machine", "cpu", "--gpus", "2"]) == 2
    assert f"there is no file {tmp_path / 'nowhere.yaml'}" in capsys.readouterr().err
