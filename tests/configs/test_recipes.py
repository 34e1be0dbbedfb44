"""Published recipes: plans at full size, and small runs with the same settings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch

from megappo.cli import main
from megappo.config import load_config
from megappo.observe.metrics import read_metrics
from megappo.ppo.assembly.methods import lambdas
from tests.support.configurations import head_command, head_commands
from tests.support.harness import succeed
from tests.support.places import ROOT, TINY

SUMS, TOOL = TWO_CORES = [ROOT / "configs" / "recipes" / f"sao_{task}two_cores.yaml" for task in ("", "tool_")]
RECIPES = sorted({*(ROOT / "configs" / "recipes").glob("*.yaml")} - {*TWO_CORES})
SAO = [path for path in RECIPES if path.stem.startswith("sao_")]
ORZ_PROMPT = """\
{{bos_token}}A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The \
Assistant first thinks about the reasoning process in the mind and then provides the User with the answer. The \
reasoning process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> tags, \
respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>. User: {{prompt}}
Assistant: <think>"""
ORZ_INSTRUCTION = """\
You must put your answer inside <answer> </answer> tags, i.e., <answer> answer here </answer>. And your final answer \
will be extracted automatically by the \\boxed{} tag.
This is the problem:
{{prompt}}
"""


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipe_fits_the_machine_in_the_comment(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The output also recommends `--signal` with the lead time of the stop, which must be in the command of the
    recipe."""
    assert main(head_command(path, "megappo")[1:]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^fits: rank", output, re.MULTILINE)
    started = head_command(path, "sbatch", "launch/torchrun.sh")
    assert f"configs/recipes/{path.name}" in started
    lead = re.search(r"--signal=(USR1@\d+)", output)
    assert lead is not None
    if started[0] == "sbatch":
        assert f"--signal={lead[1]}" in started
    assert len([command for command in head_commands(path) if command[:2] == ["megappo", "data"]]) >= 1


def test_scores_reach_the_first_token_of_long_responses() -> None:
    """Weight of a score at the first of 45,000 tokens: exp(-1 / alpha), with the published alpha."""
    mask = torch.ones(1, 45_000, dtype=torch.bool)
    for stem, alpha, share in (
        ("sao_glm4.5_air", 1.5, 0.513),
        ("sao_qwen3_30b_a3b", 1.5, 0.513),
        ("vapo_qwen2.5_32b", 0.05, 2.06e-9),
    ):
        algorithm = load_config(ROOT / "configs" / "recipes" / f"{stem}.yaml").algorithm
        assert algorithm.lam.actor.length_adaptive == alpha
        lam = float(lambdas(algorithm, mask)["lam"])
        assert lam ** (45_000 - 1) == pytest.approx(share, rel=0.01), stem


def test_prompts_of_open_reasoner_zero() -> None:
    """The result equals the two templates of the publication, one inside the other."""
    template = load_config(ROOT / "configs" / "recipes" / "orz_qwen2.5_32b.yaml").data.chat_template
    assert template is not None
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True
    )  # the options of transformers for chat templates
    for problem, bos in (("What is 1+1?", ""), ("Two\nlines {of} it ", "<s>")):
        instruction = jinja2.Template(ORZ_INSTRUCTION).render(prompt=problem)
        expected = jinja2.Template(ORZ_PROMPT).render(prompt=instruction, bos_token=bos)
        messages = [{"role": "user", "content": problem}]
        result = environment.from_string(template).render(messages=messages, bos_token=bos, add_generation_prompt=True)
        assert result == expected


def problems(folder: Path) -> dict[str, str]:
    """Write files of sums with the names of data sets. Return the paths by name."""
    named = {"gsm8k": "openai/gsm8k", "math": "DigitalLearningGmbH/MATH-lighteval"}
    for name, source in named.items():
        rows: list[dict[str, Any]] = [
            {"prompt": f"{a}+{b}=", "answer": str(a + b), "data_source": source} for a in range(4) for b in range(4)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: str(folder / f"{name}.jsonl") for name in named}


def miniature(path: Path, directory: Path) -> list[str]:
    """Return settings for two steps of 6 prompts with a small model. The task and the algorithm do not change."""
    files, config = problems(directory), load_config(path)
    overrides = [
        f"run.directory={directory / 'run'}", "run.steps=2", f"model.path={TINY}", "model.init=random",
        "model.dtype=float32", "data.apply_chat_template=false", "data.chat_template=null", "data.max_prompt_tokens=8",
        "rollout.engine=transformers", "rollout.prompts_per_step=6",
        "rollout.max_response_tokens=3", "rollout.max_total_tokens=null", "reward.workers=1", "evaluation=null",
        "checkpoint=null", "logging.wandb_project=null", "logging.tensorboard=false",
    ]  # fmt: skip
    for role, settings in config.trained.items():
        overrides += [
            f"{role}.layout={{}}",
            f"{role}.microbatch_budget_tokens=64",
            f"{role}.optimizer.warmup_updates=0",
        ]
        if settings.minibatch_sequences is not None:  # the same number of updates per step as the recipe, at most 3
            count = len(settings.minibatch_sizes(config.rollout.batch_sequences))
            overrides += [f"{role}.minibatch_sequences=null", f"{role}.minibatches={min(count, 3)}"]
    overrides += ["rollout.ahead=0"] if config.rollout.ahead else []  # the embedded engine has no separate processes
    overrides += ["rollout.samples_per_prompt=4"] if config.rollout.samples_per_prompt > 1 else []
    if config.data.mixture is not None:
        for name, file in files.items():
            overrides += [f"data.mixture.{name}.source={file}"]
        overrides += ["data.validation_sets=null"]
    else:
        overrides += [f"data.train.source={files['math']}", "data.validation=null", "data.validation_sets=null"]
    warmup = config.critic.warmup_steps if config.critic is not None else 0
    overrides += ["critic.warmup_steps=1"] if warmup else []
    return overrides


def test_small_sao_recipes_are_equal(tmp_path: Path) -> None:
    """One of these recipes is run as a sample."""
    configs = [load_config(path, [*miniature(path, tmp_path), "run.name=sao"]).model_dump() for path in SAO]
    assert [config["run"].pop("files") for config in configs] == [(str(path),) for path in SAO]
    first, *others = configs
    assert others and all(other == first for other in others)


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.parametrize("path", [path for path in RECIPES if path not in SAO[1:]], ids=lambda p: p.stem)
def test_recipe_runs_at_small_size(path: Path, tmp_path: Path) -> None:
    overrides, config = miniature(path, tmp_path), load_config(path)
    warmup = config.critic.warmup_steps if config.critic is not None else 0
    succeed("megappo", "train", path, *overrides, processes=2)
    first, second = read_metrics(tmp_path / "run" / "metrics.jsonl")[-2:]
    assert ("actor/updates" in first) == (not warmup)
    match path.stem:
        case "orz_qwen2.5_32b":
            assert (second["actor/updates"], second["critic/updates"]) == (1, 12)
            assert "reward/given" in second and "ref_kl" not in second
        case "vapo_qwen2.5_32b":
            assert second["actor/nll_loss"] >= 0 and (second["actor/updates"], second["critic/updates"]) == (3, 3)
            assert second["reward/mean"] == pytest.approx(2 * second["reward/given"] - 1, abs=1e-6)
        case "verl_qwen2_7b_megatron":
            assert {"reward/gsm8k", "reward/math"} <= second.keys() and second["critic/updates"] == 3
        case "sao_glm4.5_air":
            assert (second["actor/updates"], second["critic/updates"]) == (1, 2)
            assert {"actor/masked_below", "actor/masked_above"} <= second.keys()
        case other:
            raise AssertionError(f"{other} is not tested")


@pytest.mark.parametrize("path", TWO_CORES, ids=lambda p: p.stem)
def test_two_cores_have_the_settings_of_the_recipe(path: Path) -> None:
    """The algorithm and the models match SAO. The critic has twice as many epochs as the actor."""
    small = load_config(path)
    for whole in map(load_config, SAO):
        assert whole.algorithm.model_copy(update={"entropy_coef": 0.1, "lam": small.algorithm.lam}) == small.algorithm
        assert (whole.algorithm.lam.critic, small.algorithm.lam.critic) == (1.0, 1.0)
        assert whole.critic is not None and small.critic is not None
        assert whole.rollout.samples_per_prompt == small.rollout.samples_per_prompt == 1
        for config in (whole, small):
            assert config.critic is not None and config.critic.epochs == 2 * config.actor.epochs
            assert (config.critic.freeze, config.critic.warmup_steps) == (("attention",), 10)


def train_on_two_cores(path: Path, run: Path, lag: int, *overrides: str, warmup: int = 10) -> list[dict[str, Any]]:
    """Return the metrics of a run with a lag of 0 or 1 steps. During the warm-up of the critic, the actor is not
    updated. Few tokens are outside the band."""
    arguments = [f"run.directory={run}", "logging.tensorboard=false", "evaluation=null", *overrides]
    arguments += ["rollout.engine=tests.support.ticking:TickingEngine", "rollout.ahead=1"] if lag else []
    succeed("megappo", "train", path, *arguments, processes=2, timeout_seconds=590)
    lines = read_metrics(run / "metrics.jsonl")
    waits, learns = lines[:warmup], lines[warmup:]
    assert not any("actor/updates" in line for line in waits) and all(line["actor/updates"] == 4 for line in learns)
    assert all(line["critic/updates"] == 8 for line in lines)
    assert max(line["rollout/lag"] for line in lines) == lag
    assert all(line["actor/masked_below"] + line["actor/masked_above"] < 0.2 for line in learns)
    return lines


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.parametrize("lag", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
@pytest.mark.parametrize("path", TWO_CORES, ids=lambda p: p.stem)
def test_sao_on_two_cores(tmp_path: Path, path: Path, lag: int) -> None:
    """The steps have a fifth of the samples, with the same number of updates, and two warm-up steps instead of ten.
    Tokens of the tool are not tokens of the model. The training input equals the rollout input."""
    samples = load_config(path).rollout.prompts_per_step // 5
    small = [f"{role}.minibatch_sequences={samples // 2}" for role in ("actor", "critic")]
    small += ["run.steps=5", f"rollout.prompts_per_step={samples}", "actor.optimizer.schedule=constant"]
    small += ["rollout.environment.arguments={strict: false, entries: 4}"] if path == TOOL else []
    lines = train_on_two_cores(path, tmp_path / "run", lag, "critic.warmup_steps=2", *small, warmup=2)
    assert len(lines) == 5 and sum(line["reward/mean"] for line in lines) > 0
    for line in lines if path == TOOL else []:
        assert (line["episode/turns"], line["tool/lookup/calls"], line["episode/failures"]) == (2, 1, 0)
        assert line["episode/observed_tokens"] == 2
        assert line["response/length"] == pytest.approx(2 * line["turn/tokens"] + 2)
        assert line["mismatch/max"] < 1e-4 or line["rollout/lag"] == 1


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.learning
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("path", "lag"), [(SUMS, 0), (SUMS, 1), (TOOL, 0)], ids=["sums", "sums-lag", "tool"])
def test_sao_on_two_cores_learns(tmp_path: Path, path: Path, lag: int) -> None:
    lines = train_on_two_cores(path, tmp_path / "run", lag)
    assert sum(line["reward/mean"] for line in lines[-5:]) / 5 > 0.9
