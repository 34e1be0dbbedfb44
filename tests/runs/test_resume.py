"""A run that is killed at any point and restarted equals an uninterrupted run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megappo.checkpoint.files import finished
from megappo.observe.metric_docs import METRICS
from tests.support.attempts import SMALL, assert_same_run, attempts, killed_at, timeless, train
from tests.support.config import TWO_TURNS
from tests.support.harness import succeed
from tests.support.models import write_model
from tests.support.places import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.waits]


def whole_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Load every tensor of a checkpoint."""
    metadata = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(m.size, dtype=m.properties.dtype)
        for name, m in metadata.items()
        if isinstance(m, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    return state


def test_killed_at_every_stage(tmp_path: Path) -> None:
    """Actor (TP2) and critic (PP2) share two processes. Each kill is one step later and on the other rank."""
    settings = ("run.steps=10", "checkpoint.every_steps=1", "algorithm.jumps={grad_norm_ratio: 1.2, kl_nats: 1e-9}",
                "actor.epochs=2", "critic.epochs=2", "actor.optimizer.clip_grad_norm=1e-3",
                "critic.optimizer.clip_grad_norm=1e-3")  # fmt: skip
    places = ("rollout", "reward", "forward", "advantages", "update_critic", "update_actor", "sync", "shards_written",
              "before_marker", "after_marker")  # fmt: skip
    killed = tmp_path / "killed"
    kills = [
        killed_at(killed, step, at, 0 if "marker" in at else step % 2, *settings, after_checkpoint=step - 1)
        for step, at in enumerate(places, start=1)
    ]
    output = attempts(tmp_path, train(tmp_path / "whole", *settings), *kills, train(killed, *settings))
    assert "was stopped before its first checkpoint and begins again" in output
    assert "continuing after step 1 from" in output
    assert "step-000008 was not finished and is skipped" in output
    assert_same_run(tmp_path / "whole", killed, 10)
    jumps = [json.loads(line) for line in (killed / "jumps.jsonl").read_text().splitlines()]
    reasons = {(jump["role"], reason.split()[0]) for jump in jumps for reason in jump["reasons"]}
    assert reasons == {("actor", "gradient"), ("actor", "KL"), ("critic", "gradient")}
    assert all(jump["of_samples"] == 40 and len(jump["samples"]) == 16 for jump in jumps)
    assert "stands out: gradient norm" in output and "its samples are in jumps.jsonl" in output


@pytest.mark.parametrize("kills", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_killed_with_all_stateful_features(tmp_path: Path, kills: int) -> None:
    """The run has bfloat16, tied embeddings on TP2 with uneven PP2, an optimizer that is distributed over CP2 and
    DP2, adaptive KL, and a penalty. Parts of the optimizers are on the host, a part of the critic is frozen, and the
    reference is refreshed after step 2. Each attempt offloads other tensors."""
    model = write_model(tmp_path / "model", "llama", 3, vocab_size=16, tie_word_embeddings=True)
    settings = (
        "run.steps=4", "checkpoint.every_steps=2", f"model.path={model}", "model.init=pretrained",
        "model.tokenizer=configs/models/tiny_arithmetic", "model.dtype=bfloat16", "algorithm.mismatch_stop_nats=5",
        "actor.layout={tensor_parallel: 2, pipeline_parallel: 2, pipeline_layers: [3, 1]}",
        "critic.layout={context_parallel: 2}", "critic.optimizer.distributed=true",
        "reference.refresh_every_steps=2", "algorithm.policy_loss=penalty",
        "algorithm.kl_in_reward={kind: kl, coef: 0.1, controller: adaptive, target: 0.5, horizon: 1000}",
        "actor.optimizer.schedule=cosine", "actor.optimizer.warmup_updates=3", "actor.optimizer.on_host=0.5",
        "critic.optimizer.on_host=0.3", "critic.freeze=[attention, embeddings]",
    )  # fmt: skip
    killed = tmp_path / "killed"
    everything = [f"{role}.offload=true" for role in ("actor", "critic", "reference")]
    ways = (
        (3, "update_critic", 1, ["actor.offload={optimizer: true}", "critic.offload={weights: true}"]),
        (4, "before_marker", 0, everything),
        (1, "update_actor", 3, everything),
        (2, "sync", 2, ["critic.offload={gradients: true, optimizer: true}", "reference.offload=true"]),
    )
    attempted = [
        killed_at(killed, step, at, rank, *settings, *offload, processes=4)
        for step, at, rank, offload in sorted(ways[:kills])
    ]
    whole, last = train(tmp_path / "whole", *settings, processes=4), ["actor.offload={weights: true, gradients: true}"]
    output = attempts(tmp_path, whole, *attempted, train(killed, *settings, *last, processes=4))
    assert "changed since then" not in output
    assert_same_run(tmp_path / "whole", killed, 4)
    kls = {line["step"]: line["kl/mean"] for line in timeless(killed / "metrics.jsonl") if line["step"]}
    assert [step for step, kl in kls.items() if abs(kl) < 1e-6] == [1, 3]  # reference equals actor


def interrupted_run(tmp_path: Path, settings: tuple[str, ...]) -> Path:
    """Kill a run between rollout and update, stop it in the next rollout, and compare the whole run with a run without
    interruptions. Return its directory."""
    killed = tmp_path / "killed"
    stop = {"step": 3, "at": "token", "rank": 1, "signal": "SIGTERM", "stall": "rollout"}
    kills = [killed_at(killed, 2, "update_critic", 0, *settings), train(killed, *settings, expect="85", kill=stop)]
    attempts(tmp_path, train(tmp_path / "whole", *settings), *kills, train(killed, *settings))
    assert_same_run(tmp_path / "whole", killed, 3)
    return killed


def test_killed_run_with_episodes(tmp_path: Path) -> None:
    """Episodes have two turns and a tool. The run is killed between rollout and update, then stopped during a
    rollout. The finished episodes are kept, and the others restart."""
    settings = (
        *TWO_TURNS, "run.steps=3", "checkpoint.every_steps=1", "rollout.when_stopped=keep",
        "data.validation={source: 'configs/examples/10_tools/lookup.py:keys', options: {held_out: true}}",
        "logging.sample_texts=100",
    )  # fmt: skip
    killed = interrupted_run(tmp_path, settings)
    samples = [json.loads(line) for line in (killed / "samples.jsonl").read_text().splitlines()]
    assert all([turn["by"] for turn in s["conversation"]][:2] == ["model", "environment"] for s in samples)
    line = timeless(killed / "metrics.jsonl")[-1]
    assert line["episode/turns"] == 2 and line["tool/lookup/calls"] == 1 and line["episode/failures"] == 0
    assert 0 < line["mismatch/max"] < 1e-4


@pytest.mark.exhaustive
def test_killed_run_with_episodes_one_step_ahead(tmp_path: Path) -> None:
    """Episodes of the next step are generated during the updates. The run is killed during this time, and later
    stopped. The finished episodes are kept. The others restart with the weights of their first attempt."""
    settings = (
        "run.steps=4", "checkpoint.every_steps=1", "rollout.ahead=1", "algorithm.old_logprob=corrected",
        "rollout.engine=tests.support.talking:TalkingEngine", "rollout.when_stopped=keep", *TWO_TURNS,
        "data.validation=null", "evaluation=null",
    )  # fmt: skip
    killed = tmp_path / "killed"
    stop = {"rank": 1, "step": 3, "at": "update_actor", "signal": "SIGTERM"}
    attempts(
        tmp_path, train(tmp_path / "whole", *settings), killed_at(killed, 2, "update_critic", 0, *settings),
        train(killed, *settings, expect="85", kill=stop), train(killed, *settings),
    )  # fmt: skip
    assert_same_run(tmp_path / "whole", killed, 4)
    lines = timeless(killed / "metrics.jsonl")[-4:]
    assert [line["rollout/lag"] for line in lines] == [0, 1, 1, 1]
    assert all(line["episode/turns"] == 2 and line["episode/failures"] == 0 for line in lines)


def test_state_of_data_and_evaluation_survives_a_kill(tmp_path: Path) -> None:
    """A step has several rounds of prompts from two sources, some prompts rest, and two validation sets are
    evaluated. The run is killed in an update and stopped in a rollout."""
    sums = "{source: 'megappo.data.arithmetic:sums', options: {max_operand: %d, modulus: 10}, %s}"
    settings = (
        "data.train=null", f"data.mixture={{few: {sums % (2, 'weight: 1')}, many: {sums % (9, 'weight: 2.5')}}}",
        "data.curriculum={right_above: 0, most_resting: 0.8}",
        f"data.validation_sets={{hard: {sums % (3, 'samples: 3, temperature: 0.7, pass_at: [1, 3], limit: 9')}}}",
        "checkpoint.keep_best=eval/hard/pass@3", "evaluation.every_steps=2",
        "run.steps=3", "checkpoint.every_steps=1", "rollout.dynamic_sampling={max_rounds: 3}",
        "reward={functions: {number: {function: number, weight: 2}, exact: {function: exact}}}",
        "reward.overlong={buffer_tokens: 1}", "reward.normalize=std", "reward.scale=2", "reward.shift=0.5",
        "rollout.generation=configs/examples/13_segments/segments.py:segments",
        "rollout.generation_options={tokens: 4}",
        "algorithm.mask_truncated=true", "algorithm.positive_nll_coef=0.1",
        "algorithm.lam={actor: {length_adaptive: 0.5}, critic: 1.0}", "rollout.max_response_tokens=6",
        "actor.epochs=2", "critic.epochs=2",  # enough updates to memorize some answers
    )  # fmt: skip
    killed = interrupted_run(tmp_path, settings)
    for line in timeless(killed / "metrics.jsonl")[1:]:
        assert 1 < line["group/rounds"] <= 3 and 0 < line["group/spread"] < 1 and 0 <= line["group/filled"] < 1
        assert 0 < line["response/truncated"] <= -line["reward/overlong"] < 1  # some responses end with the last token
        total = 2 * line["reward/number"] + line["reward/exact"]  # of all rounds
        assert 0 < total < line["reward/given"] and line["actor/nll_loss"] > 0
        shaped = 2 * (line["reward/given"] + line["reward/overlong"]) / line["reward/running_std"] + 0.5
        assert line["reward/mean"] == pytest.approx(shaped, abs=1e-6)
        sources = [(line[f"source/{n}/prompts"], line[f"source/{n}/reward_mean"]) for n in ("few", "many")]
        assert sum(prompts for prompts, _ in sources) == 10
        assert sum(prompts * mean for prompts, mean in sources) / 10 == pytest.approx(line["reward/mean"], abs=1e-6)
        assert line["source/few/right"] + line["source/many/right"] == line["curriculum/right"] > 0
    assert line["curriculum/resting"] > 0
    evaluated = [line for line in timeless(killed / "metrics.jsonl") if "eval/hard/pass@1" in line]
    assert [line["step"] for line in evaluated] == [0, 2, 3]  # the last step is always evaluated
    named = [n for n in {*evaluated[1]} if n.startswith(("source/", "curriculum/", "eval/"))]
    assert {re.sub(r"^(source|eval)/\w+/(pass@)?\d?", r"\1/NAME/\2", n).replace("@", "@K") for n in named} <= {*METRICS}
    assert all(0 <= e["eval/hard/pass@1"] <= e["eval/hard/pass@3"] <= 1 and "eval/reward_mean" in e for e in evaluated)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps under TP2 and PP2 with a checkpoint of each step."""
    folder = tmp_path_factory.mktemp("two")
    attempts(folder, train(folder / "run", "run.steps=2", "checkpoint.every_steps=1"))
    return folder / "run"


def assert_same_tensors(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    """Check that tensors are bitwise equal, except for rows of zeros that pad the vocabulary."""
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        other, rows = after[key], min(len(tensor), len(after[key]))
        assert torch.equal(tensor[:rows], other[:rows]), key
        assert not tensor[rows:].any() and not other[rows:].any(), key


@pytest.mark.parametrize("length", ["run.steps=4", "run.epochs=0.6"])
def test_template_clock_is_the_start_of_the_run(tmp_path: Path, length: str) -> None:
    """The template prints seconds, so each process would render other prompts with its own clock. The ranks also
    agree on the time if they render prompts before they exchange data."""
    model = tmp_path / "model"
    shutil.copytree(ROOT / "configs/models/tiny_arithmetic", model)
    clock = "{{ strftime_now('%d%H%M%S') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (model / "chat_template.jinja").write_text(clock)
    steps = ("run.epochs=null", length) if length.startswith("run.steps") else ("run.steps=null", length)
    settings = (
        *steps, "checkpoint.every_steps=1", f"model.path={model}", "data.apply_chat_template=true",
        "data.max_prompt_tokens=16", "rollout.prompts_per_step=5", "actor.minibatch_sequences=20",
        "critic.minibatch_sequences=20", "rollout.ahead=0",
    )  # fmt: skip
    run = tmp_path / "run"
    kill = killed_at(run, 3, "update_actor", 1, *settings, after_checkpoint=2)
    output = attempts(tmp_path, kill, train(run, *settings))
    assert re.search(r"continuing after step [12] from", output)
    markers = finished(run / "checkpoints").values()
    times = {marker.content["settings"]["data"]["template_time"] for marker in markers}
    assert len(markers) > 1 and len(times) == 1 and None not in times


@pytest.mark.parametrize(
    "read_by",
    [("one", "vpp", "tp_pp"), pytest.param(("pp_tp", "dp", "context", "apart"), marks=pytest.mark.exhaustive)],
    ids="-".join,
)
def test_another_layout_loads_the_same_numbers(tmp_path: Path, read_by: tuple[str, ...]) -> None:
    """Embeddings are tied, and each tensor parallel size pads the vocabulary to a different number of rows. Layouts
    of two ranks are also in checkpoint/test_layouts.py."""
    model = write_model(tmp_path / "model", "qwen2", 3, vocab_size=17, tie_word_embeddings=True)
    settings = ("run.steps=2", "checkpoint.every_steps=1", f"model.path={model}", "model.dtype=float32",
                "model.init=pretrained", "model.tokenizer=configs/models/tiny_arithmetic")  # fmt: skip
    layouts: dict[str, tuple[Any, ...]] = {
        "one": (1, "actor.layout={}", "critic.layout={}"),
        "pp_tp": (2, "actor.layout={pipeline_parallel: 2}", "critic.layout={tensor_parallel: 2}"),
        "vpp": (2, "actor.layout={pipeline_parallel: 2, virtual_pipeline_chunks: 2}", "critic.layout={}"),
        "dp": (2, "actor.layout={}", "critic.layout={}", "actor.optimizer.distributed=true"),
        "context": (2, "actor.layout={context_parallel: 2}", "critic.layout={context_parallel: 2}"),
        "apart": (3, "actor.layout={first_rank: 1, tensor_parallel: 2}", "critic.layout={ranks: 1}"),
        "tp_pp": (4, "actor.layout={tensor_parallel: 2, pipeline_parallel: 2}", "critic.layout={tensor_parallel: 2}"),
    }
    attempts(tmp_path, train(tmp_path / "run", *settings))
    planned = []
    for name in read_by:
        processes, *layout = layouts[name]
        shutil.copytree(tmp_path / "run", tmp_path / name)
        attempt = train(tmp_path / name, *settings, *layout, processes=processes)
        planned.append({**attempt, "arguments": attempt["arguments"][1:], "rewrite": True})
    attempts(tmp_path, *planned)
    before = whole_tensors(tmp_path / "run/checkpoints/step-000002")
    assert {"actor.weight.model.embed_tokens.weight", "critic.exp_avg_sq.value_head.weight"} <= before.keys()
    for name in read_by:
        assert_same_tensors(before, whole_tensors(tmp_path / name / "checkpoints/step-000002"))


def test_settings_may_change_within_limits(two_steps: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(two_steps, run)
    constant = "actor.optimizer.schedule=constant"
    output = attempts(
        tmp_path,
        train(run, "run.steps=2", "run.seed=2", expect="2"),
        train(run, "run.steps=3", expect="2"),
        train(run, "run.steps=3", "actor.optimizer.learning_rate=0.002", "run.force_resume=true", constant),
        train(run, "run.steps=3", "actor.optimizer.learning_rate=0.002", constant),
    )
    assert "holds a run with other settings (run.seed: 1 -> 2); set them back, choose another run.directory" in output
    assert "(run.steps: 2 -> 3 (learning rates decay over the run's steps))" in output
    assert "changed since then: actor.optimizer.learning_rate: 0.001 -> 0.002" in output
    assert output.count("continuing after step 2 from") == 1
    assert output.count("continuing after step 3 from") == 1
    assert "Traceback" not in output
    assert [line["step"] for line in timeless(run / "metrics.jsonl")] == [0, 1, 2, 3]


def test_damaged_checkpoint_is_skipped_with_a_message(two_steps: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(two_steps, run)
    shard = run / "checkpoints/step-000002/__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[5000] ^= 1
    shard.write_bytes(content)
    output = attempts(tmp_path, train(run, "run.steps=2", "checkpoint.every_steps=1"))
    assert "step-000002 is damaged and is skipped: __1_0.distcp has changed content" in output
    assert "continuing after step 1 from" in output
    assert timeless(run / "metrics.jsonl") == timeless(two_steps / "metrics.jsonl")
    assert (run / "final/model.safetensors").read_bytes() == (two_steps / "final/model.safetensors").read_bytes()


def test_resume_without_checkpoints_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    without = ("run.steps=1", "checkpoint=null")
    output = attempts(tmp_path, train(run, *without), train(run, *without, expect="2"), train(run, expect="2"))
    refusals = output.count("holds a run without any checkpoint to continue from; choose another run.directory")
    assert 2 <= refusals <= 4  # two attempts report the error on one or both ranks
    assert "Traceback" not in output


def test_another_reference_is_refused(tmp_path: Path) -> None:
    """The KL would be measured from a different policy after the resume."""
    first = write_model(tmp_path / "model", "llama", 3, vocab_size=16)
    settings = (
        f"model.path={first}", "model.init=pretrained", "model.tokenizer=configs/models/tiny_arithmetic",
        "model.dtype=float32", "reference={}", "algorithm.kl_in_loss={coef: 0.1}", "run.steps=1",
    )  # fmt: skip
    attempts(tmp_path, train(tmp_path / "run", *settings))
    write_model(first, "llama", 4, vocab_size=16)
    output = attempts(tmp_path, train(tmp_path / "run", *settings, expect="2"))
    assert "the weights of the reference are not those the run began with" in output
    assert "Traceback" not in output


def test_the_checkpoint_benchmark(tmp_path: Path) -> None:
    out = tmp_path / "checkpoint.json"
    arguments = ("configs/quickstart.yaml", *SMALL[:3], "--repeat", "1", "--json", out)
    output = succeed("benchmarks.checkpoint", *arguments, processes=2)
    rows = {row["what"]: row["median_seconds"] for row in json.loads(out.read_text())["rows"]}
    assert rows["stand-still, asynchronous"] < rows["on disk, waited for"]
    assert "torch.save of the same bytes" in output
