"""Published recipes: planned whole, and run in miniature with the same settings."""

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
from megappo.ppo.methods import lambdas
from tests.support.configurations import head_command, head_commands
from tests.support.harness import start
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


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_a_recipe_fits_where_its_head_says(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And says how long before its end a job has to be told, where that is longer than the batch script has it."""
    assert main(head_command(path, "megappo")[1:]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^fits: rank", said, re.MULTILINE)
    started = head_command(path, "sbatch", "launch/torchrun.sh")
    assert f"configs/recipes/{path.name}" in started
    lead = re.search(r"--signal=(USR1@\d+)", said)
    assert lead is not None
    if started[0] == "sbatch":
        assert f"--signal={lead[1]}" in started
    assert len([words for words in head_commands(path) if words[:2] == ["megappo", "data"]]) >= 1


def test_scores_reach_the_first_token_of_long_responses() -> None:
    """Share of a score at the first of 45,000 tokens: exp(-1 / alpha), with the alpha of each publication."""
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


def test_the_prompts_of_open_reasoner_zero() -> None:
    """As its two templates make them, one within the other."""
    template = load_config(ROOT / "configs" / "recipes" / "orz_qwen2.5_32b.yaml").data.chat_template
    assert template is not None
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # as transformers renders chat templates
    for problem, bos in (("What is 1+1?", ""), ("Two\nlines {of} it ", "<s>")):
        instruction = jinja2.Template(ORZ_INSTRUCTION).render(prompt=problem)
        wanted = jinja2.Template(ORZ_PROMPT).render(prompt=instruction, bos_token=bos)
        messages = [{"role": "user", "content": problem}]
        found = environment.from_string(template).render(messages=messages, bos_token=bos, add_generation_prompt=True)
        assert found == wanted


def problems(folder: Path) -> dict[str, str]:
    """Files of sums, by the data set they pretend to be."""
    named = {"gsm8k": "openai/gsm8k", "math": "DigitalLearningGmbH/MATH-lighteval"}
    for name, source in named.items():
        rows: list[dict[str, Any]] = [
            {"prompt": f"{a}+{b}=", "answer": str(a + b), "data_source": source} for a in range(4) for b in range(4)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: str(folder / f"{name}.jsonl") for name in named}


def miniature(path: Path, directory: Path) -> list[str]:
    """Two steps of 6 prompts with a small model; what is learned, and how, stays as it is."""
    files, config = problems(directory), load_config(path)
    words = [
        f"run.directory={directory / 'run'}", "run.steps=2", f"model.path={TINY}", "model.init=random",
        "model.dtype=float32", "data.apply_chat_template=false", "data.chat_template=null", "data.max_prompt_tokens=8",
        "rollout.engine=transformers", "rollout.sglang=null", "rollout.prompts_per_step=6",
        "rollout.max_response_tokens=3", "rollout.max_total_tokens=null", "reward.workers=1", "evaluation=null",
        "checkpoint=null", "logging.wandb_project=null", "logging.tensorboard=false",
    ]  # fmt: skip
    for role, settings in config.trained.items():
        words += [f"{role}.layout={{}}", f"{role}.microbatch_budget_tokens=64", f"{role}.optimizer.warmup_updates=0"]
        if settings.minibatch_sequences is not None:  # as many updates of a step as the recipe has
            count = len(settings.minibatch_sizes(config.rollout.batch_sequences))
            words += [f"{role}.minibatch_sequences=null", f"{role}.minibatches={min(count, 3)}"]
    words += ["rollout.ahead=0"] if config.rollout.ahead else []  # the embedded engine has no processes of its own
    words += ["rollout.samples_per_prompt=4"] if config.rollout.samples_per_prompt > 1 else []
    if config.data.mixture is not None:
        for name, file in files.items():
            words += [f"data.mixture.{name}.source={file}"]
        words += ["data.validation_sets=null"]
    else:
        words += [f"data.train.source={files['math']}", "data.validation=null", "data.validation_sets=null"]
    warmup = config.critic.warmup_steps if config.critic is not None else 0
    words += ["critic.warmup_steps=1"] if warmup else []
    return words


def test_recipes_of_sao_are_the_same_in_miniature(tmp_path: Path) -> None:
    """So that one is run for all."""
    found = [load_config(path, [*miniature(path, tmp_path), "run.name=sao"]).model_dump() for path in SAO]
    assert [config["run"].pop("files") for config in found] == [(str(path),) for path in SAO]
    first, *others = found
    assert others and all(other == first for other in others)


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.parametrize("path", [path for path in RECIPES if path not in SAO[1:]], ids=lambda p: p.stem)
def test_a_recipe_runs_in_miniature(path: Path, tmp_path: Path) -> None:
    words, config = miniature(path, tmp_path), load_config(path)
    warmup = config.critic.warmup_steps if config.critic is not None else 0
    done = start("megappo", "train", path, *words, processes=2)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
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
            raise AssertionError(f"{other} is not looked at")


@pytest.mark.parametrize("path", TWO_CORES, ids=lambda p: p.stem)
def test_two_cores_have_the_settings_of_the_recipe(path: Path) -> None:
    """All that SAO says of a run; two epochs over small steps make several updates of the actor, and twice as many of
    the critic."""
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
    """Metrics of a run with the newest weights or with those of the step before: the actor waits for the critic's
    warm-up, and tokens outside of the band are few."""
    words = [f"run.directory={run}", "logging.tensorboard=false", "evaluation=null", *overrides]
    words += ["rollout.engine=tests.support.ticking:TickingEngine", "rollout.ahead=1"] if lag else []
    done = start("megappo", "train", path, *words, processes=2, timeout_seconds=590)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
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
    """Steps of a fifth of the samples in as many updates, after two in place of ten of the critic alone. What the tool
    says is no token of the model's, and the model heard what it is trained on."""
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
