"""Published recipes: planned whole, and run in miniature with the same settings."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jinja2
import pytest

from megappo.cli import main
from megappo.config import load_config
from megappo.observe.metrics import read_metrics
from tests.support.configurations import head_command, head_commands
from tests.support.harness import start
from tests.support.places import ROOT, TINY

TWO_CORES = ROOT / "configs" / "recipes" / "sao_two_cores.yaml"
RECIPES = sorted({*(ROOT / "configs" / "recipes").glob("*.yaml")} - {TWO_CORES})
SAO = [path for path in RECIPES if path.stem.startswith("sao_")]
_STEPS = 100
"""Of the recipe for two cores."""
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


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_a_recipe_runs_in_miniature(path: Path, tmp_path: Path) -> None:
    """Two steps of 6 prompts with a small model; what is learned, and how, stays as it is."""
    files, config = problems(tmp_path), load_config(path)
    words = [
        f"run.directory={tmp_path / 'run'}", "run.steps=2", f"model.path={TINY}", "model.init=random",
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
        case "sao_qwen3_30b_a3b" | "sao_glm4.5_air":
            assert (second["actor/updates"], second["critic/updates"]) == (1, 2)
            assert {"actor/masked_below", "actor/masked_above"} <= second.keys()
        case other:
            raise AssertionError(f"{other} is not looked at")


def test_two_cores_have_the_settings_of_the_recipe() -> None:
    """All that SAO says of a run; two epochs over small steps make several updates of the actor, and twice as many of
    the critic."""
    small = load_config(TWO_CORES)
    for path in SAO:
        whole = load_config(path)
        assert whole.algorithm.model_copy(update={"entropy_coef": 0.1, "lam": small.algorithm.lam}) == small.algorithm
        assert (whole.algorithm.lam.critic, small.algorithm.lam.critic) == (1.0, 1.0)
        assert whole.critic is not None and small.critic is not None
        assert whole.rollout.samples_per_prompt == small.rollout.samples_per_prompt == 1
        for config in (whole, small):
            assert config.critic is not None and config.critic.epochs == 2 * config.actor.epochs
            assert (config.critic.freeze, config.critic.warmup_steps) == (("attention",), 10)


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(("steps", "reward"), [(13, 0.0), pytest.param(_STEPS, 0.9, marks=pytest.mark.learning)])
def test_sao_on_two_cores(tmp_path: Path, lag: int, steps: int, reward: float) -> None:
    """The quickstart's sums, with the newest weights and with those of the step before: the actor waits for ten steps,
    and tokens outside of the band are few."""
    words = [f"run.directory={tmp_path / 'run'}", "logging.tensorboard=false", "evaluation=null"]
    words += [f"run.steps={steps}", "actor.optimizer.schedule=constant"] if steps < _STEPS else []
    words += ["rollout.engine=tests.support.ticking:TickingEngine", "rollout.ahead=1"] if lag else []
    done = start("megappo", "train", TWO_CORES, *words, processes=2, timeout_seconds=590)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    waits, learns = lines[:10], lines[10:]
    assert not any("actor/updates" in line for line in waits) and all(line["actor/updates"] == 4 for line in learns)
    assert all(line["critic/updates"] == 8 for line in lines)
    assert max(line["rollout/lag"] for line in lines) == lag
    assert all(line["actor/masked_below"] + line["actor/masked_above"] < 0.2 for line in learns)
    assert sum(line["reward/mean"] for line in lines[-5:]) / 5 > reward
