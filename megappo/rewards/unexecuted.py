"""Replacements of functions with which scoring libraries would execute text that a model wrote.

Some scorers of reasoning-gym (0.1.25) `eval` a response, or a question of the data; others, and math-verify (0.9), pass
it to sympy's `parse_expr`, which calls `eval`. `make_safe` replaces these calls by readers of literals and expressions,
so that ordinary responses score as before. `nothing_executed` is the second line of defence: text that is compiled to
code while a response is scored is an error, in any version of these libraries and of those that they call.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

_LITERAL, _WHOLE, _PARSE = ("eval", "read_literal"), ("eval", "read_whole"), ("parse_expr", "read_expression")
SCORERS: dict[str, dict[str, tuple[str, str]]] = {
    "reasoning_gym": {
        "reasoning_gym.algorithmic.binary_matrix": _LITERAL,
        "reasoning_gym.algorithmic.number_sorting": _LITERAL,
        "reasoning_gym.algorithmic.spiral_matrix": _LITERAL,
        "reasoning_gym.algorithmic.string_insertion": _LITERAL,
        "reasoning_gym.arithmetic.bitwise_arithmetic": _WHOLE,
        "reasoning_gym.games.n_queens": _LITERAL,
        "reasoning_gym.games.countdown": _PARSE,
        "reasoning_gym.games.puzzle24": _PARSE,
        "reasoning_gym.algebra.intermediate_integration": ("sympy", "SYMPY"),
        "reasoning_gym.algebra.simple_integration": ("sympy", "SYMPY"),
        "reasoning_gym.algebra.polynomial_multiplication": ("sp", "SYMPY"),
    },
    "math_verify": {"math_verify.parser": _PARSE},
}
"""By library and module: the name in the module that executes responses or data, and its replacement in
`expressions`."""
_scoring = threading.local()
P = ParamSpec("P")
T = TypeVar("T")


class ExecutedError(RuntimeError):
    """A scorer was about to execute text."""


@cache
def make_safe(library: str) -> None:
    """Replace the names of `SCORERS` in an imported library."""
    expressions = import_module("megappo.rewards.expressions")  # imports sympy
    for path, (name, reader) in SCORERS[library].items():
        with suppress(ModuleNotFoundError):  # another version of the library may lack the module
            setattr(import_module(path), name, getattr(expressions, reader))
    _watch(expressions.read_expression)


@contextmanager
def nothing_executed() -> Iterator[None]:
    """Within the block, this thread raises ExecutedError where any library executes text as code."""
    _scoring.on = True
    try:
        yield
    finally:
        _scoring.on = False


@cache
def _watch(read: Callable[P, T]) -> None:
    """Replace sympy's own `parse_expr` and add the audit hook, once for the process. sympy itself calls `parse_expr`,
    as in `Number("2")`; while a response is scored, `read` is called instead."""
    parser = import_module("sympy.parsing.sympy_parser")
    original: Callable[P, T] = parser.parse_expr

    def parse_expr(*arguments: P.args, **others: P.kwargs) -> T:
        return (read if getattr(_scoring, "on", False) else original)(*arguments, **others)

    vars(parser)["parse_expr"] = parse_expr
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "exec" and getattr(_scoring, "on", False) and _is_text(arguments[0]) and not _imports(sys._getframe(1)):
        raise ExecutedError("a scorer was about to execute what stands in a response")


def _is_text(code: object) -> bool:
    """Whether code was compiled from text rather than from a module's file."""
    return not isinstance(code, CodeType) or code.co_filename.startswith("<")


def _imports(frame: FrameType | None) -> bool:
    """Whether a module is being imported, which may make classes out of texts of its own."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
