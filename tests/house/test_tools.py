"""Tools of the repository: selected tests, mutants, compared runs, and subjects of commits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.house.affected import STEP, Tree, nearest
from tests.house.commit_subject import subject_problem
from tests.house.same_numbers import differences
from tests.support.places import ROOT

FILES = {
    "product/__init__.py": "from product.sums import add\n", "product/sums.py": "def add(): ...\n",
    "product/uses.py": "from product import sums\n", "product/lonely.py": "",
    "product/__main__.py": "import product.uses\n", "product/commands/__init__.py": "TABLE = {'count': 1}\n",
    "product/commands/count.py": "", "product/ways/__init__.py": "names = iter_modules(__path__)\n",
    "product/ways/long.py": "", "configs/tiny.yaml": "", "docs/a.md": "",
    "tests/support/sums.py": "from product import add\n", "tests/support/workers/worker.py": "import product.sums\n",
    "tests/product/test_name.py": "import product\nproduct.add()\n",
    "tests/product/test_helper.py": "from tests.support.sums import add\n",
    "tests/product/test_worker.py": "start('worker.py')\n", "tests/product/test_program.py": "start('product')\n",
    "tests/product/test_import_path.py": "setting = 'reward.function=x'\nother = 'product.lonely:reward'\n",
    "tests/product/test_files.py": "found = ROOT.glob('*.md')\nread(ROOT / 'configs' / 'tiny.yaml')\n",
    "tests/product/test_command.py": "run('count')\n", "tests/product/test_ways.py": "from product.ways import names\n",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "chosen"),
    [
        ("product/sums.py", ["helper", "name", "worker"]), ("product/uses.py", ["program"]),
        ("product/lonely.py", ["import_path"]), ("product/commands/count.py", ["command"]),
        ("product/ways/long.py", ["ways"]), ("configs/tiny.yaml", ["files"]), ("docs/a.md", ["files"]),
        ("tests/support/sums.py", ["helper"]), ("tests/product/test_name.py", ["name"]), ("unknown.txt", []),
    ],
)  # fmt: skip
def test_closest_tests_are_selected(tmp_path: Path, changed: str, chosen: list[str]) -> None:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert nearest(Tree(tmp_path), [changed]) == {changed: [f"tests/product/test_{name}.py" for name in chosen]}


@pytest.mark.slow
def test_every_module_selects_a_test() -> None:
    """Modules of a PPO step also select the test of a step."""
    modules = [path for room in ("megappo", "kernels") for path in (ROOT / room).rglob("*.py")]
    names = [str(path.relative_to(ROOT)) for path in modules if path.name != "__init__.py"]
    chosen = nearest(Tree(ROOT), names)
    assert not [name for name, tests in chosen.items() if not tests]
    in_a_step = {name.rpartition("/")[2] for name, tests in chosen.items() if STEP in tests}
    assert {"updates.py", "objectives.py", "packing.py"} <= in_a_step and not {"doctor.py", "network.py"} & in_a_step


@pytest.mark.waits
def test_quick_option_selects_few_cases() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quick", "tests/kernels/test_parallel.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    listed = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    assert listed == ["test_split_vocabulary[peaky-2]"]


PROGRAM = """
import sys
from pathlib import Path

sys.path[0] = "tests/house"  # the same path as for the program
import mutants

copy = mutants.copied_repository(Path(sys.argv[1]))
mutants.import_what_tests_import()
starts_processes = "tests/ppo/test_rank_agreement.py::test_error_names_differing_ranks_and_values"
arguments = ["-x", "-q", "-o", "addopts=", "tests/algo/test_golden.py", starts_processes]
with mutants.worker_pool([copy]) as pool:
    print(pool.submit(mutants.run_tests, copy, arguments, 200).result())
    with (copy / "megappo/algo/kl.py").open("a") as file:
        file.write("raise ImportError('changed')")
    print(pool.submit(mutants.run_tests, copy, arguments, 200).result())
"""


@pytest.mark.slow
@pytest.mark.waits
def test_code_of_the_copy_is_tested(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "copy")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.stdout.split() == ["passed", "failed"], done.stderr


def finished_run(directory: Path, weights: bytes, **metrics: float) -> Path:
    (directory / "final").mkdir(parents=True)
    (directory / "final" / "model.safetensors").write_bytes(weights)
    (directory / "metrics.jsonl").write_text(json.dumps({"step": 1, **metrics}) + "\n")
    return directory


def test_different_numbers_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = finished_run(tmp_path / "before", b"1", **{"actor/loss": 0.1, "time/step": 1.0, "kl/mean": float("nan")})
    same = finished_run(tmp_path / "same", b"1", **{"actor/loss": 0.1, "time/step": 2.0, "kl/mean": float("nan")})
    other = finished_run(tmp_path / "other", b"2", **{"actor/loss": 0.1, "new/metric": 1.0})
    assert differences(same, before) == []
    capsys.readouterr()
    assert differences(other, before) == ["the final weights in model.safetensors differ"]
    assert "kl/mean, new/metric" in capsys.readouterr().out
    bit = finished_run(tmp_path / "bit", b"1", **{"actor/loss": 0.1 + 2e-17})
    assert differences(bit, before) == [f"step 1: actor/loss was 0.1 and is {0.1 + 2e-17}"]


@pytest.mark.parametrize(
    "subject",
    [
        "engines: reuse one client per server", "configs: fix typo", "tests: " + 65 * "x",
        "Merge branch 'main' into feature", 'Revert "engines: reuse one client per server"',
        "kernels: compile for sm_90\n\nThe body has any length and may end with a period.",
    ],
)  # fmt: skip
def test_valid_subjects(subject: str) -> None:
    assert subject_problem(subject) is None


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        ("tests: " + 66 * "x", "has 73 characters, must have at most 72"),
        ("reuse one client", "must be 'room: imperative verb ...'"),
        ("Engines: reuse one client", "must be 'room: imperative verb ...'"),
        ("engines: Reuse one client", "must be 'room: imperative verb ...'"),
        ("engines: reuse one client.", "without a final period"),
        ("engines:reuse", "must be 'room: imperative verb ...'"),
        ("", "must be 'room: imperative verb ...'"),
    ],
)
def test_invalid_subjects(subject: str, problem: str) -> None:
    assert problem in (subject_problem(subject) or "")


@pytest.mark.waits
def test_hook_of_pre_commit(tmp_path: Path) -> None:
    (hooks,) = [repo["hooks"] for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]]
    (hook,) = [hook for hook in hooks if "commit-msg" in hook.get("stages", ())]
    program, *arguments = hook["entry"].split()
    assert program == "python"
    for message, code in (("engines: reuse one client\n", 0), ("no room\n", 1)):
        file = tmp_path / "message"
        file.write_text(message)
        done = subprocess.run([sys.executable, *arguments, str(file)], cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == code, done.stderr
