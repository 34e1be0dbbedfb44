"""Which cases of a test stand for the others where time is short, with `--quick`, and which wait until there is much
of it, with `--all`; see tests/README.md."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest


def cases(every: Iterable[Any], quick: Collection[Any] = (), exhaustive: Collection[Any] = ()) -> list[Any]:
    """Values of a parameter, or tuples of values of several; those in `quick` and `exhaustive` are marked so."""
    every = list(every)
    unknown = [x for x in (*quick, *exhaustive) if x not in every]
    assert not unknown, f"there are no cases {unknown}"

    def marks(x: Any) -> list[pytest.MarkDecorator]:
        return [getattr(pytest.mark, name) for name, of in (("quick", quick), ("exhaustive", exhaustive)) if x in of]

    return [pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=marks(x)) for x in every]


def has_exhaustive(file: Path) -> bool:
    """Whether tests of a file are marked `exhaustive`."""
    return bool(re.search(r"mark\.exhaustive|\bexhaustive=", file.read_text()))
