"""Transformer Engine and Apex: whether a run can use them, why not, and what they switch on.

Megatron-Core uses both wherever it can import them, and guards against ImportError alone. So a broken or unselected
library is hidden from it, which `find_accelerations` must do before `megatron.core` is imported. Both are opt-in: no
test and no GPU run has executed the layers, the context parallel attention or the Adam of Transformer Engine.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from packaging.specifiers import SpecifierSet

from megappo.errors import reason
from megappo.runtime.packages import installed_version

Choice = Literal["auto", "torch"]
ENGINES = {"0.16": ">=2.9.0a0,<2.12"}
"""Versions of Transformer Engine that a Megatron-Core release supports, by its own metadata; releases that are missing
here set no bound."""
UNTESTED = "no run has executed Transformer Engine's parts yet, so compare with model.accelerations torch first"
"""What a run and the doctor report where Transformer Engine is used."""
FUSED_GRADIENTS = "fused_weight_gradient_mlp_cuda"
"""Apex's extension that Megatron-Core prefers for accumulating weight gradients, in Transformer Engine's layers too."""


@dataclass(frozen=True)
class Library:
    """One of the two libraries on this machine."""

    name: str
    version: str | None
    problem: str | None = None
    """Why the library is not used, as the end of a sentence that begins with its name; None: it is used."""

    @property
    def is_used(self) -> bool:
        """Whether the library can be imported here and is wanted."""
        return self.problem is None

    @property
    def summary(self) -> str:
        """Name and version of the library."""
        return f"{self.name} {self.version}" if self.version else self.name


@dataclass(frozen=True)
class Accelerations:
    """Which parts of the two libraries a run uses."""

    engine: Library = Library("Transformer Engine", None, "was not looked for")
    apex: Library = Library("Apex", None, "was not looked for")
    gradients_problem: str | None = "was not looked for"
    """Why Apex's extension does not accumulate gradients; None: it does."""
    own_layers: bool = False
    """Whether the model has features that Transformer Engine's layers lack."""

    def for_model(self, *, own_layers: bool) -> Accelerations:
        """The same accelerations, for a model that may need megappo's own layers."""
        return replace(self, own_layers=own_layers)

    def uses_engine_layers(self, dtype: torch.dtype) -> bool:
        """Whether layers are Transformer Engine's: it supports packed sequences in 16 bits only."""
        return self.engine.is_used and dtype == torch.bfloat16 and not self.own_layers

    def switches(self, dtype: torch.dtype) -> dict[str, bool]:
        """Fields of Megatron-Core's TransformerConfig for a model of this type."""
        return {"gradient_accumulation_fusion": self.gradients_problem is None and dtype == torch.bfloat16}

    @property
    def adam(self) -> str:
        """Library whose Adam Megatron-Core uses: Transformer Engine, else Apex, else torch."""
        return next((x.name for x in (self.engine, self.apex) if x.is_used), "torch")

    def sentence(self, dtype: torch.dtype) -> str:
        """A sentence on which library does what in a model of this type, and why the rest is torch's."""
        parts, used = [], self.switches(dtype)
        if self.uses_engine_layers(dtype):
            parts.append(f"{self.engine.summary} (attention, norms, rope)")
        elif self.engine.is_used and self.own_layers:
            parts.append(f"torch's layers, as the model has what those of {self.engine.summary} have not")
        elif self.engine.is_used:
            parts.append(f"torch's layers, as {self.engine.summary} attends to packs in bfloat16 only")
        else:
            parts.append(f"torch's layers, as {self.engine.summary} {self.engine.problem}")
        if used["gradient_accumulation_fusion"]:
            parts.append(f"{self.apex.summary} adds up weight gradients")
        elif self.engine.is_used or self.apex.is_used:
            parts.append(f"torch adds up weight gradients, as {FUSED_GRADIENTS} {self.gradients_problem}")
        parts.append(f"{self.adam}'s Adam")
        if self.engine.is_used:
            parts.append(UNTESTED)
        return "; ".join(parts)


@functools.cache
def find_accelerations(choice: Choice) -> Accelerations:
    """Find what this process can use; the rest is hidden from later imports.

    `choice`: the setting `model.accelerations`. The first call of a process decides: what it hides stays hidden.
    """
    unwanted = None
    if not torch.cuda.is_available():
        unwanted = "needs CUDA"
    elif choice == "torch":
        unwanted = "is not selected by model.accelerations"
    elif find_accelerations.cache_info().currsize:
        unwanted = "is hidden, because this process imported Megatron-Core with model.accelerations torch"
    engine = _transformer_engine(unwanted)
    apex = _apex(unwanted)
    gradients = apex.problem if not apex.is_used else _import_problem(FUSED_GRADIENTS)
    if not engine.is_used:
        _hide("transformer_engine")
    if not apex.is_used:
        _hide("apex")
    if gradients is not None:
        _hide(FUSED_GRADIENTS)
    return Accelerations(engine, apex, gradients)


def decide_accelerations() -> None:
    """Hide both libraries from `megatron.core`, unless `find_accelerations` was called in this process before."""
    if not find_accelerations.cache_info().currsize:
        find_accelerations("torch")


def _transformer_engine(unwanted: str | None) -> Library:
    version = installed_version("transformer-engine")
    if version is None and importlib.util.find_spec("transformer_engine") is None:
        return Library("Transformer Engine", version, "is not installed")
    problem = unwanted or _refusal(version) or _import_problem("transformer_engine.pytorch")
    return Library("Transformer Engine", version, problem)


def _refusal(version: str | None) -> str | None:
    """Why the installed Megatron-Core cannot use this version of Transformer Engine; None where it can."""
    megatron = installed_version("megatron-core") or ""
    bounds = ENGINES.get(".".join(megatron.split(".")[:2]))
    if version is None or bounds is None or SpecifierSet(bounds).contains(version, prereleases=True):
        return None
    return f"is none of {bounds}, which Megatron-Core {megatron} was made for; 0.19, on Python 3.12, takes later ones"


def _apex(unwanted: str | None) -> Library:
    spec, version = importlib.util.find_spec("apex"), installed_version("apex")
    if spec is None:
        return Library("Apex", version, "is not installed")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "optimizers").is_dir() for folder in folders):
        return Library("Apex", version, "is another project of that name")
    return Library("Apex", version, unwanted or _import_problem("apex.optimizers"))


def _import_problem(module: str) -> str | None:
    """Why a module cannot be imported; None where it can, and it is imported then."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        return "is not installed" if error.name == module else f"cannot be imported ({reason(error)})"
    except Exception as error:  # noqa: BLE001 - a build for another torch or CUDA raises what it likes
        return f"cannot be imported ({reason(error)})"
    return None


def _hide(package: str) -> None:
    """Make every later import of a package raise ImportError, as if it were not installed."""
    for name in [n for n in sys.modules if n.startswith(f"{package}.")]:
        del sys.modules[name]
    sys.modules[package] = None  # type: ignore[assignment]
