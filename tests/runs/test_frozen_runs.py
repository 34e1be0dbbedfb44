"""Complete runs with a partly frozen critic. Frozen weights do not change, and the remaining weights learn the task."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from megappo.api import export
from megappo.observe.metrics import read_metrics
from tests.support.attempts import attempts, train
from tests.support.checkpoint_bytes import written_and_planned_bytes
from tests.support.harness import start
from tests.support.models import write_model

pytestmark = [pytest.mark.slow, pytest.mark.waits]

FREEZE = "critic.freeze=[attention, embeddings]"


def test_frozen_weights_are_bitwise_equal_after_ten_steps(tmp_path: Path) -> None:
    """The critic has two updates per update of the actor, in bfloat16, with weight decay and a clipped norm. Two data
    replicas share a distributed optimizer. Checkpoints contain moments only of the trained weights."""
    model = write_model(tmp_path / "model", "llama", 3, vocab_size=16)
    settings = (
        "run.steps=10", "checkpoint.every_steps=10", f"model.path={model}", "model.init=pretrained",
        "model.dtype=bfloat16", "model.tokenizer=configs/models/tiny_arithmetic", "actor.layout={}",
        "critic.layout={}", "critic.epochs=2", "evaluation=null", "algorithm.mismatch_stop_nats=5", FREEZE,
        "critic.optimizer={learning_rate: 0.01, weight_decay: 0.1, distributed: true}",
    )  # fmt: skip
    run = tmp_path / "run"
    attempts(tmp_path, train(run, *settings))
    lines = read_metrics(run / "metrics.jsonl")
    assert [line["critic/updates"] for line in lines] == [4.0] * 10 and lines[-1]["actor/updates"] == 2
    export(run, tmp_path / "critic", role="critic")
    initial, trained = (load_file(next(folder.glob("*.safetensors"))) for folder in (model, tmp_path / "critic"))
    frozen = {name for name in initial if "self_attn" in name or "embed_tokens" in name}
    assert len(frozen) == 4 * 4 + 1 and frozen < trained.keys()
    for name in initial.keys() & trained.keys():
        assert torch.equal(initial[name].bfloat16(), trained[name].bfloat16()) == (name in frozen), name
    keys = dcp.FileSystemReader(run / "checkpoints" / "step-000010").read_metadata().state_dict_metadata
    moments = {key for key in keys if key.startswith("critic.") and "exp_avg" in key}
    assert moments and not [key for key in moments if "attn" in key or "q_proj" in key or "embed" in key]
    written, planned = written_and_planned_bytes(run, 10, ranks=2)
    assert written == planned


@pytest.mark.learning
def test_learning_with_a_partly_frozen_critic(tmp_path: Path) -> None:
    """The quickstart learns its sums within 200 steps, although the attention layers of its critic keep their random
    weights."""
    arguments = ("train", "configs/quickstart.yaml", f"run.directory={tmp_path / 'run'}", "critic.freeze=attention",
             "run.steps=200", "evaluation=null")  # fmt: skip
    done = start("megappo", *arguments, processes=2, timeout_seconds=590)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert sum(line["reward/mean"] for line in lines[-5:]) / 5 > 0.9
