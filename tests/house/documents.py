"""Tables in README.md files that are generated from the code, between `<!-- NAME -->` and `<!-- /NAME -->`.

Usage: python -m tests.house.documents      updates all tables; tests/house/test_readme.py fails if a table is outdated
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

from megappo.commands.markdown import table
from tests.house.rooms import rooms_of
from tests.support.features import FACTORS
from tests.support.places import ROOT
from tests.support.quick import has_exhaustive

_BLOCK = re.compile(r"<!-- (\w+) -->\n(.*?)<!-- /\1 -->\n", re.DOTALL)


def documents() -> list[Path]:
    """Return the Markdown files of the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [ROOT / name for name in sorted(names) if (ROOT / name).exists()]


def features_table() -> str:
    """Return the table of the features that tests combine in pairs. The basic features come first."""
    rows = [[factor, "; ".join(level.description for level in levels)] for factor, levels in FACTORS.items()]
    return table(["", "features"], rows)


def head_of(path: Path) -> tuple[str, list[list[str]]]:
    """Return the prose and the commands of the comment at the start of a configuration. Each command is a list of
    arguments."""
    head = [line for line in path.read_text().split("\nrun:")[0].splitlines() if line.startswith("#")]
    prose = " ".join(line.removeprefix("# ") for line in head if not line.startswith("#   "))
    return prose, [shlex.split(line.removeprefix("#")) for line in head if line.startswith("#   ")]


def configurations_table() -> str:
    """Return the table of the shipped configurations, the smallest first."""
    rows = []
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        prose, commands = head_of(path)
        plan = next(command for command in commands if command[:2] == ["megappo", "plan"])
        machine, gpus = plan[plan.index("--machine") + 1], int(plan[plan.index("--gpus") + 1])
        sentences = prose.split(" Run it with")[0]
        rows.append(
            (gpus if machine != "cpu" else 0, [f"[{path.stem}]({path.name})", f"{gpus} x {machine}", sentences])
        )
    return table(["configuration", "devices that train", "what"], [row for _, row in sorted(rows)])


def room_levels() -> list[list[str]]:
    """Return the rooms of megappo by level. A room imports only rooms of lower levels, and the lowest level is
    first."""
    imported_by = rooms_of("megappo")
    rooms = [path.parent.name for path in sorted((ROOT / "megappo").glob("*/__init__.py"))]
    unread = {room: imported_by.get(room, set()) & set(rooms) for room in rooms}
    levels = []
    while unread:
        levels.append([room for room, imported in unread.items() if not imported & unread.keys()])
        assert levels[-1], f"rooms have circular imports: {unread}"
        for room in levels[-1]:
            del unread[room]
    return levels


def rooms_picture() -> str:
    """Return a drawing of the levels, the highest first."""
    lines = ["   ".join(level) for level in reversed(room_levels())]
    return "\n".join(["```", *(line.center(max(map(len, lines))).rstrip() for line in lines), "```"])


def rooms_table() -> str:
    """Return the table of the rooms. Each room comes after the rooms that the room imports."""
    imported_by = rooms_of("megappo")
    rows = []
    for name in itertools.chain(*room_levels()):
        imported = [room for room in sorted(imported_by.get(name, ())) if (ROOT / "megappo" / room).is_dir()]
        rows.append([f"[{name}]({name})", _summary(Path(name)), ", ".join(imported) or "no other room"])
    return table(["room", "what is in it", "imports"], rows)


def folders_table() -> str:
    """Return the table of the folders in rooms."""
    inits = sorted((ROOT / "megappo").glob("*/**/__init__.py"))
    folders = [path.parent.relative_to(ROOT / "megappo") for path in inits if path.parent.parent != ROOT / "megappo"]
    return table(["folder", "what is in it"], [[f"[{folder}]({folder})", _summary(folder)] for folder in folders])


def _summary(folder: Path) -> str:
    """Return the first paragraph of the docstring of a folder of megappo."""
    docstring = ast.get_docstring(ast.parse((ROOT / "megappo" / folder / "__init__.py").read_text())) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def exhaustive_table() -> str:
    """Return the table of the exhaustive tests of each file, with the last commit at which all of these tests
    passed."""
    results = json.loads((ROOT / "tests" / "house" / "exhaustive.json").read_text())  # suite.py writes this file
    marked = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if has_exhaustive(path)]
    rows = []
    for file in [str(path.relative_to(ROOT)) for path in marked]:
        if of := results.get(file):
            columns = [str(of["tests"]), f"{of['cpu_seconds']:.0f}", f"{of['commit']}, {of['date']}"]
        rows.append([f"`{file}`", *(columns if of else ["", "", "never"])])
    return table(["file", "exhaustive tests", "CPU seconds", "last passed at"], rows)


def faults_table() -> str:
    """Return the table of the faults in the last successful run of the fault matrix."""
    results = json.loads((ROOT / "tests" / "house" / "faults.json").read_text())  # faults.py writes this file
    rows = [
        [kind, str(of["faults"]), str(of["faults"] - of["ended"]), str(of["ended"]), f"{of['seconds']:.1f}"]
        for kind, of in results["kinds"].items()
    ]
    if not rows:
        return "The complete matrix has not been run yet."
    head = f"The last successful run was at {results['commit']} on {results['date']} with seed {results['seed']}."
    return f"{head}\n\n{table(['fault', 'tried', 'continued', 'ended', 'maximum seconds until the end'], rows)}"


TABLES: dict[str, Callable[[], str]] = {
    "configurations": configurations_table, "exhaustive": exhaustive_table, "faults": faults_table,
    "features": features_table, "folders": folders_table, "picture": rooms_picture, "rooms": rooms_table,
}  # fmt: skip


def with_current_tables(text: str) -> str:
    """Return the document with tables that are generated from the current code."""
    return _BLOCK.sub(lambda match: f"<!-- {match[1]} -->\n{TABLES[match[1]]()}\n<!-- /{match[1]} -->\n", text)


if __name__ == "__main__":
    for document in documents():
        document.write_text(with_current_tables(document.read_text()))
