"""What the README shows is what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml

import megappo_kernels
from megappo import errors
from megappo.config.load import load_config
from megappo.config.schema import CheckpointSettings
from megappo.observe.metric_docs import markdown_table

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_metrics_table_is_current() -> None:
    shown = README.split("<!-- metrics -->\n")[1].split("<!-- /metrics -->")[0]
    assert shown.strip() == markdown_table().strip()


def test_the_example_configuration_is_valid(tmp_path: Path) -> None:
    example = re.search(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert example is not None
    path = tmp_path / "example.yaml"
    path.write_text(example.group(1))
    assert load_config(path, ["actor.optimizer.learning_rate=2e-6"]).actor.optimizer.learning_rate == 2e-6


def test_the_kernel_example_runs() -> None:
    code = README.split("## The kernels, also on their own")[1].split("```python\n")[1].split("```")[0]
    names: dict[str, object] = {}
    exec(code, names)
    hidden = names["hidden"]
    assert isinstance(hidden, torch.Tensor) and hidden.grad is not None and torch.isfinite(hidden.grad).all()


def test_the_kernel_table_is_complete() -> None:
    section = README.split("## The kernels, also on their own")[1].split("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", section.split("```python")[0]))
    functions = {n for n in megappo_kernels.__all__ if n.islower()}
    assert functions - {"use_backend"} <= named


def test_the_checkpoint_settings_are_valid() -> None:
    example = re.search(r"```yaml\n(checkpoint:.*?)```", README, re.DOTALL)
    assert example is not None
    section = yaml.safe_load(example.group(1))["checkpoint"]
    defaults = CheckpointSettings()
    assert CheckpointSettings.model_validate(section).keep_best == "reward/mean"
    assert {**defaults.model_dump(), "keep_best": "reward/mean"} == section


def test_exit_codes_are_those_of_the_program() -> None:
    codes = {errors.RUN_ERROR, errors.USER_ERROR, errors.REQUEUE, errors.HANG, errors.STOPPED_BY_USER}
    table = README.split("| exit code | meaning |")[1].split("\n\n")[0]
    assert {int(number) for number in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == {0} | codes


def test_links_and_scripts_exist() -> None:
    for target in re.findall(r"\]\(([^)h][^)]*)\)", README) + re.findall(
        r"(?:launch|tests|benchmarks)/[\w/]+\.\w+", README
    ):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configurations_are_valid(path: Path) -> None:
    config = load_config(path, [])
    assert config.run.name == path.stem
    assert yaml.safe_load(path.read_text())["run"]["name"] == path.stem
