"""Runs that are continued with changed settings."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.runs.test_resume import whole_tensors
from tests.support.attempts import attempts, killed_at, timeless, train

pytestmark = [pytest.mark.slow, pytest.mark.waits]

SETTINGS = (
    "run.steps=4", "checkpoint={every_steps: 1, keep_last: 9}", "actor.layout={}", "critic.layout={}",
    "actor.optimizer.schedule=linear", "critic.optimizer.schedule=cosine", "rollout.prompts_per_step=4",
    "actor.minibatch_sequences=16", "critic.minibatch_sequences=16", "evaluation=null",
    "reference.refresh_every_steps=1", "algorithm.kl_in_reward={kind: kl, coef: 0.01}",
)  # fmt: skip
OTHER_UPDATES = ("actor.epochs=2", "critic.minibatch_sequences=32")


def rates(run: Path) -> list[tuple[float, float]]:
    """Return the learning rates of actor and critic for each step."""
    lines = timeless(run / "metrics.jsonl")
    return [(line["actor/learning_rate"], line["critic/learning_rate"]) for line in lines if line["step"]]


def test_resume_with_changed_settings(tmp_path: Path) -> None:
    """After the change of epochs and minibatches, the learning rates equal those of a run with these settings. A
    reference that is no longer refreshed keeps its weights, also after a second resume."""
    fewer, fixed, all_of_them = tmp_path / "fewer", tmp_path / "fixed", tmp_path / "all"
    killed = killed_at(fewer, 3, "update_actor", 0, *SETTINGS, *OTHER_UPDATES, processes=1)
    attempts(tmp_path, killed, train(all_of_them, *SETTINGS, processes=1))
    shutil.copytree(fewer, fixed)
    still = (*SETTINGS, *OTHER_UPDATES, "reference.refresh_every_steps=null", "run.force_resume=true")
    output = attempts(
        tmp_path,
        train(fewer, *SETTINGS, processes=1),
        killed_at(fixed, 4, "update_actor", 0, *still, processes=1),
        train(fixed, *still, processes=1),
    )
    assert "changed since then: actor.epochs: 2 -> 1" in output
    after = torch.tensor(rates(fewer)[2:])
    assert torch.allclose(after, torch.tensor(rates(all_of_them)[2:]), rtol=1e-6)
    assert min(min(of_step) for of_step in rates(fewer)[:3]) > 0
    of_step = [whole_tensors(fixed / "checkpoints" / f"step-{step:06d}") for step in (1, 2, 3, 4)]
    references = [{name: t for name, t in state.items() if name.startswith("reference.")} for state in of_step]
    assert all(state.keys() == references[0].keys() != set() for state in references)
    for name, tensor in references[1].items():
        assert torch.equal(tensor, references[2][name]) and torch.equal(tensor, references[3][name]), name
    assert any(not torch.equal(tensor, references[0][name]) for name, tensor in references[1].items())
