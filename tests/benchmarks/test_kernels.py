"""The kernel benchmark runs with very small shapes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import ROOT


def measured(out: Path, *suites: str) -> str:
    """Return the tables of the given suites, or of all suites."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "benchmarks.kernels", "--device", "cpu", "--tiny", "--save", str(out)]
    command += ["--suites", *suites] if suites else []
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return out.read_text()


@pytest.mark.slow
@pytest.mark.waits
def test_two_suites_print_and_save_their_tables(tmp_path: Path) -> None:
    text = measured(tmp_path / "kernels.md", "gae", "tokens")
    assert "| megappo gae |" in text and "| megappo linear_logprob |" not in text
    assert "verl loop (as published)" in text and "Error" not in text


@pytest.mark.waits
@pytest.mark.exhaustive
def test_all_suites_print_and_save_tables(tmp_path: Path) -> None:
    text = measured(tmp_path / "kernels.md")
    for provider in ("linear_logprob", "ppo_head_loss", "ppo_head_loss into main_grad", "logits_logprob", "gae"):
        rows = [line for line in text.splitlines() if line.startswith(f"| megappo {provider} |")]
        assert rows and not any("Error" in row for row in rows), provider
    assert "verl loop (as published)" in text and "| torch |" in text
    assert "- not run: verl linear_cross_entropy" in text, "the page must list peers that cannot run"
