"""All wrong overrides are reported, and a value in place of a section gets an example of the section."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megappo.config import load_config
from megappo.config.fields import all_keys, find_field, section_of
from megappo.config.yaml_core import parse_yaml
from megappo.errors import ConfigError
from tests.support.places import BASE


def problems(*overrides: str, path: Path = BASE) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


def test_all_wrong_overrides_are_reported() -> None:
    reported = problems(
        "run.stps=3",
        "nonsense",
        "actor.epochs=[1",
        "run.seed.more=3",
        "rollout.temperature=hot",
        "no_such_file.yaml",
        "actor.clipp=1",
    )
    assert len(reported) == 7
    for part in ("did you mean run.steps", "'nonsense' must have the form", "'actor.epochs=[1'", "run.seed is a value",
                 "rollout.temperature is 'hot'", "there is no file no_such_file.yaml", "actor.clipp"):  # fmt: skip
        assert sum(part in sentence for sentence in reported) == 1, part


def test_file_is_checked_together_with_wrong_overrides(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(BASE.read_text().replace("steps:", "stepps:") + "\nevaluaton: {every_steps: 3}\n")
    reported = problems("rollout.temprature=0.5", path=file)
    assert any("did you mean rollout.temperature" in sentence for sentence in reported)
    assert any("did you mean run.steps" in sentence for sentence in reported)
    assert any("did you mean evaluation" in sentence for sentence in reported)


def test_consequences_of_a_wrong_override_are_not_reported(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(re.sub(r"\bsteps: \d+, ", "", BASE.read_text()))
    (problem,) = problems("run.stps=3", path=file)
    assert "did you mean run.steps" in problem
    (problem,) = problems("run.steps=[3", path=file)
    assert "not valid YAML" in problem


def test_secrets_are_refused_alone() -> None:
    (problem,) = problems("run.stps=3", "reward.options={api_key: sk-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa}")
    assert "looks like a secret" in problem and "sk-aaa" not in problem


@pytest.mark.parametrize(
    ("override", "section", "written"),
    [
        ("data.train=x.jsonl", "{source: x.jsonl}", "data.train.source=x.jsonl"),
        ("data=x.jsonl", "{train: {source: x.jsonl}}", "data.train.source=x.jsonl"),
        ("data.mixture=x.jsonl", "{NAME: {source: x.jsonl}}", "data.mixture.NAME.source=x.jsonl"),
        ("data.mixture.sums=x.jsonl", "{source: x.jsonl}", "data.mixture.sums.source=x.jsonl"),
        ("actor.lora=16", "{rank: 16, alpha: 16}", "actor.lora.rank=16 actor.lora.alpha=16"),
        ("reference=models/one", "{path: models/one}", "reference.path=models/one"),
        ("critic=models/one", "{path: models/one}", "critic.path=models/one"),
        ("model=Qwen/Qwen3-0.6B", "{path: Qwen/Qwen3-0.6B}", "model.path=Qwen/Qwen3-0.6B"),
        ("evaluation=20", "{every_steps: 20}", "evaluation.every_steps=20"),
        ("evaluation=true", "{every_steps: NUMBER}", "evaluation.every_steps=NUMBER"),
        ("reward=gsm8k", "{function: gsm8k}", "reward.function=gsm8k"),
        ("reward.functions=gsm8k", "{NAME: {function: gsm8k}}", "reward.functions.NAME.function=gsm8k"),
        ("algorithm.kl_in_loss=0.001", "{coef: 0.001}", "algorithm.kl_in_loss.coef=0.001"),
        ("actor.optimizer=0.25", "{learning_rate: 0.25}", "actor.optimizer.learning_rate=0.25"),
        ("rollout=sglang", "{engine: sglang}", "rollout.engine=sglang"),
        ("rollout.environment=tools", "{name: tools}", "rollout.environment.name=tools"),
        ("checkpoint=50", "{every_steps: 50}", "checkpoint.every_steps=50"),
        ("data.train=[a, b]", "{source: TEXT}", "data.train.source=TEXT"),
    ],
)
def test_value_for_a_section_gets_an_example(override: str, section: str, written: str) -> None:
    (problem,) = problems(override)
    assert problem.endswith(f", such as {section}; as an override write {written}")


def test_null_disables_a_section() -> None:
    (problem,) = problems("evaluation=false")
    assert problem.endswith("; write null to disable the section")


@pytest.mark.parametrize("value", ["16", "x.jsonl", "0.5", "[1, 2]", "'two words'"])
def test_examples_of_sections_contain_valid_settings(value: str) -> None:
    examples = 0
    for key in all_keys():
        field = find_field(key)
        if field is None or section_of(field) is None:
            continue
        try:
            load_config(BASE, [f"{'.'.join(key)}={value}"])
        except ConfigError as error:
            for problem in error.problems:
                example, _, override = problem.partition("such as ")[2].partition("; as an override write ")
                if example:
                    examples += 1
                    assert isinstance(parse_yaml(example, "the example"), dict)
                    keys = [part.partition("=")[0].split(".") for part in shlex.split(override)]
                    assert keys and all(find_field(tuple(part)) is not None for part in keys)
    assert examples > 10


@pytest.mark.parametrize("typed", ["123", "007", "1e-5", "true", "2026-01-02", "no", "'7'"])
def test_text_settings_take_numbers_as_typed(typed: str) -> None:
    text = typed.strip("'")
    config = load_config(BASE, [f"{key}={typed}" for key in ("run.name", "run.directory", "logging.wandb_project")])
    assert (config.run.name, config.run.directory, config.logging.wandb_project) == (text, Path(text), text)


@pytest.mark.parametrize("typed", ["123", "true"])
def test_environment_variables_take_numbers_as_typed(typed: str) -> None:
    config = load_config(BASE, ["rollout.engine=sglang", f"rollout.sglang.environment.LEVEL={typed}"])
    assert config.rollout.sglang is not None and config.rollout.sglang.environment == {"LEVEL": typed}


def test_options_keep_the_type_of_yaml() -> None:
    config = load_config(BASE, ["reward.options.level=3", "reward.options.exact=true"])
    assert config.reward.options == {"level": 3, "exact": True}


def test_text_of_an_entry_takes_a_number_as_typed() -> None:
    config = load_config(
        BASE, ["data.train=null", "data.mixture.sums.source=data.jsonl", "data.mixture.sums.answer_key=1"]
    )
    assert config.data.mixture is not None and config.data.mixture["sums"].answer_key == "1"
