"""The kernel benchmark runs from end to end, on shapes that show nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_suite_prints_and_saves_a_table(tmp_path: Path) -> None:
    saved = tmp_path / "kernels.md"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONWARNINGS": "ignore"}
    script = ROOT / "benchmarks" / "kernels.py"
    command = [sys.executable, str(script), "--device", "cpu", "--tiny", "--save", str(saved)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    text = saved.read_text()
    for provider in ("linear_logprob", "ppo_head_loss", "ppo_head_loss into main_grad", "logits_logprob", "gae"):
        rows = [line for line in text.splitlines() if line.startswith(f"| megappo {provider} |")]
        assert rows and not any("Error" in row for row in rows), provider
    assert "verl loop (as published)" in text and "| torch |" in text
    assert "- not run: verl linear_cross_entropy" in text, "peers that cannot run are named"
