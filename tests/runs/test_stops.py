"""Runs that are stopped, hang, or share a directory."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megappo.checkpoint.files import read_marker, stamp, write_marker
from megappo.config.schema import PHASES
from megappo.ppo.rollout.in_flight_state import KEY
from tests.support import troubled
from tests.support.attempts import assert_same_run, attempts, timeless, train
from tests.support.models import write_model
from tests.support.places import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.waits]


def stopped_run(directory: Path, step: int, at: str, name: str, expect: str, *settings: str) -> dict[str, object]:
    """Return an attempt in which rank 1 receives a signal."""
    kill = {"rank": 1, "step": step, "at": at, "signal": name}
    return train(directory, *settings, expect=expect, kill=kill)


def test_signals_stop_a_run_with_a_checkpoint(tmp_path: Path) -> None:
    """A signal before the updates drops the step, and a signal during the updates finishes the step. The signal of
    one rank is sufficient."""
    settings = ("run.steps=5", "checkpoint.every_steps=100")
    run = tmp_path / "stopped"
    output = attempts(
        tmp_path, train(tmp_path / "whole", *settings), stopped_run(run, 1, "rollout", "SIGUSR1", "85", *settings),
        stopped_run(run, 2, "forward", "SIGTERM", "85", *settings),
        stopped_run(run, 2, "update_critic", "SIGINT", "130", *settings),
        stopped_run(run, 3, "sync", "SIGHUP", "85", *settings), train(run, *settings),
    )  # fmt: skip
    assert [f"stopped after step {n} with a checkpoint" in output for n in range(5)] == [True, True, True, True, False]
    assert "continuing after step 0 from" in output
    assert "Traceback" not in output
    assert_same_run(tmp_path / "whole", run, 5)


def test_run_stops_before_its_time_limit(tmp_path: Path) -> None:
    """The run stops without a signal at the end of a step. It is evaluated at the usual steps and keeps its
    milestones."""
    settings = (
        "run.steps=3", "evaluation.every_steps=2", "evaluation.before_training=false", "data.validation.limit=4",
        "checkpoint.every_steps=100", "checkpoint.keep_last=1", "checkpoint.keep_every_steps=2",
        "checkpoint.huggingface_every_steps=2",
    )  # fmt: skip
    run = tmp_path / "run"
    limited = train(run, *settings, "run.max_hours=0.001", expect="85")  # less than stopping may take
    output = attempts(tmp_path, limited, train(run, *settings))
    assert "another step may not end in time before run.max_hours 0.001: stopping with a checkpoint" in output
    assert "stopped after step 1 with a checkpoint" in output and "continuing after step 1 from" in output
    lines = timeless(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert ["eval/reward_mean" in line for line in lines] == [False, True, True]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000002", "step-000003"]
    (exported,) = (run / "huggingface").iterdir()
    assert exported.name == "step-000002"
    final = load_file(run / "final" / "model.safetensors")
    milestone = load_file(exported / "model.safetensors")
    assert milestone.keys() == final.keys()
    assert not all(torch.equal(milestone[name], final[name]) for name in final)  # of an earlier step


def test_signals_interrupt_generation_without_losses(tmp_path: Path) -> None:
    """One rank receives a signal while all ranks generate or evaluate for up to two minutes. Responses are dropped
    and generated again, or kept. An interrupted evaluation is repeated."""
    settings = (
        "run.steps=3", "checkpoint.every_steps=100", "evaluation.every_steps=3", "data.validation.limit=20",
        "rollout.generate_batch_sequences=2",
    )  # fmt: skip
    run = tmp_path / "stopped"

    def stopped(step: int, stage: str, name: str, *more: str) -> dict[str, object]:
        kill = {"rank": 1, "step": step, "at": "token", "signal": name, "stall": stage}
        return train(run, *settings, *more, expect="85", kill=kill)

    output = attempts(
        tmp_path, train(tmp_path / "whole", *settings), stopped(0, "evaluate", "SIGTERM"),
        stopped(1, "rollout", "SIGUSR1"), stopped(3, "rollout", "SIGUSR1", "rollout.when_stopped=keep"),
        stopped(3, "evaluate", "SIGTERM"), train(run, *settings),
    )  # fmt: skip
    assert re.findall(r"stopped after step (\d) with a checkpoint", output) == ["0", "0", "2", "3"]
    tokens = [int(count) for count in re.findall(r"tokens in the stalled stage: (\d+)", output)]
    assert len(tokens) == 8 and max(tokens) <= 20, (
        tokens
    )  # at least 20 sequences with up to three tokens would be generated
    states = [torch.load(path)[KEY] for path in sorted(run.glob("checkpoints/step-000002/responses-*.pt"))]
    counts = [len(state["numbers_B"]) for state in states]
    assert len(counts) == 2 and all(2 <= count < 40 for count in counts)
    last = [read_marker(folder / "checkpoints/step-000003").content for folder in (tmp_path / "whole", run)]
    assert (
        last[1]["metrics"]["eval/reward_mean"] == last[0]["metrics"]["eval/reward_mean"]
    )  # this metric selects the best checkpoint
    assert "Traceback" not in output
    assert_same_run(tmp_path / "whole", run, 3)


def test_failed_checkpoint_is_written_later(tmp_path: Path) -> None:
    """The disk of one rank is full in step 2, and step 3 writes the checkpoint. A signal stops the evaluation of step
    4. Another signal arrives during the resume and leaves the checkpoint unchanged, with the evaluation still
    pending."""
    settings = ("run.steps=5", "checkpoint.every_steps=2")
    run = tmp_path / "run"
    full = {"rank": 1, "step": 2, "times": 1}
    output = attempts(
        tmp_path,
        train(tmp_path / "whole", *settings),
        {**stopped_run(run, 4, "evaluate", "SIGTERM", "85", *settings), "full": full},
        stopped_run(run, 0, "sync", "SIGTERM", "85", *settings),
        train(run, *settings),
    )
    message = f"the checkpoint of step 2 could not be written in {run / 'checkpoints'}: "
    assert (
        output.count(message) == 1
        and "No space left on device; the checkpoint is retried, 3 times in a row at most" in output
    )
    assert "stopped after step 4 with a checkpoint" in output
    assert "stopped before the run continued after step 4; its checkpoint is unchanged" in output
    assert "Traceback" not in output
    assert_same_run(tmp_path / "whole", run, 5)


def test_permanently_failed_checkpoint_ends_the_run(tmp_path: Path) -> None:
    full = {"rank": 0, "step": 1, "times": 9}
    output = attempts(tmp_path, train(tmp_path / "run", "run.steps=1", "evaluation=null", expect="1", full=full))
    assert output.count("No space left on device; the checkpoint is retried") == 2
    assert "megappo: error: the checkpoint of step 1 could not be written" in output and "on rank" not in output
    assert "No space left on device, 3 times in a row; make room or fix the folder and start again" in output


def test_signal_stops_a_run_without_checkpoints(tmp_path: Path) -> None:
    output = attempts(
        tmp_path, stopped_run(tmp_path / "run", 2, "reward", "SIGTERM", "1", "run.steps=3", "checkpoint=null")
    )
    assert "stopped after step 1 without a checkpoint, because checkpoint is null" in output


def test_every_rank_reports_a_hang(tmp_path: Path) -> None:
    """Rank 1 sleeps without end, and rank 0 waits for rank 1 in a collective."""
    run = tmp_path / "run"
    limits = ("runtime.phase_timeouts_seconds={reward: 4}", "run.steps=2")
    hang = train(run, *limits, expect="79", kill={"rank": 1, "step": 2, "at": "reward", "signal": None})
    start = time.monotonic()
    output = attempts(tmp_path, hang, train(run, *limits))
    assert time.monotonic() - start < 60
    assert "above the limit of 4; the stacks of all ranks are in" in output
    (folder,) = run.glob("hang-*")
    waiting, sleeping = (path.read_text() for path in sorted(folder.glob("rank-*.txt")))
    for report in (waiting, sleeping):
        assert "phase reward for" in report
        assert "waits for: 40 scores of megappo.rewards.arithmetic:answer_then_end" in report
    assert "in reduce" in waiting
    assert "killed_runs.py" in sleeping and "in die" in sleeping
    assert [line["step"] for line in timeless(run / "metrics.jsonl")] == [0, 1, 2]


def test_every_stage_is_a_phase() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "megappo").rglob("*.py"))
    assert set(re.findall(r'\.stage\("(\w+)"', sources)) == set(PHASES) - {"start"}


def test_second_ctrl_c_ends_a_hanging_run(tmp_path: Path) -> None:
    hang = {"rank": 1, "step": 2, "at": "rollout", "signal": None}
    output = attempts(tmp_path, train(tmp_path / "run", "run.steps=3", expect="130", kill=hang, ctrl_c=True))
    assert output.count("SIGINT: stopping with a checkpoint as soon as the step allows") == 1
    assert "stopped at once" in output


def test_directory_in_use_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with (run / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("process 1234 on elsewhere")
        file.flush()
        output = attempts(tmp_path, train(run, "run.steps=1", expect="2"))
    assert f"run.directory '{run}' is in use by process 1234 on elsewhere; wait until this job ends" in output
    assert "Traceback" not in output
    assert os.listdir(run) == ["lock"]


def test_removed_directory_ends_the_run(tmp_path: Path) -> None:
    """Without this check, the run would log into deleted files and end with exit code 0."""
    run = tmp_path / "run"
    remove = {"rank": 1, "step": 2, "at": "forward", "remove": True}
    output = attempts(tmp_path, train(run, "run.steps=3", expect="1", kill=remove))
    assert f"run.directory '{run}' or the file `lock` in it was removed or replaced during the run" in output
    assert "step 1/3" in output and "step 2/3" not in output
    assert "Traceback" not in output and not run.exists()


NOT_FINITE = ("actor.optimizer.learning_rate=1e9", "run.steps=2")


def test_refused_update_is_saved_and_repeatable(tmp_path: Path) -> None:
    """The model has experts, so the saved batch contains the replayed routing."""
    run, model = tmp_path / "run", write_model(tmp_path / "model", "qwen3_moe", 3, vocab_size=16, num_hidden_layers=2)
    of_model = (f"model.path={model}", "model.init=pretrained", "model.tokenizer=configs/models/tiny_arithmetic",
                "actor.layout={pipeline_parallel: 2}", "critic.layout={}", "actor.optimizer.weight_decay=1e9",
                "model.dtype=float32")  # fmt: skip
    replay = {"arguments": ["train", "--replay", str(run / "replay/step-000001")], "processes": 2, "expect": "0"}
    refused = train(run, *NOT_FINITE, *of_model, "actor.offload=true", "critic.offload=true", expect="1")
    output = attempts(tmp_path, refused, replay, {**replay, "processes": 1, "expect": "2"})
    batch = torch.load(run / "replay/step-000001/batch-00000.pt")
    assert [len(routing) + 1 for routing in batch["routing"]] == [len(tokens) for tokens in batch["sequences"]] != []
    assert "its weights did not change" in output
    assert f"`megappo train --replay {run / 'replay/step-000001'}` repeats the update" in output
    assert "step 1, actor, minibatch 2: refused again, all numbers as in the run" in output
    assert "\n  loss nan\n" in output
    assert "samples with inputs of the loss that are not finite: none" in output
    assert "parameters with gradients that are not finite: decoder.final_layernorm.weight" in output
    assert "was written by 2 ranks, but there are 1; use the same number" in output
    assert "Traceback" not in output


def test_crafted_replay_runs_no_code(tmp_path: Path) -> None:
    """A folder from another user contains settings of this user, which can name functions."""
    run, trace = tmp_path / "run", tmp_path / "trace"
    attempts(tmp_path, train(run, *NOT_FINITE, expect="1"))
    folder = run / "replay/step-000001"
    marker = read_marker(folder)
    call = {"source": "pathlib:Path.touch", "options": {"self": str(trace)}}
    marker.content["settings"]["data"] |= {"train": call, "validation": call}
    marker.content["settings"]["reward"] |= {"function": "pathlib:Path.touch"}
    marker.content["settings"]["model"]["trust_remote_code"] = True
    replay = {"arguments": ["train", "--replay", str(folder)], "processes": 2}
    write_marker(folder, marker)
    output = attempts(tmp_path, {**replay, "expect": "0"})
    assert "step 1, actor, minibatch 2: refused again, all numbers as in the run" in output
    settings = marker.content["settings"]["model"]
    settings["family"] = "antigravity:FAMILY"
    write_marker(folder, marker)
    output = attempts(tmp_path, {**replay, "expect": "2"})
    assert "uses model.family 'antigravity:FAMILY', code that a replay does not import" in output
    settings["family"] = None
    (folder / ".metadata").write_bytes(pickle.dumps(Touch(str(trace))))
    write_marker(folder, replace(marker, files=marker.files | {".metadata": stamp(folder / ".metadata")}))
    output = attempts(tmp_path, {**replay, "expect": "2"})
    assert "step-000001 is damaged: .metadata names pathlib.Path.touch, which no checkpoint contains" in output
    assert "Traceback" not in output and not trace.exists()


class Touch:
    """An object whose pickle is a call that creates a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.path),)


def test_continued_run_saves_few_replays(tmp_path: Path) -> None:
    """Only the critic diverges. Its refused updates are counted, and the first refused update of a step is saved."""
    run = tmp_path / "run"
    growing = (
        "critic.optimizer.learning_rate=1e9",
        "critic.optimizer.weight_decay=1e9",
    )  # exceeds float32 within three updates
    settings = (*growing, "algorithm.on_nonfinite=skip", "critic.value_clip=null")
    output = attempts(tmp_path, train(run, "run.steps=2", "actor.optimizer.learning_rate=1e-9", *settings))
    assert len(os.listdir(run / "replay")) <= 2
    lines = timeless(run / "metrics.jsonl")
    assert max(line.get("critic/skipped_updates", 0) for line in lines) > 0
    assert "Traceback" not in output


OF_GROUPS = ("critic=null", "algorithm.estimator=grpo", "algorithm.lam=1.0")
PENALTY = ("algorithm.policy_loss=penalty", "reference={}",
           "algorithm.kl_in_reward={coef: 0.1, controller: adaptive, target: 1.0}")  # fmt: skip


def test_run_continues_if_all_failures_are_tolerated(tmp_path: Path) -> None:
    """Steps in which all episodes fail have no update and no message about the weights of the engine. With a lower
    limit, the run ends with the error of the episodes."""

    def failing(how: str, most: float, *settings: str, expect: str = "0") -> dict[str, object]:
        environment = {"name": "tests.support.troubled:Fails", "arguments": {"how": how}, "max_failure_fraction": most}
        overrides = (f"rollout.environment={json.dumps(environment)}", "reward.function=environment", "evaluation=null")
        return train(tmp_path / how, "run.steps=2", "checkpoint=null", *overrides, *settings, expect=expect)

    output = attempts(
        tmp_path,
        failing("raised", 1.0, *PENALTY),
        failing("nonsense", 1.0, *OF_GROUPS, "algorithm.old_logprob=corrected"),
        failing("without a turn", 1.0, "algorithm.old_logprob=bypass"),
        failing("refused", 0.5, "rollout.environment.arguments={how: raised}", expect="1"),
    )
    for how in ("raised", "nonsense", "without a turn"):
        lines = timeless(tmp_path / how / "metrics.jsonl")
        assert [(line["episode/failures"], line["actor/updates"]) for line in lines] == [(1.0, 0.0)] * 2
        assert not any(name.startswith("mismatch/") for line in lines for name in line)
    assert "80 of 80 episodes failed, more than rollout.environment.max_failure_fraction 0.5" in output
    assert "does not hold the actor's weights" not in output and "Traceback" not in output


def test_first_failed_reward_is_reported(tmp_path: Path) -> None:
    """A run reports the first failure once, with the line of code of the user. Each sample has its reason, with any
    selection, and each line has the share of failures. Prompts with unknown tokens are also reported."""
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}*1=", "answer": str(n)}) + "\n" for n in range(8)))
    overrides = (
        "run.steps=2", "checkpoint=null", "evaluation=null", f"data={{train: {{source: {data}}}, "
        "apply_chat_template: false, max_prompt_tokens: 8}", "logging.sample_texts=40",
        "reward={function: 'tests.support.troubled:fussy', failure_score: -0.5, max_failure_fraction: 0.9}",
    )  # fmt: skip
    first = train(tmp_path / "all", *overrides)
    chosen = train(tmp_path / "chosen", *overrides, "rollout.dynamic_sampling={max_rounds: 2}")
    broken = train(tmp_path / "broken", *overrides, "reward.max_failure_fraction=0.1", expect="1")
    output = attempts(tmp_path, first, chosen, broken)
    code = Path(troubled.__file__).read_text().splitlines()
    line = next(n for n, text in enumerate(code, 1) if "cannot read" in text)
    at = f"({troubled.__file__}:{line})"
    failures = re.findall(r"step 1: the first reward that failed: (ValueError: cannot read .*); each sets", output)
    assert len(failures) == 2 and all(at in failure for failure in failures)
    assert re.search(rf"max_failure_fraction 0.1; .* the first: ValueError: .* {re.escape(at)}", output)
    assert len(re.findall(r"step [12]/2 .*  failed rewards [0-9.]+%", output)) == 4
    assert "8 of 8 prompts of" in output and "8 of 32 tokens are <unk>; use the tokenizer of the model" in output
    for run in ("all", "chosen"):
        samples = [json.loads(text) for text in (tmp_path / run / "samples.jsonl").read_text().splitlines()]
        failed = [sample for sample in samples if int(sample["prompt"][0]) % 2]
        assert failed and all(at in sample["score_failure"] and sample["score"] == -0.5 for sample in failed)
        assert not any("score_failure" in sample for sample in samples if sample not in failed)


def test_torchrun_forwards_a_signal(tmp_path: Path) -> None:
    """A scheduler sends a signal to torchrun. The workers end with a checkpoint before torchrun kills them."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--shutdown-timeout", "250", "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1", "-m", "megappo"]
    command += train(tmp_path / "run", "run.steps=1000")["arguments"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        assert job.stdout is not None
        lines: list[str] = []
        while not lines or not lines[-1].startswith("step 1/"):
            lines.append(job.stdout.readline())
            assert lines[-1], lines
        job.send_signal(signal.SIGUSR1)
        output, _ = job.communicate(timeout=300)
    assert "SIGUSR1: stopping with a checkpoint as soon as the step allows" in output
    assert re.search(r"stopped after step \d+ with a checkpoint; the same command continues the run", output)
    assert list((tmp_path / "run/checkpoints").glob("step-*/checkpoint.json"))
