"""Output that is closed, has no reader, is on a full disk or cannot encode a text does not end a command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import worlds
from tests.support.places import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.waits]

QUICKSTART = "configs/quickstart.yaml"
ONE_STEP = (
    "run.steps=1", "actor.layout={}", "critic.layout={}", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=2",
    "actor.minibatch_sequences=4", "critic.minibatch_sequences=4", "evaluation=null", "run.export_final_model=false",
)  # fmt: skip
LATIN = {"PYTHONIOENCODING": "latin-1"}
ASCII = {"PYTHONIOENCODING": "ascii"}
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
SEVERAL = """
import json, sys
from megappo.observe.terminal.streams import prepare_streams
prepare_streams()
import megappo.cli
codes = [megappo.cli.main(arguments) for arguments in json.loads(sys.argv[2])]
open(sys.argv[1], "w").write(json.dumps(codes))
"""


def in_shell(line: str, *arguments: str, **changes: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of bash in which `"$@"` is a command of Python."""
    command = ["bash", "-c", f"set -o pipefail; {line}", "bash", sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=worlds.environment(**changes), capture_output=True, timeout=240, check=False
    )


def train(run: Path, *arguments: str) -> list[str]:
    return ["-m", "megappo", "train", QUICKSTART, f"run.directory={run}", *ONE_STEP, *arguments]


def with_tables(folder: Path) -> list[list[str]]:
    """Return commands that print a table or the text of a user. The first command writes the run for `report`."""
    directory = f"run.directory={folder}/run"
    return [
        ["train", QUICKSTART, directory, *ONE_STEP], ["plan", QUICKSTART, "--machine", "cpu", "--gpus", "2"],
        ["plan", QUICKSTART, "--machine", "cpu", "--gpus", "2", "--search"],
        ["train", QUICKSTART, "--dry-run", f"run.directory={folder}/é…/other", "run.name=naïve"],
        ["report", f"{folder}/run"], ["settings", "algorithm"], ["completion", "bash"],
    ]  # fmt: skip


def test_run_with_closed_output_succeeds(tmp_path: Path) -> None:
    done = in_shell('"$@" >&-', *train(tmp_path / "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert b"Traceback" not in done.stderr
    # No output of the run was written to a file with the descriptor of a closed stream.
    (record,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(record)["step"] == 1


def test_commands_run_with_closed_output(tmp_path: Path) -> None:
    commands = with_tables(tmp_path)
    done = in_shell('"$@" >&- 2>&- <&-', "-c", SEVERAL, f"{tmp_path}/codes", json.dumps(commands))
    assert done.returncode == 0
    assert json.loads((tmp_path / "codes").read_text()) == [0] * len(commands)


@pytest.mark.parametrize("variables", [ASCII, LATIN | C_LOCALE], ids=["ascii", "latin-1"])
def test_tables_are_printed_in_narrow_encodings(tmp_path: Path, variables: dict[str, str]) -> None:
    commands = with_tables(tmp_path)
    done = in_shell('"$@"', "-c", SEVERAL, f"{tmp_path}/codes", json.dumps(commands), **variables)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    assert json.loads((tmp_path / "codes").read_text()) == [0] * len(commands)
    shown = done.stdout.decode("latin-1")
    assert "critic" in shown and "\\u25" not in shown, "tables must use lines of ASCII"


@pytest.mark.parametrize("command", ["train", "dry-run", "settings"])
def test_closed_pipe_is_not_an_error(tmp_path: Path, command: str) -> None:
    commands = {
        "train": train(tmp_path / "run"),
        "dry-run": train(tmp_path / "run", "--dry-run"),
        "settings": ["-m", "megappo", "settings", "--schema"],
    }
    done = in_shell('"$@" | head -c 1', *commands[command])
    assert (done.returncode, len(done.stdout)) == (0, 1), done.stderr
    assert b"Traceback" not in done.stderr and b"BrokenPipe" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux")
def test_full_disk_is_reported(tmp_path: Path) -> None:
    """The result of a run is in its folder. The result of `settings` is the output."""
    done = in_shell('"$@" >/dev/full', "-m", "megappo", "settings", "run")
    assert done.returncode == 1
    assert done.stderr.decode().startswith("megappo: error: writing failed, No space left on device; free some space")
    assert done.stderr.count(b"\n") == 1
