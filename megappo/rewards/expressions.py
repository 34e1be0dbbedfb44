"""Reader of expressions in the syntax of sympy's `parse_expr`, without the execution of code. Imports sympy.

sympy translates text to Python code of numbers, symbols, operators and functions, and then evaluates that code. This
module walks the syntax tree of the code instead. A table maps each node to the value that `eval` would return. The
table has no attributes, indices, strings or other names. A result above `_MOST_BITS` is rejected before computation.
"""

from __future__ import annotations

import ast
import builtins
import math
import operator
import re
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import sympy
from sympy.parsing import sympy_parser

_MOST_CHARACTERS = 20_000
_MOST_BITS = 5000.0
"""Maximum size in bits of a number, or of the height and degree of an expression together. A symbol counts as one
bit."""
_MOST_COUNTED = 400
"""Largest integer whose factorial is computed."""
_LONGEST_SHIFT = 10_000
_EXPONENT = re.compile(r"[eE][-+]?(\d+)")

_OPERATORS: dict[type[ast.operator | ast.unaryop], Callable[..., sympy.Basic]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.BitXor: operator.xor,
    ast.BitAnd: operator.and_, ast.BitOr: operator.or_, ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., sympy.Basic]] = {
    name: getattr(sympy, name)
    for name in (
        "Integer", "Rational", "Add", "Mul", "Pow", "Not", "And", "Or", "Min", "Max", "Mod", "Integral", "Abs", "sign",
        "floor", "ceiling", "re", "im", "arg", "conjugate", "sqrt", "cbrt", "root", "log", "ln", "exp", "factorial",
        "factorial2", "binomial", "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "asec",
        "acsc", "atan2", "sinh", "cosh", "tanh", "coth", "sech", "csch", "asinh", "acosh", "atanh", "acoth", "asech",
        "acsch", "erf", "erfc", "erfi", "Ei", "Si", "Ci", "li",
    )
} | {"abs": abs, "round": round, "pow": pow, "max": sympy.Max, "min": sympy.Min}  # fmt: skip
_CONSTANTS = {name: getattr(sympy, name) for name in ("pi", "E", "I", "oo", "zoo", "nan")}
_POWERS = ("pow", "Pow")
_EXPONENTIALS = ("exp", "sinh", "cosh", "coth", "sech", "csch", "erfi", "Ei")
_COUNTED = ("factorial", "factorial2", "binomial")
_NAMED = ("Symbol", "Function")


class _Sized(NamedTuple):
    value: Any
    bits: float
    """Upper bound of the bits of the number, or of the numbers and the degree of the expression."""


def read_expression(
    text: str,
    local_dict: Mapping[str, sympy.Basic] | None = None,
    transformations: tuple[sympy_parser.TRANS, ...] = sympy_parser.standard_transformations,
    global_dict: sympy_parser.DICT | None = None,
    evaluate: bool = True,
) -> sympy.Basic:
    """Return the result of `sympy.parse_expr` with the same arguments, for numbers, symbols, arithmetic and common
    functions.

    Raises ValueError or SyntaxError for other text.
    """
    if len(text) > _MOST_CHARACTERS or any(mark in text for mark in "'\"\\`#@"):
        raise ValueError("the text is not an expression")
    names = dict(local_dict or {})
    code = sympy_parser.stringify_expr(text, names, _known() if global_dict is None else global_dict, transformations)
    tree = ast.parse(code.strip(), mode="eval") if evaluate else sympy_parser.evaluateFalse(code)
    return _read(tree.body, local_dict or {}).value


SYMPY = ModuleType("sympy")
"""Module sympy with `read_expression` as its `parse_expr`, for scorers that call `sympy.parse_expr`."""
vars(SYMPY).update({**vars(sympy), "parse_expr": read_expression})


def read_literal(text: Any) -> Any:
    """Return the value of a Python literal of lists, tuples, dictionaries, strings and numbers.

    The function replaces `eval`, which would run any code. Raises the errors of `ast.literal_eval`.
    """
    if not isinstance(text, str) or len(text) > _MOST_CHARACTERS:
        raise ValueError("the text is not a literal")
    return ast.literal_eval(text)


def read_whole(text: str) -> int:
    """Return the value of an expression of integers with +, -, *, << and >>. Raises ValueError or SyntaxError
    otherwise."""
    return _whole(ast.parse(text.strip(), mode="eval").body)


def _whole(node: ast.AST) -> int:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_whole(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() as op, right=right):
            return int(_OPERATORS[type(op)](_whole(left), _whole(right)))
        case ast.BinOp(left=left, op=ast.LShift() | ast.RShift() as op, right=right):
            bits = _whole(right)
            if bits > _LONGEST_SHIFT:
                raise ValueError(f"a shift by {bits} bits is too large")
            return _whole(left) << bits if isinstance(op, ast.LShift) else _whole(left) >> bits
    raise ValueError(f"{type(node).__name__} is not supported in an expression of integers")


@cache
def _known() -> sympy_parser.DICT:
    """Return the names that `parse_expr` reads as functions and constants instead of symbols."""
    builtin = {name: value for name, value in vars(builtins).items() if isinstance(value, type(len))}
    return {name: getattr(sympy, name) for name in sympy.__all__} | builtin | {"max": sympy.Max, "min": sympy.Min}


def _read(node: ast.AST, names: Mapping[str, sympy.Basic]) -> _Sized:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return _checked(number, number.bit_length())
        case ast.Name(id=name) if name in names:
            return _Sized(names[name], 1)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _Sized(_CONSTANTS[name], 2)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            of = _read(operand, names)
            return _Sized(_OPERATORS[type(op)](of.value), of.bits)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _operated(op, _read(left, names), _read(right, names))
        case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=str() as text)], keywords=[]):
            return _named(name, text)
        case ast.Call(func=ast.Call() as function, args=arguments, keywords=[]):
            values = [_read(argument, names) for argument in arguments]
            return _checked(_read(function, names).value(*(v.value for v in values)), 1 + sum(v.bits for v in values))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords) if name in _FUNCTIONS:
            return _called(name, [_read(argument, names) for argument in arguments], keywords)
    raise ValueError(f"{type(node).__name__} is not supported in an expression")


def _operated(op: ast.operator, left: _Sized, right: _Sized) -> _Sized:
    bits = left.bits * _raised(right) if isinstance(op, ast.Pow) else left.bits + right.bits + 1
    _check(bits)
    return _Sized(_OPERATORS[type(op)](left.value, right.value), bits)


def _named(name: str, text: str) -> _Sized:
    """Return a decimal number, a symbol or an unknown function. The parser writes all of them as strings."""
    if name in _NAMED:
        return _Sized(getattr(sympy, name)(text), 1)
    if name != "Float":
        raise ValueError(f"{name} of a string is not supported in an expression")
    exponent = _EXPONENT.search(text)
    bits = 4 * len(text) + (4.0 * float(exponent[1][:9]) if exponent else 0.0)
    _check(bits)
    return _Sized(sympy.Float(text), bits)


def _called(name: str, values: list[_Sized], keywords: list[ast.keyword]) -> _Sized:
    if not all(k.arg == "evaluate" and isinstance(k.value, ast.Constant) and k.value.value is False for k in keywords):
        raise ValueError("keyword arguments are not supported in an expression")
    bits = 1 + sum(v.bits for v in values)
    if name in _POWERS and len(values) == 2:
        bits = values[0].bits * _raised(values[1])
    elif name in _EXPONENTIALS and values:
        bits = 2 * _raised(values[0])
    elif name in _COUNTED:
        bits += 8 * max((_counted(v.value) for v in values), default=0)
    _check(bits)
    return _Sized(_FUNCTIONS[name](*(v.value for v in values), **{k.arg: False for k in keywords if k.arg}), bits)


def _counted(value: int | sympy.Basic) -> float:
    """Return the size of an integer whose factorial is computed.

    The size is 0 for an expression with symbols, because no factorial is computed. The size is infinite for numbers
    above `_MOST_COUNTED`.
    """
    value = sympy.sympify(value, strict=True)
    if value.free_symbols:
        return 0.0
    return float(abs(int(value))) if value.is_Integer and abs(value) <= _MOST_COUNTED else math.inf


def _raised(exponent: _Sized) -> float:
    """Return the factor by which an exponent multiplies the bits of its base."""
    value = sympy.sympify(exponent.value, strict=True)
    if value.is_Rational or value.is_Float:
        return max(1.0, abs(float(value))) if exponent.bits < 1000 else math.inf
    if value.free_symbols:
        return 1.0 + exponent.bits
    return 2.0**exponent.bits if exponent.bits < 1000 else math.inf


def _checked(value: int | sympy.Basic, bits: float) -> _Sized:
    _check(bits)
    return _Sized(value, bits)


def _check(bits: float) -> None:
    if not bits <= _MOST_BITS:
        raise ValueError("the value exceeds the maximum size of an expression")
