"""Rules for the structure of the code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house import rooms
from tests.house.formulas import repeated
from tests.house.rooms import imports, in_circles, module_imports, rooms_of
from tests.support.harness import start
from tests.support.places import ROOT

SOURCES = sorted([*(ROOT / "megappo").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])
TESTS = sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])
LARGEST_TOP_LEVEL = 6
LARGEST_FOLDER = 15
LISTS = {"families", "commands"}
"""Folders with one module per model family, per command, and per part of the client of SGLang."""
SERVER_SIDE = ("cpu_platform.py", "server_hooks.py", "slice_loader.py")
"""Modules of `engines/sglang` that run in the processes of the servers."""
UNSPLIT = {
    "tests/engines/test_sglang_parts.py", "tests/environments/test_environments.py",
    "tests/environments/test_gateway.py", "tests/ppo/test_in_flight.py", "tests/rewards/test_judge.py",
    "tests/rewards/test_workers.py", "tests/sglang/test_dispatch.py",
}  # fmt: skip
"""Files of tests that are longer than the rule permits. New files must not be added."""


@pytest.mark.parametrize("package", ["megappo", "kernels/megappo_kernels"])
def test_rooms_and_modules_have_no_circular_imports(package: str) -> None:
    """The imports of rooms and of modules have an order. Imports of types count."""
    assert not in_circles(rooms_of(package))
    assert not in_circles(module_imports(package))


def test_circles_of_types_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "example"
    package.mkdir()
    (package / "one.py").write_text("from example import two\nfrom example.three import name\n")
    (package / "two.py").write_text("if TYPE_CHECKING:\n    from example.one import Name\n")
    (package / "three.py").write_text("")
    monkeypatch.setattr(rooms, "ROOT", tmp_path)
    assert in_circles(module_imports("example")) == {"example.one": ["example.two"], "example.two": ["example.one"]}


def test_class_names_are_unique_in_a_room() -> None:
    """Two classes of a room must have different names. A leading underscore is ignored."""
    homes: dict[tuple[str, ...], Path] = {}
    for path in SOURCES:
        room = path.relative_to(ROOT).parts[:2]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                assert homes.setdefault((*room, node.name.lstrip("_")), path) == path, (node.name, path)


def test_package_has_few_top_level_modules() -> None:
    modules = {path.name for path in (ROOT / "megappo").glob("*.py")}
    assert len(modules) <= LARGEST_TOP_LEVEL, modules


def test_folders_have_few_modules() -> None:
    """A larger folder is split by content, unless it is a list of parts of the same kind."""
    modules = Counter(str(path.parent.relative_to(ROOT / "megappo")) for path in (ROOT / "megappo").rglob("*.py"))
    assert {folder for folder, count in modules.items() if count > LARGEST_FOLDER} == LISTS, modules


def test_algorithms_import_only_torch_and_kernels() -> None:
    own = {"torch", "megappo", "megappo_kernels"}
    for path in (ROOT / "megappo" / "algo").rglob("*.py"):
        outside = {n.split(".")[0] for n in imports(path)} - own - set(sys.stdlib_module_names)
        assert not outside, path
        assert all(n.startswith("megappo.algo") for n in imports(path) if n.split(".")[0] == "megappo")


def test_kernels_do_not_import_megappo() -> None:
    for path in (ROOT / "kernels").rglob("*.py"):
        assert not [n for n in imports(path) if n.split(".")[0] == "megappo"], path


def test_object_collectives_are_in_one_file() -> None:
    """Only `runtime/ranks/objects.py` gathers and broadcasts pickled objects. Patches of upstream code are excepted."""
    collectives = re.compile(r"\b(broadcast_object_list|(all_)?gather_object|scatter_object_list)\b")
    homes = {path.name for path in (ROOT / "megappo").rglob("*.py") if collectives.search(path.read_text())}
    assert homes <= {"objects.py", "all_devices.py"}


def test_no_formula_is_repeated() -> None:
    assert not repeated(SOURCES)


def test_repeated_formula_is_detected_with_other_names(tmp_path: Path) -> None:
    once = "def kl(gap):\n    near = gap.clamp(-20, 20)\n    shrunk = (-near).exp()\n    return shrunk - 1 + near\n"
    again = "def estimate(d):\n    x = torch.clamp(d, -20.0, 20.0)\n    return x + (tl.exp(-x) - 1)\n"
    other = "def estimate(policy, other):\n    return policy - other + torch.exp(other - policy) - 1\n"
    for name, text in (("once", once), ("again", again), ("other", other)):
        (tmp_path / f"{name}.py").write_text(text)
    (where,) = repeated([tmp_path / "once.py", tmp_path / "again.py"]).values()
    assert where == {f"{tmp_path / 'once.py'}:kl", f"{tmp_path / 'again.py'}:estimate"}
    assert not repeated([tmp_path / "once.py", tmp_path / "other.py"])


def test_deadlines_use_the_monotonic_clock() -> None:
    """Deadlines and durations use the monotonic clock. The system clock is used only by the doctor, which compares
    clocks, by events of TensorBoard, and by the message about the end of a SLURM job."""
    for path in (ROOT / "megappo").rglob("*.py"):
        if path.parent.name != "doctor" and path.name not in ("tensorboard_log.py", "launchers.py"):
            assert not re.search(r"\btime\.time\(|datetime\.(now|utcnow)\(", path.read_text()), path


def test_common_operations_are_in_one_file() -> None:
    """Only these files contain suggestions of names, waits with a deadline, output to the terminal, process groups
    (which all need a timeout), and transfers of objects. `guard` is a separate program."""
    homes = {
        r"^import difflib|^from difflib": {"errors.py"},
        r"\btime\.sleep\(": {"runtime/waiting.py", "engines/sglang/servers/guard.py"},
        r"\bprint\(.*sys\.stderr": {"cli.py", "runtime/torchrun.py", "observe/terminal/messages.py"},
        r"\b(new_group|init_process_group)\(": {"runtime/ranks/groups.py"},
        r"\.all_gather_object\(|\.broadcast_object_list\(": {"runtime/ranks/objects.py"},
    }
    for pattern, files in homes.items():
        paths = {p for p in (ROOT / "megappo").rglob("*.py") if re.search(pattern, p.read_text(), re.MULTILINE)}
        assert {str(p.relative_to(ROOT / "megappo")) for p in paths} == files, pattern


@pytest.mark.slow
@pytest.mark.waits
def test_megatron_is_prepared_before_import() -> None:
    """Megatron is prepared by every first import of megappo. Otherwise Megatron prints warnings at each start."""
    program = "from megappo.runtime.memory.allocator import collections_put_off\n"
    program += "with collections_put_off(): import megappo.checkpoint, megappo.ppo.run"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "Transformer Engine" not in done.stderr, done.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_are_short(path: Path) -> None:
    assert path.read_text().count("\n") <= 450
    for name, lines in function_lines(path):
        assert lines <= 60, f"{path} {name}"


def test_tests_are_short() -> None:
    files = {str(path.relative_to(ROOT)): path for path in TESTS}
    assert {name for name, path in files.items() if path.read_text().count("\n") > 450} <= UNSPLIT
    assert not [(path, name) for path in TESTS for name, lines in function_lines(path) if lines > 60]


def function_lines(path: Path) -> Iterator[tuple[str, int]]:
    """Yield functions and their numbers of lines. Triton kernels are excluded, because the functions that a kernel
    calls are inlined."""
    nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in nodes:
        if not any(ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list):
            yield node.name, (node.end_lineno or 0) - node.lineno + 1


def test_most_functions_are_very_short() -> None:
    lines = sorted(length for path in SOURCES for _, length in function_lines(path))
    assert lines[len(lines) * 9 // 10] <= 22


def test_ppo_step_is_short() -> None:
    tree = ast.parse((ROOT / "megappo" / "ppo" / "trainer.py").read_text())
    step = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "ppo_step")
    assert (step.end_lineno or 0) - step.lineno < 60


def private_names() -> set[str]:
    """Return the private names of the product: functions, classes, attributes and constants."""
    nodes = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))]
    names = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    names |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    names |= {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    of_named_tuples = {"_replace", "_asdict", "_make", "_fields"}  # public methods of Python
    return {name for name in names if re.match(r"_[^_]", name)} - of_named_tuples


PRIVATE = private_names()


def private_members(source: str) -> set[str]:
    """Return the private names that a file uses by attribute, import, string or patch."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()"):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and re.search(r"(attr|item|patch\.object)$", ast.unparse(node.func)):
            names |= {str(argument.value) for argument in node.args[1:2] if isinstance(argument, ast.Constant)}
        elif isinstance(node, ast.Constant) and re.fullmatch(r"megappo(_kernels)?(\.\w+)+", str(node.value)):
            names |= {*str(node.value).split(".")}
    return names & PRIVATE


def test_tests_use_only_public_names() -> None:
    """Tests and benchmarks use only public names, so that the names that users depend on are tested."""
    for path in TESTS:
        assert not private_members(path.read_text()), path


@pytest.mark.parametrize(
    "line",
    ["engine._complete = True", "from megappo.rewards.processes.workers import _Job",
     "monkeypatch.setattr(engine, '_generate_batch', batch)", "patch.object(engine, '_generate_batch', batch)",
     "monkeypatch.setattr('megappo.rewards.processes.workers._DIED', '')"],
)  # fmt: skip
def test_use_of_private_member_is_detected(line: str) -> None:
    assert private_members(line)
    assert not private_members("self._complete = cls._complete = other.__class__; os._exit(1); super()._complete()")


def test_only_megatron_core_is_imported() -> None:
    for path in SOURCES:
        assert not [n for n in imports(path) if n.startswith("megatron.") and not n.startswith("megatron.core")], path


def test_trainer_does_not_import_sglang() -> None:
    """The import takes seconds and fails with some versions of transformers. Only files for servers import SGLang."""
    for path in (path for path in SOURCES if path.name not in SERVER_SIDE):
        assert not [n for n in imports(path) if n.split(".")[0] == "sglang"], path


def test_security_document_names_existing_tests() -> None:
    rows = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("| ") and "::" in line]
    assert len(rows) > 15
    for row in rows:
        path, name = row.rsplit("`", 2)[1].split("::")
        assert f"\ndef {name}(" in (ROOT / path).read_text(), row


def test_top_level_files_are_fixed() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    top = {name.split("/")[0] for name in tracked}
    fixed = {"setup.py", "megappo", "launch", "configs", "kernels", "tests", "benchmarks", "README.md"}
    others = {"pyproject.toml", "LICENSE", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CITATION.cff"}
    assert {t for t in top if not t.startswith(".")} == fixed | others
    assert "kernels/__init__.py" not in tracked


def test_mutation_areas_name_existing_files() -> None:
    areas = sorted((ROOT / ".cosmic-ray").glob("*.toml"))
    assert {path.stem for path in areas} == {
        "algo", "checkpoint", "config", "engines", "environments", "kernels", "map", "packing", "plan", "ppo",
    }  # fmt: skip
    for path in areas:
        settings = tomllib.loads(path.read_text())["cosmic-ray"]
        tests = [word for word in settings["test-command"].split() if word.startswith("tests/")]
        assert tests and all((ROOT / name).exists() for name in [*settings["module-path"], *tests]), path


def test_each_room_has_a_test_folder() -> None:
    """The README.md of `tests` lists all other folders."""
    tests = {path.parent.name for path in (ROOT / "tests").glob("*/__init__.py")}
    rooms = {path.parent.name for path in (ROOT / "megappo").glob("*/__init__.py")}
    others = {"kernels", "launch", "configs", "benchmarks", "runs", "sglang", "slurm", "gpu", "support", "house"}
    assert tests == rooms | others
    readme = (ROOT / "tests" / "README.md").read_text()
    assert all(f"[{name}]({name})" in readme for name in others)
    assert all(list((ROOT / "tests" / room).glob("test_*.py")) for room in rooms)


def test_tests_are_one_package() -> None:
    """Files in two folders can have the same name, and no test folder hides another package."""
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]
    for path in TESTS:
        assert "noqa: E" + "402" not in path.read_text(), path


def test_benchmarks_import_only_shared_test_code() -> None:
    """Shared test code does not import benchmarks. Benchmarks import only the shared code of the tests."""
    for path in (ROOT / "tests" / "support").rglob("*.py"):
        assert not [name for name in imports(path) if name.split(".")[0] == "benchmarks"], path
    for path in (ROOT / "benchmarks").rglob("*.py"):
        of_tests = {name for name in imports(path) if name.split(".")[0] == "tests"}
        assert all(name.startswith("tests.support") for name in of_tests), path


@pytest.mark.waits
@pytest.mark.parametrize(
    ("line", "fails"),
    [
        ("subprocess.run([sys.executable, '-c', ''])", True), ("os.waitpid(os.fork() or os._exit(0), 0)", True),
        ("time.sleep(0.05)", True), ("socket.socket().bind(('127.0.0.1', 0))", True),
        ("subprocess.run(['git', '--version'])", False), ("time.monotonic()", False),
    ],
)  # fmt: skip
def test_waiting_test_needs_the_marker(tmp_path: Path, line: str, fails: bool) -> None:
    """A test that waits without the marker fails. The marker identifies tests that can be slow on busy cores."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_runtest_call, pytest_runtest_setup\n")
    marks = {"bare": "", "marked": "@pytest.mark.waits\n"}
    for name, mark in marks.items():
        text = f"import os, socket, subprocess, sys, time, pytest\n\n{mark}def test_it(): {line}\n"
        (tmp_path / f"test_{name}.py").write_text(text)
    done = start("pytest", "-q", "-p", "no:cacheprovider", tmp_path)
    assert ("1 failed, 1 passed" in done.stdout, "2 passed" in done.stdout) == (fails, not fails), done.stdout
    assert ("without the marker: add @pytest.mark.waits" in done.stdout) == fails
