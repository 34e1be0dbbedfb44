"""Which rooms of a package import which, read from their files."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.places import ROOT


def imports(path: Path) -> set[str]:
    """Every module that a file imports, and names imported from the top of a package, which may be modules."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names if "." not in node.module)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def rooms_of(package: str) -> dict[str, set[str]]:
    """For each room (a folder, or a module of the top level) of a package, the rooms it imports."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / package).rglob("*.py"):
        parts = path.relative_to(ROOT / package).with_suffix("").parts
        room, name = parts[0], Path(package).name
        for imported in imports(path):
            of_package = imported.split(".")
            if of_package[0] == name and len(of_package) > 1 and of_package[1] != room:
                found.setdefault(room, set()).add(of_package[1])
    return found
