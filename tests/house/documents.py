"""The tables of the README.md files that are made from the code, between `<!-- NAME -->` and `<!-- /NAME -->`.

Usage: python -m tests.house.documents      writes them anew; tests/house/test_readme.py says when that is due
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

from megappo.commands import COMMANDS, module_of
from megappo.commands.markdown import metrics_table, table
from tests.house.rooms import rooms_of
from tests.support.features import FACTORS
from tests.support.places import ROOT
from tests.support.quick import has_exhaustive

_BLOCK = re.compile(r"<!-- (\w+) -->\n(.*?)<!-- /\1 -->\n", re.DOTALL)


def documents() -> list[Path]:
    """Every Markdown file of the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [ROOT / name for name in sorted(names) if (ROOT / name).exists()]


def features_table() -> str:
    """What steps are made of whose features meet in pairs, the plain ones first."""
    rows = [[factor, "; ".join(level.words for level in levels)] for factor, levels in FACTORS.items()]
    return table(["", "features"], rows)


def commands_table() -> str:
    """How each subcommand is called, and what it does."""
    rows = []
    for name, command in COMMANDS.items():
        wide = functools.partial(argparse.HelpFormatter, width=1000)
        parser = argparse.ArgumentParser(prog=f"megappo {name}", add_help=False, formatter_class=wide)
        module_of(name).add_arguments(parser)
        rows.append([f"`{parser.format_usage().removeprefix('usage: ').strip()}`", command.help])
    return table(["command", "what it does"], rows)


def head_of(path: Path) -> tuple[str, list[list[str]]]:
    """The comment at the head of a configuration: its sentences, and the words of the commands in it."""
    head = [line for line in path.read_text().split("\nrun:")[0].splitlines() if line.startswith("#")]
    words = " ".join(line.removeprefix("# ") for line in head if not line.startswith("#   "))
    return words, [shlex.split(line.removeprefix("#")) for line in head if line.startswith("#   ")]


def configurations_table() -> str:
    """The shipped configurations, smallest first."""
    rows = []
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        words, commands = head_of(path)
        plan = next(command for command in commands if command[:2] == ["megappo", "plan"])
        machine, gpus = plan[plan.index("--machine") + 1], int(plan[plan.index("--gpus") + 1])
        sentences = words.split(" Run it with")[0]
        rows.append(
            (gpus if machine != "cpu" else 0, [f"[{path.stem}]({path.name})", f"{gpus} x {machine}", sentences])
        )
    return table(["configuration", "devices that train", "what"], [row for _, row in sorted(rows)])


def floors() -> list[list[str]]:
    """The rooms of megappo from the bottom up: those of a floor import rooms of the floors below it alone."""
    imported_by = rooms_of("megappo")
    rooms = [path.parent.name for path in sorted((ROOT / "megappo").glob("*/__init__.py"))]
    unread = {room: imported_by.get(room, set()) & set(rooms) for room in rooms}
    found = []
    while unread:
        found.append([room for room, imported in unread.items() if not imported & unread.keys()])
        assert found[-1], f"rooms import in circles: {unread}"
        for room in found[-1]:
            del unread[room]
    return found


def rooms_picture() -> str:
    """The floors, the topmost first."""
    lines = ["   ".join(floor) for floor in reversed(floors())]
    return "\n".join(["```", *(line.center(max(map(len, lines))).rstrip() for line in lines), "```"])


def rooms_table() -> str:
    """The rooms of megappo, each below those that it imports."""
    imported_by = rooms_of("megappo")
    rows = []
    for name in itertools.chain(*floors()):
        docstring = ast.get_docstring(ast.parse((ROOT / "megappo" / name / "__init__.py").read_text())) or ""
        sentence = " ".join(docstring.split("\n\n")[0].split())
        imported = [room for room in sorted(imported_by.get(name, ())) if (ROOT / "megappo" / room).is_dir()]
        rows.append([f"[{name}]({name})", sentence, ", ".join(imported) or "no other room"])
    return table(["room", "what is in it", "imports"], rows)


def exhaustive_table() -> str:
    """What `tests/run.sh --all` has more than `tests/run.sh`, and when it was green last, file by file."""
    found = json.loads((ROOT / "tests" / "house" / "exhaustive.json").read_text())  # which suite.py writes
    marked = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if has_exhaustive(path)]
    rows = []
    for file in [str(path.relative_to(ROOT)) for path in marked]:
        if of := found.get(file):
            told = [str(of["tests"]), f"{of['cpu_seconds']:.0f}", f"{of['commit']}, {of['date']}"]
        rows.append([f"`{file}`", *(told if of else ["", "", "never"])])
    return table(["file", "exhaustive tests", "CPU seconds", "all held last at"], rows)


def faults_table() -> str:
    """Which faults were tried when everything held last."""
    found = json.loads((ROOT / "tests" / "house" / "faults.json").read_text())  # which faults.py writes
    rows = [
        [kind, str(of["faults"]), str(of["faults"] - of["ended"]), str(of["ended"]), f"{of['seconds']:.1f}"]
        for kind, of in found["kinds"].items()
    ]
    if not rows:
        return "They have not been run as a whole yet."
    head = f"All of these held last at {found['commit']} on {found['date']}, with seed {found['seed']}."
    return f"{head}\n\n{table(['fault', 'tried', 'went on', 'ended', 'after at most seconds'], rows)}"


TABLES: dict[str, Callable[[], str]] = {
    "commands": commands_table,
    "configurations": configurations_table,
    "exhaustive": exhaustive_table,
    "faults": faults_table,
    "features": features_table,
    "metrics": metrics_table,
    "picture": rooms_picture,
    "rooms": rooms_table,
}


def written_anew(text: str) -> str:
    """A document with its tables as the code has them now."""
    return _BLOCK.sub(lambda found: f"<!-- {found[1]} -->\n{TABLES[found[1]]()}\n<!-- /{found[1]} -->\n", text)


if __name__ == "__main__":
    for document in documents():
        document.write_text(written_anew(document.read_text()))
