"""Availability of Transformer Engine and Apex in a run, and the parts of the model that use them.

Megatron-Core uses both libraries if it can import them, and catches only ImportError. `find_accelerations` must
therefore hide a broken or unselected library before `megatron.core` is imported. Both libraries are opt-in: no test and
no GPU run has executed the layers, the context parallel attention or the Adam of Transformer Engine.
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
"""Versions of Transformer Engine that each Megatron-Core release supports, from the metadata of the release. A release
without an entry sets no limit."""
UNTESTED = "no run has executed Transformer Engine's parts yet, so compare with model.accelerations torch first"
"""Warning of a run and of the doctor if Transformer Engine is used."""
FUSED_GRADIENTS = "fused_weight_gradient_mlp_cuda"
"""Extension of Apex for the accumulation of weight gradients. Layers of Transformer Engine also use the extension."""


@dataclass(frozen=True)
class Library:
    """One of the two libraries in this environment."""

    name: str
    version: str | None
    problem: str | None = None
    """Reason that the library is not used, as a predicate of the name of the library; None if the library is used."""
    is_other_project: bool = False
    """Whether a different project with the same name is installed."""

    @property
    def is_used(self) -> bool:
        """Whether the library can be imported and is selected."""
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
    """Reason that the extension of Apex does not accumulate gradients; None if the extension is used."""
    own_layers: bool = False
    """Whether the model has features that Transformer Engine's layers lack."""

    def for_model(self, *, own_layers: bool) -> Accelerations:
        """Return the same accelerations for a model that may need the layers of megappo."""
        return replace(self, own_layers=own_layers)

    def uses_engine_layers(self, dtype: torch.dtype) -> bool:
        """Return whether the layers are from Transformer Engine, which supports packed sequences only in bfloat16."""
        return self.engine.is_used and dtype == torch.bfloat16 and not self.own_layers

    def switches(self, dtype: torch.dtype) -> dict[str, bool]:
        """Return fields of Megatron-Core's TransformerConfig for a model of this dtype."""
        return {"gradient_accumulation_fusion": self.gradients_problem is None and dtype == torch.bfloat16}

    @property
    def adam(self) -> str:
        """Library of the Adam optimizer: Transformer Engine if used, otherwise Apex if used, otherwise torch."""
        return next((x.name for x in (self.engine, self.apex) if x.is_used), "torch")

    def sentence(self, dtype: torch.dtype) -> str:
        """Return a text with the library of each part of a model of this dtype, and the reasons for parts of torch."""
        parts, used = [], self.switches(dtype)
        if self.uses_engine_layers(dtype):
            parts.append(f"{self.engine.summary} (attention, norms, rope)")
        elif self.engine.is_used and self.own_layers:
            parts.append(f"torch's layers, because the layers of {self.engine.summary} lack features of the model")
        elif self.engine.is_used:
            parts.append(f"torch's layers, because {self.engine.summary} supports packed sequences only in bfloat16")
        else:
            parts.append(f"torch's layers, because {self.engine.summary} {self.engine.problem}")
        if used["gradient_accumulation_fusion"]:
            parts.append(f"{self.apex.summary} adds up weight gradients")
        elif self.engine.is_used or self.apex.is_used:
            parts.append(f"torch adds up weight gradients, because {FUSED_GRADIENTS} {self.gradients_problem}")
        parts.append(f"{self.adam}'s Adam")
        if self.engine.is_used:
            parts.append(UNTESTED)
        return "; ".join(parts)


@functools.cache
def find_accelerations(choice: Choice) -> Accelerations:
    """Find the libraries that this process can use, and hide the others from later imports.

    `choice` is the setting `model.accelerations`. A library that the first call hides stays hidden in this process.
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
    """Hide both libraries from `megatron.core`, unless this process has already called `find_accelerations`."""
    if not find_accelerations.cache_info().currsize:
        find_accelerations("torch")


def _transformer_engine(unwanted: str | None) -> Library:
    version = installed_version("transformer-engine")
    if version is None and importlib.util.find_spec("transformer_engine") is None:
        return Library("Transformer Engine", version, "is not installed")
    problem = unwanted or _refusal(version) or _import_problem("transformer_engine.pytorch")
    return Library("Transformer Engine", version, problem)


def _refusal(version: str | None) -> str | None:
    """Return the reason that Megatron-Core does not support this version of Transformer Engine, or None."""
    megatron = installed_version("megatron-core") or ""
    bounds = ENGINES.get(".".join(megatron.split(".")[:2]))
    if version is None or bounds is None or SpecifierSet(bounds).contains(version, prereleases=True):
        return None
    return f"is not in {bounds}, the range of Megatron-Core {megatron}; 0.19, on Python 3.12, supports later versions"


def _apex(unwanted: str | None) -> Library:
    spec, version = importlib.util.find_spec("apex"), installed_version("apex")
    if spec is None:
        return Library("Apex", version, "is not installed")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "optimizers").is_dir() for folder in folders):
        return Library("Apex", version, "is a different project with the same name", is_other_project=True)
    return Library("Apex", version, unwanted or _import_problem("apex.optimizers"))


def _import_problem(module: str) -> str | None:
    """Import a module. Returns the reason if the import fails, otherwise None."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        return "is not installed" if error.name == module else f"cannot be imported ({reason(error)})"
    except Exception as error:  # noqa: BLE001 - a build for a different torch or CUDA may raise any exception
        return f"cannot be imported ({reason(error)})"
    return None


def _hide(package: str) -> None:
    """Make every later import of a package raise ImportError, as if it were not installed."""
    for name in [n for n in sys.modules if n.startswith(f"{package}.")]:
        del sys.modules[name]
    sys.modules[package] = None  # type: ignore[assignment]
