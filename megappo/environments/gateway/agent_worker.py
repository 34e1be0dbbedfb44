"""Runs an agent: `python -m megappo.environments.gateway.agent_worker REQUESTS ANSWERS`, for `agent.Agent`.

The worker receives an AgentProgram, and answers (status, end of the standard error output).
"""

from __future__ import annotations

import os
import subprocess
from tempfile import TemporaryFile
from typing import NamedTuple

from megappo.rewards.processes.channel import WorkerEnd
from megappo.rewards.processes.worker_main import main

_ERROR_CHARACTERS = 300


class AgentProgram(NamedTuple):
    """Program for the worker."""

    command: list[str]
    """Program and its arguments."""
    variables: dict[str, str]
    """Environment variables of the program in addition to the variables of the worker."""
    task: str
    folder: str
    """Working directory. The process that started the worker removes it, because the worker may be killed."""


def _serve(pool: WorkerEnd) -> None:
    program: AgentProgram = pool.first
    with TemporaryFile() as errors:
        try:
            done = subprocess.run(
                program.command,
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
        errors.seek(max(0, errors.tell() - _ERROR_CHARACTERS))
        pool.send((done.returncode, errors.read().decode(errors="replace").strip()))


if __name__ == "__main__":
    main(_serve)
