"""Commands that describe megappo: guides, settings, and completion in a shell."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megappo.cli import main
from megappo.commands import COMMANDS, guide
from megappo.commands.completion import SHELLS, script
from megappo.commands.guide import GUIDES, TOPICS, text_of
from megappo.config.fields import all_keys, dotted, find_field, section_of
from megappo.config.reference import sections
from megappo.observe.metric_docs import METRICS
from tests.support.places import ROOT


def test_every_guide_is_a_topic() -> None:
    assert {path.stem for path in GUIDES.glob("*.md")} == set(TOPICS)


def test_list_of_topics(output_of: Callable[..., str]) -> None:
    lines = output_of("guide").splitlines()
    assert [line.split()[2] for line in lines] == list(TOPICS)


@pytest.mark.parametrize("topic", TOPICS)
def test_print_a_guide(topic: str, output_of: Callable[..., str]) -> None:
    assert output_of("guide", topic) == text_of(topic)


def test_print_a_section_with_its_subsections(output_of: Callable[..., str]) -> None:
    printed = output_of("guide", "ppo", "ratio and")
    assert printed.startswith("## Ratio and clipping\n") and "### Dual clip" in printed
    assert "## Estimators of KL" not in printed


def test_comments_in_code_are_no_headings(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "# Title\n\n## Use\n\n```bash\n# a comment about ends\nls\n```\n\nmore\n\n## End\n\nlast\n"
    monkeypatch.setattr("megappo.commands.guide.text_of", lambda topic: text)
    assert guide.section_of("ppo", "use").endswith("```\n\nmore")
    assert guide.section_of("ppo", "end") == "## End\n\nlast"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["troubleshot"], "there is no guide 'troubleshot'; the nearest topic is troubleshoot"),
        (["xyzzy"], "there is no guide 'xyzzy'; the topics are"),
        (["ppo", "no such words"], "the guide ppo has no section 'no such words'; its sections are"),
    ],
)
def test_unknown_topics_and_sections(arguments: list[str], message: str, errors_of: Callable[..., str]) -> None:
    assert message in errors_of("guide", *arguments)


def test_every_setting_is_described_by_name(output_of: Callable[..., str]) -> None:
    for key in all_keys():
        field = find_field(key)
        assert field is not None and field.description is not None
        if section_of(field) is None:
            output = output_of("settings", dotted(key))
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
            ["'lr' is a setting of other trainers; here:", "actor.optimizer.learning_rate (",
             "critic.optimizer.learning_rate ("],
        ),
        ("actor.ppo_mini_batch_size", ["verl counts prompts, megappo counts samples", "actor.minibatch_sequences ("]),
        ("rollout-batch-size",
         ["'rollout_batch_size' is a setting of other trainers; here:", "rollout.prompts_per_step ("]),
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
)  # fmt: skip
def test_names_are_explained(name: str, lines: list[str], output_of: Callable[..., str]) -> None:
    output = output_of("settings", *filter(None, [name]))
    assert all(line in output for line in lines), output


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("temperatur_", "no setting has 'temperatur_' in its name; the nearest is 'temperature'"),
        ("actor.xyzzy", "no setting has 'actor.xyzzy' in its name; `megappo settings` lists all sections"),
        ("actor/clip_frac", "there is no metric 'actor/clip_frac'; there are actor/clipfrac"),
    ],
)
def test_unknown_name_gets_the_nearest(name: str, message: str, errors_of: Callable[..., str]) -> None:
    assert message in errors_of("settings", name)


def test_schema_has_every_shipped_setting(output_of: Callable[..., str]) -> None:
    """Every key of a shipped file is a property of the schema, and unknown keys are refused. No JSON validator is
    installed."""
    schema = json.loads(output_of("settings", "--schema"))

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


def test_markdown_reference_has_every_setting_and_metric(output_of: Callable[..., str]) -> None:
    """Each row has four cells, and each link to a section leads to a heading."""
    text = output_of("settings", "--markdown")
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


COMPLETE = """
source "$1"
shift
for line in "$@"; do
    COMP_LINE=$line COMP_POINT=${#line}
    read -ra COMP_WORDS <<<"$line"
    [[ $line == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _megappo
    (IFS='|'; echo "${COMPREPLY[*]}")
done
complete -p megappo
"""


@pytest.fixture(scope="module", params=SHELLS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the script of a shell. bash can run the script of zsh without its first line."""
    path = tmp_path_factory.mktemp("completion") / request.param
    path.write_text(script(request.param))
    return path


@pytest.mark.waits
def test_bash_completes(written: Path) -> None:
    cases = {
        "megappo pl": "plan ",
        "megappo ": "|".join(f"{name} " for name in COMMANDS),
        "megappo plan --se": "--search ",
        "megappo export --role ": "actor |critic ",
        "megappo export --format p": "peft ",
        "megappo data ": "prepare ",
        "megappo train run.yaml actor.optimizer.lea": "actor.optimizer.learning_rate=",
        "megappo train run.yaml": "",  # files
        "megappo train run.yaml run.steps=": "",
        "megappo report actor.lay": "",  # the command has no overrides
        "megappo settings rollout.temperature": "rollout.temperature ",
        "megappo xyzzy --": "",
    }
    lines = [line for line in written.read_text().splitlines() if not line.startswith("autoload")]
    written.write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        ["bash", "-uc", COMPLETE, "bash", str(written), *cases], capture_output=True, text=True, check=True
    )
    *answers, registered = done.stdout.splitlines()
    assert dict(zip(cases, answers, strict=True)) == cases
    assert "-F _megappo megappo" in registered and "-o default" in registered


@pytest.mark.waits
def test_zsh_reads_its_script(tmp_path: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    (tmp_path / "script").write_text(script("zsh"))
    done = subprocess.run(
        ["zsh", "-fc", f"source {tmp_path / 'script'}; which _megappo"], capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
