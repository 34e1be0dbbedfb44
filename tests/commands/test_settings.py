"""`megappo settings` describes settings and metrics."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

from megappo.cli import main
from megappo.config.fields import all_keys, dotted, find_field, section_of
from megappo.config.reference import sections
from megappo.observe.metric_docs import METRICS
from tests.support.places import ROOT


def settings_output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["settings", *arguments]) == 0
    return capsys.readouterr().out


def test_every_setting_is_described_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    for key in all_keys():
        field = find_field(key)
        assert field is not None and field.description is not None
        if section_of(field) is None:
            output = settings_output(capsys, dotted(key))
            assert output.startswith(f"{dotted(key)} ("), key
            assert " ".join(field.description.split())[:60] in " ".join(output.split()), key


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("algorithm.gamma", ["algorithm.gamma (number >= 0, <= 1; default 1)"]),
        ("warmup_steps", ["critic.warmup_steps (integer >= 0; default 0)"]),
        ("reward.overlong", ["reward.overlong.buffer_tokens (integer > 0; required)", "default 1)"]),
        (
            "lr",
            [
                "'lr' is a setting of other trainers; here:",
                "actor.optimizer.learning_rate (",
                "critic.optimizer.learning_rate (",
            ],
        ),
        ("actor.ppo_mini_batch_size", ["verl counts prompts, megappo counts samples", "actor.minibatch_sequences ("]),
        (
            "rollout-batch-size",
            ["'rollout_batch_size' is a setting of other trainers; here:", "rollout.prompts_per_step ("],
        ),
        ("actor_rollout_ref.model.lora_rank", ["is a setting of verl; here:", "actor.lora.rank ("]),
        ("n_samples_per_eval_prompt", ["data.validation_sets.NAME.samples\n    "]),
        ("low_var_kl", ["'low_var_kl' is a value of algorithm.kl_in_reward.kind, algorithm.kl_in_loss.kind"]),
        ("data.answer_key", ["there is no setting 'data.answer_key', but", "data.train.answer_key ("]),
        ("trainer", ["this section of verl corresponds to four sections", "run\n    Name, length, seed."]),
        ("vf_coef", ["there is no setting 'vf_coef': actor and critic have separate losses"]),
        ("clip_", ["actor.optimizer.clip_grad_norm", "algorithm.clip_low", "algorithm.clip_high"]),
        ("actor/clipfrac", ["actor/clipfrac (metric; fraction)\n    Tokens outside the band"]),
        ("eval/aime/pass@8", ["eval/aime/pass@8 (metric; fraction)"]),
        ("clipfrac", ["actor/clipfrac (metric;", "critic/clipfrac (metric;"]),
        ("", ["\nactor.optimizer\n", "\ncritic.optimizer\n", "run: Name, length, seed."]),
    ],
)
def test_names_are_explained(name: str, lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    output = settings_output(capsys, *filter(None, [name]))
    assert all(line in output for line in lines), output


def test_unknown_name_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "temperatur_"]) == 2
    assert "no setting has 'temperatur_' in its name; the nearest is 'temperature'" in capsys.readouterr().err
    assert main(["settings", "actor.xyzzy"]) == 2
    message = "no setting has 'actor.xyzzy' in its name; `megappo settings` lists all sections"
    assert message in capsys.readouterr().err
    assert main(["settings", "actor/clip_frac"]) == 2
    assert "there is no metric 'actor/clip_frac'; there are actor/clipfrac" in capsys.readouterr().err


def test_schema_has_every_shipped_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """Every key of a shipped file is a property of the schema, and unknown keys are refused. No JSON validator is
    installed."""
    schema = json.loads(settings_output(capsys, "--schema"))

    def check(settings: object, rule: dict[str, Any], where: str) -> None:
        choices = [rule, *rule.get("anyOf", [])]
        names = [str(c["$ref"]).split("/")[-1] for c in choices if "$ref" in c]
        inner = schema["$defs"][names[0]] if names else rule
        if isinstance(settings, dict) and "properties" in inner:
            assert inner["additionalProperties"] is False, where
            for name, value in settings.items():
                check(value, inner["properties"][name], f"{where}.{name}")

    for path in sorted((ROOT / "configs").glob("*.yaml")):
        check(yaml.safe_load(path.read_text()), schema, path.name)


@pytest.mark.waits
def test_closed_pipe_is_no_error() -> None:
    """Programs such as head close the pipe. Here the pipe is closed before any output."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "megappo", "settings", "--schema"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_markdown_reference_has_every_setting_and_metric(capsys: pytest.CaptureFixture[str]) -> None:
    """Each row has four cells, and each link to a section leads to a heading."""
    text = settings_output(capsys, "--markdown")
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("| `")]
    assert all(len(row) == 4 for row in rows)
    names = [row[0].strip(" `") for row in rows]
    assert set(METRICS) <= set(names)
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    for section in sections():
        assert ", ".join(f"`{place}`" for place in section.places) in headings
        assert {setting.name for setting in section.settings} <= set(names)
    anchors = {re.sub(r"[`.,]", "", heading).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\(#([^)]+)\)", text)) <= anchors


def test_markdown_and_schema_cannot_be_combined(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["settings", "--markdown", "--schema"])
    assert "not allowed with argument" in capsys.readouterr().err
