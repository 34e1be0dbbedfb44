"""Formulas in the functions of the product, compared by computation. Names of variables do not matter.

A formula is an expression with a minimum number of arithmetic operations. A variable that is assigned once is replaced
by its value. `torch.exp(x)`, `xp.exp(x)`, `x.exp()` and `x.exp_()` are equal, and the order of the terms of a sum is
ignored.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SMALLEST, SMALLEST_PLAIN = 4, 5
"""Minimum number of operations of a formula. The first applies to formulas with functions such as exp or clamp."""
_LIBRARIES = {"torch", "xp", "tl", "math", "np", "triton"}
_FUNCTIONS = {
    "abs", "clamp", "clip", "cos", "cumsum", "erf", "exp", "exp2", "expm1", "log", "log1p", "log2", "log_softmax",
    "logsumexp", "maximum", "minimum", "pow", "reciprocal", "rsqrt", "sigmoid", "softmax", "sqrt", "square", "std",
    "tanh", "var", "where",
}  # fmt: skip
_COMMUTE = (ast.Add, ast.Mult, ast.BitAnd, ast.BitOr)


@dataclass(frozen=True)
class Formula:
    """Expression in a normal form."""

    text: str
    operations: int
    is_real: bool
    """Whether the formula contains a function of real numbers."""


def formulas_of(tree: ast.AST) -> Iterator[tuple[str, Formula]]:
    """Yield (function name, formula) for every formula of a module."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            known = _assigned_once(function)
            for node in ast.walk(function):
                if isinstance(node, ast.expr):
                    formula = _normal(node, known, 0)
                    if formula.operations >= (SMALLEST if formula.is_real else SMALLEST_PLAIN):
                        yield function.name, formula


def repeated(paths: Iterable[Path]) -> dict[str, set[str]]:
    """Return the formulas that occur in several functions, with the functions. For nested formulas, only the largest
    is returned."""
    places: dict[Formula, set[str]] = {}
    for path in paths:
        for function, formula in formulas_of(ast.parse(path.read_text())):
            places.setdefault(formula, set()).add(f"{path}:{function}")
    several = {formula: where for formula, where in places.items() if len(where) > 1}
    return {
        f.text: where
        for f, where in several.items()
        if not any(f.text in other.text and f != other and where <= places[other] for other in several)
    }


def _assigned_once(function: ast.FunctionDef) -> dict[str, ast.expr]:
    values: dict[str, list[ast.expr | None]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs: Iterable[tuple[ast.expr, ast.expr | None]] = [(target, node.value)]
                if isinstance(target, ast.Tuple):
                    parts = node.value.elts if isinstance(node.value, ast.Tuple) else [None] * len(target.elts)
                    pairs = zip(target.elts, parts, strict=False)
                for name, value in pairs:
                    if isinstance(name, ast.Name):
                        values.setdefault(name.id, []).append(value)
        elif isinstance(node, ast.AugAssign | ast.For) and isinstance(node.target, ast.Name):
            values.setdefault(node.target.id, []).append(None)
    arguments = {a.arg for a in [*function.args.args, *function.args.kwonlyargs]}
    return {name: v[0] for name, v in values.items() if len(v) == 1 and v[0] is not None and name not in arguments}


def _normal(node: ast.expr, known: dict[str, ast.expr], depth: int) -> Formula:
    if isinstance(node, ast.Name) and node.id in known and depth < 20:
        return _normal(known[node.id], {n: v for n, v in known.items() if n != node.id}, depth + 1)
    if isinstance(node, ast.Constant):
        return Formula(repr(float(node.value)) if isinstance(node.value, int | float) else "_", 0, False)
    if isinstance(node, ast.BinOp):
        parts = [_normal(side, known, depth + 1) for side in (node.left, node.right)]
        return _joined(type(node.op).__name__, parts, commute=isinstance(node.op, _COMMUTE))
    if isinstance(node, ast.UnaryOp):
        return _joined(type(node.op).__name__, [_normal(node.operand, known, depth + 1)])
    if isinstance(node, ast.Compare):
        return _joined("Compare", [_normal(side, known, depth + 1) for side in (node.left, *node.comparators)])
    if isinstance(node, ast.Call):
        arguments = list(node.args)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "_")
        if isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") not in _LIBRARIES:
            arguments.insert(0, node.func.value)
        name = name.removesuffix("_")
        if name in _FUNCTIONS:
            arguments += [keyword.value for keyword in node.keywords]
            return _joined(name, [_normal(argument, known, depth + 1) for argument in arguments], is_real=True)
        if name in ("float", "double", "detach", "contiguous", "to") and arguments:
            return _normal(arguments[0], known, depth + 1)
    return Formula("_", 0, False)


def _joined(operator: str, parts: list[Formula], *, commute: bool = False, is_real: bool = False) -> Formula:
    texts = sorted(p.text for p in parts) if commute else [p.text for p in parts]
    operations = 1 + sum(p.operations for p in parts)
    return Formula(f"{operator}({', '.join(texts)})", operations, is_real or any(p.is_real for p in parts))
