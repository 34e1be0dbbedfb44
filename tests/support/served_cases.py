"""Runs with SGLang whose model, lengths, pools and faults are drawn at random."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pyarrow import parquet

from tests.support.harness import launch
from tests.support.lone_server import TOKENIZER, reference, token_logprobs
from tests.support.models import write_model
from tests.support.places import ROOT

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "glm4_moe")
"""Families that SGLang computes on a CPU."""
TIED = ("llama", "mistral", "qwen2", "qwen3")
STEPS = 4
_EOS = 1


@dataclass(frozen=True)
class ServedCase:
    """A random run."""

    seed: int
    family: str
    ahead: int
    changes: dict[str, Any]
    """Fields of config.json."""
    positions: int
    prompt_tokens: int
    response_tokens: int
    least_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    pool_tokens: int
    pause: str
    retracts: bool
    """Whether SGLang regularly retracts requests, even if the pool has free memory."""
    caches: bool
    """Whether servers have a prefix cache."""
    strikes: list[tuple[str, int, float]]
    """Kills of servers; see struck_run.py."""


def draw_case(seed: int, family: str, ahead: int) -> ServedCase:
    """Draw the case of a seed."""
    draw = random.Random(f"{seed} {family} {ahead}")
    positions = draw.choice([48, 64, 90])
    prompt_tokens = draw.randint(4, positions - 12)
    response_tokens = positions - prompt_tokens
    changes: dict[str, Any] = {"max_position_embeddings": positions, "num_hidden_layers": 2}
    rope = draw.choice(["default"] if family == "mixtral" else ["default", "linear", "llama3", "yarn"])
    if rope != "default":
        changes["rope_parameters"] = {"rope_type": rope, "rope_theta": 1e4, "factor": draw.choice([2.0, 4.0])}
    if rope in ("llama3", "yarn"):
        changes["rope_parameters"]["original_max_position_embeddings"] = 32
    if rope == "llama3":
        changes["rope_parameters"] |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if family == "glm4_moe":
        changes["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    if family in TIED:
        changes["tie_word_embeddings"] = draw.random() < 0.5
    least = draw.choice([0, min(6, response_tokens)])
    strikes = [
        ("sync", draw.randint(3, 12), 0.0),
        ("rollout", draw.randint(10, 60), draw.random() / 5),
        ("restart", draw.randint(1, 2), 8 * draw.random()),
    ]
    return ServedCase(
        seed, family, ahead, changes, positions, prompt_tokens, response_tokens, least,
        temperature=draw.choice([1.0, 0.7]),
        stop_token_ids=tuple(sorted(draw.sample(range(16, 131), draw.choice([0, 1, 8])))),
        pool_tokens=draw.choice([positions, 2 * positions, 40 * positions]),
        pause=draw.choice(["abort", "retract"]) if ahead == 2 else "abort",
        retracts=draw.random() < 0.5,
        caches=draw.random() < 0.5,
        strikes=strikes[: draw.randint(1, 3)],
    )  # fmt: skip


def _arguments(case: ServedCase, folder: Path) -> list[str]:
    servers = {
        "max_total_tokens": case.pool_tokens, "threads": 1, "count": 1, "pause": case.pause,
        "deterministic": not case.caches, "probe": case.pause == "abort", "verify": True, "max_restarts": 6,
        "stall_timeout_seconds": 5, "health_timeout_seconds": 10, "sync_timeout_seconds": 60,
        "environment": {"SGLANG_TEST_RETRACT": 1, "SGLANG_TEST_RETRACT_INTERVAL": 3} if case.retracts else {},
    }  # fmt: skip
    return [
        "train", str(ROOT / "configs/sglang_quickstart.yaml"), f"run.directory={folder / 'run'}", f"run.steps={STEPS}",
        f"run.seed={case.seed}", f"model.path={folder / 'model'}", f"model.tokenizer={TOKENIZER}",
        "model.init=pretrained", "actor.layout={}", "critic=null", "algorithm.estimator=grpo", "evaluation=null",
        "data.validation=null", "data.train={source: " + str(folder / "prompts.jsonl") + "}",
        f"data.max_prompt_tokens={case.prompt_tokens}", "data.apply_chat_template=false",
        "reward.function=tests.support.outside_reward:digits", "rollout.prompts_per_step=6",
        "rollout.samples_per_prompt=4", "actor.minibatch_sequences=24", "actor.optimizer.learning_rate=0.01",
        "actor.optimizer.schedule=constant", f"rollout.ahead={case.ahead}",
        *(["rollout.max_lag=2"] if case.ahead == 2 else []),
        f"rollout.max_response_tokens={case.response_tokens}", f"rollout.min_response_tokens={case.least_tokens}",
        f"rollout.temperature={case.temperature}", f"rollout.stop_token_ids={list(case.stop_token_ids)}",
        "rollout.servers=" + json.dumps(servers), "rollout.sync_bucket_bytes=16000", "algorithm.old_logprob=corrected",
        *(["algorithm.router_replay=false"] if case.ahead == 2 else []),
        "algorithm.mismatch_stop_nats=100", "algorithm.mismatch_warn_nats=100", "algorithm.entropy_coef=0.0",
        "logging={console: quiet, tensorboard: false, save_experience: {}}",
        "checkpoint={every_steps: 100, huggingface_every_steps: 1}",
    ]  # fmt: skip


def run_case(case: ServedCase, folder: Path) -> str:
    """Run a case and return its output."""
    write_model(folder / "model", case.family, case.seed, **case.changes)
    draw = random.Random(case.seed)
    lengths = [case.prompt_tokens, *(draw.randint(1, case.prompt_tokens) for _ in range(4))]
    texts = ["".join(draw.choice("0123456789+=") for _ in range(n)) for n in lengths]
    lines = [json.dumps({"prompt": draw.choice(texts), "answer": "1"}) for _ in range(6 * STEPS - len(texts))]
    lines += [json.dumps({"prompt": text, "answer": "1"}) for text in texts]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"arguments": _arguments(case, folder), "strikes": case.strikes}))
    return launch("struck_run.py", 1, plan, timeout_seconds=500)


@dataclass(frozen=True)
class Recomputed:
    """Results of transformers for the saved tokens of a run."""

    tokens: int
    gap: float
    """Largest difference of log-probabilities in nats."""
    versions: set[int]
    longest: int
    """Tokens of the longest prompt with its response."""
    split: int
    """Number of samples whose tokens have several versions."""


def recompute(case: ServedCase, folder: Path) -> Recomputed:
    """Recompute the log-probability of each saved token with the weights of its recorded version."""
    run = folder / "run"
    rows = [
        row
        for path in sorted((run / "experience").glob("step-*/rank-*.parquet"))
        for row in parquet.read_table(path).to_pylist()
    ]
    models: dict[int, Any] = {}
    gap, versions, split, masked = 0.0, set[int](), 0, {_EOS, *case.stop_token_ids}
    for row in rows:
        made = row.get("token_versions") or [row["weight_version"]] * len(row["response_tokens"])
        engine = torch.tensor(row["engine_logprobs"])
        for version in set(made):
            if version not in models:
                weights = folder / "model" if version == 1 else run / "huggingface" / f"step-{version - 1:06d}"
                models[version] = reference(weights)
            recomputed = token_logprobs(
                models[version], row["prompt_tokens"], row["response_tokens"], temperature=case.temperature,
                masked=masked, least_tokens=case.least_tokens,
            )  # fmt: skip
            of_version = torch.tensor([v == version for v in made])
            apart = (recomputed - engine)[of_version].abs()
            assert apart.isfinite().all()
            gap = max(gap, float(apart.max()))
        versions |= set(made)
        split += len(set(made)) > 1
    longest = max(len(row["prompt_tokens"]) + len(row["response_tokens"]) for row in rows)
    return Recomputed(sum(len(row["response_tokens"]) for row in rows), gap, versions, longest, split)
