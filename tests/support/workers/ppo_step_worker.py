"""Run one PPO step on given rollouts and save metrics and weights; see test_ppo_step.py.

Usage (under torchrun): ppo_step_worker.py SCENARIO.json FOUND.json
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megappo.config import derive_run, load_config, resolve
from megappo.config.schema import RuntimeSettings
from megappo.families.parameters import pieces
from megappo.families.weights import scatter_shard
from megappo.megatron.roles import LocalRole, Role, TrainedRole
from megappo.observe.ends import End
from megappo.ppo.assembly.components import assemble
from megappo.ppo.reports.reporting import Reporter
from megappo.ppo.trainer import Trainer
from megappo.ppo.updates import NonFiniteUpdateError
from megappo.reshard.stream import WeightStream
from megappo.runtime.process import start_runtime
from megappo.runtime.ranks.objects import all_gather_objects
from megappo.types import Episode, Episodes, Prompt, Rollouts, Turn
from tests.support.rewards import without_reward_workers


def rollouts_of_rank(samples: list[dict[str, Any]], rank: int, world: int) -> Rollouts:
    """Return every world-th sample, or every world-th group of samples, with NaN at positions without tokens."""
    mine = [(i, s) for i, s in enumerate(samples) if s.get("group", i) % world == rank]
    lengths = torch.tensor([s["response"] for _, s in mine])
    R = int(lengths.max())
    mask = torch.arange(R)[None] < lengths[:, None]
    logprob = torch.full((len(mine), R), float("nan"))
    logprob[mask] = torch.tensor([s.get("engine", -1.0) for _, s in mine]).repeat_interleave(lengths)
    episodes = episodes_of_samples([s["turn_rewards"] for _, s in mine], R) if "turn_rewards" in samples[0] else None
    if episodes is not None:
        mask &= ~episodes.turn_rewards_BR.isnan()
        logprob[~mask] = float("nan")
    return Rollouts(
        prompts=tuple(Prompt(i, tuple(s["tokens"][: -s["response"]]), "", None, {}) for i, s in mine),
        sample_ids_B=torch.tensor([i for i, _ in mine]),
        group_ids_B=torch.tensor([s.get("group", i) for i, s in mine]),
        sequences=tuple(torch.tensor(s["tokens"]) for _, s in mine),
        response_lengths_B=lengths,
        engine_logprob_BR=logprob,
        response_mask_BR=mask,
        ends=(End.COMPLETE,) * len(mine),
        weight_versions_B=torch.ones(len(mine), dtype=torch.int64),
        responses=("",) * len(mine),
        raw_responses=("",) * len(mine),
        special_tokens_B=torch.zeros(len(mine), dtype=torch.int64),
        routing=tuple(torch.tensor(s["routing"], dtype=torch.uint8) for _, s in mine)
        if "routing" in samples[0]
        else None,
        episodes=episodes,
    )


def episodes_of_samples(rewards: list[list[float | None]], R: int) -> Episodes:
    """Return episodes with these rewards at their tokens, and NaN at tokens that are not from the model."""
    nan = float("nan")
    padded = [[nan if r is None else r for r in of_sample] + [nan] * (R - len(of_sample)) for of_sample in rewards]
    episodes = tuple(Episode(tuple(turns_of(of_sample))) for of_sample in rewards)
    return Episodes(episodes, torch.tensor(padded), ((),) * len(rewards))


def turns_of(rewards: list[float | None]) -> Iterator[Turn]:
    """Yield the ranges of tokens from the model."""
    place = 0
    for is_own, tokens in itertools.groupby(rewards, key=lambda reward: reward is not None):
        start, place = place, place + len(list(tokens))
        if is_own:
            yield Turn(start, place)


def run(scenario: dict[str, Any], runtime: Any, out_file: Path) -> None:
    """Build the roles, compute scores and advantages, update the models, and save the results."""
    config = resolve(load_config(scenario["config"], scenario["overrides"]), on_cuda=runtime.device.type == "cuda")
    with without_reward_workers():
        parts = assemble(config, derive_run(config, runtime.world_size), runtime)
    trainer = Trainer(parts, Reporter(config, parts.derived, runtime))
    trainer.step = 1
    samples = scenario["samples"]
    rollouts = rollouts_of_rank(samples, runtime.rank, runtime.world_size)
    ids = rollouts.sample_ids_B.tolist()
    placed, scored = trainer.forward(rollouts, torch.tensor([samples[i]["score"] for i in ids]))
    experience = trainer.estimate_advantages(scored)
    stopped = ""
    try:
        if parts.critic is not None:
            trainer.update_critic(placed, experience)
        trainer.update_actor(placed, experience)
    except NonFiniteUpdateError as error:
        stopped = str(error)
    columns = {
        "old_logprob": scored.old_logprob_BR,
        "values": scored.values_BR,
        "advantages": experience.advantages_BR,
        "returns": experience.returns_BR,
    }
    per_sample = {
        i: {name: column[b, own].tolist() for name, column in columns.items() if column is not None}
        for b, (i, own) in enumerate(zip(ids, rollouts.response_mask_BR, strict=True))
    }
    gathered = all_gather_objects(per_sample)
    actor, stop_token_ids = {name: tensor.clone() for name, tensor in parts.weights}, parts.stop_token_ids
    critic = {} if parts.critic is None else critic_weights(trainer, runtime)
    adapters = {role.placement.name: adapter_weights(role) for role in parts.trained}
    parts.close()
    if runtime.is_main:
        out = Path(scenario["out"])
        out.mkdir(parents=True)
        save_file(actor, out / "actor.safetensors")
        if critic:
            save_file(critic, out / "critic.safetensors")
        for role, tensors in adapters.items():
            if tensors:
                save_file(tensors, out / f"{role}-adapters.safetensors")
        plans = {
            role: [sorted(m) for m in trainer.minibatches(role)] for role in ("actor", *(["critic"] if critic else []))
        }
        merged = {str(k): v for part in gathered for k, v in part.items()}
        out_file.write_text(
            json.dumps(
                {
                    "stopped": stopped, "metrics": trainer.metrics, "samples": merged, "minibatches": plans,
                    "stop_token_ids": list(stop_token_ids),
                    "built": {role: built(getattr(parts, role)) for role in plans},
                }
            )
        )  # fmt: skip


def built(role: Any) -> dict[str, Any]:
    """Return settings of Megatron for speed and memory, if rank 0 has a part of the role."""
    if not isinstance(role, TrainedRole):
        return {}
    ddp, config = role.optimizer.chunks[0].ddp_config, role.model.config
    return {
        "reduces": ddp.overlap_grad_reduce,
        "gathers": ddp.overlap_param_gather,
        "modules": config.recompute_modules,
        "frees": config.deallocate_pipeline_outputs,
    }


def adapter_weights(role: Role) -> dict[str, torch.Tensor]:
    """Return the PEFT tensors of the adapters of a role, combined from all ranks. The result is empty without
    adapters."""
    mine = []
    if isinstance(role, LocalRole) and role.options.lora is not None:
        place = role.layout.tensor_rank, role.layout.grid.tp, role.options.padded_vocab
        mine = [
            (parameter.entry, pieces(role.arch, parameter.entry, *place), role.read_shard(parameter).clone())
            for parameter in role.trained_parameters()
        ]
    adapters: dict[str, torch.Tensor] = {}
    for part in all_gather_objects(mine):
        for entry, slices, shard in part:
            for name, shape in entry.tensors.items():
                adapters.setdefault(name, torch.full(shape, float("nan")))
            scatter_shard(shard, slices, adapters)
    return adapters


def critic_weights(trainer: Trainer, runtime: Any) -> dict[str, torch.Tensor]:
    """Return the trunk of the critic from the stream and its head from the last stage."""
    critic = trainer.parts.critic
    assert critic is not None
    weights = {name: tensor.clone() for name, tensor in WeightStream(critic, 1 << 20)}
    head: list[tuple[torch.Tensor, torch.Tensor] | None] = [None]
    source = critic.placement.grid.output_rank(0)
    if runtime.rank == source:
        assert isinstance(critic, LocalRole)
        layer = critic.model.chunks[-1].output_layer
        head = [(critic.read(layer.weight), critic.read(layer.bias))]
    dist.broadcast_object_list(head, src=source)
    assert head[0] is not None
    return weights | {"head.weight": head[0][0].clone(), "head.bias": head[0][1].clone()}


def main() -> None:
    with start_runtime(RuntimeSettings(collective_timeout_seconds=120)) as runtime:
        run(json.loads(Path(sys.argv[1]).read_text()), runtime, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
