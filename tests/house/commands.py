"""Commands that documents show, checked without running what takes long."""

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
"""Programs and shell functions that are not looked into."""
PLACEHOLDERS = {
    "CONFIG": "configs/quickstart.yaml",
    "RUN_DIR": "runs/my-run",
    "OUT": "out",
    "FOLDER": "folder",
    "SHELL": "zsh",
    "TASK": "gsm8k",
}
PREFIXES = ("bash ", "launch/", "megappo ", "mpirun ", "python ", "sbatch ", "srun ", "torchrun ")


def inline_code(text: str) -> list[str]:
    """What stands between backticks, outside of blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


def blocks(text: str, language: str) -> list[str]:
    """The blocks of a document in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(text: str) -> Iterator[list[str]]:
    """The words of every command in a document, in blocks and between backticks."""
    lines = [line for block in blocks(text, "bash") for line in block.replace("\\\n", " ").splitlines()]
    lines += [code for code in inline_code(text) if code.startswith(PREFIXES)]
    for line in lines:
        for part in line.split(" && "):
            words = shlex.split(part.split(" > ")[0], comments=True)
            if words and "..." not in words and not any(word.startswith("[") for word in words):
                yield [PLACEHOLDERS.get(word, word) for word in words]


def check_command(words: list[str], example: Path) -> None:
    """Fails where a program, a file, an option or a setting of the command is not there. `example` stands in for the
    configurations that a reader writes."""
    while re.match(r"\w+=", words[0]):
        assert_is_read(words.pop(0).split("=")[0])
    program, *rest = words
    if Path(program).name in ELSEWHERE:
        return
    if program == "megappo":
        check_megappo(rest, example)
    elif program in ("torchrun", "srun", "mpirun"):
        inner = next(i for i, word in enumerate(rest) if word in ("-m", "python") or word.endswith(".py"))
        check_python(rest[inner + 1 :] if rest[inner] == "python" else rest[inner:], example)
    elif program.startswith("python") or program.endswith("/python"):
        check_python(rest, example)
    elif program == "sbatch":
        script = next((i for i, word in enumerate(rest) if word.endswith(".sbatch")), None)
        if script is not None:
            check_script(rest[script])
            check_megappo(["train", *rest[script + 1 :]], example)
    elif program in ("bash", "source"):
        check_script(rest[0])
        check_options(rest[0], rest[1:])
    else:
        check_script(program)
        assert os.access(ROOT / program, os.X_OK), f"{program} cannot be executed"
        subcommand = next((i for i, word in enumerate(rest) if word in COMMANDS), None)
        if subcommand is not None:
            check_megappo(rest[subcommand:], example)


def assert_is_read(variable: str) -> None:
    """Something in the repository reads the environment variable."""
    found = subprocess.run(["grep", "-rqw", "--exclude=*.md", variable, "launch", "megappo"], cwd=ROOT, check=False)
    assert found.returncode == 0, f"nothing reads {variable}"


def check_script(name: str) -> None:
    """A script of the shell is there and can be parsed."""
    subprocess.run(["bash", "-n", str(ROOT / name)], check=True)


def check_options(script: str, words: list[str]) -> None:
    """A program of ours knows every option, and every file of ours that is named is there."""
    text = (ROOT / script).read_text()
    for word in words:
        assert not word.startswith("--") or f'"{word}"' in text or f"{word} " in text, f"{script} does not know {word}"
        assert not re.match(r"(configs|tests)/", word) or (ROOT / word).exists(), word


def check_python(words: list[str], example: Path) -> None:
    """`python -m MODULE ...` or `python FILE ...`."""
    if words[0].endswith(".py"):
        check_options(words[0], words[1:])
    elif words[:2] == ["-m", "megappo"]:
        check_megappo(words[2:], example)
    elif words[:2] == ["-m", "pytest"]:
        check_pytest(words[2:])
    elif words[0] == "-m":
        assert find_spec(words[1]), f"there is no module {words[1]}"
        if (ROOT / (ours := f"{words[1].replace('.', '/')}.py")).exists():
            check_options(ours, words[2:])
    else:
        assert words[0] == "-c", words
        compile(words[1], "a document", "exec")


def check_pytest(words: list[str]) -> None:
    """Every file is there, and every word behind `-k` is in the name or the text of one of them."""
    places = [ROOT / word.split("::")[0] for word in words if word.startswith("tests/")]
    if "-k" in words:
        files = [file for place in places for file in ([place] if place.is_file() else place.rglob("test_*.py"))]
        texts = [file.stem + file.read_text() for file in files]
        for name in re.split(r" (?:or|and|and not) ", words[words.index("-k") + 1]):
            assert any(name in text for text in texts), f"-k {name} selects nothing of {places}"
    assert all(place.exists() for place in places), places


def check_megappo(words: list[str], example: Path) -> None:
    """The command line takes the words, and its settings are valid; a plan is made."""
    if len(words) == 1:
        assert words[0] in COMMANDS
        return
    ours = [str(example) if word in ("my-run.yaml", "next.yaml") else word for word in words]
    arguments = parse(ours)
    if getattr(arguments, "config", None):
        load_config(arguments.config, arguments.overrides)
    if arguments.command == "plan":
        assert main(ours) in (0, 1), words
