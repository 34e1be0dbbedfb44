"""From the name in the configuration to the function."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from megappo.rewards.rules import RULES


def resolve(name: str) -> Callable[..., Any]:
    """The reward function of a name: a rule, or `package.module:function`.

    Raises ValueError with the nearest name, or with what of a Python path could not be found.
    """
    if name in RULES:
        return RULES[name]
    if ":" not in name:
        known = [*RULES, "model"]
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"reward.function '{name}' is not one of {', '.join(known)}; did you mean '{nearest}'? "
            "A Python function is written package.module:function"
        )
    return load_function(name, "reward.function")


def load_function(path: str, setting: str) -> Callable[..., Any]:
    """Import `package.module:function`; `setting` names the place in errors."""
    module_name, _, function_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{setting} '{path}': module '{module_name}' cannot be imported ({error}); install it or set PYTHONPATH"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        near = difflib.get_close_matches(function_name, names, n=1, cutoff=0.0)
        hint = f"; did you mean '{module_name}:{near[0]}'?" if near else ""
        raise ValueError(f"{setting} '{path}': module '{module_name}' has no function '{function_name}'{hint}")
    return function  # type: ignore[no-any-return]
