"""Versions, and the implementation that each feature will use."""

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
from megappo.errors import how_to_install, reason
from megappo.observe.loggers import find_logger
from megappo.observe.wandb_log import import_wandb
from megappo.plugins import is_import_path
from megappo.runtime.accelerations import FUSED_GRADIENTS, Accelerations, find_accelerations
from megappo.runtime.packages import installed_version
from megappo.runtime.sglang_cpu import TRIED_VERSION

_REQUIREMENTS = Path(megappo.__file__).with_name("requirements.txt")
REQUIRED = tuple(line for line in _REQUIREMENTS.read_text().splitlines() if not line.startswith("#"))
SGLANG = f"sglang=={TRIED_VERSION}"
# Versions with locks of all packages in launch/locks.
_PYTHONS = ((3, 11), (3, 12))
_SHOWN = ("torch", "megatron-core", "transformers")
_REWARD_PACKAGES = {"math_verify": "math-verify", "reasoning_gym": "reasoning-gym"}


def software_findings(config: Config | None) -> Iterator[Finding]:
    """Everything about installed packages."""
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
    found = find_accelerations(config.model.accelerations if config is not None else "torch")
    megatron = _megatron()
    yield megatron
    if megatron.state == "fine":
        yield from acceleration_findings(found, config)
    yield _collectives()


def check_package(requirement: str) -> Finding | None:
    """A finding where a requirement, as requirements.txt writes it, does not hold."""
    wanted = Requirement(requirement)
    if wanted.marker is not None and not wanted.marker.evaluate():
        return None  # it is for another Python
    name, version = wanted.name, installed_version(wanted.name)
    bounds = requirement.partition(";")[0].removeprefix(name)
    remedy = f"pip install '{name}{bounds}'"
    if version is None:
        return broken(name, "not installed", remedy)
    if not holds(version, bounds):
        return broken(name, f"version {version}, needed is {bounds}", remedy)
    return None


def holds(version: str, bounds: str) -> bool:
    """Whether a version keeps bounds such as `>=0.16,<0.20`."""
    return SpecifierSet(bounds).contains(version, prereleases=True)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] in _PYTHONS:
        return fine("python", version)
    return broken("python", f"{version} is not 3.11 or 3.12", "make the environment with one of them")


def reward_findings(config: Config | None) -> Iterator[Finding]:
    """The package that the settings' reward needs."""
    functions = [str(term.function) for _, term in config.reward.terms.values()] if config is not None else []
    for package in sorted({_REWARD_PACKAGES[name] for name in functions if name in _REWARD_PACKAGES}):
        version = installed_version(package)
        if version is None:
            yield broken("reward", f"{package} is not installed", how_to_install("tasks"))
        else:
            yield fine("reward", f"{package} {version}")


def logger_findings(config: Config) -> Iterator[Finding]:
    """Check that wandb and the loggers of the user can be imported. No logger is started."""
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
            words = f"version {installed_version('wandb')}" if name == "wandb" else "imported, and takes its options"
            yield fine("logger", f"{name}: {words}")


def generation_finding(config: Config | None) -> Finding:
    """SGLang: needed where the settings ask for it, and in one version only."""
    engine = config.rollout.engine if config is not None else None
    if config is not None and engine is not None and is_import_path(engine):
        try:
            find_engine(config.rollout)
        except ValueError as error:
            return from_sentence("generation", "broken", error)
        return fine("generation", f"{engine}, an engine of your own")
    judged = config is not None and any(judge.server is not None for judge in config.reward.judges.values())
    wanted = judged or (config is not None and config.rollout.has_servers)
    version = installed_version("sglang")
    if version is None:
        if wanted:
            words = "a judge's own server is SGLang" if judged else "rollout.engine is sglang"
            instead = "give the judge a url" if judged else "set rollout.engine to transformers"
            return broken("generation", f"{words}, which is not installed", f"{how_to_install('sglang')}, or {instead}")
        return fine("generation", "transformers, embedded in every rank; SGLang is not installed")
    if not holds(version, SGLANG.removeprefix("sglang")):
        return broken("generation", f"SGLang {version}, needed is {TRIED_VERSION}", f"pip install '{SGLANG}'")
    return fine("generation", f"SGLang {version}" if wanted else f"transformers, embedded; SGLang {version} is there")


def _kernels() -> Finding:
    """Our kernels, and that Hugging Face's package of nearly the same name is not shadowed by a folder."""
    if importlib.util.find_spec("megappo_kernels") is None:
        remedy = "pip install . again, or put the repository's kernels/ on PYTHONPATH"
        return broken("kernels", "megappo_kernels cannot be imported", remedy)
    namesake = importlib.util.find_spec("kernels")
    origin = None if namesake is None else namesake.origin
    if origin is not None and Path(origin).parents[1].joinpath("megappo").is_dir():
        return broken("kernels", f"{origin} hides Hugging Face's kernels", f"remove {origin}")
    if not torch.cuda.is_available():
        return fine("kernels", "torch; Triton's are for CUDA")
    if importlib.util.find_spec("triton") is None:
        return broken("kernels", "Triton is not installed", "pip install triton")
    return fine("kernels", f"Triton {installed_version('triton')}")


def _megatron() -> Finding:
    from megappo.runtime.megatron_cpu import hide_cuda_only_packages
    from megappo.runtime.megatron_patches import silence_megatron

    silence_megatron()
    if not torch.cuda.is_available():
        hide_cuda_only_packages()
    try:
        importlib.import_module("megatron.core.models.gpt.gpt_model")
    except (ImportError, OSError) as error:  # OSError: a library that a compiled package needs
        return broken("megatron", f"cannot be imported ({reason(error)})", "reinstall what it names, or remove it")
    return fine("megatron", f"megatron-core {installed_version('megatron-core')} imports")


def acceleration_findings(found: Accelerations, config: Config | None) -> Iterator[Finding]:
    """Findings on the implementations of layers, gradient accumulation and the optimizer, and on what would make them
    faster."""
    selected = config is not None and config.model.accelerations == "auto"
    impostor = found.apex.problem is not None and "another project" in found.apex.problem
    if impostor:
        words, remedy = f"version {found.apex.version} {found.apex.problem}", "NVIDIA's is built from its sources"
        yield slow("apex", words, f"pip uninstall apex; {remedy}")
    if not torch.cuda.is_available():
        yield fine("layers", "Megatron's torch layers, torch's SDPA attention; Transformer Engine needs CUDA")
        yield fine("optimizer", "torch's AdamW")
        return
    words = found.sentence(getattr(torch, config.model.dtype) if config is not None else torch.bfloat16)
    if not selected:
        yield fine("layers", words)
        return
    remedies = []
    if not found.engine.is_used:
        absent = found.engine.version is None
        remedies.append(how_to_install("te") if absent else "reinstall Transformer Engine, or uninstall it")
    if found.gradients_problem is not None:
        remedies.append(f"build NVIDIA's Apex with {FUSED_GRADIENTS}")
    remedy = f"{' and '.join(remedies)}; launch/README.md says how"
    yield slow("layers", words, remedy) if remedies else fine("layers", words)


def _collectives() -> Finding:
    if not dist.is_available():
        return broken("collectives", "this torch has no torch.distributed", "install a torch for Linux")
    if not torch.cuda.is_available():
        return fine("collectives", "gloo")
    if not dist.is_nccl_available():
        return broken("collectives", "this torch has no NCCL", "install a torch with CUDA for Linux")
    return fine("collectives", f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, gloo")
