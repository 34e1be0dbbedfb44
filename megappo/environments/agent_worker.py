"""Runs an agent's program: `python -m megappo.environments.agent_worker REQUESTS ANSWERS`, started by `agent.Agent`.

It receives an AgentProgram, and answers (status, the end of what it wrote to its standard error).
"""

from __future__ import annotations

import os
import subprocess
from tempfile import TemporaryFile
from typing import NamedTuple

from megappo.rewards.channel import WorkerEnd
from megappo.rewards.worker_main import main

_TOLD_CHARACTERS = 300


class AgentProgram(NamedTuple):
    """The program that the worker is to run."""

    words: list[str]
    """The program and its arguments."""
    variables: dict[str, str]
    """Environment variables that the program gets besides the worker's."""
    task: str
    folder: str
    """The working directory, which whoever started the worker removes: the worker may be killed."""


def _serve(pool: WorkerEnd) -> None:
    program: AgentProgram = pool.first
    with TemporaryFile() as errors:
        try:
            done = subprocess.run(
                program.words,
                input=program.task.encode(),
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=os.environ | program.variables | {"PWD": program.folder},
                cwd=program.folder,
                check=False,
            )
        except OSError as error:
            pool.send((127, str(error)))
            return
        errors.seek(max(0, errors.tell() - _TOLD_CHARACTERS))
        pool.send((done.returncode, errors.read().decode(errors="replace").strip()))


if __name__ == "__main__":
    main(_serve)
