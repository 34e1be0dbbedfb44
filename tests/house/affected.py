"""Select the tests that are closest to changed files, by imports.

Usage: python -m tests.house.affected [FILE...]     `bash tests/run.sh --affected [FILE...]` runs the selected tests

The default files are all differences from main, committed or not. A test uses a file if the test imports, starts or
names the file, directly or through other files. Packages that only re-export names are skipped. A change to a part of
a PPO step also selects the comparison of a step with the oracle. Test files are printed to stdout, and the reasons to
stderr.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from tests.support.places import ROOT

STEP = "tests/runs/test_ppo_step.py"
_SOURCES = (".", "kernels")
"""Folders with importable packages."""
_SILENT = {"tests/support/nursery.py", "tests/house/affected.py"}
"""Files whose imports are ignored, because these files import most modules for a faster start of programs."""
_HELPER = re.compile(r"tests/\w+/")
_WORKERS = "tests/support/workers"
"""Folder of the programs that tests start by file name."""
_NAME = re.compile(r"[A-Za-z_][\w.]*(:[\w.]+)?")


@dataclass
class Reach:
    """Files that a file uses."""

    files: set[str] = field(default_factory=set)
    patterns: set[str] = field(default_factory=set)
    """Patterns of file names, such as `*.yaml`."""
    folders: set[str] = field(default_factory=set)
    """Folders that the file names."""


class Tree:
    """Files of a repository and the relations between the files. Paths are relative to the root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @functools.cached_property
    def roots(self) -> set[str]:
        """Top-level names of the modules of this repository."""
        return {path.stem for source in _SOURCES for path in (self.root / source).glob("*")}

    @functools.cached_property
    def programs(self) -> dict[str, str]:
        """Files that a test selects by a name: programs (packages with `__main__.py`) and modules that a package loads
        by name."""
        paths = {path.parent.name: path for path in self.root.glob("*/__main__.py")}
        for package in self.root.rglob("__init__.py"):
            tree = ast.parse(package.read_text())
            if finds_modules([*ast.walk(tree)]):
                keys = [path.stem for path in package.parent.glob("[!_]*.py")]
            else:
                tables = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
                keys = [str(key.value) for node in tables for key in node.keys if isinstance(key, ast.Constant)]
            paths |= {key: path for key in keys if (path := package.with_name(f"{key}.py")).is_file()}
        return {name: str(path.relative_to(self.root)) for name, path in paths.items()}

    @functools.cache  # noqa: B019
    def module_file(self, module: str) -> str | None:
        """Return the file of a module, or None if the module is not part of this repository."""
        if module.partition(".")[0] not in self.roots:
            return None
        for source in _SOURCES:
            path = self.root / source / module.replace(".", "/")
            for file in (path.with_suffix(".py"), path / "__init__.py"):
                if file.is_file():
                    return str(file.relative_to(self.root))
        return None

    @functools.cache  # noqa: B019 - a tree exists until the program ends
    def parsed(self, file: str) -> ast.Module:
        return ast.parse((self.root / file).read_text())

    @functools.cache  # noqa: B019
    def exported(self, package_file: str) -> dict[str, str]:
        """Return the names that a package's `__init__.py` imports, with the file that defines each name."""
        files = {}
        for node in self.parsed(package_file).body:
            if isinstance(node, ast.ImportFrom) and node.module and package_file.endswith("__init__.py"):
                for alias in node.names:
                    if file := self.home(node.module, alias.name):
                        files[alias.asname or alias.name] = file
        return files

    def home(self, module: str, name: str) -> str | None:
        """Return the file that defines `name` for `from module import name`."""
        if submodule := self.module_file(f"{module}.{name}"):
            return submodule
        file = self.module_file(module)
        return None if file is None else self.exported(file).get(name, file)

    @functools.cache  # noqa: B019
    def reach(self, file: str) -> Reach:
        """Return the files that a file imports, starts or names."""
        result = Reach()
        nodes = list(ast.walk(self.parsed(file)))
        packages: dict[str, str] = {}  # local names of imported packages
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                homes = {alias.asname or alias.name: self.home(node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                homes = {alias.asname or alias.name: self.module_file(alias.name) for alias in node.names}
            else:
                continue
            for name, home in homes.items():
                if home is not None and home.endswith("__init__.py"):
                    packages[name] = home
                elif home is not None:
                    result.files.add(home)
        result.files |= self._through(nodes, packages)
        if finds_modules(nodes):
            result.files |= {str(path.relative_to(self.root)) for path in (self.root / file).parent.glob("*.py")}
        for text in texts(nodes):
            self._note(text, file, result)
        result.files.discard(file)
        return result

    def _through(self, nodes: Sequence[ast.AST], packages: dict[str, str]) -> set[str]:
        """Return the files that define each used `package.name`. A package without used names returns its own file."""
        used: dict[str, set[str]] = {name: set() for name in packages}
        for node in nodes if packages else ():
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in used:
                used[ast.unparse(node.value)].add(node.attr)
        files = set[str]()
        for name, attributes in used.items():
            exported = self.exported(packages[name])
            files |= {exported.get(attribute, packages[name]) for attribute in attributes} or {packages[name]}
        return files

    def _note(self, text: str, file: str, reach: Reach) -> None:
        """Add the files, folders or modules that a string names to `reach`."""
        if re.fullmatch(r"\*\.\w+", text):
            reach.patterns.add(text)
        elif text and len(text) < 200 and not text.startswith(("/", ".")) and not re.search(r"\s", text):
            for base in (self.root, (self.root / file).parent, self.root / _WORKERS):
                path = base / text
                if path.is_file():
                    reach.files.add(str(path.resolve().relative_to(self.root)))
                elif path.is_dir() and base == self.root:
                    reach.folders.add(text.rstrip("/"))
        if not _NAME.fullmatch(text.removeprefix("python:")):
            return
        parts = re.split(r"[.:]", text.removeprefix("python:"))
        if len(parts) == 1 and _HELPER.match(file):
            reach.files |= {self.programs[text]} if text in self.programs else set()
        for end in range(len(parts), 1, -1):
            if module := self.module_file(".".join(parts[:end])):
                reach.files.add(module)
                break

    def distances(self, test: str) -> dict[str, int]:
        """Return the number of imports between a test and each file that the test uses. Test helpers do not count."""
        steps_to, edge = {test: 0}, [test]
        while edge:
            file = edge.pop(0)
            if not file.endswith(".py") or file in _SILENT:
                continue
            for used in self.reach(file).files:
                steps = steps_to[file] + (_HELPER.match(used) is None)
                if steps < steps_to.get(used, sys.maxsize):
                    steps_to[used] = steps
                    edge.append(used)
        return steps_to

    def looking_for(self, file: str, distances: Mapping[str, Mapping[str, int]]) -> list[str]:
        """Return the tests that search for this kind of file name, directly or with helpers. Otherwise return the tests
        that name a parent folder of the file."""
        by_name, by_folder = [], []
        for test, near in distances.items():
            own = [self.reach(used) for used, steps in near.items() if not steps and used.endswith(".py")]
            if any(fnmatch(Path(file).name, pattern) for reach in own for pattern in reach.patterns):
                by_name.append(test)
            if any(file.startswith(f"{folder}/") for reach in own for folder in reach.folders):
                by_folder.append(test)
        return by_name or by_folder


def finds_modules(nodes: Sequence[ast.AST]) -> bool:
    """Return whether a package lists the modules of its own folder."""
    return any(isinstance(node, ast.Name) and node.id == "__path__" for node in nodes)


def texts(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yield every string literal except docstrings, and every path that is joined from literals."""
    for node in nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield "/".join(path_parts(node))
        elif not isinstance(node, ast.Expr):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.Constant) and isinstance(child.value, str):
                    yield child.value


def path_parts(node: ast.expr) -> list[str]:
    """Return the parts of `ROOT / "folder" / "file"`."""
    if isinstance(node, ast.BinOp):
        return [*path_parts(node.left), *path_parts(node.right)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def nearest(tree: Tree, changed: Sequence[str]) -> dict[str, list[str]]:
    """Return the closest tests of each changed file."""
    tests = sorted(str(path.relative_to(tree.root)) for path in (tree.root / "tests").rglob("test_*.py"))
    distances = {test: tree.distances(test) for test in tests}
    selected = {}
    for file in changed:
        steps = {test: near[file] for test, near in distances.items() if file in near}
        if not file.endswith(".py"):
            steps = steps or dict.fromkeys(tree.looking_for(file, distances), 0)
        least = min(steps.values(), default=0)
        selected[file] = [test for test, count in steps.items() if count == least]
        if STEP in steps and STEP not in selected[file]:
            selected[file].append(STEP)
    return selected


def changed_files(root: Path) -> list[str]:
    """Return the files that differ from the merge base with main, committed or not."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.split() if done.returncode == 0 else []

    bases = [commits[0] for name in ("main", "origin/main", "HEAD") if (commits := git("merge-base", "HEAD", name))]
    names = {*git("diff", "--name-only", bases[0]), *git("ls-files", "--others", "--exclude-standard")}
    return sorted(name for name in names if (root / name).is_file())


def main() -> int:
    """Print the selected tests. Return 0, also if no test is selected."""
    changed = [str(Path(name).resolve().relative_to(ROOT)) for name in sys.argv[1:]] or changed_files(ROOT)
    selected = nearest(Tree(ROOT), changed)
    for file, tests in selected.items():
        print(f"{file}: {' '.join(tests) or 'no test uses it'}", file=sys.stderr)
    print("\n".join(sorted({test for tests in selected.values() for test in tests})))
    return 0


if __name__ == "__main__":
    sys.exit(main())
