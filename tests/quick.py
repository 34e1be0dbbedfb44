"""Which cases of a test stand for the others where time is short: with `--quick`, see conftest.py."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def cases(every: Iterable[Any], quick: Collection[Any]) -> list[pytest.ParameterSet]:
    """Values of a parameter, or tuples of values of several; those in `quick` are marked."""
    marks = {True: (pytest.mark.quick,), False: ()}
    return [pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=marks[x in quick]) for x in every]
