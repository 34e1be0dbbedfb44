"""Checks of versions, and of the implementation that each feature uses."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import megappo
from megappo.config import Config
from megappo.doctor.findings import Finding, broken, fine, from_sentence, slow
from megappo.engines.registry import find_engine
from megappo.engines.sglang.version import TRIED_VERSION
from megappo.errors import how_to_install, reason
from megappo.observe.loggers import find_logger
from megappo.observe.wandb_log import import_wandb
from megappo.runtime.accelerations import FUSED_GRADIENTS, Accelerations, find_accelerations
from megappo.runtime.packages import installed_version

_REQUIREMENTS = Path(megappo.__file__).with_name("requirements.txt")
REQUIRED = tuple(line for line in _REQUIREMENTS.read_text().splitlines() if not line.startswith("#"))
SGLANG = f"sglang=={TRIED_VERSION}"
# Python versions with locked packages in launch/locks.
_PYTHONS = ((3, 11), (3, 12))
_SHOWN = ("torch", "megatron-core", "transformers")
_REWARD_PACKAGES = {"math_verify": "math-verify", "reasoning_gym": "reasoning-gym"}


def software_findings(config: Config | None) -> Iterator[Finding]:
    """Yield findings on installed packages."""
    yield _python()
    unfit = [finding for requirement in REQUIRED if (finding := check_package(requirement)) is not None]
    yield from unfit
    if not unfit:
        versions = ", ".join(f"{name} {installed_version(name)}" for name in _SHOWN)
        yield fine("packages", f"{versions} and {len(REQUIRED) - len(_SHOWN)} others")
    yield from reward_findings(config)
    if config is not None:
        yield from logger_findings(config)
    yield generation_finding(config)
    if any(f.check in ("torch", "megatron-core") for f in unfit):
        return
    yield _kernels()
    accelerations = find_accelerations(config.model.accelerations if config is not None else "torch")
    megatron = _megatron()
    yield megatron
    if megatron.state == "fine":
        yield from acceleration_findings(accelerations, config)
    yield _collectives()


def check_package(requirement: str) -> Finding | None:
    """Return a finding if a requirement in the syntax of requirements.txt is not met, otherwise None."""
    parsed = Requirement(requirement)
    if parsed.marker is not None and not parsed.marker.evaluate():
        return None  # the requirement is for another Python version
    name, version = parsed.name, installed_version(parsed.name)
    bounds = requirement.partition(";")[0].removeprefix(name)
    remedy = f"pip install '{name}{bounds}'"
    if version is None:
        return broken(name, "not installed", remedy)
    if not satisfies(version, bounds):
        return broken(name, f"version {version}, but {bounds} is required", remedy)
    return None


def satisfies(version: str, bounds: str) -> bool:
    """Return whether a version is within bounds such as `>=0.16,<0.20`."""
    return SpecifierSet(bounds).contains(version, prereleases=True)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] in _PYTHONS:
        return fine("python", version)
    return broken("python", f"{version} is not 3.11 or 3.12", "create the environment with Python 3.11 or 3.12")


def reward_findings(config: Config | None) -> Iterator[Finding]:
    """Yield findings on the packages that the configured rewards need."""
    functions = [str(term.function) for _, term in config.reward.terms.values()] if config is not None else []
    for package in sorted({_REWARD_PACKAGES[name] for name in functions if name in _REWARD_PACKAGES}):
        version = installed_version(package)
        if version is None:
            yield broken("reward", f"{package} is not installed", how_to_install("tasks"))
        else:
            yield fine("reward", f"{package} {version}")


def logger_findings(config: Config) -> Iterator[Finding]:
    """Check that wandb and the user's loggers can be imported. No logger is started."""
    imports: dict[str, Callable[[], object]] = {
        path: partial(find_logger, path, options) for path, options in config.logging.loggers.items()
    }
    if config.logging.wandb_project is not None:
        imports["wandb"] = partial(import_wandb, config.logging.wandb_project)
    for name, load in imports.items():
        try:
            load()
        except ValueError as error:
            yield from_sentence("logger", "broken", str(error))
        else:
            text = f"version {installed_version('wandb')}" if name == "wandb" else "imported, and accepts its options"
            yield fine("logger", f"{name}: {text}")


def generation_finding(config: Config | None) -> Finding:
    """Return a finding on the generation engine. SGLang must be installed in the supported version if the settings
    require it."""
    if config is not None and config.rollout.is_custom:
        try:
            find_engine(config.rollout)
        except ValueError as error:
            return from_sentence("generation", "broken", error)
        return fine("generation", f"{config.rollout.engine_name}, a custom engine")
    judged = config is not None and any(judge.server is not None for judge in config.reward.judges.values())
    is_needed = judged or (config is not None and config.rollout.capabilities.separate_processes)
    version = installed_version("sglang")
    if version is None:
        if is_needed:
            text = "the server of a judge is SGLang" if judged else "rollout.servers.kind is sglang"
            instead = "set a url for the judge" if judged else "set rollout.engine to transformers"
            return broken("generation", f"{text}, which is not installed", f"{how_to_install('sglang')}, or {instead}")
        return fine("generation", "transformers, embedded in every rank; SGLang is not installed")
    if not satisfies(version, SGLANG.removeprefix("sglang")):
        return broken("generation", f"SGLang {version}, but {TRIED_VERSION} is required", f"pip install '{SGLANG}'")
    return fine(
        "generation", f"SGLang {version}" if is_needed else f"transformers, embedded; SGLang {version} is installed"
    )


def _kernels() -> Finding:
    """Return a finding on megappo's kernels. The check also verifies that no folder hides the package `kernels` of
    Hugging Face."""
    if importlib.util.find_spec("megappo_kernels") is None:
        remedy = "pip install . again, or put the repository's kernels/ on PYTHONPATH"
        return broken("kernels", "megappo_kernels cannot be imported", remedy)
    namesake = importlib.util.find_spec("kernels")
    origin = None if namesake is None else namesake.origin
    if origin is not None and Path(origin).parents[1].joinpath("megappo").is_dir():
        return broken("kernels", f"{origin} hides Hugging Face's kernels", f"remove {origin}")
    if not torch.cuda.is_available():
        return fine("kernels", "torch; the Triton kernels need CUDA")
    if importlib.util.find_spec("triton") is None:
        return broken("kernels", "Triton is not installed", "pip install triton")
    return fine("kernels", f"Triton {installed_version('triton')}")


def _megatron() -> Finding:
    try:
        importlib.import_module("megappo.megatron")  # prepares the import of Megatron-Core
        importlib.import_module("megatron.core.models.gpt.gpt_model")
    except (ImportError, OSError) as error:  # OSError: a missing library of a compiled package
        return broken("megatron", f"cannot be imported ({reason(error)})", "reinstall the named package, or remove it")
    return fine("megatron", f"megatron-core {installed_version('megatron-core')} imports")


def acceleration_findings(used: Accelerations, config: Config | None) -> Iterator[Finding]:
    """Yield findings on the implementations of layers, gradient accumulation and the optimizer, with remedies that
    enable faster implementations."""
    selected = config is not None and config.model.accelerations == "auto"
    if used.apex.is_other_project:
        text, remedy = f"version {used.apex.version} {used.apex.problem}", "NVIDIA's is built from its sources"
        yield slow("apex", text, f"pip uninstall apex; {remedy}")
    if not torch.cuda.is_available():
        yield fine("layers", "Megatron's torch layers, torch's SDPA attention; Transformer Engine needs CUDA")
        yield fine("optimizer", "torch's AdamW")
        return
    text = used.sentence(getattr(torch, config.model.dtype) if config is not None else torch.bfloat16)
    if not selected:
        yield fine("layers", text)
        return
    remedies = []
    if not used.engine.is_used:
        absent = used.engine.version is None
        remedies.append(how_to_install("te") if absent else "reinstall Transformer Engine, or uninstall it")
    if used.gradients_problem is not None:
        remedies.append(f"build NVIDIA's Apex with {FUSED_GRADIENTS}")
    remedy = f"{' and '.join(remedies)}; see launch/README.md"
    yield slow("layers", text, remedy) if remedies else fine("layers", text)


def _collectives() -> Finding:
    if not dist.is_available():
        return broken("collectives", "this torch has no torch.distributed", "install a torch for Linux")
    if not torch.cuda.is_available():
        return fine("collectives", "gloo")
    if not dist.is_nccl_available():
        return broken("collectives", "this torch has no NCCL", "install a torch with CUDA for Linux")
    return fine("collectives", f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, gloo")
