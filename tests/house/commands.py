"""Checks of the commands in documents. Slow commands are only parsed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from megappo.cli import main, parse
from megappo.commands import COMMANDS
from megappo.config import load_config
from tests.support.places import ROOT

ELSEWHERE = {"apptainer", "docker", "ensure_environment", "export", "git", "hf", "mypy", "pip", "pre-commit", "ruff"}
"""Programs and shell functions that are not checked."""
PLACEHOLDERS = {
    "CONFIG": "configs/quickstart.yaml", "RUN_DIR": "runs/my-run", "OUT": "out", "FOLDER": "folder", "SHELL": "zsh",
    "TASK": "gsm8k",
}  # fmt: skip
PREFIXES = ("bash ", "launch/", "megappo ", "mpirun ", "python ", "sbatch ", "srun ", "torchrun ")


def inline_code(text: str) -> list[str]:
    """Return the texts between backticks outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


def blocks(text: str, language: str) -> list[str]:
    """Return the code blocks of a document in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(text: str) -> Iterator[list[str]]:
    """Yield the arguments of every command in the code blocks and inline code of a document."""
    lines = [line for block in blocks(text, "bash") for line in block.replace("\\\n", " ").splitlines()]
    lines += [code for code in inline_code(text) if code.startswith(PREFIXES)]
    for line in lines:
        for part in line.split(" && "):
            arguments = shlex.split(part.split(" > ")[0], comments=True)
            if arguments and "..." not in arguments and not any(argument.startswith("[") for argument in arguments):
                yield [PLACEHOLDERS.get(argument, argument) for argument in arguments]


def check_command(arguments: list[str], example: Path) -> None:
    """Check that the program, files, options and settings of a command exist. Raises AssertionError otherwise.
    `example` replaces configuration files that a reader writes."""
    while re.match(r"\w+=", arguments[0]):
        assert_is_read(arguments.pop(0).split("=")[0])
    program, *rest = arguments
    if Path(program).name in ELSEWHERE:
        return
    if program == "megappo":
        check_megappo(rest, example)
    elif program in ("torchrun", "srun", "mpirun"):
        inner = next(i for i, argument in enumerate(rest) if argument in ("-m", "python") or argument.endswith(".py"))
        check_python(rest[inner + 1 :] if rest[inner] == "python" else rest[inner:], example)
    elif program.startswith("python") or program.endswith("/python"):
        check_python(rest, example)
    elif program == "sbatch":
        script = next((i for i, argument in enumerate(rest) if argument.endswith(".sbatch")), None)
        if script is not None:
            check_script(rest[script])
            check_megappo(["train", *rest[script + 1 :]], example)
    elif program in ("bash", "source"):
        check_script(rest[0])
        check_options(rest[0], rest[1:])
    else:
        check_script(program)
        assert os.access(ROOT / program, os.X_OK), f"{program} cannot be executed"
        subcommand = next((i for i, argument in enumerate(rest) if argument in COMMANDS), None)
        if subcommand is not None:
            check_megappo(rest[subcommand:], example)


def assert_is_read(variable: str) -> None:
    """Check that the repository contains a use of the environment variable."""
    search = subprocess.run(["grep", "-rqw", "--exclude=*.md", variable, "launch", "megappo"], cwd=ROOT, check=False)
    assert search.returncode == 0, f"no file uses {variable}"


def check_script(name: str) -> None:
    """Check that a shell script exists and has valid syntax."""
    subprocess.run(["bash", "-n", str(ROOT / name)], check=True)


def check_options(script: str, arguments: list[str]) -> None:
    """Check that a script supports all options, and that all named configuration and test files exist."""
    text = (ROOT / script).read_text()
    for argument in arguments:
        assert not argument.startswith("--") or f'"{argument}"' in text or f"{argument} " in text, (
            f"{script} has no option {argument}"
        )
        assert not re.match(r"(configs|tests)/", argument) or (ROOT / argument).exists(), argument


def check_python(arguments: list[str], example: Path) -> None:
    """Check the arguments of `python -m MODULE ...` or `python FILE ...`."""
    if arguments[0].endswith(".py"):
        check_options(arguments[0], arguments[1:])
    elif arguments[:2] == ["-m", "megappo"]:
        check_megappo(arguments[2:], example)
    elif arguments[:2] == ["-m", "pytest"]:
        check_pytest(arguments[2:])
    elif arguments[0] == "-m":
        assert find_spec(arguments[1]), f"there is no module {arguments[1]}"
        if (ROOT / (ours := f"{arguments[1].replace('.', '/')}.py")).exists():
            check_options(ours, arguments[2:])
    else:
        assert arguments[0] == "-c", arguments
        compile(arguments[1], "a document", "exec")


def check_pytest(arguments: list[str]) -> None:
    """Check that all files exist, and that each name after `-k` occurs in one of the files."""
    places = [ROOT / argument.split("::")[0] for argument in arguments if argument.startswith("tests/")]
    if "-k" in arguments:
        files = [file for place in places for file in ([place] if place.is_file() else place.rglob("test_*.py"))]
        texts = [file.stem + file.read_text() for file in files]
        for name in re.split(r" (?:or|and|and not) ", arguments[arguments.index("-k") + 1]):
            assert any(name in text for text in texts), f"-k {name} matches no test in {places}"
    assert all(place.exists() for place in places), places


def check_megappo(command: list[str], example: Path) -> None:
    """Parse a megappo command and load its configuration. A `plan` command is also run."""
    if len(command) == 1:
        assert command[0] in (*COMMANDS, "--help")
        return
    ours = [str(example) if argument in ("my-run.yaml", "next.yaml") else argument for argument in command]
    arguments = parse(ours)
    if getattr(arguments, "config", None):
        load_config(arguments.config, arguments.overrides)
    if arguments.command == "plan":
        assert main(ours) in (0, 1), command
