"""Print the locations of weights, gradients and optimizer of each role at the start of the stages of a step, as JSON.

Usage: python -m tests.support.workers.storage_worker FOLDER
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar
from unittest.mock import patch

from megappo.config.sections.engine import EngineCapabilities
from megappo.engines.protocol import Completion, GenerateRequest, SamplingParams
from megappo.megatron.optimizer.offload import RoleTensors
from megappo.megatron.roles import LocalRole, TrainedRole
from megappo.observe.timing.stopwatch import Lap
from megappo.ppo.assembly.components import RunComponents
from megappo.ppo.reports.reporting import Reporter
from megappo.ppo.rollout import probe
from tests.gpu.acceptance.registry import Place
from tests.gpu.acceptance.workload import NoEngine, Size, make_config, model_folder, settings, trainer

ROLES = ("actor", "critic", "reference")


class Probed(NoEngine):
    """An engine of one replica that answers all requests, including probes, with the same tokens."""

    capabilities = EngineCapabilities(separate_processes=True)
    replicas = (0,)

    def generate(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> Iterator[tuple[int, Completion]]:
        """Yield three tokens and the end."""
        yield from enumerate(Completion((5, 6, 7), (-1.0, -1.0, -1.0), True, self.version) for _ in requests)


class Watching(Reporter):
    """A reporter that records the tensors on the device at the start of a stage."""

    parts: ClassVar[RunComponents | None] = None
    seen: ClassVar[list[tuple[str, list[str]]]] = []

    def stage(self, name: str, waits_for: str = "") -> AbstractContextManager[Lap]:
        """Record the tensors and start the stage."""
        if self.parts is not None:
            self.seen.append((name, on_device(self.parts)))
        return super().stage(name, waits_for)


def on_device(parts: RunComponents) -> list[str]:
    """Return the parts of roles that are on the device. Offloaded parts have no bytes on the device."""
    reference = parts.reference
    assert isinstance(reference, LocalRole)
    roles = {role.placement.name: role.optimizer.tensors() for role in parts.trained if isinstance(role, TrainedRole)}
    assert len(roles) == 2
    roles["reference"] = RoleTensors(weights=reference.parameters)
    names = []
    for role, tensors in roles.items():
        kinds = {"weights": tensors.weights, "gradients": tensors.gradients, "optimizer": tensors.optimizer}
        names += [
            f"{role}'s {kind}" for kind, read in kinds.items() if any(t.untyped_storage().nbytes() for t in read())
        ]
    return names


def main(folder: str) -> None:
    """Train two steps with all roles offloaded. Any gap between engine and actor is accepted."""
    place = Place("cpu", True, folder)
    content = settings(place, model_folder(place, "0.6B"), Size(4, 8, 8), "float32")
    content["rollout"] |= {"engine": None, "servers": {"kind": f"{Probed.__module__}:Probed"}}
    content["algorithm"] |= {"kl_in_reward": {"coef": 0.01}}
    overrides = [f"{role}.offload=true" for role in ROLES]
    tolerance = patch.object(probe, "default_tolerance_nats", lambda dtype: math.inf)
    with tolerance, trainer(make_config(place, content, overrides), Watching) as t:
        Watching.parts = t.parts
        t.sync_weights()
        for t.step in (1, 2):
            t.ppo_step()
        Watching.seen.append(("end", on_device(t.parts)))
    print(json.dumps(Watching.seen))


if __name__ == "__main__":
    main(sys.argv[1])
