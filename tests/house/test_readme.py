"""Documents: links, commands, settings, examples and generated tables match the code."""

from __future__ import annotations

import ast
import inspect
import json
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megappo import errors
from megappo.commands.markdown import anchor
from megappo.config.load import load_config
from megappo.config.schema import CheckpointSettings, Config
from megappo.observe.metric_docs import METRICS
from tests.house.commands import assert_is_read, blocks, check_command, commands, inline_code
from tests.house.documents import documents, with_current_tables
from tests.support.places import QUICKSTART, ROOT

DOCUMENTS = documents()
CURRENT = [path for path in DOCUMENTS if path.parent.name != "results"]
"""Documents without results of past measurements."""
LONGEST_README_LINES = 150


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def every(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=name_of)


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """Return the configuration in the README."""
    path = tmp_path / "my-run.yaml"
    path.write_text(blocks((ROOT / "README.md").read_text(), "yaml")[0])
    return path


def test_readme_is_short() -> None:
    assert (ROOT / "README.md").read_text().count("\n") <= LONGEST_README_LINES


def test_links_from_the_readme_reach_every_document() -> None:
    """Pages with results are linked from the pages that cite the results."""
    reached, pending = set(), [ROOT / "README.md"]
    while pending:
        path = pending.pop()
        if path not in reached:
            reached.add(path)
            targets = re.findall(r"\]\(([^)#\s]+\.md)(?:#[^)]*)?\)", path.read_text())
            pending += [(path.parent / target).resolve() for target in targets if not target.startswith("http")]
    documents_of_users = {path for path in DOCUMENTS if ".github" not in path.parts}
    assert sorted(name_of(path) for path in documents_of_users - reached) == []


@every(DOCUMENTS)
def test_generated_tables_are_current(path: Path) -> None:
    text = path.read_text()
    assert text == with_current_tables(text), "run: python -m tests.house.documents"


@cache
def anchors(path: Path) -> set[str]:
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)}


@every(DOCUMENTS)
def test_links_have_existing_targets(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if not target.startswith("http"):
            file, _, heading = target.partition("#")
            place = (path.parent / file).resolve() if file else path
            assert place.exists(), target
            assert not heading or heading in anchors(place), target


@every(CURRENT)
def test_named_files_and_variables_exist(path: Path) -> None:
    text = path.read_text()
    for name in re.findall(r"(?<![\w./])(?:launch|tests|benchmarks|configs|megappo|kernels)/[\w./-]+\.\w+\b", text):
        assert (ROOT / name).exists(), name
    for variable in re.findall(r"MEGAPPO_[A-Z_]+", text):
        assert_is_read(variable)


@every(CURRENT)
def test_commands_are_valid(path: Path, example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All commands are parsed, including each setting. Commands with `plan` are run."""
    for command in commands(path.read_text()):
        check_command(command, example)
    capsys.readouterr()


def settings_below(model: Any) -> Any:
    """Return the fields of a section. A union with None is resolved."""
    for candidate in (model, *getattr(model, "__args__", ())):
        if hasattr(candidate, "model_fields"):
            return candidate.model_fields
    return None


@every([path for path in CURRENT if path.name != "CHANGELOG.md"])  # the changelog names old settings
def test_named_settings_and_metrics_exist(path: Path) -> None:
    sections, kinds = "|".join(Config.model_fields), {name.split("/")[0] for name in METRICS}
    for code in inline_code(path.read_text()):
        match = re.match(rf"((?:{sections})(?:\.[a-z_0-9]+)+)(?:[:=, ]|$)", code)
        if match and not code.endswith((".json", ".sh", ".yaml")):
            fields: Any = Config.model_fields
            for key in match[1].split("."):
                assert fields is None or key in fields, code
                fields = settings_below(fields[key].annotation) if fields is not None else None
        kind, _, metric = code.partition("/")
        if kind in kinds and re.fullmatch(r"[a-z_0-9]+", metric) and not (path.parent / code).exists():
            assert code in METRICS, code


@every(CURRENT)
def test_examples_of_settings_and_data_are_valid(path: Path, tmp_path: Path) -> None:
    """An example without the section `run` replaces settings of the quickstart."""
    for block in blocks(path.read_text(), "yaml"):
        example = tmp_path / "example.yaml"
        example.write_text(block)
        files = [example] if "run" in yaml.safe_load(block) else [QUICKSTART, example]
        load_config(files[0], [str(path) for path in files[1:]])
    for block in blocks(path.read_text(), "json"):
        assert all(isinstance(json.loads(line), dict) for line in block.splitlines())


@every([path for path in CURRENT if blocks(path.read_text(), "python")])
def test_examples_in_python_run(path: Path) -> None:
    """Examples of `megappo.api` are excluded, because tests/api/test_api.py runs these examples."""
    for block in blocks(path.read_text(), "python") if path.parent.name != "api" else ():
        if "megappo.api" in block:
            continue
        names: dict[str, Any] = {}
        exec(compile(block, path, "exec"), names)
        if "my_reward" in names:
            assert names["my_reward"](response="2", answer="2") == 1.0
        if "hidden" in names:
            assert isinstance(names["hidden"].grad, torch.Tensor) and names["hidden"].grad.isfinite().all()


def test_kernel_table_is_complete() -> None:
    """The README of the kernels documents all kernels that the trainer uses."""
    named = set(inline_code((ROOT / "kernels" / "README.md").read_text()))
    imported = {
        (node.module, alias.name)
        for path in (ROOT / "megappo").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("megappo_kernels.")
        for alias in node.names
    }
    functions = {name for module, name in imported if inspect.isfunction(getattr(import_module(module), name))}
    assert "ppo_head_loss" in functions and functions <= named


def test_checkpoint_settings_are_documented_with_defaults() -> None:
    (example,) = blocks((ROOT / "megappo" / "checkpoint" / "README.md").read_text(), "yaml")
    section = yaml.safe_load(example)["checkpoint"]
    assert {**CheckpointSettings().model_dump(), "keep_best": "reward/mean"} == section


def test_documented_exit_codes_are_complete() -> None:
    codes = {errors.RUN_ERROR, errors.USER_ERROR, errors.REQUEUE, errors.HANG, errors.STOPPED_BY_USER, errors.FAULT}
    text = (ROOT / "megappo" / "checkpoint" / "README.md").read_text()
    table = text.split("| exit code | meaning |")[1].split("\n\n")[0]
    assert {int(number) for number in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == {0} | codes


def test_workflow_runs_existing_files() -> None:
    (path,) = (ROOT / ".github" / "workflows").glob("*.yml")
    jobs = yaml.safe_load(path.read_text())["jobs"]
    ran = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert ran and all((ROOT / command.split()[0]).exists() for command in ran)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configurations_are_valid(path: Path) -> None:
    config = load_config(path, [])
    assert config.run.name == path.stem
    assert yaml.safe_load(path.read_text())["run"]["name"] == path.stem
