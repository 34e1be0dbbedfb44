"""The reward of countdown's puzzles, which `megappo data prepare countdown` makes."""

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
    """1 where the text between the last <answer> tags is an expression of each of `metadata`'s `numbers` once, by +, -,
    *, / and parentheses, whose exact value is its `target`; `format_score` for another expression of numbers.

    Raises ValueError for a record that is no puzzle.
    """
    numbers, target = metadata.get("numbers"), metadata.get("target")
    if not isinstance(numbers, list) or not isinstance(target, int):
        raise ValueError("countdown's reward needs numbers and target with every prompt; prepare countdown's data")
    found, used = _TAGGED.findall(response), list[int]()
    try:
        value = _value(ast.parse(_text(found[-1] if found else ""), mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0  # the model wrote something else
    return 1.0 if sorted(used) == sorted(numbers) and value == target else format_score


def _text(expression: str) -> str:
    """The expression with Python's operators. Raises ValueError for text that is no expression of a few numbers, or too
    long for one."""
    plain = expression.strip().translate(_SIGNS)
    if len(plain) > _LONGEST_CHARACTERS or not _ALLOWED.fullmatch(plain):
        raise ValueError("not an expression of some numbers")
    return plain


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """The exact value of an expression; its numbers are appended to `used`. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, used), _value(node.right, used))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    raise ValueError("not an expression of some numbers")
