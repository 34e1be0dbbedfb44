"""Replacement of attributes of modules and classes of other projects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


def replace_attributes(owner: ModuleType | type, **attributes: Any) -> None:
    """Replace attributes of a module or a class permanently."""
    for name, value in attributes.items():
        setattr(owner, name, value)


@contextmanager
def replaced_attributes(owner: ModuleType | type, **attributes: Any) -> Iterator[None]:
    """Replace attributes of a module or a class within the context."""
    before = {name: getattr(owner, name) for name in attributes}
    replace_attributes(owner, **attributes)
    try:
        yield
    finally:
        replace_attributes(owner, **before)
