"""Mathematical tools: functions that workers call with keyword arguments of the model."""

from __future__ import annotations

import ast
import contextlib
import io
import math
import operator
import traceback
from collections.abc import Callable

_BINARY: dict[type[ast.operator], Callable[[complex, complex], complex]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[complex], complex]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., complex]] = {
    name: getattr(math, name)
    for name in ("sqrt", "exp", "log", "sin", "cos", "tan", "floor", "ceil", "factorial", "gcd", "lcm", "comb")
} | {"abs": abs, "round": round, "min": min, "max": max}
_NAMES = {"pi": math.pi, "e": math.e}


def calculate(expression: str) -> str:
    """Return the value of an arithmetic expression in Python notation. `^` also denotes powers.

    Raises ValueError for any other expression.
    """
    return str(_value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body))


def _value(node: ast.expr) -> complex:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(_value, arguments))
    raise ValueError(f"'{ast.unparse(node)}' is no arithmetic")


def python(code: str) -> str:
    """Run a program and return its output, followed by the value of the last line if it is an expression, or the error.

    The caller, `tool_worker`, confines the process.
    """
    printed, names = io.StringIO(), {"__name__": "__main__"}
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            body = ast.parse(code).body
            last = body[-1].value if body and isinstance(body[-1], ast.Expr) else None
            body = body if last is None else body[:-1]
            exec(compile(ast.Module(body, []), "<code>", "exec"), names)
            value = eval(compile(ast.Expression(last), "<code>", "eval"), names) if last is not None else None
            if value is not None:
                print(repr(value))
        except (MemoryError, KeyboardInterrupt):
            raise
        except (Exception, SystemExit):  # noqa: BLE001 - the model sees the exception of its code
            printed.write(traceback.format_exc(limit=-1))
    return printed.getvalue()
