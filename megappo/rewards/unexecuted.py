"""Replacements of functions that would execute text of a model in scoring libraries.

Some scorers of reasoning-gym (0.1.25) `eval` a response or a question of the data. Other scorers, and math-verify
(0.9), pass the text to sympy's `parse_expr`, which calls `eval`. `make_safe` replaces these calls with readers of
literals and expressions, and the scores of ordinary responses stay the same. `nothing_executed` is the second line of
defence: compilation of text to code during scoring is an error, in every version of these libraries and of their
dependencies.
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
"""Name that executes text of responses or data in each library's modules, and its replacement in `expressions`."""
_scoring = threading.local()
P = ParamSpec("P")
T = TypeVar("T")


class ExecutedError(RuntimeError):
    """Error for a scorer that was about to execute text."""


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
    """Context in which this thread raises ExecutedError if a library executes text as code."""
    _scoring.on = True
    try:
        yield
    finally:
        _scoring.on = False


@cache
def _watch(read: Callable[P, T]) -> None:
    """Replace sympy's `parse_expr` and add the audit hook, once per process.

    Code of sympy also calls `parse_expr`, for example `Number("2")`. During scoring, `read` is called instead.
    """
    parser = import_module("sympy.parsing.sympy_parser")
    original: Callable[P, T] = parser.parse_expr

    def parse_expr(*arguments: P.args, **others: P.kwargs) -> T:
        return (read if getattr(_scoring, "on", False) else original)(*arguments, **others)

    vars(parser)["parse_expr"] = parse_expr
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "exec" and getattr(_scoring, "on", False) and _is_text(arguments[0]) and not _imports(sys._getframe(1)):
        raise ExecutedError("a scorer was about to execute text of a response")


def _is_text(code: object) -> bool:
    """Return whether code was compiled from text rather than from the file of a module."""
    return not isinstance(code, CodeType) or code.co_filename.startswith("<")


def _imports(frame: FrameType | None) -> bool:
    """Return whether a module import is in progress. An import can create classes from text of the module."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
