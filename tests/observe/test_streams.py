"""Output that is closed, has no reader, has no room or cannot encode a text does not end a command."""

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
from megappo.observe.streams import prepare_streams
prepare_streams()
import megappo.cli
codes = [megappo.cli.main(words) for words in json.loads(sys.argv[2])]
open(sys.argv[1], "w").write(json.dumps(codes))
"""


def in_shell(line: str, *words: str, **changes: str) -> subprocess.CompletedProcess[bytes]:
    """A line of bash in which `"$@"` stands for a command of Python."""
    command = ["bash", "-c", f"set -o pipefail; {line}", "bash", sys.executable, *words]
    return subprocess.run(
        command, cwd=ROOT, env=worlds.environment(**changes), capture_output=True, timeout=240, check=False
    )


def train(run: Path, *words: str) -> list[str]:
    return ["-m", "megappo", "train", QUICKSTART, f"run.directory={run}", *ONE_STEP, *words]


def with_tables(folder: Path) -> list[list[str]]:
    """Commands that print a table or the text of a user. The first one leaves what `report` reads."""
    directory = f"run.directory={folder}/run"
    return [
        ["train", QUICKSTART, directory, *ONE_STEP],
        ["plan", QUICKSTART, "--machine", "cpu", "--gpus", "2"],
        ["plan", QUICKSTART, "--machine", "cpu", "--gpus", "2", "--search"],
        ["train", QUICKSTART, "--dry-run", f"run.directory={folder}/é…/other", "run.name=naïve"],
        ["report", f"{folder}/run"],
        ["settings", "algorithm"],
        ["completion", "bash"],
    ]


def test_a_run_with_closed_output_ends_well(tmp_path: Path) -> None:
    done = in_shell('"$@" >&-', *train(tmp_path / "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert b"Traceback" not in done.stderr
    # No output of the run went into a file that got the number of a closed stream.
    (record,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(record)["step"] == 1


def test_each_command_runs_with_closed_output(tmp_path: Path) -> None:
    commands = with_tables(tmp_path)
    done = in_shell('"$@" >&- 2>&- <&-', "-c", SEVERAL, f"{tmp_path}/codes", json.dumps(commands))
    assert done.returncode == 0
    assert json.loads((tmp_path / "codes").read_text()) == [0] * len(commands)


@pytest.mark.parametrize("variables", [ASCII, LATIN | C_LOCALE], ids=["ascii", "latin-1"])
def test_each_table_is_printed_in_a_narrow_encoding(tmp_path: Path, variables: dict[str, str]) -> None:
    commands = with_tables(tmp_path)
    done = in_shell('"$@"', "-c", SEVERAL, f"{tmp_path}/codes", json.dumps(commands), **variables)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    assert json.loads((tmp_path / "codes").read_text()) == [0] * len(commands)
    shown = done.stdout.decode("latin-1")
    assert "critic" in shown and "\\u25" not in shown, "tables have lines of ASCII"


@pytest.mark.parametrize("command", ["train", "dry-run", "settings"])
def test_a_reader_that_ends_early_is_no_error(tmp_path: Path, command: str) -> None:
    words = {
        "train": train(tmp_path / "run"),
        "dry-run": train(tmp_path / "run", "--dry-run"),
        "settings": ["-m", "megappo", "settings", "--schema"],
    }
    done = in_shell('"$@" | head -c 1', *words[command])
    assert (done.returncode, len(done.stdout)) == (0, 1), done.stderr
    assert b"Traceback" not in done.stderr and b"BrokenPipe" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="of Linux")
def test_a_full_disk_loses_no_run_and_no_answer_silently(tmp_path: Path) -> None:
    """The result of a run is in its folder; that of `settings` is its output."""
    done = in_shell('"$@" >/dev/full', "-m", "megappo", "settings", "run")
    assert done.returncode == 1
    assert done.stderr.decode().startswith("megappo: error: writing failed, No space left on device; make room")
    assert done.stderr.count(b"\n") == 1
