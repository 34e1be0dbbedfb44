"""Several configuration files, and overrides: later values, and all wrong values in one report."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megappo.cli import main
from megappo.config import ConfigError, derive, load_config, save_config
from megappo.config.derive import describe
from megappo.config.fields import all_keys, find_field, section_of
from megappo.config.reading.yaml_core import parse_yaml
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
    [("actor: {epoch: 2}", "actor.epoch is not a setting; did you mean actor.epochs?"),
     ("[1]", "layer.yaml holds [1], must be sections"), ("", "layer.yaml is empty"), ("actor: 3", "actor is 3")],
)  # fmt: skip
def test_mistakes_in_a_layer_are_reported(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(BASE, [layer(tmp_path, text)])
    assert sentence in str(caught.value)


def test_missing_layer_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(BASE), str(tmp_path / "nowhere.yaml"), "--machine", "cpu", "--gpus", "2"]) == 2
    assert f"there is no file {tmp_path / 'nowhere.yaml'}" in capsys.readouterr().err


def problems(*overrides: str, path: Path = BASE) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


def test_all_wrong_overrides_are_reported() -> None:
    reported = problems(
        "run.stps=3", "nonsense", "actor.epochs=[1", "run.seed.more=3", "rollout.temperature=hot", "no_such_file.yaml",
        "actor.clipp=1",
    )  # fmt: skip
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
        ("rollout=transformers", "{engine: transformers}", "rollout.engine=transformers"),
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
    config = load_config(BASE, ["rollout.servers.kind=sglang", f"rollout.servers.environment.LEVEL={typed}"])
    assert config.rollout.servers is not None and config.rollout.servers.environment == {"LEVEL": typed}


def test_options_keep_the_type_of_yaml() -> None:
    config = load_config(BASE, ["reward.options.level=3", "reward.options.exact=true"])
    assert config.reward.options == {"level": 3, "exact": True}


def test_text_of_an_entry_takes_a_number_as_typed() -> None:
    config = load_config(
        BASE, ["data.train=null", "data.mixture.sums.source=data.jsonl", "data.mixture.sums.answer_key=1"]
    )
    assert config.data.mixture is not None and config.data.mixture["sums"].answer_key == "1"
