"""What a plan says of settings that the configuration leaves open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megappo.cli import main
from megappo.config import load_config
from megappo.plan.choices import choices
from tests.support.configurations import write_short

OPEN = {
    "rollout.engine": "sglang", "rollout.prompts_per_step": "256", "data.max_prompt_tokens": "1024",
    "rollout.max_response_tokens": "1024", "critic": "{}",
    "actor.optimizer.learning_rate": "1e-06", "actor.minibatches": "4", "actor.microbatch_budget_tokens": "8192",
    "actor.optimizer.distributed": "true",
    "critic.optimizer.learning_rate": "5e-06", "critic.minibatches": "4", "critic.microbatch_budget_tokens": "8192",
    "critic.optimizer.distributed": "true",
}  # fmt: skip


@pytest.fixture
def short(tmp_path: Path) -> Path:
    return write_short(tmp_path)


def chosen(path: Path, *words: str, ranks: int = 8, on_cuda: bool = True) -> dict[str, str]:
    return {choice.setting: choice.value for choice in choices(load_config(path, words), ranks, on_cuda=on_cuda)}


def test_all_that_is_open_is_named(short: Path) -> None:
    assert chosen(short) == OPEN
    on_one = {key: value for key, value in OPEN.items() if not key.endswith("distributed")}
    assert chosen(short, ranks=1, on_cuda=False) == on_one | {"rollout.engine": "transformers"}
    raised = chosen(short, "rollout.max_response_tokens=9000", "actor.layout.tensor_parallel=2")
    assert raised["actor.microbatch_budget_tokens"] == raised["critic.microbatch_budget_tokens"] == "10240"
    assert raised["actor.layout.sequence_parallel"] == "true" and "critic.layout.sequence_parallel" not in raised


def test_what_is_chosen_may_be_said(short: Path) -> None:
    """Each value as an override has it gives the same settings, and is no choice any more."""
    long = "rollout.max_response_tokens=9000"
    words = [f"{key}={value}" for key, value in chosen(short, long).items()]
    assert chosen(short, long, *words) == {}
    said, left = load_config(short, [long, *words]), load_config(short, [long])
    for name, role in left.trained.items():
        shares = role.optimizer.model_copy(update={"distributed": True})
        assert said.trained[name] == role.model_copy(update={"minibatches": 4, "optimizer": shares})


def test_the_command_says_why(short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(short), "--machine", "h100", "--gpus", "8", "actor.layout.tensor_parallel=2"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    found = lines[lines.index("chosen for settings that the configuration omits:") + 1 :]
    assert (
        "  actor.layout.sequence_parallel=true: 2 ranks share the activations between tensor parallel regions" in found
    )
    assert "  actor.optimizer.distributed=true: 4 ranks have the same weights and share the optimizer's state" in found
    assert "  critic={}: algorithm.estimator gae needs one" in found
    assert len(found) == len(OPEN) + 1
    assert main([*command, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)["choices"]
    assert [f"  {c['setting']}={c['value']}: {c['why']}" for c in content] == found
