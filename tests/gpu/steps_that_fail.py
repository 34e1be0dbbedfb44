"""Steps that go wrong in every way, for test_acceptance_command.py."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator

from tests.gpu.acceptance.registry import Place
from tests.gpu.acceptance.table import Row, Skip, judged, measured


def sound(place: Place) -> Iterator[Row]:
    """Says which process it ran in."""
    yield measured("process", str(os.getpid()), pid=os.getpid())


def unsound(place: Place) -> Iterator[Row]:
    """Something that does not hold."""
    yield judged("sum", 1 + 1 == 3, "2, bound 3")


def raises(place: Place) -> Iterator[Row]:
    """After its first row."""
    yield measured("before", "1")
    raise ValueError("a bad | value\nover two lines")


def dies(place: Place) -> Iterator[Row]:
    """As by a driver's error."""
    yield measured("before", "1")
    os.abort()


def hangs(place: Place) -> Iterator[Row]:
    """As a kernel that never ends."""
    yield measured("before", "1")
    time.sleep(1000)


def cannot(place: Place) -> Iterator[Row]:
    """Something is missing."""
    yield measured("before", "1")
    raise Skip("needs what is not here")


def leaves_nothing(place: Place) -> Iterator[Row]:
    """After a step, while the trainer's name is still there, models and optimizers are not."""
    from tests.gpu.acceptance import workload
    from tests.gpu.acceptance.ppo_step import one_step

    size, held = workload.Size(4, 8, 8), []
    folder = workload.model_folder(place, "0.6B")
    with workload.trainer(workload.make_config(place, workload.settings(place, folder, size, "bfloat16"))) as trainer:
        one_step(trainer, workload.samples(size, folder, ragged=True))
        for role in trainer.parts.trained:
            held += [weakref.ref(parameter) for parameter in role.parameters()]
            held += [weakref.ref(p.main_grad) for p in role.parameters()]  # type: ignore[attr-defined]
        del role
    alive = sum(reference() is not None for reference in held)
    yield judged("tensors", bool(held) and not alive, f"{alive} of {len(held)} are still there", held=len(held))
