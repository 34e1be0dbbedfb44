"""The tests that a change concerns most: those that import what was changed, or come nearest to it.

Usage: python -m tests.house.affected [FILE...]     `bash tests/run.sh --affected [FILE...]` runs them

Without files: what differs from main, committed or not. A test comes near to a file by its imports, through packages
that only pass names on and through the programs that it starts, and by naming the file. Whatever takes part in a step
of PPO is also tried in one, against the oracle. Prints the tests' files; what they were chosen for goes to stderr.
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
"""Folders that packages are imported from."""
_SILENT = {"tests/support/nursery.py", "tests/house/affected.py"}
"""What they import and name says nothing about a test: all that programs may need, so that they start at once."""
_HELPER = re.compile(r"tests/\w+/")
_WORKERS = "tests/support/workers"
"""Whose files tests start by their names."""
_NAME = re.compile(r"[A-Za-z_][\w.]*(:[\w.]+)?")


@dataclass
class Reach:
    """What a file uses."""

    files: set[str] = field(default_factory=set)
    patterns: set[str] = field(default_factory=set)
    """Of the names of files that it looks for."""
    folders: set[str] = field(default_factory=set)
    """Named as a whole."""


class Tree:
    """The files of a repository, and which use which; paths are relative to its root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @functools.cached_property
    def roots(self) -> set[str]:
        """First parts of the import paths of this repository's modules."""
        return {path.stem for source in _SOURCES for path in (self.root / source).glob("*")}

    @functools.cached_property
    def programs(self) -> dict[str, str]:
        """What a test chooses by a word: packages that are run, and modules that a package finds by their names."""
        found = {path.parent.name: path for path in self.root.glob("*/__main__.py")}
        for package in self.root.rglob("__init__.py"):
            tree = ast.parse(package.read_text())
            if finds_modules([*ast.walk(tree)]):
                keys = [path.stem for path in package.parent.glob("[!_]*.py")]
            else:
                tables = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
                keys = [str(key.value) for node in tables for key in node.keys if isinstance(key, ast.Constant)]
            found |= {key: path for key in keys if (path := package.with_name(f"{key}.py")).is_file()}
        return {name: str(path.relative_to(self.root)) for name, path in found.items()}

    @functools.cache  # noqa: B019
    def module_file(self, module: str) -> str | None:
        """Where a module of this repository is written down."""
        if module.partition(".")[0] not in self.roots:
            return None
        for source in _SOURCES:
            path = self.root / source / module.replace(".", "/")
            for file in (path.with_suffix(".py"), path / "__init__.py"):
                if file.is_file():
                    return str(file.relative_to(self.root))
        return None

    @functools.cache  # noqa: B019 - a tree lives as long as the program
    def parsed(self, file: str) -> ast.Module:
        return ast.parse((self.root / file).read_text())

    @functools.cache  # noqa: B019
    def exported(self, package_file: str) -> dict[str, str]:
        """Names that a package's __init__.py takes from elsewhere, and the file they are from."""
        found = {}
        for node in self.parsed(package_file).body:
            if isinstance(node, ast.ImportFrom) and node.module and package_file.endswith("__init__.py"):
                for alias in node.names:
                    if file := self.home(node.module, alias.name):
                        found[alias.asname or alias.name] = file
        return found

    def home(self, module: str, name: str) -> str | None:
        """The file that `from module import name` ends in."""
        if submodule := self.module_file(f"{module}.{name}"):
            return submodule
        file = self.module_file(module)
        return None if file is None else self.exported(file).get(name, file)

    @functools.cache  # noqa: B019
    def reach(self, file: str) -> Reach:
        """What a file imports, starts or names."""
        found = Reach()
        nodes = list(ast.walk(self.parsed(file)))
        packages: dict[str, str] = {}  # names that stand for a package here
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
                    found.files.add(home)
        found.files |= self._through(nodes, packages)
        if finds_modules(nodes):
            found.files |= {str(path.relative_to(self.root)) for path in (self.root / file).parent.glob("*.py")}
        for text in texts(nodes):
            self._note(text, file, found)
        found.files.discard(file)
        return found

    def _through(self, nodes: Sequence[ast.AST], packages: dict[str, str]) -> set[str]:
        """Files behind `package.name`; the package's own where no name is taken from it."""
        used: dict[str, set[str]] = {name: set() for name in packages}
        for node in nodes if packages else ():
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in used:
                used[ast.unparse(node.value)].add(node.attr)
        found = set[str]()
        for name, attributes in used.items():
            exported = self.exported(packages[name])
            found |= {exported.get(attribute, packages[name]) for attribute in attributes} or {packages[name]}
        return found

    def _note(self, text: str, file: str, found: Reach) -> None:
        """A file or a folder of the repository that a text names, or a module by its import path."""
        if re.fullmatch(r"\*\.\w+", text):
            found.patterns.add(text)
        elif text and len(text) < 200 and not text.startswith(("/", ".")) and not re.search(r"\s", text):
            for base in (self.root, (self.root / file).parent, self.root / _WORKERS):
                path = base / text
                if path.is_file():
                    found.files.add(str(path.resolve().relative_to(self.root)))
                elif path.is_dir() and base == self.root:
                    found.folders.add(text.rstrip("/"))
        if not _NAME.fullmatch(text.removeprefix("python:")):
            return
        parts = re.split(r"[.:]", text.removeprefix("python:"))
        if len(parts) == 1 and _HELPER.match(file):
            found.files |= {self.programs[text]} if text in self.programs else set()
        for end in range(len(parts), 1, -1):
            if module := self.module_file(".".join(parts[:end])):
                found.files.add(module)
                break

    def distances(self, test: str) -> dict[str, int]:
        """How many imports lie between a test and every file it uses; what helps tests is no distance."""
        found, edge = {test: 0}, [test]
        while edge:
            file = edge.pop(0)
            if not file.endswith(".py") or file in _SILENT:
                continue
            for used in self.reach(file).files:
                steps = found[file] + (_HELPER.match(used) is None)
                if steps < found.get(used, sys.maxsize):
                    found[used] = steps
                    edge.append(used)
        return found

    def looking_for(self, file: str, distances: Mapping[str, Mapping[str, int]]) -> list[str]:
        """Tests that, themselves or by their helpers, look for files of such a name; else those of its folder."""
        by_name, by_folder = [], []
        for test, near in distances.items():
            own = [self.reach(used) for used, steps in near.items() if not steps and used.endswith(".py")]
            if any(fnmatch(Path(file).name, pattern) for reach in own for pattern in reach.patterns):
                by_name.append(test)
            if any(file.startswith(f"{folder}/") for reach in own for folder in reach.folders):
                by_folder.append(test)
        return by_name or by_folder


def finds_modules(nodes: Sequence[ast.AST]) -> bool:
    """Whether a package with these nodes looks into its own folder."""
    return any(isinstance(node, ast.Name) and node.id == "__path__" for node in nodes)


def texts(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Every literal text but docstrings, and paths that are put together of such texts."""
    for node in nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield "/".join(path_parts(node))
        elif not isinstance(node, ast.Expr):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.Constant) and isinstance(child.value, str):
                    yield child.value


def path_parts(node: ast.expr) -> list[str]:
    """The texts of `ROOT / "folder" / "file"`."""
    if isinstance(node, ast.BinOp):
        return [*path_parts(node.left), *path_parts(node.right)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def nearest(tree: Tree, changed: Sequence[str]) -> dict[str, list[str]]:
    """For each changed file, the tests that come nearest to it."""
    tests = sorted(str(path.relative_to(tree.root)) for path in (tree.root / "tests").rglob("test_*.py"))
    distances = {test: tree.distances(test) for test in tests}
    found = {}
    for file in changed:
        steps = {test: near[file] for test, near in distances.items() if file in near}
        if not file.endswith(".py"):
            steps = steps or dict.fromkeys(tree.looking_for(file, distances), 0)
        least = min(steps.values(), default=0)
        found[file] = [test for test, count in steps.items() if count == least]
        if STEP in steps and STEP not in found[file]:
            found[file].append(STEP)
    return found


def changed_files(root: Path) -> list[str]:
    """What differs from where this branch left main, committed or not."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.split() if done.returncode == 0 else []

    bases = [found[0] for name in ("main", "origin/main", "HEAD") if (found := git("merge-base", "HEAD", name))]
    names = {*git("diff", "--name-only", bases[0]), *git("ls-files", "--others", "--exclude-standard")}
    return sorted(name for name in names if (root / name).is_file())


def main() -> int:
    """0, also where nothing is concerned."""
    changed = [str(Path(name).resolve().relative_to(ROOT)) for name in sys.argv[1:]] or changed_files(ROOT)
    found = nearest(Tree(ROOT), changed)
    for file, tests in found.items():
        print(f"{file}: {' '.join(tests) or 'no test uses it'}", file=sys.stderr)
    print("\n".join(sorted({test for tests in found.values() for test in tests})))
    return 0


if __name__ == "__main__":
    sys.exit(main())
