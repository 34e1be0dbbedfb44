"""Complete runs through the command line."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megappo.observe.metric_docs import documented
from megappo.observe.metrics import read_metrics
from tests.support import harness
from tests.support.harness import start, succeed
from tests.support.places import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.waits]


def megappo(*arguments: object, processes: int = 0, timeout: float = 400) -> subprocess.CompletedProcess[str]:
    """Run the command line, with the variables of torchrun if there are several processes."""
    return start("megappo", *arguments, processes=processes, timeout_seconds=timeout)


def quickstart(directory: Path, *overrides: str, processes: int = 2, timeout: float = 400) -> list[dict[str, Any]]:
    """Run the quickstart configuration and return its metrics."""
    arguments = ("train", "configs/quickstart.yaml", f"run.directory={directory}", *overrides)
    succeed("megappo", *arguments, processes=processes, timeout_seconds=timeout)
    return read_metrics(directory / "metrics.jsonl")


EXACT = "reward.function=exact"  # some first answers are right, so the returns differ
SHORT = (
    "run.steps=2", "rollout.prompts_per_step=10", "actor.minibatch_sequences=40", "critic.minibatch_sequences=40",
    EXACT,
)  # fmt: skip


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("short") / "run"
    quickstart(directory, *SHORT, "evaluation.every_steps=1", "--profile=2")
    return directory


def test_every_logged_metric_is_documented_and_finite(short_run: Path) -> None:
    lines = read_metrics(short_run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    names = {name for line in lines for name in line} - {"step"}
    assert not [name for name in names if documented(name) is None]
    assert {"reward/mean", "actor/grad_norm", "critic/explained_variance", "sync/version", "eval/reward_mean"} <= names
    assert "response/special_tokens" in names
    assert all(math.isfinite(value) for line in lines for value in line.values())


def test_engine_and_trainer_logprobs_agree(short_run: Path) -> None:
    """Both sides have float32 weights before and after an update, so the sync transferred the weights."""
    for line in read_metrics(short_run / "metrics.jsonl")[1:]:
        assert 0 < line["mismatch/max"] < 1e-4
    assert line["sync/version"] == 3


def test_run_directory_contains_the_expected_files(short_run: Path) -> None:
    assert (short_run / "config.yaml").exists()
    assert list((short_run / "tensorboard").glob("events*"))
    samples = [json.loads(line) for line in (short_run / "samples.jsonl").read_text().splitlines()]
    assert {"step", "prompt", "response", "raw_response", "answer", "score", "tokens"} <= samples[0].keys()
    for sample in samples:  # the raw text also shows special tokens, the clean text none
        tokens = re.findall(r"<\w+>|.", sample["raw_response"])
        assert len(tokens) <= sample["tokens"]  # the model has one more token than its tokenizer can write
        assert "".join(token for token in tokens if len(token) == 1) == sample["response"]
    output = succeed("megappo", "report", short_run)
    assert "reward/mean" in output and str(short_run / "final") in output


def test_step_is_traced_on_every_rank(short_run: Path) -> None:
    """Each stage of the trace is at least as long as in the log, and the sum of the stages is at most the duration of
    the step. The report ends with the page of the trace."""
    profile = short_run / "profile"
    traces = [f"step-000002-rank-{rank}.json.gz" for rank in (0, 1)]
    assert sorted(path.name for path in profile.iterdir()) == sorted([*traces, "step-000002.json", "step-000002.md"])
    logged = read_metrics(short_run / "metrics.jsonl")[-1]
    ranks = json.loads((profile / "step-000002.json").read_text())
    assert len(ranks) == 2
    stages = {stage["stage"]: stage for stage in ranks[0]["stages"]}
    timed = ("rollout", "reward", "forward", "advantages", "update_critic", "update_actor", "sync")
    assert set(stages) == set(timed)
    traced = {
        name: stages[name]["seconds"] for name in timed
    }  # includes the logged duration, measured by another clock
    assert all(traced[name] > 0.99 * logged[f"time/{name}"] - 1e-3 for name in timed)
    assert sum(traced.values()) < 1.01 * logged["time/step"]
    update = stages["update_actor"]
    assert 0 < update["exchanging"] < update["computing"] < update["seconds"]
    assert (profile / "step-000002.md").read_text().strip() in megappo("report", short_run).stdout


def test_final_folder_loads_in_transformers(short_run: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(short_run / "final")
    tokenizer = AutoTokenizer.from_pretrained(short_run / "final")
    ids = tokenizer("1+2=", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()


def test_export_equals_the_final_model(short_run: Path, tmp_path: Path) -> None:
    succeed("megappo", "export", short_run, tmp_path / "out")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    final = AutoModelForCausalLM.from_pretrained(short_run / "final").state_dict()
    assert ours.keys() == final.keys()
    assert all(torch.equal(ours[name], final[name]) for name in ours)


def test_export_reports_a_missing_configuration(short_run: Path, tmp_path: Path) -> None:
    done = megappo("export", tmp_path, tmp_path / "out")
    assert done.returncode == 2
    assert "contains no config.yaml; name the directory of a run" in done.stderr


def test_evaluation_of_exported_weights(short_run: Path) -> None:
    one_process = ("actor.layout.tensor_parallel=1", "critic.layout.pipeline_parallel=1")
    other = ("evaluation=null", EXACT)  # these settings differ from those of the training run
    weights = short_run / "final"
    output = succeed("megappo", "eval", "configs/quickstart.yaml", "--weights", weights, *one_process, *other)
    last = read_metrics(short_run / "metrics.jsonl")[-1]
    assert f"eval/reward_mean: {last['eval/reward_mean']:.4f}" in output


def test_evaluation_reports_failures_and_dropped_prompts(tmp_path: Path) -> None:
    """One process evaluates with a configuration of two ranks. The mean contains only answers with a grade."""
    sums = ["1+1=", "2+1=", "2+2=", "3+1=", "4+1="]
    for name, prompts in (("sums", sums), ("long", [*sums, "1+1+1+1+1+1="])):
        lines = [json.dumps({"prompt": prompt, "answer": "2"}) for prompt in prompts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    long = {"source": str(tmp_path / "long.jsonl"), "samples": 2, "temperature": 1.0, "pass_at": [1, 2]}
    overrides = (
        f"data.validation={{source: {tmp_path / 'sums.jsonl'}}}", f"data.validation_sets={json.dumps({'long': long})}",
        "reward={function: 'tests.support.troubled:fussy', failure_score: 9}",
    )  # fmt: skip
    output = succeed("megappo", "eval", "configs/quickstart.yaml", *overrides, "reward.max_failure_fraction=0.4")
    numbers = dict(line.split(": ", 1) for line in output.splitlines() if line.startswith("eval/"))
    assert {name: float(numbers[name]) for name in ("eval/failures", "eval/long/failures", "eval/dropped")} == {
        "eval/failures": 0.4, "eval/long/failures": 0.4, "eval/dropped": 0.0,
    }  # fmt: skip
    assert float(numbers["eval/long/dropped"]) == 1 and 0 <= float(numbers["eval/reward_mean"]) <= 1
    assert 0 <= float(numbers["eval/long/pass@2"]) <= 1
    assert "eval: 2 of 5 answers have no grade; the first: ValueError: cannot read 1+1=" in output
    assert "eval/long: 4 of 10 answers have no grade" in output
    assert "5 validation prompts of long, 1 dropped and 0 cut as too long" in output
    refused = megappo("eval", "configs/quickstart.yaml", *overrides, "reward.max_failure_fraction=0.3")
    assert refused.returncode == 1
    assert "2 of 5 rewards failed, more than reward.max_failure_fraction 0.3" in refused.stderr


def test_run_reports_samples_without_a_grade(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"prompt": p}) for p in ("1+1=", "2+1=", "1+1+1+1+1=")))
    overrides = (
        f"data.validation={{source: {tmp_path / 'data.jsonl'}}}", "reward.function=tests.support.troubled:fussy",
        "evaluation.every_steps=1", "run.steps=1", "actor.layout={}", "critic.layout={}", "reward.failure_score=9",
        f"run.directory={tmp_path / 'run'}", "reward.max_failure_fraction=0.9",
    )  # fmt: skip
    output = succeed("megappo", "train", "configs/quickstart.yaml", *overrides)
    assert "2 validation prompts, 1 dropped and 0 cut as too long" in output
    assert "eval: 1 of 2 answers have no grade; the first: ValueError: cannot read 1+1=" in output
    assert re.search(r"step 1: validation reward [01]\.\d+ of the 50.0% with a grade", output)
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert (last["eval/failures"], last["eval/dropped"]) == (0.5, 1.0) and last["eval/reward_mean"] <= 1


def test_run_with_other_settings_is_refused(short_run: Path) -> None:
    one_process = ("actor.layout={}", "critic.layout={}", EXACT)
    done = megappo("train", "configs/quickstart.yaml", f"run.directory={short_run}", *one_process)
    assert done.returncode == 2
    assert "holds a run with other settings (run.steps: 2 -> 160" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus"])
def test_estimators_without_a_critic(tmp_path: Path, estimator: str) -> None:
    lines = quickstart(tmp_path / "run", *SHORT, f"algorithm.estimator={estimator}", "critic=null")
    assert "critic/loss" not in lines[-1]
    assert lines[-1]["actor/updates"] > 0


def test_ranks_without_prompts(tmp_path: Path) -> None:
    """A step may have fewer prompts than ranks."""
    one_prompt = (*SHORT, "rollout.prompts_per_step=1", "rollout.samples_per_prompt=40")
    alone = quickstart(tmp_path / "one", *one_prompt, "actor.layout={}", "critic.layout={}", processes=1)
    on_two_ranks = quickstart(tmp_path / "two", *one_prompt, "actor.layout={}", "critic.layout={}", processes=2)
    assert len(on_two_ranks) == len(alone) == 3
    for line, expected in zip(on_two_ranks, alone, strict=True):
        same = {name: n for name, n in expected.items() if not re.search("^time/|^memory/|second|imbalance", name)}
        assert {name: line[name] for name in same} == pytest.approx(same, rel=1e-4, abs=1e-6, nan_ok=True)


def test_many_options_together(tmp_path: Path) -> None:
    """The run has adaptive KL in the reward, KL in the loss, PPO-penalty, target KL, a correction with rejection, and
    a warm-up of the critic."""
    lines = quickstart(
        tmp_path / "run", *SHORT, "run.steps=3", "reference={}",
        "algorithm.kl_in_reward={kind: kl, coef: 0.1, controller: adaptive, target: 0.5, horizon: 100}",
        "algorithm.kl_in_loss={coef: 0.01}", "algorithm.policy_loss=penalty", "algorithm.target_kl=1e-9",
        "algorithm.old_logprob=corrected", "algorithm.correction={level: sequence, cap: 2.0, reject_above: 1.5}",
        "critic.warmup_steps=1", "actor.layout={pipeline_parallel: 2}", "critic.layout={tensor_parallel: 2}",
        "algorithm.loss_aggregation=seq-mean-token-sum-norm",
    )  # fmt: skip
    steps = {line["step"]: line for line in lines}
    assert "actor/loss" not in steps[1]  # the critic warms up
    assert steps[1]["kl/mean"] == pytest.approx(0, abs=1e-6)  # the reference is the starting policy
    assert steps[2]["actor/updates"] == 1  # the second update exceeded the target KL and was not applied
    assert steps[3]["kl/coef"] != steps[1]["kl/coef"]
    assert steps[2]["actor/penalty_coef"] == 1
    kl = steps[2]["actor/final_kl"]  # default target: 0.01
    assert kl > 1e-9
    assert steps[3]["actor/penalty_coef"] == (2 if kl > 0.015 else 0.5 if kl < 0.01 / 1.5 else 1)
    assert steps[3]["correction/weight_mean"] == pytest.approx(1, abs=1e-3)


def test_critic_warmup_with_a_number_of_minibatches(tmp_path: Path) -> None:
    """40 samples are split into 3 minibatches of 14, 13 and 13 samples. The actor does not change."""
    lines = quickstart(
        tmp_path / "run", *SHORT, "critic.minibatch_sequences=null", "critic.minibatches=3", "critic.epochs=1",
        "critic.warmup_steps=2", "actor.layout={}", "critic.layout={}",
        "critic.optimizer={learning_rate: 1.0e-3, schedule: wsd, warmup_ratio: 0.4, decay_ratio: 0.4}",
        "rollout.samples_per_prompt=4", processes=1,
    )  # fmt: skip
    steps = {line["step"]: line for line in lines}
    assert [steps[n]["critic/updates"] for n in (1, 2)] == [3, 3]
    assert steps[1]["critic/loss"] != steps[2]["critic/loss"]
    assert not any(name.startswith("actor/") and name != "actor/mfu" for line in lines for name in line)
    assert [steps[n]["critic/learning_rate"] for n in (1, 2)] == pytest.approx([1e-3, 5e-4])
    assert steps[2]["mismatch/max"] < 1e-4


def test_penalty_adapts_to_the_final_kl(tmp_path: Path) -> None:
    """The step has one update, and the KL before this update is 0. The coefficient increases if the KL after the
    update is above the target."""
    lines = quickstart(
        tmp_path / "run", *SHORT, "run.steps=4", "algorithm.policy_loss=penalty", "algorithm.penalty={target: 1.0e-9}",
        "actor.epochs=1", "actor.minibatch_sequences=80",
    )  # fmt: skip
    steps = [line for line in lines if line["step"]]
    assert [line["actor/updates"] for line in steps] == [1] * 4
    assert all(abs(line["actor/ppo_kl_k3"]) < 1e-9 < line["actor/final_kl"] for line in steps)
    assert [line["actor/penalty_coef"] for line in steps] == [1, 2, 4, 8]


def test_bypass_uses_logprobs_of_the_engine(tmp_path: Path) -> None:
    """Weights and arithmetic of engine and trainer are equal, so the first update of each step starts near ratio 1.
    Every second step skips the scores of the actor. A file at the path of the trace does not end the run."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").touch()
    bypass = ("algorithm.old_logprob=bypass", "algorithm.mismatch_every_steps=2")
    settings = (*bypass, "actor.epochs=1", "actor.minibatch_sequences=80", "--profile=1")
    lines = quickstart(tmp_path / "run", *SHORT, *settings)
    steps = [line for line in lines if line["step"] > 0]
    assert [line["step"] for line in steps if "mismatch/mean" in line] == [line["step"] for line in steps][::2]
    for line in lines[1:]:
        assert 0 < abs(line["actor/ratio_max"] - 1) < 1e-3


@pytest.mark.parametrize("bypass", [False, True])
def test_engine_and_trainer_agree_below_a_minimum_length(tmp_path: Path, bypass: bool) -> None:
    """Engine and trainer both exclude stop tokens from the first three tokens."""
    settings = ["rollout.min_response_tokens=3", "rollout.max_response_tokens=5", "actor.layout={tensor_parallel: 2}"]
    if bypass:
        settings += ["algorithm.old_logprob=bypass", "actor.epochs=1", "actor.minibatch_sequences=80"]
    lines = quickstart(tmp_path / "run", *SHORT, *settings, "evaluation=null", "data.validation=null")
    for line in lines[1:]:
        assert 3 <= line["response/length"] <= 5 and 0 < line["mismatch/max"] < 1e-4
        assert not bypass or abs(line["actor/ratio_max"] - 1) < 1e-3


def test_runs_with_the_same_seed_are_equal(tmp_path: Path) -> None:
    first, second = (quickstart(tmp_path / name, *SHORT) for name in "ab")
    for a, b in zip(first, second, strict=True):
        for name in a:
            if not name.startswith(("time/", "memory/", "sync/")) and "per_second" not in name:
                assert a[name] == b[name], name


def test_quickstart_starts_to_learn(tmp_path: Path) -> None:
    """The run has one sixth of the steps of the quickstart, with its initial learning rates."""
    constant = [f"{role}.optimizer.schedule=constant" for role in ("actor", "critic")]
    rewards = [
        line["reward/mean"] for line in quickstart(tmp_path / "run", "run.steps=20", "evaluation=null", *constant)
    ]
    assert rewards[0] < 0.3
    assert sum(rewards[-5:]) / 5 > 0.5


@pytest.mark.exhaustive
def test_quickstart_learns_answers_and_end_tokens(tmp_path: Path) -> None:
    """transformers generates the answer with special tokens: the sum, then the end token."""
    lines = quickstart(tmp_path / "run", timeout=590)
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    assert rewards[0] < 0.3
    assert sum(rewards[-5:]) / 5 > 0.8
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "final")
    right = []
    for a, b in itertools.product(range(5), repeat=2):
        ids = tokenizer(f"{a}+{b}=", return_tensors="pt").input_ids
        answer = model.generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]
        right.append(tokenizer.decode(answer, skip_special_tokens=False) == f"{a + b}<eos>")
    assert sum(right) >= 0.95 * len(right)


def test_benchmark_of_a_step(tmp_path: Path) -> None:
    out = tmp_path / "step.json"
    arguments = ("configs/quickstart.yaml", "--warmup", "1", "--repeat", "2", "--json", out)
    output = succeed("benchmarks.step", *arguments, processes=2)
    report = json.loads(out.read_text())
    stages = {row["stage"]: row for row in report["stages"]}
    assert list(stages) == [
        "rollout", "reward", "forward", "advantages", "update_critic", "update_actor", "sync", "step",
    ]  # fmt: skip
    for row in stages.values():
        assert 0 < row["min_seconds"] <= row["median_seconds"] <= row["max_seconds"]
        assert row["samples_per_second"] == pytest.approx(400 / row["median_seconds"])
    assert stages["step"]["median_seconds"] > stages["update_actor"]["median_seconds"]
    assert "update_actor" in output and "outside of generation and models" in output
    assert 0 < report["outside_share"] < 1


LISTENERS = """
import atexit, os, psutil

def write():
    parent = psutil.Process(os.getppid())
    if parent.cmdline()[1:3] == ["-m", "megappo.runtime.torchrun"]:
        found = [s.laddr.ip for s in parent.net_connections() if s.status == psutil.CONN_LISTEN]
        open(os.environ["LISTENERS"], "a").write(f"{found}\\n")
atexit.register(write)
"""


def test_launch_script(short_run: Path, tmp_path: Path) -> None:
    """On one machine, no process of the launch, including torchrun, listens to other machines."""
    (tmp_path / "sitecustomize.py").write_text(LISTENERS)
    environment = os.environ | {"MEGAPPO_PYTHON": sys.executable, "LISTENERS": str(tmp_path / "listeners")}
    environment["PYTHONPATH"] = str(tmp_path)
    command = ["bash", "launch/torchrun.sh", "2", "report", str(short_run), "--metric", "actor/entropy"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "actor/entropy over 2 steps" in done.stdout
    assert (tmp_path / "listeners").read_text() == "[]\n[]\n"


def test_mismatch_above_the_limit_stops_the_run(tmp_path: Path) -> None:
    """Rounding errors exceed a limit of 1e-12 nats. The error message names the limit."""
    one_process = ("actor.layout={}", "critic.layout={}", *SHORT)
    done = megappo(
        "train", "configs/quickstart.yaml", f"run.directory={tmp_path / 'run'}", *one_process,
        "algorithm.mismatch_stop_nats=1e-12",
    )  # fmt: skip
    assert done.returncode == 1
    assert "megappo: error: engine and trainer log-probabilities differ by" in done.stderr
    assert "above algorithm.mismatch_stop_nats 1e-12" in done.stderr
    assert "Traceback" not in done.stderr


def test_failing_rewards_stop_the_run_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "broken_reward.py").write_text("def score(**sample):\n    raise KeyError('no such column')\n")
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT / 'kernels'}"}
    settings = ("train", "configs/quickstart.yaml", f"run.directory={tmp_path / 'run'}", *SHORT, "evaluation=null")
    variables = harness.environment() | path
    done = start("megappo", *settings, "reward.function=broken_reward:score", processes=2, environment=variables)
    assert done.returncode == 1
    assert "KeyError: 'no such column'" in done.stderr
    assert "max_failure_fraction" in done.stderr
    assert "megappo/commands/train.py" not in done.stderr


def test_training_of_an_agent_with_openai_sdk(tmp_path: Path) -> None:
    """The agent receives only the endpoint and its key. The log-probabilities of the turns agree with those of the
    trainer."""
    pytest.importorskip("openai", reason="OpenAI's SDK is not installed; it comes with SGLang")
    directory = f"run.directory={tmp_path / 'run'}"
    succeed("megappo", "train", "configs/examples/11_agent/agent.yaml", directory, processes=1)
    first, last = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for line in (first, last):
        assert line["episode/turns"] == 2 and line["episode/trajectories"] == 1 and line["episode/failures"] == 0
        assert 0 < line["mismatch/max"] < 1e-5
    assert first["reward/mean"] > 0 and first["actor/grad_norm"] > 0 and last["sync/version"] == 3
    assert [name for name in first if documented(name) is None] == ["step"]


@pytest.mark.learning
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "engine", ["rollout.engine=transformers", "rollout.servers={max_total_tokens: 16384, threads: 1}"]
)
def test_model_learns_to_use_a_tool(tmp_path: Path, engine: str) -> None:
    """Episodes have two turns. The second turn needs the answer of the tool, one of a hundred. With the tool, the
    model also solves held-out problems. Without the tool, it solves almost no problem."""
    rewards: dict[bool, list[dict[str, Any]]] = {}
    for answers in (True, False):
        run = tmp_path / str(answers)
        arguments = f"rollout.environment.arguments={{strict: true, answers: {str(answers).lower()}}}"
        command = [
            "train", "configs/examples/10_tools/tools.yaml", f"run.directory={run}", engine,
            arguments,
        ]  # fmt: skip
        command += ["rollout.servers={max_total_tokens: 16384, threads: 1}"] if engine == "sglang" else []
        succeed("megappo", *command, processes=2, timeout_seconds=1700)
        rewards[answers] = read_metrics(run / "metrics.jsonl")
    with_tool, without = ([line["reward/mean"] for line in rewards[answers][-5:]] for answers in (True, False))
    assert min(with_tool) > 0.9 and rewards[True][-1]["eval/reward_mean"] > 0.9
    assert max(without) < 0.3 and rewards[False][-1]["eval/reward_mean"] < 0.3
