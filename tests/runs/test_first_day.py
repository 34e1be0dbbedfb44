"""The first day of a new user, who follows only the documents, with custom data, reward and settings outside the
repository."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pytest
import torch
from pyarrow import parquet
from transformers import AutoModelForCausalLM, AutoTokenizer

from megappo.observe.metrics import read_metrics
from tests.support.harness import succeed
from tests.support.places import TINY

pytestmark = [pytest.mark.slow, pytest.mark.waits]

REWARD = """
def mine(response: str, answer: str) -> float:
    return float(response.strip() == answer) + 0.1 * response.strip().isdigit()
"""
SETTINGS = f"""
run: {{name: mine, steps: 4, directory: runs/mine}}
model: {{path: {TINY}, init: random}}
data:
  train: {{source: problems.jsonl}}
  validation: {{source: held_out.parquet}}
  apply_chat_template: false
  max_prompt_tokens: 8
rollout: {{engine: transformers, prompts_per_step: 10, samples_per_prompt: 4, max_response_tokens: 3}}
reward: {{function: 'my_reward.py:mine'}}
actor: {{layout: {{tensor_parallel: 2}}, minibatch_sequences: 20, optimizer: {{learning_rate: 1.0e-3}}}}
critic: {{layout: {{pipeline_parallel: 2}}, minibatch_sequences: 20, optimizer: {{learning_rate: 2.0e-3}}}}
evaluation: {{every_steps: 4}}
checkpoint: {{every_steps: 2, keep_best: reward/mean}}
logging: {{save_experience: {{}}}}
"""
PROGRAM = """
import os, sys
os.chdir({folder!r})
from megappo.cli import main
sys.exit(main())
"""
SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder with a reward function, problems as JSON lines, held-out problems as parquet, and settings."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "my_reward.py").write_text(REWARD)
    (folder / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in SUMS))
    parquet.write_table(pyarrow.Table.from_pylist(SUMS[::3]), folder / "held_out.parquet")
    (folder / "mine.yaml").write_text(SETTINGS)
    (folder / "megappo_here.py").write_text(PROGRAM.format(folder=str(folder)))
    return folder


def command(folder: Path, *arguments: str, processes: int = 0) -> str:
    """Run a command in the folder, check its exit status, and return its output."""
    return succeed(folder / "megappo_here.py", *arguments, processes=processes)


def test_first_day_of_a_new_user(mine: Path) -> None:
    """Check the settings, train, continue with another layout, export and load the best actor, compare runs, and
    inspect a sample."""
    message = "my_reward.py:mine scores the answers 1.1 and empty responses 0"
    assert message in command(mine, "train", "mine.yaml", "--dry-run")
    assert not (mine / "runs").exists()
    assert "the trained actor is in runs/mine/final" in command(mine, "train", "mine.yaml", processes=2)
    other = ("actor.layout={}", "critic.layout={tensor_parallel: 2}")
    output = command(mine, "train", "mine.yaml", "run.steps=6", *other, processes=2)
    assert "continuing after step 4 from runs/mine/checkpoints/step-000004" in output
    lines = read_metrics(mine / "runs/mine/metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(7))
    assert [line["step"] for line in lines if "eval/reward_mean" in line] == [0, 4, 6]

    best = max((2, 4, 6), key=lambda step: lines[step]["reward/mean"])
    assert f"the actor after step {best} is in best" in command(mine, "export", "runs/mine", "best", "--step", "best")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(mine / "best"), AutoTokenizer.from_pretrained(mine / "best")
    question = tokenizer("2+2=", return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        assert model.generate(**question, max_new_tokens=1, do_sample=False).shape == (
            1,
            question.input_ids.shape[1] + 1,
        )

    command(mine, "train", "mine.yaml", "run.directory=runs/other", "run.seed=5", "run.steps=2", processes=2)
    compared = command(mine, "report", "runs/mine", "runs/other")
    assert "reward/mean at step 2, the last of all: " in compared and compared.count("reward/mean over") == 2
    command(mine, "report", "runs/mine", "runs/other", "--html", "both.html")
    assert b"Content-Security-Policy" in (mine / "both.html").read_bytes()
    assert "step 6 of runs/mine: 40 of its 40 samples are saved" in command(mine, "inspect", "runs/mine")
    shown = command(mine, "inspect", "runs/mine", "--step", "6", "--sample", "3")
    assert "right answer: " in shown and "old/engine" in shown
