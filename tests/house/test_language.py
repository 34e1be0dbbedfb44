"""Names and docstrings use the standard terms of the field."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.places import ROOT

BANNED = frozenset(
    [
        "found", "told", "tell", "said", "say", "given", "gives", "wanted", "held", "holds", "there", "here", "back",
        "further", "words", "kept", "asked", "ask", "heard", "owed", "owes", "anew", "beside", "likeness", "neighbour",
    ]
)  # fmt: skip
"""Words that must not be a part of a name between underscores."""
ALLOWED = ("held_out", "stop_words")
"""Standard terms that contain a banned word."""
OPENINGS = frozenset(("it", "that", "those", "what", "who", "none"))
"""Words that must not begin a docstring."""
FOLDERS = ("megappo", "kernels", "benchmarks", "tests", "configs", "launch")
EXEMPT = ("megappo/engines/", "megappo/ppo/")
"""Rooms with names that the next engine interface replaces. Only their names are exempt."""
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def assigned_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each variable, parameter, attribute, function and class that a file defines."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name


def banned_terms(name: str) -> frozenset[str]:
    """Return the banned words in a name."""
    for term in ALLOWED:
        name = name.replace(term, "")
    return BANNED & set(name.lower().split("_"))


def openings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and first word of each docstring, including the docstrings of fields."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))) if text.split():
                yield node.lineno, text.split()[0].lower().strip(",.:;`'\"")


@pytest.mark.parametrize("path", [p for p in SOURCES if not name_of(p).startswith(EXEMPT)], ids=name_of)
def test_names_contain_no_banned_terms(path: Path) -> None:
    names = assigned_names(ast.parse(path.read_text()))
    assert [(line, name) for line, name in names if banned_terms(name)] == []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_docstrings_begin_with_their_subject_or_verb(path: Path) -> None:
    assert [(line, word) for line, word in openings(ast.parse(path.read_text())) if word in OPENINGS] == []


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names of the parameters of a function."""
    arguments = function.args
    single = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    return {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *single)}


def documented_arguments(docstring: str) -> Iterator[str]:
    """Yield the names in the section `Args:` of a docstring."""
    section = re.split(r"\n\S", docstring.partition("Args:\n")[2])[0]
    for names in re.findall(r"^    ([a-z_, ]+): ", section, re.MULTILINE):
        yield from names.split(", ")


@pytest.mark.parametrize("path", [p for p in SOURCES if name_of(p).startswith(("megappo/", "kernels/"))], ids=name_of)
def test_documented_arguments_are_parameters(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            documented = set(documented_arguments(ast.get_docstring(node) or ""))
            assert documented <= parameters_of(node), node.name


@pytest.mark.parametrize(
    ("name", "terms"),
    [
        ("found", {"found"}), ("_told_first", {"told"}), ("HERE", {"here"}), ("held_out_samples", set()),
        ("stop_words", set()), ("foundation", set()), ("test_held_out_set_is_not_held", {"held"}),
    ],
)  # fmt: skip
def test_banned_terms_are_whole_parts(name: str, terms: set[str]) -> None:
    assert banned_terms(name) == terms


def test_checks_find_every_kind_of_name_and_docstring() -> None:
    tree = ast.parse('class A:\n    told: int\n    "None at first."\n    def say(self, back):\n        self.kept = 1\n')
    assert {name for _, name in assigned_names(tree) if banned_terms(name)} == {"told", "say", "back", "kept"}
    assert [word for _, word in openings(tree)] == ["none"]
