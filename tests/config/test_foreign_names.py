"""Frequent names from scripts and configurations of other trainers lead to the correct settings of megappo."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from megappo.commands.settings import explanation
from megappo.config import ConfigError, load_config
from megappo.config.fields import find_field
from megappo.config.other_names import TRAINERS, counterpart
from tests.support.places import BASE

_LINES = (Path(__file__).parent / "foreign_names.txt").read_text().splitlines()
ANSWERS = dict(line.split(" = ", 1) for line in _LINES if line and not line.startswith("#"))
"""The settings of megappo for each foreign name, or `none: ` and a part of the reason."""
VALUES = {"algo.advantage.is_correction_type": "tis"}
"""Values for names whose answers depend on the value."""
_KEY = re.compile(r"[a-z_]+(?:\.[A-Za-z_0-9]+)+|[a-z]+")


def _keys_of_sentence(sentence: str) -> set[str]:
    remedy = re.search(r"; (?:did you mean|see) ([^?(]*)", sentence)
    return {*re.split(r", | or ", remedy[1].strip())} if remedy else set()


def _keys_of_explanation(text: str) -> set[str]:
    """Return the settings that a text explains. Each setting is at the start of a line."""
    starts = [line.split(" (")[0] for line in text.splitlines() if not line.startswith((" ", "'"))]
    return {start for start in starts if _KEY.fullmatch(start)}


def test_list_has_the_names_of_all_trainers() -> None:
    assert len(ANSWERS) >= 200
    for trainer, names in TRAINERS.items():
        assert len(names.keys() & ANSWERS.keys()) >= 20, trainer


def test_overrides_with_foreign_names_name_our_settings() -> None:
    wrong = {}
    for name, answer in ANSWERS.items():
        if find_field(tuple(name.split("."))) is not None:
            assert name == answer
            continue
        with pytest.raises(ConfigError) as error:
            load_config(BASE, [f"{name}={VALUES.get(name, 1)}"])
        sentence = str(error.value)
        _, is_none, reason = answer.rpartition("none: ")
        is_right = (
            f"{name} is not a setting: " in sentence and reason in sentence
            if is_none
            else _keys_of_sentence(sentence) == {*answer.split()}
        )
        if not is_right:
            wrong[name] = (answer, sentence)
    assert not wrong


def test_settings_explains_foreign_names() -> None:
    wrong = {}
    for name, answer in ANSWERS.items():
        text = explanation(name)
        _, is_none, reason = answer.rpartition("none: ")
        has_place = find_field(tuple(name.split("."))) is not None
        is_ours = any(key.endswith(f".{name}") for key in answer.split())
        if is_none and not text.startswith("there is no setting"):
            # megappo has a section `optimizer`, which is the better answer to the bare word.
            assert name == "optimizer" and "actor.optimizer" in text
        elif is_none:
            if reason not in text:
                wrong[name] = (answer, text)
        elif has_place or is_ours:
            if not {*answer.split()} <= _keys_of_explanation(text):
                wrong[name] = (answer, text)
        elif _keys_of_explanation(text) != {*answer.split()}:
            wrong[name] = (answer, text)
    assert not wrong


def test_flags_and_hydra_additions_are_the_same_names() -> None:
    for typed in ("--rollout-batch-size", "+rollout_batch_size", "rollout_batch_size=32"):
        assert "rollout.prompts_per_step (" in explanation(typed)


def test_each_setting_in_a_foreign_file_is_reported(tmp_path: Path) -> None:
    theirs = {
        "critic": {"model": {"path": "org/critic"}, "optim": {"lr": 1.0e-5}},
        "algorithm": {"kl_ctrl": {"type": "adaptive", "target_kl": 0.1}},
        "policy": {"megatron_cfg": {"optimizer": {"lr": 1.0e-6}}},
        "target_kl": 0.1,
    }
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(theirs))
    with pytest.raises(ConfigError) as error:
        load_config(BASE, [str(path)])
    named = {sentence.split(" is not a setting")[0]: _keys_of_sentence(sentence) for sentence in error.value.problems}
    assert named == {
        "critic.model.path": {"critic.path"},
        "critic.optim.lr": {"critic.optimizer.learning_rate"},
        "algorithm.kl_ctrl.type": {"algorithm.kl_in_reward.controller"},
        "algorithm.kl_ctrl.target_kl": {"algorithm.kl_in_reward.target"},
        "policy.megatron_cfg.optimizer.lr": {"actor.optimizer.learning_rate"},
        "target_kl": {"algorithm.target_kl", "algorithm.kl_in_reward.target"},
    }


@pytest.mark.parametrize(
    "name",
    ["foo.type", "some.path", "critic_foo", "xyz.mode", "frobnicate", "foo.beta", "bar.n", "lr_foo", "other.save"],
)
def test_unknown_name_has_no_answer(name: str) -> None:
    *section, last = name.split(".")
    assert counterpart(section, last) is None
    with pytest.raises(ConfigError, match="lists all sections"):
        explanation(name)
    with pytest.raises(ConfigError) as error:
        load_config(BASE, [f"{name}=1"])
    assert "did you mean" not in str(error.value)


def test_nested_setting_with_the_same_name_is_not_suggested() -> None:
    """`reward.judge.prompt` is unrelated to the prompts of the data."""
    with pytest.raises(ConfigError) as error:
        load_config(BASE, ["data.prompt=x"])
    assert "reward.judge" not in str(error.value)
