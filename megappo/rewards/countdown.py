"""Reward of countdown puzzles from `megappo data prepare countdown`."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ALLOWED = re.compile(r"[0-9+*/() -]+")
_SIGNS = str.maketrans("\u00d7\u00f7\u2212", "*/-")
_LONGEST_CHARACTERS = 200
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def expression_of_target(
    *, prompt: str, response: str, answer: str | None, metadata: dict[str, Any], format_score: float = 0.0
) -> float:
    """Return 1 for a solution of the puzzle, `format_score` for another expression of numbers, and 0 for other text.

    The expression is the text between the last <answer> tags. A solution contains each of `metadata`'s `numbers` once,
    only +, -, *, / and parentheses, and has exactly the value `target`.

    Raises ValueError for a record that is not a puzzle.
    """
    numbers, target = metadata.get("numbers"), metadata.get("target")
    if not isinstance(numbers, list) or not isinstance(target, int):
        raise ValueError("the countdown reward needs numbers and target with every prompt; prepare the countdown data")
    tagged, used = _TAGGED.findall(response), list[int]()
    try:
        value = _value(ast.parse(_text(tagged[-1] if tagged else ""), mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0  # the text is not an expression
    return 1.0 if sorted(used) == sorted(numbers) and value == target else format_score


def _text(expression: str) -> str:
    """Return the expression with Python's operators. Raises ValueError for other text and for text that is too long."""
    plain = expression.strip().translate(_SIGNS)
    if len(plain) > _LONGEST_CHARACTERS or not _ALLOWED.fullmatch(plain):
        raise ValueError("not an expression of some numbers")
    return plain


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """Return the exact value of an expression and append its numbers to `used`. Raises ValueError for other nodes."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, used), _value(node.right, used))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    raise ValueError("not an expression of some numbers")
