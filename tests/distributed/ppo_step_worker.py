"""Runs scenarios of one PPO step on given rollouts and saves metrics and weights; see test_ppo_step.py.

Usage (under torchrun): ppo_step_worker.py SCENARIOS.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from distributed.harness import own_groups
from megappo.assembly import assemble
from megappo.config import derive_run, load_config
from megappo.models.roles import NonFiniteUpdateError
from megappo.models.updates import minibatch_plan
from megappo.reporting import Reporter
from megappo.reshard.stream import WeightStream
from megappo.runtime import start_runtime
from megappo.trainer import Trainer
from megappo.types import Prompt, Rollouts


def rollouts_of_rank(samples: list[dict[str, Any]], rank: int, world: int) -> Rollouts:
    """Every world-th sample, with NaN wherever there is no token."""
    mine = [(i, s) for i, s in enumerate(samples) if i % world == rank]
    lengths = torch.tensor([s["response"] for _, s in mine])
    R = int(lengths.max())
    mask = torch.arange(R)[None] < lengths[:, None]
    logprob = torch.full((len(mine), R), float("nan"))
    logprob[mask] = -1.0
    return Rollouts(
        prompts=tuple(Prompt(i, tuple(s["tokens"][: -s["response"]]), "", None, {}) for i, s in mine),
        sample_ids_B=torch.tensor([i for i, _ in mine]),
        group_ids_B=torch.tensor([i for i, _ in mine]),
        sequences=tuple(torch.tensor(s["tokens"]) for _, s in mine),
        response_lengths_B=lengths,
        engine_logprob_BR=logprob,
        response_mask_BR=mask,
        truncated_B=torch.zeros(len(mine), dtype=torch.bool),
        weight_versions_B=torch.ones(len(mine), dtype=torch.int64),
        responses=("",) * len(mine),
        raw_responses=("",) * len(mine),
        special_tokens_B=torch.zeros(len(mine), dtype=torch.int64),
    )


def run(scenario: dict[str, Any], runtime: Any) -> None:
    """One scenario: build, score, estimate, update, save."""
    config = load_config(scenario["config"], scenario["overrides"])
    parts = assemble(config, derive_run(config, runtime.world_size), runtime)
    trainer = Trainer(parts, Reporter(config, parts.derived, runtime))
    trainer.step = 1
    samples = scenario["samples"]
    rollouts = rollouts_of_rank(samples, runtime.rank, runtime.world_size)
    ids = rollouts.sample_ids_B.tolist()
    scored = trainer.score(rollouts, torch.tensor([samples[i]["score"] for i in ids]))
    experience = trainer.estimate_advantages(scored)
    stopped = ""
    try:
        trainer.update_critic(experience)
        trainer.update_actor(experience)
    except NonFiniteUpdateError as error:
        stopped = str(error)
    per_sample = {
        i: {
            "old_logprob": scored.old_logprob_BR[b, :n].tolist(),
            "values": scored.values_BR[b, :n].tolist(),
            "advantages": experience.advantages_BR[b, :n].tolist(),
            "returns": experience.returns_BR[b, :n].tolist(),
        }
        for b, (i, n) in enumerate(zip(ids, rollouts.response_lengths_B.tolist(), strict=True))
    }
    gathered: list[Any] = [None] * runtime.world_size
    dist.all_gather_object(gathered, per_sample)
    actor = {name: tensor.clone() for name, tensor in parts.weights}
    critic = critic_weights(trainer, runtime)
    parts.close()
    if runtime.is_main:
        out = Path(scenario["out"])
        out.mkdir(parents=True)
        save_file(actor, out / "actor.safetensors")
        save_file(critic, out / "critic.safetensors")
        plans = {
            role: [sorted(m) for m in minibatch_plan(settings, len(samples), trainer._seed(role))]
            for role, settings in (("actor", config.actor), ("critic", config.critic))
        }
        merged = {str(k): v for part in gathered for k, v in part.items()}
        (out / "result.json").write_text(
            json.dumps({"stopped": stopped, "metrics": trainer.metrics, "samples": merged, "minibatches": plans})
        )


def critic_weights(trainer: Trainer, runtime: Any) -> dict[str, torch.Tensor]:
    """The critic's trunk by the stream, its head from the last stage."""
    critic, parts = trainer.parts.critic, trainer.parts
    assert critic is not None and parts.derived.critic is not None
    from megappo.assembly import load_architecture, model_folder

    arch = load_architecture(model_folder(parts.config.model.path), False)
    stream = WeightStream(
        critic.placement.grid,
        arch,
        critic.model,
        padded_vocab=parts.derived.critic.padded_vocab_size,
        dtype=torch.float32,
        device=runtime.device,
        bucket_bytes=1 << 20,
    )
    weights = {name: tensor.clone() for name, tensor in stream}
    head = [None]
    source = critic.placement.grid.output_rank(0)
    if runtime.rank == source:
        assert critic.model is not None
        layer = critic.model.chunks[-1].output_layer
        head = [(layer.weight.detach(), layer.bias.detach())]
    dist.broadcast_object_list(head, src=source)
    assert head[0] is not None
    return weights | {"head.weight": head[0][0].clone(), "head.bias": head[0][1].clone()}


def main() -> None:
    scenarios = json.loads(Path(sys.argv[1]).read_text())
    from megappo.config.schema import RuntimeSettings

    with start_runtime(RuntimeSettings(collective_timeout_seconds=120)) as runtime:
        for scenario in scenarios:
            with own_groups():
                run(scenario, runtime)


if __name__ == "__main__":
    main()
