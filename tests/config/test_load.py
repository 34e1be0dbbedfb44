"""Reading of YAML and overrides, messages of the validation, and the round trip."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from megappo.config import Config, ConfigError, load_config, save_config
from megappo.config.base import Settings
from megappo.config.fields import all_keys, find_field, names_in, section_of
from megappo.config.load import flat_settings
from megappo.config.reading.explain import likely_keys
from megappo.config.reading.yaml_core import dump_yaml, parse_yaml
from megappo.errors import divisors
from megappo.files.json_values import JSONValue
from megappo.models.hub import hub_folder
from tests.support.places import BASE, ROOT
from tests.support.quick import cases

SETTINGS: dict[str, Any] = parse_yaml(BASE.read_text(), "base")
REMOVED = object()
BOUNDED = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
"""Types of pydantic errors for a value that has the correct type but is too small or too large."""


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the base settings with dotted keys set or removed."""
    data = copy.deepcopy(SETTINGS)
    for key, value in changes.items():
        *sections, name = key.split(".")
        place = data
        for section in sections:
            place = place.setdefault(section, {})
        if value is REMOVED:
            del place[name]
        else:
            place[name] = value
    return data


def written(tmp_path: Path, changes: dict[str, Any]) -> Path:
    """Write a YAML file of the changed base settings."""
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(changed(changes)))
    return path


def refusal(tmp_path: Path, changes: dict[str, Any], *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, changes), overrides)
    return caught.value


def test_base_is_valid() -> None:
    config = load_config(BASE)
    assert config.actor.optimizer.learning_rate == 1e-5
    assert config.reference is not None and config.algorithm.kl_in_loss is None
    assert config.run.path == Path("runs/base")


MALFORMED: list[tuple[dict[str, Any], list[str]]] = [
    ({"actor.epoch": 2}, ["actor.epoch is not a setting", "did you mean actor.epochs?"]),
    ({"actor.learning_rate": 1e-5}, ["actor.learning_rate", "did you mean actor.optimizer.learning_rate?"]),
    ({"critic.lr": 1e-5}, ["critic.lr", "did you mean critic.optimizer.learning_rate?"]),
    ({"algorithm.temperature": 1.0}, ["algorithm.temperature", "did you mean rollout.temperature?"]),
    ({"rollout.max_new_tokens": 7}, ["rollout.max_new_tokens", "did you mean rollout.max_response_tokens?"]),
    ({"actor.tp": 2}, ["actor.tp is not a setting", "actor.layout.tensor_parallel?"]),
    ({"steps": 3}, ["steps is not a setting", "did you mean run.steps?"]),
    ({"evaluation.samples_per_prompt": 4}, ["did you mean data.validation_sets.NAME.samples?"]),
    ({"evaluation.temperature": 0.7}, ["did you mean data.validation_sets.NAME.temperature?"]),
    ({"data.train.weight": 0.5}, ["data.train.weight is not a setting; did you mean data.mixture.NAME.weight?"]),
    ({"reference.optimizers": {}}, ["did you mean actor.optimizer or critic.optimizer?"]),
    ({"actor.paths": 3}, ["actor.paths is not a setting; the section actor has "]),
    ({"logging.xyzzy": 3}, ["logging.xyzzy", "the section logging has tensorboard, wandb_project"]),
    ({"qqqq": {}}, ["qqqq is not a setting", "the top level has run, runtime, model"]),
    ({"run.steps": REMOVED}, ["run: steps is missing; set steps (PPO steps) or epochs (passes over data.train)"]),
    ({"run.epochs": 2}, ["run: steps 10 and epochs 2 are both given; keep one of them"]),
    ({"run.epochs": 0}, ["run.epochs is 0", "must be above 0"]),
    ({"reward": REMOVED}, ["reward is missing", "add it (Scoring)"]),
    ({"reward": REMOVED, "rewards": {"function": "exact"}}, ["rewards is not a setting", "did you mean reward?"]),
    ({"run.seed": -1}, ["run.seed is -1", "at least 0", "the nearest is 0"]),
    ({"run.steps": "10"}, ["run.steps is '10'", "whole number; write 10"]),
    ({"run.steps": "1_000"}, ["run.steps is '1_000'", "write 1000"]),
    ({"run.steps": 1e3}, ["run.steps is 1000.0", "whole number", "the nearest is 1000"]),
    ({"run.steps": True}, ["run.steps is true", "must be a whole number"]),
    ({"run.steps": None}, ["run: steps is missing", "or epochs"]),
    ({"run.name": ""}, ["run.name is ''", "must not be empty"]),
    ({"run.name": 7}, ["run.name is 7", "must be text; put it in quotes: '7'"]),
    ({"run.directory": 7}, ["run.directory is 7", "must be a path"]),
    ({"run": 7}, ["run is 7", "must be a section of `key: value` lines"]),
    ({"critic": [1]}, ["critic is [1]", "must be a section"]),
    ({"reward.options": 3}, ["reward.options is 3", "must be a section"]),
    ({"actor.offload": "cpu"}, ["actor.offload is 'cpu', must be true or false, or a section of `key: value` lines"]),
    ({"rollout.dynamic_sampling": True}, ["must be a section of `key: value` lines; write {} for its defaults"]),
    ({"rollout.servers.memory_fraction": 80}, ["memory_fraction is 80, must be below 1.0; 80% is 0.8"]),
    ({"algorithm.estimator": "ppo"}, ["algorithm.estimator: 'ppo'", "did you mean 'gae'?"]),
    ({"model.trust_remote_code": "yes"}, ["model.trust_remote_code is 'yes'", "true or false; write true"]),
    ({"algorithm.mismatch_every_steps": 4},
     ["mismatch_every_steps is 4", "with old_logprob decoupled every step needs", "set old_logprob: bypass"]),
    ({"model.dtype": "bf16"}, ["model.dtype is 'bf16'", "float32 or bfloat16", "nearest is 'bfloat16'"]),
    ({"rollout.dtype": "fp16"}, ["rollout.dtype is 'fp16'", "must be float32 or bfloat16"]),
    ({"actor.recompute_modules": ["core_atn"]},
     ["actor.recompute_modules.0 is 'core_atn', must be core_attn, mlp or moe; the nearest is 'core_attn'"]),
    ({"algorithm.kl_in_loss": {"coef": 0.1, "kind": "k4"}}, ["algorithm.kl_in_loss.kind is 'k4'", "low_var_kl"]),
    ({"algorithm.estimator": "groupo"}, ["algorithm.estimator: 'groupo'", "is none of gae", "did you mean 'grpo'"]),
    ({"algorithm.gamma": 1.5}, ["algorithm.gamma is 1.5", "at most 1.0; the nearest is 1.0"]),
    ({"algorithm.lam": 2}, ["algorithm.lam: 2 is neither a number from 0 to 1 nor {actor: 0.95,", "write one of"]),
    ({"algorithm.lam": {"actor": "x"}}, ["algorithm.lam.actor: 'x' is neither a number", "{length_adaptive: 1.5}"]),
    ({"algorithm.lam": {"actor": {"number": 0.5, "length_adaptive": 0.1}}},
     ["algorithm.lam.actor: number and length_adaptive are given together; give one of them"]),
    ({"rollout.generation": "segments"}, ["rollout: generation is 'segments', must be an import path; write package"]),
    ({"rollout.generation_options": {"tokens": 1}}, ["generation_options need a function in generation", "remove"]),
    ({"algorithm.clip_low": 1}, ["algorithm.clip_low is 1", "must be below 1"]),
    ({"algorithm.dual_clip": 1.0}, ["algorithm.dual_clip is 1.0", "must be above 1"]),
    ({"actor.optimizer.learning_rate": float("inf")}, ["learning_rate is inf", "must be a finite number"]),
    ({"actor.optimizer.beta2": 1.0}, ["actor.optimizer.beta2 is 1.0", "must be below 1.0"]),
    ({"actor.optimizer.min_learning_rate": 1.0}, ["actor.optimizer: min_learning_rate 1.0 is above", "lower it"]),
    ({"actor.optimizer.overlap_param_gather": True, "actor.optimizer.distributed": False},
     ["actor.optimizer: overlap_param_gather is true, but every rank updates", "remove one of them"]),
    ({"actor.optimizer.overlap_param_gather": True, "actor.optimizer.distributed": True},
     ["actor.optimizer: overlap_param_gather is true, which Megatron", "set overlap_grad_reduce to true, or remove"]),
    ({"evaluation": "off"}, ["evaluation is 'off'", "; write null to disable the section"]),
    ({"logging.loggers": ["wandb"]}, ["such as {package.module:Logger: {option: value}}", "set logging.wandb_project"]),
    ({"data.train.prompt_fiel": "x"}, ["the section data.train has source, options, prompt_key"]),
    ({"algorithm.clip_range": 0.2}, ["did you mean algorithm.clip_low or algorithm.clip_high?"]),
    ({"rollout.stop_token_ids": [1, -2]}, ["rollout.stop_token_ids.1 is -2", "at least 0; the nearest is 0"]),
    ({"reward.model_path": "x"}, ["reward: model_path belongs to function: model", "set both or neither"]),
    ({"algorithm.kl_in_reward": {"coef": 0, "controller": "adaptive"}},
     ["algorithm.kl_in_reward: the adaptive controller", "set coef above 0"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "fragments"), MALFORMED, ids=lambda v: next(iter(v)) if isinstance(v, dict) else ""
)
def test_malformed(tmp_path: Path, changes: dict[str, Any], fragments: list[str]) -> None:
    error = refusal(tmp_path, changes)
    assert len(error.problems) == 1, error.problems
    assert "\n" not in error.problems[0]
    assert all(word in error.problems[0] for word in fragments), error.problems


def test_every_problem_is_reported(tmp_path: Path) -> None:
    error = refusal(tmp_path, {"run.steps": 0, "actor.epoch": 1, "runtime.device": "tpu"})
    assert len(error.problems) == 3
    assert str(error).splitlines() == list(error.problems)


TEXTS: list[tuple[str, list[str]]] = [
    ("", ["is empty", "run, model, data, reward"]),
    ("- a\n- b\n", ["holds ['a', 'b']", "must be sections"]),
    ("run:\n  name: a\n  steps: 1\n  name: b\n", ["line 4, column 3", "'name' occurs twice", "remove one"]),
    ("run: {name: a\nmodel: 3\n", ["line 2", "not valid YAML"]),
    ("run:\n\tname: a\n", ["line 2", "not valid YAML"]),
    ("run: !!python/object:os.system {}\n", ["line 1", "could not determine a constructor"]),
    ("a: 1\n---\nb: 2\n", ["line 2", "single document"]),
    ("run: &x\n  inner: *x\n", ["an anchor contains itself"]),
    ("run: *nowhere\n", ["line 1", "undefined alias"]),
    ("run: !!int x\n", ["line 1, column 6", "'x' is no int; remove the tag !!int"]),
    ("7: 3\n", ["7 is a key that is not text"]),
    ("run: \x07\n", ["not valid YAML"]),
]


@pytest.mark.parametrize(("text", "fragments"), TEXTS)
def test_unreadable_yaml(tmp_path: Path, text: str, fragments: list[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert all(word in str(caught.value) for word in fragments), caught.value


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"run: \xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "latin.yaml")


def test_yaml_core_schema() -> None:
    text = "[1e-5, 1E3, -2.e1, .5, 010, 0o17, 0xff, 1:30, no, on, 2026-01-02, ~, null, TRUE, 1_000, +3, .inf]"
    expected = [1e-5, 1e3, -20.0, 0.5, 10, 15, 255, "1:30", "no", "on", "2026-01-02", None, None, True]
    assert parse_yaml(text, "text") == [*expected, "1_000", 3, float("inf")]
    assert parse_yaml("a: &x {b: 1}\nc: {<<: *x, b: 2}\n", "text") == {"a": {"b": 1}, "c": {"b": 2}}


@pytest.mark.parametrize("value", ["1e-5", "010", "no", "0o7", "null", "", "~", "2026-01-02", "a: b", "ü\n#"])
def test_text_is_text_for_both_yaml_versions(value: str) -> None:
    text = dump_yaml({"key": value})
    assert parse_yaml(text, "text") == {"key": value}
    assert yaml.safe_load(text) == {"key": value}


def test_overrides(tmp_path: Path) -> None:
    overrides = [
        "run.steps=3", "run.steps=4", "actor.optimizer.learning_rate=3e-6", "critic=null", "algorithm.estimator=grpo",
        "algorithm.kl_in_loss.coef=0.5", "rollout.stop_token_ids=[1, 2]", "reward.options.deep.key=a=b",
        "run.directory=/tmp/x", "logging.wandb_project=",
    ]  # fmt: skip
    config = load_config(written(tmp_path, {}), overrides)
    assert (config.run.steps, config.actor.optimizer.learning_rate, config.critic) == (4, 3e-6, None)
    assert config.algorithm.kl_in_loss is not None and config.algorithm.kl_in_loss.coef == 0.5
    assert config.rollout.stop_token_ids == (1, 2)
    assert config.reward.options == {"deep": {"key": "a=b"}}
    assert config.run.path == Path("/tmp/x")
    assert load_config(written(tmp_path, {"reference": None}), ["reference={}"]).reference is not None


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("run.name", "exp #2"),
        ("run.directory", "/data/run #2"),
        ("model.path", "/models/v1 #final"),
        ("run.name", "#2"),
        ("run.name", "5 #2"),
        ("run.name", "null #a # b"),
        ("run.name", "a  #"),
        ("run.name", "&exp 2"),
        ("run.name", "--- exp"),
        ("run.name", "| #2"),
        ("data.system_prompt", "a\nb #2"),
        ("data.system_prompt", "Answer with a number.\u00a0#"),
    ],
)
def test_plain_text_of_an_override_is_not_split(tmp_path: Path, key: str, text: str) -> None:
    config = load_config(written(tmp_path, {}), [f"{key}={text}"])
    assert dict(flat_settings(config.model_dump(mode="json")))[key] == text


def test_override_with_multiple_lines_can_contain_comments(tmp_path: Path) -> None:
    text = "# of a file\nfunction: exact # the rule\nworkers: 3\n"
    reward = load_config(written(tmp_path, {}), [f"reward={text}"]).reward
    assert (reward.function, reward.workers) == ("exact", 3)


def test_override_of_the_length_replaces_the_alternative(tmp_path: Path) -> None:
    run = load_config(written(tmp_path, {}), ["run.epochs=2"]).run
    assert (run.steps, run.epochs) == (None, 2)
    run = load_config(written(tmp_path, {"run.steps": REMOVED, "run.epochs": 2}), ["run.steps=3"]).run
    assert (run.steps, run.epochs) == (3, None)
    error = refusal(tmp_path, {}, "run.epochs=2", "run.steps=3")
    assert error.problems == ("run: steps 3 and epochs 2 are both given; keep one of them",)


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("actor.optimiser.learning_rate=1", ["actor.optimiser is not a setting; did you mean actor.optimizer?"]),
        ("run.steps.x=1", ["run.steps is a value"]),
        ("run.steps=[1", ["override 'run.steps=[1'", "not valid YAML"]),
        ("run.steps=5 # five", ["run.steps is '5 # five', must be a whole number"]),
        ("rollout.stop_token_ids=[1, 2] # ends", ["'# ends' would be a comment of YAML and be lost; remove it"]),
        ("run.name='exp' #2", ["'#2' would be a comment of YAML"]),
        ("run.name=!!str 5 #2", ["'#2' would be a comment of YAML"]),
        ("run=name: exp #2", ["'#2' would be a comment of YAML"]),
        ("run={name: exp #2}", ["'#2}' would be a comment of YAML"]),
        ("critic.optimizer=3", ["critic.optimizer is 3, must be a section"]),
    ],
)
def test_bad_overrides(tmp_path: Path, override: str, fragments: list[str]) -> None:
    error = refusal(tmp_path, {}, override)
    assert len(error.problems) == 1
    assert all(word in error.problems[0] for word in fragments), error.problems


def test_override_inside_a_plain_value_is_refused(tmp_path: Path) -> None:
    assert "actor is 3, must be a section with layout" in str(refusal(tmp_path, {"actor": 3}, "actor.epochs=2"))


def test_override_changes_one_use_of_an_anchor(tmp_path: Path) -> None:
    text = BASE.read_text().replace("optimizer: {learning_rate: 2e-5}", "optimizer: *o")
    path = tmp_path / "anchored.yaml"
    path.write_text(text.replace("optimizer: {learning_rate: 1e-5,", "optimizer: &o {learning_rate: 1e-5,"))
    config = load_config(path, ["actor.optimizer.learning_rate=9e-5"])
    assert config.actor.optimizer.learning_rate == 9e-5
    assert config.critic is not None
    assert config.critic.optimizer.learning_rate == 1e-5


@pytest.mark.parametrize(
    "overrides",
    [[], ["critic=null", "algorithm.estimator=grpo", "run.directory=/tmp/some dir", "run.name='1e-5'"],
     ["rollout.stop_token_ids=[1, 2]", "reward.options={a: [1, 1e-7, 'no', null], b: {c: '010'}}"]],
)  # fmt: skip
def test_round_trip(tmp_path: Path, overrides: list[str]) -> None:
    config = load_config(BASE, overrides)
    saved = tmp_path / "deep" / "config.yaml"
    save_config(config, saved)
    assert load_config(saved) == config
    assert "virtual_pipeline_chunks: 1" in saved.read_text()
    save_config(load_config(saved), tmp_path / "again.yaml")
    assert (tmp_path / "again.yaml").read_text() == saved.read_text()


BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
ABSURD = {
    "infinite steps": ("run: {steps: .inf}", "run.steps is inf, must be a whole number"),
    "steps beyond any float": ("run: {steps: 1e999}", "run.steps is inf, must be a whole number"),
    "steps that are no number": ("run: {steps: .nan}", "run.steps is nan, must be a whole number"),
    "deep nesting": ("run: " + "[" * 1001 + "]" * 1001, "more than 5000 values or 50 levels"),
    "deep sections": ("- " * 5000, "more than 5000 values or 50 levels"),
    "a tag that lies": ("run: {steps: !!bool maybe}", "line 1, column 14: 'maybe' is no bool; remove the tag"),
    "a tag before nothing": ('run: {steps: !!float ""}', "'' is no float; remove the tag"),
    "a character that is none": ('run: {name: "\\UFFFFFFFF"}', "line 1, column 16: this is not valid YAML"),
    "half a character": ('run: {name: "\\ud800"}', "must not hold a NUL or half a surrogate pair"),
    "first rank": ("actor: {layout: {first_rank: 100000000000}}", "first_rank is 100000000000, must be below 16384"),
    "ranks": ("actor: {layout: {ranks: 100000000000}}", "ranks is 100000000000, must be at most 16384"),
    "tensor parallel": ("actor: {layout: {tensor_parallel: 100000000000}}", "tensor_parallel is 100000000000, must be"),
    "token ids": ("rollout: {stop_token_ids: [18446744073709551616]}", "stop_token_ids.0 is 18446744073709551616"),
    "a long name": (f"run: {{name: {'x' * 5000}}}", "run.name: the path has 5000 bytes and its longest part has 5000"),
    "a long path": (f"model: {{path: {'x/' * 4000}y}}", "model.path: the path has 8001 bytes"),
    "prompts": ("rollout: {prompts_per_step: 1000000000000}", "prompts_per_step is 1000000000000, must be at most"),
    "digits": ("run: {seed: " + "9" * 4300 + "}", "no setting takes a whole number of 4300 characters"),
    "hexadecimal digits": ("run: {seed: 0x" + "f" * 9000 + "}", "no setting takes a whole number of 9002 characters"),
    "unknown keys": ("\n".join(f"k{i}: 1" for i in range(2400)), "2384 more settings are wrong; correct these first"),
    "an alias bomb": (BOMB, "more than 5000 values or 50 levels with anchors expanded"),
    "too much text": ("# " + "x" * 100_000, "has more than 100000 characters"),
}


@pytest.mark.parametrize("case", ABSURD)
def test_absurd_settings_are_refused_at_once(tmp_path: Path, case: str) -> None:
    text, message = ABSURD[case]
    path = tmp_path / "absurd.yaml"
    path.write_text(text)
    before = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert time.process_time() - before < 2
    assert any(message in problem for problem in caught.value.problems), caught.value.problems[:3]
    assert len(str(caught.value)) < 10_000


def test_every_number_in_settings_has_an_upper_bound() -> None:
    """Settings must use the types of megappo.config.base, not the types of pydantic. A number without a bound can cause
    a hang or a traceback."""

    def walk(schema: dict[str, Any], where: str) -> None:
        if schema.get("type") in ("integer", "number"):
            assert {"maximum", "exclusiveMaximum", "const", "enum"} & set(schema), where
        for name, inner in schema.items():
            for part in inner if isinstance(inner, list) else [inner]:
                if isinstance(part, dict):
                    walk(part, f"{where}/{name}")

    walk(Config.model_json_schema(), "")


def test_divisors_are_computed_quickly() -> None:
    before = time.process_time()
    numbers = divisors(2**24 * 65535)
    assert time.process_time() - before < 1
    assert (numbers[:4], numbers[-1], len(numbers)) == ([1, 2, 3, 4], 2**24 * 65535, 25 * 16)
    assert [divisors(n) for n in (1, 7, 12, 36)] == [[1], [1, 7], [1, 2, 3, 4, 6, 12], [1, 2, 3, 4, 6, 9, 12, 18, 36]]


@pytest.mark.parametrize("name", ["../../x", "..", ".", "/tmp/x", "a/../b", "a//b", "a/"])
def test_run_directory_is_below_runs(tmp_path: Path, name: str) -> None:
    assert f"run.name: '{name}' is not a folder below runs/" in str(refusal(tmp_path, {"run.name": name}))
    assert load_config(written(tmp_path, {"run.name": "group/x..y"})).run.path == Path("runs/group/x..y")


def test_control_characters_are_escaped(tmp_path: Path) -> None:
    problems = refusal(tmp_path, {"algorithm.estimator": "\x1b[2J"}).problems
    assert "algorithm.estimator: '\\x1b[2J'" in problems[0]


@pytest.mark.parametrize("value", cases([2, 0.5, True, "word", [1], {}], quick=("word",)), ids=str)
def test_suggested_settings_accept_the_value(value: JSONValue) -> None:
    """Names of settings are tried in every other section. If another setting is suggested, that setting must accept the
    value."""
    sections = [(), *(key for key in all_keys() if (f := find_field(key)) is not None and section_of(f) is not None)]
    names = [*sorted({key[-1] for key in all_keys()})[::4], "weight", "samples", "pass_at"]
    suggested = set()
    for section in sections:
        for name in set(names) - set(names_in(section)):
            suggested |= {key for key in likely_keys(section, name, value) if key[:-1] != section}
    assert suggested
    for key in suggested:
        settings: Any = value
        for part in reversed(key):
            settings = {part: settings}
        with pytest.raises(ValidationError) as caught:
            Config.model_validate(settings)
        for problem in caught.value.errors():
            refused = tuple(map(str, problem["loc"])) == key and problem["type"] not in ("missing", "value_error")
            assert not refused or problem["type"] in BOUNDED, (key, problem)


def test_frozen() -> None:
    config = load_config(BASE)
    values: list[BaseModel] = [config]
    while values:
        section = values.pop()
        for name in type(section).model_fields:
            with pytest.raises(ValidationError, match="frozen"):
                setattr(section, name, getattr(section, name))
            if isinstance(getattr(section, name), BaseModel):
                values.append(getattr(section, name))


def test_every_setting_is_described() -> None:
    assert len(all_keys()) > 100
    for key in all_keys():
        field = find_field(key)
        assert field is not None
        assert field.description, key
        section = section_of(field)
        assert section is None or issubclass(section, Settings)
    assert set(Config.model_fields) >= {"run", "actor", "critic", "rollout", "algorithm"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_full_disk_error_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").symlink_to("/dev/full")
    with pytest.raises(OSError, match=rf"No space left on device \(.*free of .*\): '{tmp_path}/config.yaml'"):
        save_config(load_config(BASE), tmp_path / "config.yaml")


@pytest.mark.parametrize("name", ["configs/models/nothing", "./nothing", "../a/b", "a/b/c"])
def test_missing_folder_is_not_a_hub_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the parent of the path is a folder, the path is a local path, for models and for tokenizers. Another user can
    own the same name on the Hub."""
    monkeypatch.chdir(ROOT / "configs" if name.startswith("configs/") else ROOT)
    with pytest.raises(ConfigError, match="there is no such folder"):
        hub_folder(name.removeprefix("configs/"), key="model.tokenizer")


def test_external_servers_replace_own_servers() -> None:
    """The shipped configuration documents the override. An explicit number of own servers is refused."""
    config, urls = ROOT / "configs/sglang_disaggregated.yaml", "rollout.servers.urls=['http://a:30000']"
    servers = load_config(config, [urls]).rollout.server_settings
    assert servers.urls == ("http://a:30000",) and servers.count is None
    with pytest.raises(ConfigError, match="count 2 starts own servers, but urls name external servers; set"):
        load_config(config, [urls, "rollout.servers.count=2"])
