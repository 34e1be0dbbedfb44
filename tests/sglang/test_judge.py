"""A training step with the reward of a judge on a real SGLang server of the run."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megappo.observe.metrics import read_metrics
from megappo.rewards.judge import JudgeText, Reading
from tests.support import worlds
from tests.support.harness import start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs the full environment"),
]
READING = Reading(r"(\d)", (0.0, 9.0), {}, -1.0)
TOKENS = 6


def test_step_with_the_reward_of_a_judge(tmp_path: Path) -> None:
    """Both ranks use the server of the first rank. The scores equal the scores of transformers with the same
    weights."""
    model = worlds.pretrained(tmp_path / "judge")
    judge = {"server": {"threads": 1, "max_total_tokens": 4096}, "model": str(model), "chat": False}
    judge |= {"prompt": "{question}{answer}=", "pattern": READING.pattern, "scale": [0, 9], "unreadable": -1.0}
    command = (
        "train", "configs/quickstart.yaml", f"run.directory={tmp_path / 'run'}", "run.steps=1", "evaluation=null",
        "data.validation=null", "rollout.prompts_per_step=8", "rollout.samples_per_prompt=4", "checkpoint=null",
        "actor.minibatch_sequences=32", "critic.minibatch_sequences=32", "logging.sample_texts=16",
        f"reward={json.dumps({'judge': judge | {'max_tokens': TOKENS}})}",
    )  # fmt: skip
    done = start("megappo", *command, processes=2, timeout_seconds=400)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    scores = [sample["score"] for sample in samples]
    assert len(scores) == 16 and len(set(scores)) > 2
    assert scores == pytest.approx([expected(model, s["prompt"] + s["response"] + "=") for s in samples], abs=1e-6)
    (metrics,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert metrics["reward/failures"] == 0.0 and metrics["reward/judge/seconds"] > 0
    unreadable, local = 32 * metrics["reward/judge/unreadable"], sum(score == -1.0 for score in scores)
    assert local <= round(unreadable) <= local + 16  # samples of the other rank are not recorded
    assert (tmp_path / "run" / "engines" / "judge.log").exists()


def expected(folder: Path, prompt: str) -> float:
    """Return the score of the greedy response of the model, as computed by transformers."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([tokenizer(prompt).input_ids])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
    text = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    is_finished = output[0, -1] == model.generation_config.eos_token_id
    return READING.score(JudgeText(text, "" if is_finished else "cut"))
