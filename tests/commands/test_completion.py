"""The completion script, run by bash: commands, options, choices, settings, and files."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from megappo.commands import COMMANDS
from megappo.commands.completion import SHELLS, script

COMPLETE = """
source "$1"
shift
for line in "$@"; do
    COMP_LINE=$line COMP_POINT=${#line}
    read -ra COMP_WORDS <<<"$line"
    [[ $line == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _megappo
    (IFS='|'; echo "${COMPREPLY[*]}")
done
complete -p megappo
"""


@pytest.fixture(scope="module", params=SHELLS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the script of a shell. bash can run the script of zsh without its first line."""
    path = tmp_path_factory.mktemp("completion") / request.param
    path.write_text(script(request.param))
    return path


@pytest.mark.waits
def test_bash_completes(written: Path) -> None:
    cases = {
        "megappo pl": "plan ",
        "megappo ": "|".join(f"{name} " for name in COMMANDS),
        "megappo plan --se": "--search ",
        "megappo export --role ": "actor |critic ",
        "megappo export --format p": "peft ",
        "megappo data ": "prepare ",
        "megappo train run.yaml actor.optimizer.lea": "actor.optimizer.learning_rate=",
        "megappo train run.yaml": "",  # files
        "megappo train run.yaml run.steps=": "",
        "megappo report actor.lay": "",  # the command has no overrides
        "megappo settings rollout.temperature": "rollout.temperature ",
        "megappo xyzzy --": "",
    }
    lines = [line for line in written.read_text().splitlines() if not line.startswith("autoload")]
    written.write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        ["bash", "-uc", COMPLETE, "bash", str(written), *cases], capture_output=True, text=True, check=True
    )
    *answers, registered = done.stdout.splitlines()
    assert dict(zip(cases, answers, strict=True)) == cases
    assert "-F _megappo megappo" in registered and "-o default" in registered


@pytest.mark.waits
def test_zsh_reads_its_script(tmp_path: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    (tmp_path / "script").write_text(script("zsh"))
    done = subprocess.run(
        ["zsh", "-fc", f"source {tmp_path / 'script'}; which _megappo"], capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
