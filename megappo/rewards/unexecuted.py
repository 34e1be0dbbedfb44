"""What a model wrote is not executed by the libraries that score it.

Some scorers of reasoning-gym (0.1.25) `eval` a response, or a question of the data; others, and math-verify (0.9), hand
it to sympy's `parse_expr`, which does. `make_safe` has them read literals and expressions instead, so that ordinary
responses score as before. `nothing_executed` stands behind that: text that becomes code while a response is scored is
an error, in any version of these libraries and of those that they call.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from types import CodeType, FrameType
from typing import Any

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
"""By library, each module that executes responses or data, the name by which it does, and what of `expressions` stands
there instead."""
_scoring = threading.local()


class ExecutedError(RuntimeError):
    """A scorer was about to execute text."""


@cache
def make_safe(library: str) -> None:
    """Replace what executes responses in a library's scorers, which has been imported."""
    expressions = import_module("megappo.rewards.expressions")  # and with it sympy
    for path, (name, reader) in SCORERS[library].items():
        with suppress(ModuleNotFoundError):  # of another version
            setattr(import_module(path), name, getattr(expressions, reader))
    _watch(expressions.read_expression)


@contextmanager
def nothing_executed() -> Iterator[None]:
    """Within, this thread raises ExecutedError where text is executed as code, by whatever library."""
    _scoring.on = True
    try:
        yield
    finally:
        _scoring.on = False


@cache
def _watch(read: Callable[..., Any]) -> None:
    """Once for the process. While a response is scored, sympy reads texts by `read`, such as `Number("2")`, too."""
    parser = import_module("sympy.parsing.sympy_parser")
    original: Callable[..., Any] = parser.parse_expr

    def parse_expr(*arguments: Any, **others: Any) -> Any:
        return (read if getattr(_scoring, "on", False) else original)(*arguments, **others)

    vars(parser)["parse_expr"] = parse_expr
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "exec" and getattr(_scoring, "on", False) and _is_text(arguments[0]) and not _imports(sys._getframe(1)):
        raise ExecutedError("a scorer was about to execute what stands in a response")


def _is_text(code: object) -> bool:
    """Rather than a module's file."""
    return not isinstance(code, CodeType) or code.co_filename.startswith("<")


def _imports(frame: FrameType | None) -> bool:
    """Whether a module is being imported, which may make classes out of texts of its own."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
