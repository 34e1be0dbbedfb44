"""Steps with all kinds of failures, for test_acceptance_command.py."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator

from tests.gpu.acceptance.registry import Place
from tests.gpu.acceptance.table import Row, Skip, judged, measured


def sound(place: Place) -> Iterator[Row]:
    """Report the process of the step."""
    yield measured("process", str(os.getpid()), pid=os.getpid())


def unsound(place: Place) -> Iterator[Row]:
    """Yield a failed check."""
    yield judged("sum", 1 + 1 == 3, "2, bound 3")


def raises(place: Place) -> Iterator[Row]:
    """Raise an error after the first row."""
    yield measured("before", "1")
    raise ValueError("a bad | value\nover two lines")


def dies(place: Place) -> Iterator[Row]:
    """Abort the process, as after an error of a driver."""
    yield measured("before", "1")
    os.abort()


def hangs(place: Place) -> Iterator[Row]:
    """Sleep, as in a kernel that does not end."""
    yield measured("before", "1")
    time.sleep(1000)


def cannot(place: Place) -> Iterator[Row]:
    """Skip the rest because of a missing requirement."""
    yield measured("before", "1")
    raise Skip("needs a missing package")


def leaves_nothing(place: Place) -> Iterator[Row]:
    """Check that models and optimizers are freed after the block, although the name of the trainer still exists."""
    from tests.gpu.acceptance import workload
    from tests.gpu.acceptance.ppo_step import one_step

    size, references = workload.Size(4, 8, 8), []
    folder = workload.model_folder(place, "0.6B")
    with workload.trainer(workload.make_config(place, workload.settings(place, folder, size, "bfloat16"))) as trainer:
        one_step(trainer, workload.samples(size, folder, ragged=True))
        for role in trainer.parts.trained:
            references += [weakref.ref(parameter) for parameter in role.parameters()]
            references += [weakref.ref(p.main_grad) for p in role.parameters()]  # type: ignore[attr-defined]
        del role
    alive = sum(reference() is not None for reference in references)
    yield judged(
        "tensors",
        bool(references) and not alive,
        f"{alive} of {len(references)} still exist",
        references=len(references),
    )
