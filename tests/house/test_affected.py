"""Selection of the closest tests of a change, and of quick cases with `--quick`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.affected import ROOT, STEP, Tree, nearest

FILES = {
    "product/__init__.py": "from product.sums import add\n",
    "product/sums.py": "def add(): ...\n",
    "product/uses.py": "from product import sums\n",
    "product/lonely.py": "",
    "product/__main__.py": "import product.uses\n",
    "product/commands/__init__.py": "TABLE = {'count': 1}\n",
    "product/commands/count.py": "",
    "product/ways/__init__.py": "names = iter_modules(__path__)\n",
    "product/ways/long.py": "",
    "configs/tiny.yaml": "",
    "docs/a.md": "",
    "tests/support/sums.py": "from product import add\n",
    "tests/support/workers/worker.py": "import product.sums\n",
    "tests/product/test_name.py": "import product\nproduct.add()\n",
    "tests/product/test_helper.py": "from tests.support.sums import add\n",
    "tests/product/test_worker.py": "start('worker.py')\n",
    "tests/product/test_program.py": "start('product')\n",
    "tests/product/test_import_path.py": "setting = 'reward.function=x'\nother = 'product.lonely:reward'\n",
    "tests/product/test_files.py": "found = ROOT.glob('*.md')\nread(ROOT / 'configs' / 'tiny.yaml')\n",
    "tests/product/test_command.py": "run('count')\n",
    "tests/product/test_ways.py": "from product.ways import names\n",
}


@pytest.mark.parametrize(
    ("changed", "chosen"),
    [
        ("product/sums.py", ["helper", "name", "worker"]),
        ("product/uses.py", ["program"]),
        ("product/lonely.py", ["import_path"]),
        ("product/commands/count.py", ["command"]),
        ("product/ways/long.py", ["ways"]),
        ("configs/tiny.yaml", ["files"]),
        ("docs/a.md", ["files"]),
        ("tests/support/sums.py", ["helper"]),
        ("tests/product/test_name.py", ["name"]),
        ("unknown.txt", []),
    ],
)
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
