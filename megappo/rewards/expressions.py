"""Reads expressions as sympy's `parse_expr` does, which evaluates Python code; here nothing is executed.

sympy turns the text into Python code of numbers, symbols, operators and functions. That code is walked as a syntax
tree, and each node becomes what `eval` would have made of it, from a table without attributes, indices, texts or other
names. Results that would grow beyond `_MOST_BITS` are refused before they are computed. Imports sympy.
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
"""Largest size of a number, in bits, or of the height and degree of an expression together, where a symbol counts one
bit."""
_MOST_COUNTED = 400
"""Largest whole number whose factorial is computed."""
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
    """Upper bound of the bits of the number, or of the expression's numbers and degree."""


def read_expression(
    text: str,
    local_dict: Mapping[str, sympy.Basic] | None = None,
    transformations: tuple[sympy_parser.TRANS, ...] = sympy_parser.standard_transformations,
    global_dict: sympy_parser.DICT | None = None,
    evaluate: bool = True,
) -> sympy.Basic:
    """The result of `sympy.parse_expr`, which has the same arguments, for numbers, symbols, arithmetic and common
    functions. Raises ValueError or SyntaxError for anything else."""
    if len(text) > _MOST_CHARACTERS or any(mark in text for mark in "'\"\\`#@"):
        raise ValueError("this is no expression")
    names = dict(local_dict or {})
    code = sympy_parser.stringify_expr(text, names, _known() if global_dict is None else global_dict, transformations)
    tree = ast.parse(code.strip(), mode="eval") if evaluate else sympy_parser.evaluateFalse(code)
    return _read(tree.body, local_dict or {}).value


SYMPY = ModuleType("sympy")
"""The module sympy with `read_expression` as its `parse_expr`, for scorers that call `sympy.parse_expr`."""
vars(SYMPY).update({**vars(sympy), "parse_expr": read_expression})


def read_literal(text: Any) -> Any:
    """The value of a Python literal of lists, tuples, dictionaries, texts and numbers, in place of `eval`, which would
    run any code. Raises as `ast.literal_eval`."""
    if not isinstance(text, str) or len(text) > _MOST_CHARACTERS:
        raise ValueError("this is no literal")
    return ast.literal_eval(text)


def read_whole(text: str) -> int:
    """The value of an expression of whole numbers with +, -, *, << and >>. Raises ValueError or SyntaxError for
    anything else."""
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
                raise ValueError(f"{bits} bits are too many to shift by")
            return _whole(left) << bits if isinstance(op, ast.LShift) else _whole(left) >> bits
    raise ValueError(f"{type(node).__name__} has no place between whole numbers")


@cache
def _known() -> sympy_parser.DICT:
    """The names that `parse_expr` takes for functions and constants instead of symbols."""
    builtin = {name: found for name, found in vars(builtins).items() if isinstance(found, type(len))}
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
        case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=str() as said)], keywords=[]):
            return _named(name, said)
        case ast.Call(func=ast.Call() as function, args=arguments, keywords=[]):
            given = [_read(argument, names) for argument in arguments]
            return _checked(_read(function, names).value(*(g.value for g in given)), 1 + sum(g.bits for g in given))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords) if name in _FUNCTIONS:
            return _called(name, [_read(argument, names) for argument in arguments], keywords)
    raise ValueError(f"{type(node).__name__} has no place in an expression")


def _operated(op: ast.operator, left: _Sized, right: _Sized) -> _Sized:
    bits = left.bits * _raised(right) if isinstance(op, ast.Pow) else left.bits + right.bits + 1
    _check(bits)
    return _Sized(_OPERATORS[type(op)](left.value, right.value), bits)


def _named(name: str, said: str) -> _Sized:
    """A number with a point, a symbol or an unknown function, which the parser writes as texts."""
    if name in _NAMED:
        return _Sized(getattr(sympy, name)(said), 1)
    if name != "Float":
        raise ValueError(f"{name} of a text has no place in an expression")
    exponent = _EXPONENT.search(said)
    bits = 4 * len(said) + (4.0 * float(exponent[1][:9]) if exponent else 0.0)
    _check(bits)
    return _Sized(sympy.Float(said), bits)


def _called(name: str, given: list[_Sized], keywords: list[ast.keyword]) -> _Sized:
    if not all(k.arg == "evaluate" and isinstance(k.value, ast.Constant) and k.value.value is False for k in keywords):
        raise ValueError("arguments with names have no place in an expression")
    bits = 1 + sum(g.bits for g in given)
    if name in _POWERS and len(given) == 2:
        bits = given[0].bits * _raised(given[1])
    elif name in _EXPONENTIALS and given:
        bits = 2 * _raised(given[0])
    elif name in _COUNTED:
        bits += 8 * max((_counted(g.value) for g in given), default=0)
    _check(bits)
    return _Sized(_FUNCTIONS[name](*(g.value for g in given), **{k.arg: False for k in keywords if k.arg}), bits)


def _counted(value: int | sympy.Basic) -> float:
    """Size of a whole number whose factorial is computed; 0 for an expression with symbols, of which none is computed;
    infinite for numbers above `_MOST_COUNTED`."""
    value = sympy.sympify(value, strict=True)
    if value.free_symbols:
        return 0.0
    return float(abs(int(value))) if value.is_Integer and abs(value) <= _MOST_COUNTED else math.inf


def _raised(exponent: _Sized) -> float:
    """Factor by which an exponent multiplies the bits of its base."""
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
        raise ValueError("this grows beyond what an expression may be")
