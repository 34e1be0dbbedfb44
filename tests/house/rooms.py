"""Import relations between the rooms of a package, from the source files."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.places import ROOT


def imports(path: Path) -> set[str]:
    """Return all modules that a file imports. Names that are imported from a top-level package are included, because
    these names can be modules."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names if "." not in node.module)}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    return modules


def rooms_of(package: str) -> dict[str, set[str]]:
    """Return the imported rooms of each room. A room is a folder or a top-level module of the package."""
    rooms: dict[str, set[str]] = {}
    for path in (ROOT / package).rglob("*.py"):
        parts = path.relative_to(ROOT / package).with_suffix("").parts
        room, name = parts[0], Path(package).name
        for imported in imports(path):
            of_package = imported.split(".")
            if of_package[0] == name and len(of_package) > 1 and of_package[1] != room:
                rooms.setdefault(room, set()).add(of_package[1])
    return rooms
