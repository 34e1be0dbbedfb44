"""Complete runs with a frozen reward model, which both ranks share in one process."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaForSequenceClassification

from megappo.observe.metrics import read_metrics
from megappo.rewards.model import RewardModel
from megappo.runtime.waiting import wait_until
from tests.support.harness import start, succeed
from tests.support.places import TINY
from tests.support.rewards import with_code

pytestmark = [pytest.mark.slow, pytest.mark.waits]
STEPS = 20
"""Twenty steps of a quarter of a second are longer than a kill of a process on busy cores."""


SMALL = (
    "evaluation=null", "checkpoint=null", "data.validation=null", "rollout.prompts_per_step=8",
    "rollout.samples_per_prompt=4", "actor.minibatch_sequences=32", "critic.minibatch_sequences=32",
    "logging.sample_texts=16",
)  # fmt: skip


def reward_model(folder: Path) -> Path:
    """Write a reward model with random weights for the texts of the quickstart."""
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(TINY, num_labels=1, initializer_range=0.5)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


def processes_of(model: Path) -> list[int]:
    """Return the processes that serve this model. The file in their command line identifies them."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command_line = (entry / "cmdline").read_text().split("\0")
                if (
                    "megappo.rewards.model_server" in command_line[1:3]
                    and str(model) in Path(command_line[4]).read_text()
                ):
                    pids.append(int(entry.name))
            except (OSError, IndexError):
                continue
    return pids


def test_two_ranks_train_with_one_reward_model(tmp_path: Path) -> None:
    """The process of the model is killed and restarted. Each score equals the score of a copy, and no process
    remains."""
    folder, run = reward_model(tmp_path / "model"), tmp_path / "run"
    reward = {"function": "model", "model_path": str(folder), "model_server": {"threads": 1}}
    arguments = (
        "train", "configs/quickstart.yaml", f"run.directory={run}", f"run.steps={STEPS}", *SMALL,
        f"reward={json.dumps(reward)}",
    )  # fmt: skip
    servers = list[list[int]]()

    def kill() -> None:
        """Kill the process after its first scores. The search starts earlier, because the run trains meanwhile."""
        samples = run / "samples.jsonl"
        wait_until(lambda: bool(processes_of(folder)), 200.0, every_seconds=0.1)
        servers.append(first := processes_of(folder))
        if wait_until(lambda: samples.exists() and samples.stat().st_size > 0, 200.0, every_seconds=0.01):
            os.kill(first[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    done = start("megappo", *arguments, processes=2, timeout_seconds=400)
    killer.join()
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    assert len(servers[0]) == 1, "both ranks share one process"
    # Ranks may receive scores before the process that watches the reward model has detected its readiness.
    ends = re.findall(r"reward model \(http://127.0.0.1:\d+\) (died|ended during its start); ", output)
    assert len(ends) == 1 and "; it is started again" in output, output[-4000:]
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    model = RewardModel(str(folder), dtype=torch.float32, device=torch.device("cpu"))
    expected = model.score([s["prompt"] for s in samples], [s["response"] for s in samples])
    assert len(samples) == STEPS * 16 and expected.std() > 0.1
    torch.testing.assert_close(torch.tensor([s["score"] for s in samples]), expected, atol=1e-5, rtol=1e-5)
    assert [line["reward/failures"] for line in read_metrics(run / "metrics.jsonl")] == [0.0] * STEPS
    assert not processes_of(folder)


@pytest.mark.parametrize("trusted", [False, True])
def test_each_rank_trains_with_a_separate_copy(tmp_path: Path, trusted: bool) -> None:
    """One model is a class of transformers, the other needs code of its folder."""
    folder, run = reward_model(tmp_path / "model"), tmp_path / "run"
    model = RewardModel(str(folder), dtype=torch.float32, device=torch.device("cpu"))
    if trusted:
        with_code(folder, tokenizer=False)
    arguments = (
        "train", "configs/quickstart.yaml", f"run.directory={run}", "run.steps=2", *SMALL,
        f"reward={json.dumps({'function': 'model', 'model_path': str(folder)})}",
        f"model.trust_remote_code={str(trusted).lower()}",
    )  # fmt: skip
    succeed("megappo", *arguments, processes=2, timeout_seconds=400)
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    expected = model.score([s["prompt"] for s in samples], [s["response"] for s in samples])
    assert len(samples) == 2 * 16 and expected.std() > 0.1
    torch.testing.assert_close(torch.tensor([s["score"] for s in samples]), expected, atol=1e-5, rtol=1e-5)
    assert [line["reward/failures"] for line in read_metrics(run / "metrics.jsonl")] == [0.0] * 2


def test_reward_of_nan_is_the_error_of_the_run(tmp_path: Path) -> None:
    """The error names the reward, although the loss of the critic would not be finite either."""
    folder = reward_model(tmp_path / "model")
    broken = LlamaForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        broken.score.weight.fill_(float("nan"))
    broken.save_pretrained(folder)
    reward = {"function": "model", "model_path": str(folder)}
    arguments = (f"run.directory={tmp_path / 'run'}", "run.steps=2", "evaluation=null", f"reward={json.dumps(reward)}")
    done = start("megappo", "train", "configs/quickstart.yaml", *arguments, processes=2, timeout_seconds=400)
    output = done.stdout + done.stderr
    assert done.returncode == 1 and "learning_rate, or set" not in output
    assert "400 of 400 rewards failed" in output and "the first: the reward model gave nan, must be finite" in output
