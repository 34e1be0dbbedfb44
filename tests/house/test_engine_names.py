"""The name of SGLang is in few files outside its folder, and no code compares an engine with the name."""

from __future__ import annotations

import ast
import io
import tokenize

import pytest

from tests.support.places import ROOT

NAME = "sglang"
HOME = ROOT / "megappo" / "engines" / NAME
TABLE = ROOT / "megappo" / "config" / "sections" / "engine.py"
MOST_FILES = 16
OUTSIDE = [path for path in sorted((ROOT / "megappo").rglob("*.py")) if HOME not in path.parents]


def code_names(text: str) -> list[str]:
    """Return the identifiers and strings of a program that contain the name. Comments and docstrings are excluded."""
    statements = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr))
    docstrings = {(node.lineno, node.col_offset) for node in statements if isinstance(node, ast.Constant)}
    return [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type != tokenize.COMMENT and token.start not in docstrings and NAME in token.string.lower()
    ]


def comparisons(text: str) -> list[int]:
    """Return the lines that compare a value with the name, by an operator or by `match`."""
    lines = []
    for node in ast.walk(ast.parse(text)):
        operands = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        operands += [node.value] if isinstance(node, ast.MatchValue) else []
        for operand in operands:
            choices = operand.elts if isinstance(operand, ast.Tuple | ast.List | ast.Set) else [operand]
            values = [choice.value for choice in choices if isinstance(choice, ast.Constant)]
            lines += [operand.lineno for value in values if str(value).lower() == NAME]
    return lines


def test_few_files_name_sglang() -> None:
    naming = [str(path.relative_to(ROOT)) for path in OUTSIDE if code_names(path.read_text())]
    assert len(naming) <= MOST_FILES, naming


def test_no_code_compares_an_engine_with_the_name() -> None:
    """Code asks `EngineCapabilities`, so that an engine with the same properties is treated the same."""
    compared = {str(path): comparisons(path.read_text()) for path in OUTSIDE if path != TABLE}
    assert not {path: lines for path, lines in compared.items() if lines}


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ('"""About SGLang."""\nx = 1  # not SGLang\n', []),
        ("import megappo.engines.sglang.servers.spec as spec\n", [NAME]),
        ("def require_sglang(): pass\n", ["require_sglang"]),
        ("x = {'SGLANG_CACHE': 1}\n", ["'SGLANG_CACHE'"]),
        ("def f():\n    'SGLang.'\n    return 'SGLang'\n", ["'SGLang'"]),
    ],
)
def test_names_in_code_are_counted(program: str, expected: list[str]) -> None:
    assert code_names(program) == expected


@pytest.mark.parametrize(
    ("line", "is_comparison"),
    [
        ("x == 'sglang'", True),
        ("x in (None, 'sglang')", True),
        ("x != 'SGLang' and y", True),
        ("match x:\n    case 'sglang': pass", True),
        ("f('sglang')", False),
        ("x == 'sglang==0.5'", False),
        ("version('sglang') == x", False),
    ],
)
def test_comparisons_with_the_name_are_detected(line: str, is_comparison: bool) -> None:
    assert bool(comparisons(f"{line}\n")) == is_comparison
