"""Measure the memory of a process during training; see test_memory.py.

Usage (under torchrun): memory_worker.py CASE.json FOUND.json
- `alone`: only an actor is updated.
- Otherwise, a step of PPO is trained.
The results are bytes: storages of roles and engine at every change of stage and after every update, storages of the
optimizers, and the peak of anonymous memory in each stage above the memory of the imports.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from megappo.config import Config, derive_run, load_config, resolve
from megappo.megatron.placed import PlacedBatch, announce, place
from megappo.megatron.roles import LocalRole, TrainedRole
from megappo.ppo.assembly.components import assemble
from megappo.ppo.assembly.methods import find_objective
from megappo.ppo.assembly.models import ModelBuilder
from megappo.ppo.reports.reporting import Reporter
from megappo.ppo.training_run import TrainingRun
from megappo.ppo.updates import LossWeights, PolicyTask
from megappo.runtime.memory.allocator import trim_heap
from megappo.runtime.process import Runtime
from megappo.types import Samples
from tests.support.workers import answer


def anonymous_bytes() -> int:
    """Return the memory of this process without file-backed pages."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


class Meter:
    """Peaks of anonymous memory in each stage, sampled a hundred times per second, and storages at the start of
    stages."""

    def __init__(self) -> None:
        trim_heap()
        self._imports = anonymous_bytes()
        self.stage = "start"
        self.anonymous: dict[str, int] = {}
        self.storages: dict[str, int] = {}
        self.optimizers = 0
        self.roles: list[Any] = []

    def enter(self, stage: str, _waits_for: str = "") -> None:
        """Start a stage and record the memory of the previous stage."""
        self.weigh()
        self._look()
        self.stage = stage

    def weigh(self) -> None:
        """Record storages."""
        self.storages[self.stage] = max(self.storages.get(self.stage, 0), storage_bytes(self.roles))
        trained = [role for role in self.roles if isinstance(role, TrainedRole)]
        self.optimizers = max(self.optimizers, bytes_of(t for r in trained for t in r.optimizer.tensors().optimizer()))

    def _look(self) -> None:
        self.anonymous[self.stage] = max(self.anonymous.get(self.stage, 0), anonymous_bytes() - self._imports)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Sample memory in a thread, and record storages after every update before the role is offloaded."""
        done, update = threading.Event(), PlacedBatch.update

        def update_and_weigh(*args: Any, **kwargs: Any) -> Any:
            result = update(*args, **kwargs)
            self.weigh()
            return result

        PlacedBatch.update = update_and_weigh  # type: ignore[method-assign]

        def look() -> None:
            while not done.wait(0.01):
                self._look()

        thread = threading.Thread(target=look)
        thread.start()
        yield
        done.set()
        thread.join()


def storage_bytes(roles: list[Any]) -> int:
    """Return the bytes of distinct storages of the tensors of the roles and of the model of the embedded engine."""
    tensors = [p for model in gc.get_objects() if isinstance(model, transformers.PreTrainedModel)
               for p in model.parameters()]  # fmt: skip
    for role in roles:
        if isinstance(role, LocalRole):
            tensors += role.parameters()
        if isinstance(role, TrainedRole):
            tensors_of_optimizer = role.optimizer.tensors()
            tensors += [*tensors_of_optimizer.gradients(), *tensors_of_optimizer.optimizer()]
    return bytes_of(tensors)


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages of tensors."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def train(config: Config, runtime: Runtime, meter: Meter) -> None:
    """Train one step."""
    derived = derive_run(config, runtime.world_size)
    parts = assemble(config, derived, runtime)
    meter.roles += [parts.actor, parts.critic, parts.reference]
    TrainingRun(parts, Reporter(config, derived, runtime, meter.enter)).train()
    meter.enter("end")
    parts.close()


def update_alone(config: Config, runtime: Runtime, meter: Meter) -> None:
    """Update an actor with the maximum number of tokens of a step."""
    actor = ModelBuilder(config, derive_run(config, 1), runtime, roles=("actor",)).actor()
    meter.roles.append(actor)
    prompt, response, n = (
        config.data.max_prompt_tokens,
        config.rollout.max_response_tokens,
        config.rollout.prompts_per_step,
    )
    sequences = tuple(torch.randint(2, 16, (prompt + response,)) for _ in range(n))
    samples = Samples(torch.arange(n), sequences, torch.full((n,), response))
    fields = dict.fromkeys(("old_logprob", "advantages", "ref_logprob"), torch.zeros(n, response))
    batch = place(actor, announce(samples, runtime.device), [range(n)]).with_fields(
        fields | {"mask": torch.ones(n, response)}
    )
    meter.enter("update_actor")
    weights = LossWeights("token-mean", n * response, n, response)
    assert batch.update(0, PolicyTask(find_objective(config.algorithm, 0.0), weights)).applied
    meter.enter("end")


def measured(case: dict[str, Any], runtime: Runtime) -> dict[str, Any]:
    config = resolve(load_config(case["config"], case["overrides"]), on_cuda=False)
    meter = Meter()
    with meter.looking():
        (update_alone if case["alone"] else train)(config, runtime, meter)
    return {"storages": meter.storages, "anonymous": meter.anonymous, "optimizers": meter.optimizers}


if __name__ == "__main__":
    answer(measured)
