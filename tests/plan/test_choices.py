"""Settings that the plan chooses because the configuration omits them."""

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


def chosen(path: Path, *overrides: str, ranks: int = 8, on_cuda: bool = True) -> dict[str, str]:
    return {choice.setting: choice.value for choice in choices(load_config(path, overrides), ranks, on_cuda=on_cuda)}


def test_all_open_settings_are_listed(short: Path) -> None:
    assert chosen(short) == OPEN
    on_one = {key: value for key, value in OPEN.items() if not key.endswith("distributed")}
    assert chosen(short, ranks=1, on_cuda=False) == on_one | {"rollout.engine": "transformers"}
    raised = chosen(short, "rollout.max_response_tokens=9000", "actor.layout.tensor_parallel=2")
    assert raised["actor.microbatch_budget_tokens"] == raised["critic.microbatch_budget_tokens"] == "10240"
    assert raised["actor.layout.sequence_parallel"] == "true" and "critic.layout.sequence_parallel" not in raised


def test_chosen_values_can_be_set_explicitly(short: Path) -> None:
    """Each chosen value gives the same settings as an override, and is then no longer listed."""
    long = "rollout.max_response_tokens=9000"
    overrides = [f"{key}={value}" for key, value in chosen(short, long).items()]
    assert chosen(short, long, *overrides) == {}
    explicit, default = load_config(short, [long, *overrides]), load_config(short, [long])
    for name, role in default.trained.items():
        shares = role.optimizer.model_copy(update={"distributed": True})
        assert explicit.trained[name] == role.model_copy(update={"minibatches": 4, "optimizer": shares})


def test_plan_command_explains_choices(short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(short), "--machine", "h100", "--gpus", "8", "actor.layout.tensor_parallel=2"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    choices_text = lines[lines.index("chosen for settings that the configuration omits:") + 1 :]
    assert (
        "  actor.layout.sequence_parallel=true: 2 ranks share the activations between tensor parallel regions"
        in choices_text
    )
    assert (
        "  actor.optimizer.distributed=true: 4 ranks have the same weights and share the optimizer's state"
        in choices_text
    )
    assert "  critic={}: algorithm.estimator gae needs one" in choices_text
    assert len(choices_text) == len(OPEN) + 1
    assert main([*command, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)["choices"]
    assert [f"  {c['setting']}={c['value']}: {c['why']}" for c in content] == choices_text
