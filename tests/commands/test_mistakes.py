"""Typical mistakes in settings. Each error names the value or the setting, the rule and the remedy."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import fields
from pathlib import Path

import pytest

from megappo.cli import main
from megappo.plan.hardware.machines import MACHINES
from megappo.types import Prompt
from tests.support.places import ROOT

MISTAKES = [
    ("run.steps=ten", "run.steps is 'ten', must be a whole number; give a number without quotes or units"),
    ("run.steps=-5", "the nearest is 1"),
    ("run.steps=0", "run.steps is 0, must be above 0; the nearest is 1"),
    ("run.step=10", "did you mean run.steps?"),
    ("run.seed=abc", "give a number without quotes or units"),
    ("run.name=", "run.name is null, must be text; write a text, or leave the setting out"),
    ("run.max_hours=-1", "must be above 0.0"),
    ("model.path=no/such/model", "model.path 'no/such/model': there is no such folder (from "),
    ("model.path=qwen3-8b", "give a folder with config.json, or a hub name such as Qwen/Q"),
    ("model.dtype=fp8", "model.dtype is 'fp8', must be float32 or bfloat16"),
    ("model.dtype=float16", "which megappo does not support; set bfloat16, or float32 on GPUs without bfloat16"),
    ("model.init=xavier", "must be pretrained or random"),
    ("model.accelerations=flash", "must be auto or torch"),
    ("actor.optimizer.learning_rate=1e-3x", "is '1e-3x', must be a number; give a number without quotes or units"),
    ("actor.optimizer.learning_rate=-0.001", "must be above 0.0"),
    ("actor.optimizer.lr=0.001", "did you mean actor.optimizer.learning_rate?"),
    ("actor.lr=1e-6", "did you mean actor.optimizer.learning_rate?"),
    ("actor.optimizer.warmup_ratio=2", "2% is 0.02"),
    ("actor.optimizer.schedule=cosinus", "the nearest is 'cosine'"),
    ("actor.optimizer.max_grad_norm=-1", "did you mean actor.optimizer.clip_grad_norm?"),
    ("actor.epochs=0", "the nearest is 1"),
    ("actor.epochs=1.5", "the nearest is 2"),
    ("actor.minibatch_sequences=7", "the nearest is 5 or 8, or set actor.minibatches"),
    ("actor.minibatch_sequences=0", "the nearest is 1"),
    ("actor.microbatch_budget_tokens=4", "set at least 11"),
    ("actor.layout.tensor_parallel=3", "the nearest is 2"),
    ("actor.layout.tensor_parallel=16", "the nearest is 2"),
    ("actor.layout.pipeline_parallel=5", "the nearest are 2 x 1 or 1 x 1"),
    ("actor.layout.tp=2", "did you mean actor.layout.tensor_parallel?"),
    ("actor.layout={expert_parallel: 2}", "set it to 1"),
    ("actor.lora=16", "as an override write actor.lora.rank=16 actor.lora.alpha=16"),
    ("actor.lora={rank: 0, alpha: 16}", "the nearest is 1"),
    ("critic=none", "critic is 'none', must be a section of `key: value` lines; write null to disable the section"),
    ("critic.layout.pipeline_parallel=9", "the nearest are 2 x 1 or 1 x 1"),
    ("critic.path=nowhere", "give a folder with config.json, or a hub name such as Qwen/Q"),
    ("algorithm.gamma=1.5", "1.5% is 0.015"),
    ("algorithm.lam=-0.1", "write one of these forms"),
    ("algorithm.clip_low=2", "2% is 0.02"),
    ("algorithm.clip_range=0.2", "set both)"),
    ("algorithm.estimator=gaee", "did you mean 'gae'?"),
    ("algorithm.kl_in_reward=0.05", "as an override write algorithm.kl_in_reward.coef=0.05"),
    ("algorithm.kl_in_reward={kind: k2, coef: 0.1}", "add `reference: {}` or set algorithm.kl_in_reward to null"),
    ("algorithm.kl_in_reward={kind: kl, coef: -1}", "the nearest is 0.0"),
    ("algorithm.kl_coef=0.05", "did you mean algorithm.kl_in_reward.coef?"),
    ("algorithm.entropy_coef=high", "give a number without quotes or units"),
    ("algorithm.dual_clip=0.5", "must be above 1.0"),
    ("algorithm.target_kl=0", "must be above 0.0"),
    ("data.train=prompts.jsonl", "as an override write data.train.source=prompts.jsonl"),
    ("data.train.source=missing.jsonl", "check the path"),
    ("data.train.source=prompts.csv", "use FILE.jsonl, FILE.parquet, datasets:NAME, reasoning_gym:T"),
    ("data.train.prompt_field=question", "did you mean data.train.prompt_key?"),
    ("data.max_prompt_tokens=0", "the nearest is 1"),
    ("data.max_prompt_tokens=100000", "shorten both"),
    ("data.validation=test.jsonl", "as an override write data.validation.source=test.jsonl"),
    ("data.validation_sets={math: {source: a.jsonl, pass_at: [4]}}", "raise samples, or lower pass_at"),
    ("data.validation_sets={math: {source: a.jsonl, samples: 4}}", "set temperature above 0, or samples to 1"),
    ("data.apply_chat_template=yes please", "must be true or false"),
    ("data.chat_template=missing.jinja", "give the path of a file"),
    ("data.overlong_prompts=skip", "must be drop, truncate or error"),
    ("data.shuffle=2", "must be true or false"),
    ("rollout.engine=vllm", "choose one of them, or set rollout.servers to generate with servers"),
    ("rollout.servers.kind=sglang2", "did you mean 'sglang'?"),
    ("rollout.temperature=-1", "must be above 0.0"),
    ("rollout.temperature=0", "must be above 0.0; training needs random samples, such as with 1.0"),
    (
        "rollout.top_p=0.9",
        "top_p 0.9 truncates the distribution, which biases the ratios; set top_p to 1.0, and use temp",
    ),
    ("rollout.top_k=5", "rollout: top_k 5 truncates the distribution, which biases the ratios; set top_k to 0"),
    ("rollout.top_p=1.5", "1.5% is 0.015"),
    ("rollout.max_response_tokens=0", "the nearest is 1"),
    ("rollout.max_response_tokens=5000", "set rollout.max_response_tokens to at most 24"),
    ("rollout.prompts_per_step=0", "the nearest is 1"),
    ("rollout.prompts_per_step=7.5", "the nearest is 8"),
    ("rollout.samples_per_prompt=0", "the nearest is 1"),
    ("rollout.n=8", "did you mean rollout.samples_per_prompt?"),
    ("rollout.ahead=-1", "the nearest is 0"),
    ("rollout.ahead=2", "set it to 0"),
    ("rollout.stop=END", "rollout.stop is 'END', must be a list, such as [\"END\"]"),
    ("rollout.stop_token_ids=[99]", "set ids of at most 15, or remove it"),
    ("rollout.environment=tools", "as an override write rollout.environment.name=tools"),
    ("rollout.environment={name: tool, arguments: {}}", "did you mean 'tools'?"),
    ("rollout.servers={tensor_parallel: 3}", "the nearest is 2"),
    ("rollout.servers.mem_fraction_static=0.8", "did you mean rollout.servers.memory_fraction?"),
    ("reward.function=reward.py", "write reward.py:NAME, with a name that the file defines"),
    ("reward.function=reward.py:score", "create it, or correct the path"),
    ("reward.function=gsm8kk", "did you mean 'gsm8k'?"),
    ("reward.function=null", "give one of them"),
    ("reward.timeout_seconds=0", "must be above 0.0"),
    ("reward.workers=0", "the nearest is 1"),
    ("reward.batch=3", "must be true or false"),
    ("reward.clip=5", "reward.clip is 5, must be a list, such as [1, 2]"),
    ("reward.judge={url: judge, model: m}", "correct url"),
    ("evaluation.every_steps=0", "the nearest is 1"),
    ("evaluation=5", "as an override write evaluation.every_steps=5"),
    ("checkpoint.every_steps=-1", "the nearest is 1"),
    ("checkpoint.keep_last=0", "the nearest is 1"),
    ("checkpoint.keep_best=reward", "the nearest are 'reward/mean', 'reward/std', 'reward/min', '"),
    ("rollout.stop=[3]", "put it in quotes: '3'; in a shell, put double quotes around the whole override"),
    ("logging.console=pretty", "must be auto, live, plain or quiet"),
    ("logging.loggers=[wandb]", "for Weights & Biases set logging.wandb_project"),
    ("runtime.device=gpu", "runtime.device is 'gpu', must be auto, cpu or cuda; the nearest is 'cuda'"),
    ("runtime.device=tpu", "the nearest is 'cpu'"),
    ("reference.path=nowhere", "give a folder with config.json, or a hub name such as Qwen/Q"),
    ("reference=true", "write {} for its defaults"),
    ("trainer.total_epochs=3", "did you mean run.epochs?"),
    ("batch_size=8", "did you mean rollout.prompts_per_step?"),
    ("run.steps", "must have the form section.key=value, such as run.steps=10"),
    ("+run.steps=3", "begins with an operator of Hydra; write run.steps=3"),
    ("++run.steps=3", "begins with an operator of Hydra; write run.steps=3"),
    ("~critic", "begins with an operator of Hydra; write critic=null"),
    ("run.name=\udcc3\udca4", "is not text in the encoding of this locale, utf-8; write UTF-8, and set LC_ALL=C.UTF-8"),
    ("reward.function=megappo.rewards.rules:nope", "has no function 'nope'; it has number_gold, "),
    ("=3", "must have the form section.key=value, such as run.steps=10"),
    ("actor..layout=2", "must have the form section.key=value, such as run.steps=10"),
    ("run.max_steps=10", "did you mean run.steps?"),
    ("actor.optimizer.beta1=2", "2% is 0.02"),
    ("critic.optimizer.learning_rate=1,0e-5", "give a number without quotes or units"),
    ("critic.epochs=two", "give a number without quotes or units"),
    ("critic.minibatch_sequences=30", "the nearest is 25 or 40, or set critic.minibatches"),
    ("reference=false", "write null to disable the section"),
    ("rollout.max_lag=-1", "the nearest is 1"),
    ("rollout.stop_token_ids=2", "rollout.stop_token_ids is 2, must be a list, such as [2]"),
    ("rollout.max_total_tokens=4", "set at least 9, or lower data.max_prompt_tokens"),
    ("rollout.min_response_tokens=9", "set at most 3"),
    ("data.train.limit=0", "the nearest is 1"),
    ("data.train.source=~nobody-here/x.jsonl", "write the whole path, or ./~nobody-here/x.jsonl for a name t"),
    ("data.train.source=$DATA/x.jsonl", "write the whole path, or let the shell expand the variable"),
    ("data.mixture={a: {source: a.jsonl}}", "set exactly one of these settings"),
    ("data.validation_sets={a b: {source: a.jsonl}}", "use letters, digits and _, no digit first, at most 60 char"),
    ("evaluation.before_training=maybe", "must be true or false"),
    ("checkpoint.keep_every_steps=0", "the nearest is 1"),
    ("run.directory=$SCRATCH/run", "write the whole path, or let the shell expand the variable"),
    ("logging.profile_steps=3", "must be a list, such as [3]"),
    ("logging.save_experience=true", "write {} for its defaults"),
    ("reward.max_failure_fraction=2", "2% is 0.02"),
    ("reward.timeout_seconds=30s", "give a number without quotes or units"),
    ("algorithm.whiten_advantages=on", "write true"),
]
"""Overrides of configs/quickstart.yaml, and the end of the first sentence: the remedy, or the valid values."""


@pytest.fixture(autouse=True)
def repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("MEGAPPO_LAUNCH", raising=False)


@pytest.mark.parametrize(("override", "remedy"), MISTAKES)
def test_errors_have_a_remedy(override: str, remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "configs/quickstart.yaml", "--dry-run", override]) == 2
    output = capsys.readouterr()
    errors = output.err.splitlines()
    assert errors and all(line.startswith("megappo: error: ") for line in errors) and "would run" not in output.out
    name = override.partition("=")[0]
    assert name.rpartition(".")[2] in errors[0] or override in errors[0], "the error names the setting"
    assert remedy in errors[0]


def dry_run(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    assert main(["train", "configs/quickstart.yaml", "--dry-run", *overrides]) == 0
    return " ".join(re.sub("[│┃]", " ", capsys.readouterr().out).split())


@pytest.mark.waits
@pytest.mark.parametrize(("epochs", "steps"), [(2, 1), (8, 4), (0.5, 1)])
def test_updates_of_epochs_are_counted(capsys: pytest.CaptureFixture[str], epochs: float, steps: int) -> None:
    """There are 25 prompts. A step has 50 prompts and 4 updates of each role."""
    overrides = ["run.steps=null", f"run.epochs={epochs}", "actor.optimizer.warmup_ratio=0.5"]
    output = dry_run(capsys, *overrides, "actor.optimizer.warmup_updates=0")
    assert f"{epochs:g} epochs of 25 prompts = {steps} steps" in output.replace("epoch of", "epochs of")
    assert output.count(f"= 4 per step, {4 * steps} in all") == 2
    assert f"0.001 linear, warm-up {2 * steps}" in output


@pytest.mark.waits
@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_missing_packages_of_loggers_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["logging.wandb_project=sums", "logging.loggers={no_such_module:Logger: {}}"]
    assert main(["train", "configs/quickstart.yaml", "--dry-run", *overrides]) == 2
    errors = " ".join(capsys.readouterr().err.split())
    assert "logging.wandb_project is 'sums', but wandb is not installed; pip install '.[wandb]'" in errors
    assert "logging.loggers 'no_such_module:Logger'" in errors


@pytest.mark.waits
@pytest.mark.parametrize(
    ("options", "launch"),
    [
        (["--machine", "h100", "--gpus", "2"], "--nproc-per-node 2 -m"),
        (["--machine", "h100", "--gpus", "8"], "--nproc-per-node 8 -m"),
        (
            ["--machine", "h100", "--gpus", "16"],
            "--nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m",
        ),
        (["--machine", "cpu", "--gpus", "16"], "--nproc-per-node 16 -m"),
    ],
)
def test_command_starts_one_process_per_device(
    capsys: pytest.CaptureFixture[str], options: list[str], launch: str
) -> None:
    output = dry_run(capsys, *options, "model.accelerations=torch")
    assert f"would run: torchrun {launch} megappo train configs/quickstart.yaml" in output
    assert ("on each machine; HOST is the first" in output) == ("--nnodes" in launch)


@pytest.mark.waits
@pytest.mark.parametrize(
    ("ranks", "nodes"), [(1, 1), (7, 1), (8, 1), (9, 3), (12, 2), (16, 2), (20, 4), (24, 3), (13, 13), (4096, 512)]
)
def test_each_machine_has_the_same_number_of_ranks(ranks: int, nodes: int) -> None:
    assert MACHINES["h100"].nodes_of(ranks) == (nodes, ranks // nodes) and ranks // nodes <= 8


@pytest.mark.waits
def test_environment_of_a_file_is_created_and_not_played(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "guesser.py").write_text("class Guess:\n    async def run(self, session):\n        raise KeyError\n")
    environment = f"rollout.environment={{name: '{tmp_path}/guesser.py:Guess'}}"
    output = dry_run(capsys, environment, "reward.function=environment")
    assert "Guess of guesser.py; tools: none in workers; no episode was played" in output


@pytest.mark.waits
def test_documented_attributes_of_a_prompt_are_complete() -> None:
    for document in ("environments/README.md", "guides/agents.md"):
        text = (ROOT / "megappo" / document).read_text()
        start = text.index("`text`")
        names = re.findall(r"`(\w+)`", text[start : text.index("`source`", start) + len("`source`")])
        assert sorted(set(names)) == sorted(field.name for field in fields(Prompt)), document
