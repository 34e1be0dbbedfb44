"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*(ROOT / "megappo").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])
STAGES = ("data", "rollout", "rewards", "models", "reshard", "algo", "observe", "plan", "checkpoint")
# What a room may import of others besides types, config and runtime. The trainer, assembly and the few modules at the
# top level wire the stages.
ALLOWED = {
    "algo": set(),
    "observe": set(),
    "rewards": {"data"},  # what a prompt of chat messages keeps for the reward model
    "data": {"rewards"},  # the loader of python:module:function
    "reshard": {"models"},  # shapes and layouts, not roles
    "models": {"algo", "reshard"},
    "rollout": {"data", "reshard"},  # buckets of weights on their way into engines
    "checkpoint": {"models", "reshard"},  # what a role's weights and optimizer are, and what whole tensors they make
    "plan": {"observe", "reshard"},  # FLOPs per token, and the map that says which parameters there are
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("room", STAGES)
def test_stages_do_not_import_each_other(room: str) -> None:
    for path in (ROOT / "megappo" / room).rglob("*.py"):
        rooms = {name.split(".")[1] for name in imports(path) if name.startswith("megappo.")}
        assert rooms & set(STAGES) <= ALLOWED[room] | {room}, path


def test_the_mathematics_depends_on_torch_only() -> None:
    for path in (ROOT / "megappo" / "algo").glob("*.py"):
        outside = {n.split(".")[0] for n in imports(path)} - {"torch", "megappo"} - set(sys.stdlib_module_names)
        assert not outside, path
        assert all(n.startswith("megappo.algo") for n in imports(path) if n.startswith("megappo"))


def test_kernels_know_nothing_of_megappo() -> None:
    for path in (ROOT / "kernels").rglob("*.py"):
        assert not [n for n in imports(path) if n.split(".")[0] == "megappo"], path


def test_the_trainer_has_no_second_implementation_of_a_kernel() -> None:
    """`megappo.algo` holds the plain functions that the kernels are tested against; only its estimators are used."""
    for path in (ROOT / "megappo").rglob("*.py"):
        if "algo" in path.relative_to(ROOT).parts:
            continue
        used = {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
        used |= {
            alias.name
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.ImportFrom) and n.module and n.module.startswith("megappo.algo")
            for alias in n.names
        }
        plain = {"policy_loss", "value_loss", "compute_gae", "whiten_stats", "log_softmax", "cross_entropy"}
        allowed = {"policy_loss"} if "algorithm.policy_loss" in path.read_text() else set()  # a setting of that name
        assert not (used & plain) - allowed, path


def test_a_clock_that_jumps_decides_nothing() -> None:
    """Deadlines and durations are of the monotonic clock; only the doctor, which compares clocks, reads the other."""
    for path in (ROOT / "megappo").rglob("*.py"):
        if path.parent.name != "doctor":
            assert not re.search(r"\btime\.time\(|datetime\.(now|utcnow)\(", path.read_text()), path


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_fit_a_screen(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 450
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 70, f"{path}:{node.lineno} {node.name}"


def test_the_step_fits_a_screen() -> None:
    tree = ast.parse((ROOT / "megappo" / "trainer.py").read_text())
    step = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "ppo_step")
    assert (step.end_lineno or 0) - step.lineno < 60


def test_upstream_is_reached_through_megatron_core_only() -> None:
    for path in SOURCES:
        assert not [n for n in imports(path) if n.startswith("megatron.") and not n.startswith("megatron.core")], path


def test_the_top_level_is_fixed() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    top = {name.split("/")[0] for name in tracked}
    fixed = {"setup.py", "megappo", "launch", "configs", "kernels", "tests", "benchmarks", "README.md"}
    settings = {"LICENSE", "ruff.toml", "mypy.ini", "pytest.ini"}
    assert {t for t in top if not t.startswith(".")} <= fixed | settings
    assert "kernels/__init__.py" not in tracked


def test_command_line_starts_without_torch() -> None:
    code = "import sys, megappo.cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_area_of_mutation_testing_names_files_that_are_there() -> None:
    areas = sorted((ROOT / ".cosmic-ray").glob("*.toml"))
    assert {path.stem for path in areas} == {"algo", "checkpoint", "kernels", "map", "packing", "plan"}
    for path in areas:
        settings = tomllib.loads(path.read_text())["cosmic-ray"]
        tests = [word for word in settings["test-command"].split() if word.startswith("tests/")]
        assert tests and all((ROOT / name).exists() for name in [*settings["module-path"], *tests]), path
