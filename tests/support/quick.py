"""Selection of test cases: a few representative cases for `--quick`, and expensive cases that run only with `--all`;
see tests/README.md."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest


def cases(every: Iterable[Any], quick: Collection[Any] = (), exhaustive: Collection[Any] = ()) -> list[Any]:
    """Return values of a parameter, or tuples of values for several parameters. Cases in `quick` and `exhaustive`
    have these marks."""
    every = list(every)
    unknown = [x for x in (*quick, *exhaustive) if x not in every]
    assert not unknown, f"unknown cases {unknown}"

    def marks(x: Any) -> list[pytest.MarkDecorator]:
        return [getattr(pytest.mark, name) for name, of in (("quick", quick), ("exhaustive", exhaustive)) if x in of]

    return [pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=marks(x)) for x in every]


def has_exhaustive(file: Path) -> bool:
    """Return whether a file contains tests with the mark `exhaustive`."""
    return bool(re.search(r"mark\.exhaustive|\bexhaustive=", file.read_text()))
