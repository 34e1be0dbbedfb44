"""What the settings ask of this machine: the model on its disk, and room for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from megappo.config import Config
from megappo.doctor.findings import Finding, broken, fine, slow
from megappo.plan import MACHINES, Machine, Models, make_plan, remedy


def settings_findings(config: Config, models: Models, world_size: int) -> Iterator[Finding]:
    """The model's files, and memory for every role on its ranks."""
    paths = [config.model.path, config.critic.path if config.critic else None]
    paths.append(config.reference.path if config.reference else None)
    for path in dict.fromkeys(p for p in paths if p is not None):
        yield _model(path)
    yield _room(config, models, world_size)


def _model(path: str) -> Finding:
    """Whether a model is on this machine."""
    if Path(path).is_dir():
        return fine("model", f"{path} is a folder here")
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(path, "config.json"), str):
        return fine("model", f"{path} is in the cache of the hub")
    words = f"{path} is not on this machine; a run will fetch it"
    return slow("model", words, "fetch it before (hf download), or set model.path to a folder of all machines")


def _room(config: Config, models: Models, world_size: int) -> Finding:
    """The plan of the run on this machine's devices."""
    machine = this_machine()
    plan = make_plan(config, models, machine, world_size)
    if plan.fits:
        return fine("room", f"{world_size} x {machine.words}: {plan.verdict}")
    return broken("room", plan.verdict, remedy(config, models, machine, world_size)[0])


def this_machine() -> Machine:
    """The machine of the planner's tables that is most like this one, with this one's memory."""
    if not torch.cuda.is_available():
        import psutil

        total = float(psutil.virtual_memory().total)
        return replace(MACHINES["cpu"], memory_bytes=total, words=f"a share of {total / 1e9:.0f} GB")
    name = torch.cuda.get_device_name(0)
    alike = next((m for m in MACHINES.values() if m.name.upper() in name.upper()), MACHINES["h100"])
    total = float(torch.cuda.get_device_properties(0).total_memory)
    return replace(alike, memory_bytes=total, words=f"{name}, {total / 1e9:.0f} GB")
