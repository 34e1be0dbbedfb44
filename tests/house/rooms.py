"""Import relations between the rooms of a package, from the source files."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

from tests.support.places import ROOT


def imports(path: Path) -> set[str]:
    """Return all modules that a file imports, including imports in functions and under `TYPE_CHECKING`.

    Names that are imported from a top-level package are included, because these names can be modules.
    """
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


def module_imports(package: str) -> dict[str, set[str]]:
    """Return the imported modules of each module of the package, including imports in functions and under
    `TYPE_CHECKING`. Modules are named as in `package.room.module`."""
    parent = (ROOT / package).parent
    paths = {".".join(path.relative_to(parent).with_suffix("").parts): path for path in (ROOT / package).rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    return {name: _known(path, modules) - {name} for name, path in modules.items()}


def _known(path: Path, modules: Mapping[str, Path]) -> set[str]:
    known = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            known |= (members & modules.keys()) | (
                {node.module} & modules.keys() if members - modules.keys() else set()
            )
        elif isinstance(node, ast.Import):
            known |= {alias.name for alias in node.names} & modules.keys()
    return known


def in_circles(imported_by: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """Return the rooms or modules in circles of imports, and the imports of each within the circles."""
    unread = {name: set(imported) for name, imported in imported_by.items()}
    while readable := [name for name, imported in unread.items() if not imported & unread.keys()]:
        for name in readable:
            del unread[name]
    return {name: sorted(imported & unread.keys()) for name, imported in unread.items()}
