"""Saved experience of a run, and runs that train on saved experience without an engine, including value pretraining."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megappo.observe.metrics import read_metrics
from megappo.observe.saved_samples import read_lines, saved_steps
from megappo.ppo.records.experience_files import SavedSamples, read_samples
from tests.support.attempts import attempts, killed_at, timeless, train
from tests.support.config import TWO_TURNS
from tests.support.harness import succeed

pytestmark = [pytest.mark.slow, pytest.mark.waits]

SHORT = ("run.steps=3", "checkpoint.every_steps=1", "evaluation=null", "data.validation=null")
KL = ("reference={}", "algorithm.kl_in_reward={kind: kl, coef: 0.1, controller: adaptive, target: 0.5, horizon: 1000}",
      "reward.normalize=mean_std", "reward.scale=2")  # fmt: skip
TURNS = (*TWO_TURNS, "algorithm.discount_at=turn")
ONE = ("actor.layout={}", "critic.layout={}")


def saved(run: Path) -> list[dict[str, torch.Tensor]]:
    """Return the numbers of each saved step. The samples of all ranks are in order."""
    steps = saved_steps(run / "experience").values()
    return [by_name([read_samples(path) for path in step.files]) for step in steps]


def assert_scores_are_those_of_the_samples_file(run: Path) -> None:
    """Check the scores, including the rewards of turns, against `samples.jsonl`."""
    for step, saved_step in saved_steps(run / "experience").items():
        written = [line for line in map(json.loads, (run / "samples.jsonl").open()) if line["step"] == step]
        of_file = read_lines(saved_step.file(0))
        assert written and [line["score"] for line in written] == [x.score for x in of_file[: len(written)]]
        assert [line["raw_response"] for line in written] == [x.raw_response for x in of_file[: len(written)]]


def by_name(of_ranks: list[SavedSamples]) -> dict[str, torch.Tensor]:
    """Return selected numbers of a step. Numbers of tokens are concatenated."""
    parts_of: dict[str, list[torch.Tensor]] = {}
    for experience in (samples.experience for samples in of_ranks):
        scored, rollouts = experience.scored, experience.scored.rollouts
        assert scored.values_BR is not None and experience.rewards_BR is not None
        tokens = {
            "old": scored.old_logprob_BR, "values": scored.values_BR, "rewards": experience.rewards_BR,
            "advantages": experience.advantages_BR, "returns": experience.returns_BR,
        }  # fmt: skip
        if scored.ref_logprob_BR is not None and experience.kl_BR is not None:
            tokens |= {"ref": scored.ref_logprob_BR, "kl": experience.kl_BR}
        parts_of.setdefault("scores", []).append(scored.scores_B)
        parts_of.setdefault("ids", []).append(rollouts.sample_ids_B)
        for name, numbers_BR in tokens.items():
            parts_of.setdefault(name, []).append(numbers_BR[rollouts.response_mask_BR])
    return {name: torch.cat(parts) for name, parts in parts_of.items()}


@pytest.mark.parametrize("task", [pytest.param(KL, marks=pytest.mark.exhaustive), TURNS], ids=["answers", "turns"])
def test_loaded_steps_train_to_the_same_weights(tmp_path: Path, task: tuple[str, ...]) -> None:
    """The actor has TP2 and the critic PP2. A killed and resumed run saves the same experience. The saved experience
    trains again to the same bits, also after a kill. On data replicas, context ranks and one rank the numbers are
    saved again and agree within 1e-4."""
    whole, killed, again = (tmp_path / name for name in ("whole", "killed", "again"))
    settings = (*SHORT, *task, "logging.save_experience={}")
    load = (*SHORT, *task, f"rollout.load_from={whole / 'experience'}")
    other = (*load, "logging.save_experience={}")
    context = ("actor.layout={context_parallel: 2}", "critic.layout={tensor_parallel: 2}")
    attempts(
        tmp_path, train(whole, *settings), killed_at(killed, 3, "update_actor", 1, *settings, after_checkpoint=2),
        train(killed, *settings), killed_at(again, 2, "update_critic", 0, *load, after_checkpoint=1),
        train(again, *load), train(tmp_path / "replicas", *other, *ONE), train(tmp_path / "context", *other, *context),
        train(tmp_path / "one", *other, *ONE, processes=1), timeout=280,
    )  # fmt: skip
    of_whole = saved(whole)
    assert len(of_whole) == 3
    for step, of_killed in zip(of_whole, saved(killed), strict=True):
        assert all(torch.equal(step[name], of_killed[name]) for name in step)
        assert step["ids"].tolist() == list(range(80))
    assert_scores_are_those_of_the_samples_file(whole)
    assert timeless(whole / "metrics.jsonl") == timeless(again / "metrics.jsonl")
    final = "final/model.safetensors"
    assert (whole / final).read_bytes() == (again / final).read_bytes()
    assert (whole / "samples.jsonl").read_bytes() == (again / "samples.jsonl").read_bytes()
    weights = load_file(whole / final)
    for name in ("replicas", "context", "one"):
        for of_run, step in zip(saved(tmp_path / name), of_whole, strict=True):
            assert all(torch.allclose(of_run[key], step[key], rtol=0, atol=1e-4) for key in step)
        theirs = load_file(tmp_path / name / final)
        assert max(float((theirs[key] - weights[key]).abs().max()) for key in weights) < 1e-4


def pretrain(run: Path, experience: Path, *overrides: str) -> tuple[str, ...]:
    """Return the arguments of value pretraining."""
    return ("train", "configs/quickstart.yaml", "--critic-only", f"run.directory={run}", *overrides,
            "logging.tensorboard=false", f"rollout.load_from={experience}")  # fmt: skip


def run_with(*arguments: str) -> str:
    """Run a command on two ranks and check its exit status."""
    return succeed("megappo", *arguments, processes=2, timeout_seconds=590)


def test_pretraining_of_a_critic(tmp_path: Path) -> None:
    """The critic trains on the first samples of two steps, without the held-out samples. A resumed run equals an
    uninterrupted run, the actor is not trained, and another run starts with the critic."""
    run, some = tmp_path / "run", "logging.save_experience={steps: [2, 4], samples: 60}"
    spread = "reward.truncated_penalty=0.5"  # otherwise all returns can be equal, and their variance is zero
    save = (some, f"rollout.save_to={tmp_path / 'saved'}", spread)
    attempts(tmp_path, train(run, "run.steps=4", "evaluation=null", *save))
    assert [(s.step, s.saved) for s in saved_steps(tmp_path / "saved").values()] == [(2, 60), (4, 60)]
    alone = ("rollout.prompts_per_step=8", "critic.minibatch_sequences=64", "actor.minibatch_sequences=64",
             "checkpoint.every_steps=2", "run.steps=5", "actor.optimizer.schedule=constant")  # fmt: skip
    run_with(*pretrain(tmp_path / "critic", tmp_path / "saved", *alone))
    run_with(*pretrain(tmp_path / "halves", tmp_path / "saved", *alone, "run.steps=3"))
    run_with(*pretrain(tmp_path / "halves", tmp_path / "saved", *alone))
    lines = timeless(tmp_path / "critic" / "metrics.jsonl")
    assert lines == timeless(tmp_path / "halves" / "metrics.jsonl")
    assert all("critic/held_out_explained_variance" in line and line["critic/updates"] == 2 for line in lines)
    assert not any(name.startswith(("actor/", "mismatch/")) for line in lines for name in line)
    assert not (tmp_path / "critic" / "final").exists()
    assert "the critic begins with that of" in run_with(
        "train", "configs/quickstart.yaml", f"run.directory={tmp_path / 'next'}", "run.steps=1", "evaluation=null",
        f"critic.start_from={tmp_path / 'critic'}", *alone[:3],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("before", "steps", "samples"),
    [pytest.param(22, 8, 2000, marks=pytest.mark.exhaustive), pytest.param(40, 20, 2000, marks=pytest.mark.learning)],
)
def test_pretrained_critic_explains_unseen_samples(tmp_path: Path, before: int, steps: int, samples: int) -> None:
    """The task is the quickstart. The policy answers some sums. The critic trains on samples of five steps; a tenth
    of them are held out. The explained variance is measured on the held-out samples, and on new samples of the policy
    before their first update."""
    run, critic = tmp_path / "run", tmp_path / "critic"
    numbers = list(range(before - 4, before + 1))
    quick = ("logging.tensorboard=false", "evaluation=null", "actor.optimizer.schedule=constant")
    arguments = ("train", "configs/quickstart.yaml", f"run.directory={run}", f"run.steps={before}", *quick)
    run_with(*arguments, f"logging.save_experience={{steps: {numbers}}}")
    assert sum(step.saved for step in saved_steps(run / "experience").values()) == samples
    run_with(*pretrain(critic, run / "experience", f"run.steps={steps}"))
    explained = [line["critic/held_out_explained_variance"] for line in read_metrics(critic / "metrics.jsonl")]
    assert explained[0] < 0.2 and explained[-1] > 0.5
    arguments = ("train", "configs/quickstart.yaml", f"run.directory={tmp_path / 'next'}", "run.steps=1", *quick)
    run_with(*arguments, f"actor.start_from={run}", f"critic.start_from={critic}")
    assert read_metrics(tmp_path / "next" / "metrics.jsonl")[-1]["critic/explained_variance"] > 0.4
