"""Commands for the shell in which the user started megappo."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from megappo.config.shipped import shipped_file

_LAUNCH = "MEGAPPO_LAUNCH"
"""Variable that launch/environment.sh sets to the folder of the scripts in a clone. The scripts select the environment,
so the user's shell has neither `megappo` nor `torchrun`. pip installs both, and the variable is then unset."""


def command_line(*arguments: str) -> str:
    """Return a line that runs a command of megappo."""
    return f"{_megappo()} {shlex.join(arguments)}"


def training_line(nodes: int, per_node: int, arguments: Sequence[str]) -> str:
    """Return a line that starts a command on `nodes` machines with `per_node` processes each. `HOST` is a placeholder
    for the first of several machines."""
    if _LAUNCH in os.environ:
        options = [str(per_node)] if nodes == 1 else ["--nodes", str(nodes), "--head", "HOST:29500", str(per_node)]
        return shlex.join([_script("torchrun.sh"), *options, *arguments])
    options = ["--nproc-per-node", str(per_node)]
    if nodes > 1:
        options = ["--nnodes", str(nodes), *options, "--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500"]
    program = "torchrun" if shutil.which("torchrun") else f"{_python()} -m torch.distributed.run"
    return f"{program} {shlex.join([*options, '-m', 'megappo', *arguments])}"


def sbatch_line(nodes: int, per_node: int, config: Path) -> str:
    """Return a line that submits a run to SLURM. The job runs in the working directory of this process."""
    root, script = shipped_file(), shipped_file("launch", "slurm", "ppo.sbatch")
    arguments = ["sbatch", "--nodes", str(nodes), "--gpus-per-node", str(per_node), _shown(script), str(config)]
    variable = "" if root == Path.cwd() else f"MEGAPPO_ROOT={shlex.quote(str(root))} "
    return f"{variable}{shlex.join(arguments)}"


def _megappo() -> str:
    if _LAUNCH in os.environ:
        return shlex.quote(_script("megappo"))
    return "megappo" if shutil.which("megappo") else f"{_python()} -m megappo"


def _script(name: str) -> str:
    return _shown(Path(os.environ[_LAUNCH], name))


def _python() -> str:
    active = shutil.which("python")
    is_own = active is not None and os.path.realpath(active) == os.path.realpath(sys.executable)
    return "python" if is_own else shlex.quote(sys.executable)


def _shown(file: Path) -> str:
    """Return the path relative to the working directory if the file is below the working directory, otherwise the
    absolute path."""
    return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)
