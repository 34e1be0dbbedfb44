"""A step's samples on the ranks of a role: sent there once, read by every forward pass and update of the step.

Each sample goes to the replicas that process it in some minibatch of the step or in the forward pass, known from the
lengths and the minibatches beforehand: at most 1 + epochs of them (and those that fill a schedule up with it). So a
rank holds no more than (1 + epochs) / replicas of the batch, and the plan of each minibatch stays balanced by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megappo.megatron.packing import MicrobatchPlan, plan_microbatches
from megappo.megatron.roles import Role, TrainedRole, Update
from megappo.megatron.schedule import PlacedSample, Task
from megappo.runtime.exchange import Routes, all_gather_varying, exchange, make_routes
from megappo.runtime.objects import from_rank
from megappo.types import RoutingShape, Samples


@dataclass(frozen=True)
class Manifest:
    """What every rank knows of all samples of the step; in the order of ranks, then of the rank's own samples."""

    homes: dict[int, int]
    """The rank that handed each sample over and gets its results."""
    tokens: dict[int, int]
    """Length of each sample, prompt and response together."""
    responses: dict[int, int]
    """Length of each response."""


@dataclass(frozen=True)
class PlacedBatch:
    """The samples of all ranks as one role holds them; every method is a collective of the world."""

    role: Role
    samples: Samples
    """The samples that this rank made and handed over."""
    here: Mapping[int, PlacedSample]
    """The samples that this rank processes by their ids, in the host's memory."""
    minibatches: tuple[Collection[int], ...]
    """Sample ids of each update of the step."""
    forward_plan: MicrobatchPlan
    update_plans: tuple[MicrobatchPlan, ...]
    """How each minibatch is cut into microbatches, in the order of `minibatches`."""
    manifest: Manifest
    there: Routes
    """Where each sample travels: from the rank that made it to those of the role that process it."""
    back: Routes
    """From the ranks that hand out results of the forward pass to the homes."""

    def forward(self) -> Tensor:
        """The model's output at each response token of this rank's samples: log-probabilities of the sampled tokens
        of a policy, values of a critic. (B, R) float32 on the CPU, padded with 0."""
        outputs = self.role.run_forward(self.forward_plan, self.here)
        device = self.role.runtime.device
        found = exchange(outputs, self.back, self.manifest.responses, dtype=torch.float32, device=device)
        lengths = self.samples.response_lengths_B.tolist()
        output_BR = torch.zeros(len(lengths), max(lengths, default=0))
        for output_R, sample_id, n in zip(output_BR, self.samples.sample_ids_B.tolist(), lengths, strict=True):
            output_R[:n] = found[sample_id]
        return output_BR

    def seen_by(self, role: Role) -> PlacedBatch:
        """The same samples for a role that stands in the same place; nothing is sent."""
        assert role.placement == self.role.placement
        return replace(self, role=role)

    def with_fields(self, fields_BR: Mapping[str, Tensor]) -> PlacedBatch:
        """The same samples with numbers for each response token, which are sent to where the samples are.

        The names and their order are the same on all ranks.
        """
        fields_FBR = torch.stack([values_BR.float() for values_BR in fields_BR.values()])
        mine = zip(self.samples.sample_ids_B.tolist(), self.samples.response_lengths_B.tolist(), strict=True)
        outgoing = {sample_id: fields_FBR[:, b, :n] for b, (sample_id, n) in enumerate(mine)}
        sizes = {sample_id: len(fields_BR) * n for sample_id, n in self.manifest.responses.items()}
        found = exchange(outgoing, self.there, sizes, dtype=torch.float32, device=self.role.runtime.device)
        here = {
            sample_id: replace(
                sample, fields=dict(zip(fields_BR, found[sample_id].view(len(fields_BR), -1), strict=True))
            )
            for sample_id, sample in self.here.items()
        }
        return replace(self, here=here)

    def update(self, number: int, task: Task, *, stop_above: tuple[str, float] | None = None) -> Update:
        """One optimizer update from the samples of a minibatch.

        Args:
            number: of the minibatch among `minibatches`.
            task: gives the weighted sum to differentiate and metrics of it, `loss` and `count` among them.
            stop_above: a metric and the mean per `count` from which the update is refused.
        """
        role, mine = self.role, None
        if isinstance(role, TrainedRole):
            mine = role.run_update(self.update_plans[number], self.here, task, stop_above)
        update = from_rank(mine, src=role.placement.grid.ranks[0])
        assert update is not None, f"{role.placement.name} is not trained"
        return update


def place(role: Role, samples: Samples, minibatches: Iterable[Collection[int]] = ()) -> PlacedBatch:
    """Send every rank's samples to the ranks of the role; a collective of the world.

    Args:
        samples: this rank's; ids are unique over all ranks.
        minibatches: sample ids of each update to come, the same on every rank.
    """
    minibatches, placement = tuple(minibatches), role.placement
    manifest = _announce(samples, role.runtime.device)
    plans = [
        plan_microbatches(
            {i: placement.grid.padded(manifest.tokens[i]) for i in minibatch},
            cost=placement.cost,
            replicas=placement.grid.dp,
            budget_tokens=placement.budget_tokens,
            multiple_of=placement.microbatch_multiple,
            in_step=placement.grid.replicas_in_step,
        )
        for minibatch in (manifest.tokens, *minibatches)
    ]
    destinations: dict[int, list[int]] = {i: [] for i in manifest.tokens}
    for replica in range(placement.grid.dp):
        for sample_id in {i for plan in plans for microbatch in plan.replicas[replica] for i in microbatch.sample_ids}:
            destinations[sample_id] += placement.grid.replica_ranks(replica)
    there = make_routes(manifest.homes, destinations)
    outgoing = dict(zip(samples.sample_ids_B.tolist(), samples.sequences, strict=True))
    found = exchange(outgoing, there, manifest.tokens, dtype=torch.int64, device=role.runtime.device)
    routing = _send_routing(role, samples, manifest, destinations)
    answering = {i: placement.grid.output_rank(replica) for i, replica in plans[0].replica_of().items()}
    return PlacedBatch(
        role=role,
        samples=samples,
        here={
            i: PlacedSample(i, tokens_T, manifest.responses[i], routing=routing.get(i)) for i, tokens_T in found.items()
        },
        minibatches=minibatches,
        forward_plan=plans[0],
        update_plans=tuple(plans[1:]),
        manifest=manifest,
        there=there,
        back=make_routes(answering, {i: (home,) for i, home in manifest.homes.items()}),
    )


def _send_routing(
    role: Role, samples: Samples, manifest: Manifest, destinations: Mapping[int, Sequence[int]]
) -> dict[int, Tensor]:
    """The routing of each sample that this rank processes, in the layers that are here, where the role replays it."""
    if samples.routing is None or not role.options.replays_routing:
        return {}
    shape, grid, layers = RoutingShape.of(role.arch), role.placement.grid, role.placement.stage_layers
    assert shape is not None
    stage_of = {rank: grid.stage_of(rank) for rank in grid.ranks}
    # What goes to a stage has an id of its own: sample x stages + stage.
    homes = {i * grid.pp + stage: home for i, home in manifest.homes.items() for stage in range(grid.pp)}
    to_stages = {i: [rank for rank in destinations[i // grid.pp] if stage_of[rank] == i % grid.pp] for i in homes}
    outgoing = {
        i * grid.pp + stage: routing_TLK[:, layers[stage]].contiguous().view(torch.uint8)
        for i, routing_TLK in zip(samples.sample_ids_B.tolist(), samples.routing, strict=True)
        for stage in range(grid.pp)
    }
    of_token = [len(of_stage) * shape.experts_per_token * shape.dtype.itemsize for of_stage in layers]
    sizes = {i: (manifest.tokens[i // grid.pp] - 1) * of_token[i % grid.pp] for i in homes}
    routes = make_routes(homes, to_stages)
    found = exchange(outgoing, routes, sizes, dtype=torch.uint8, device=role.runtime.device)
    return {
        i // grid.pp: flat.view(shape.dtype).view(-1, len(layers[i % grid.pp]), shape.experts_per_token)
        for i, flat in found.items()
    }


def _announce(samples: Samples, device: torch.device) -> Manifest:
    tokens_B = torch.tensor([len(s) for s in samples.sequences], dtype=torch.int64)
    local_B3 = torch.stack([samples.sample_ids_B, tokens_B, samples.response_lengths_B], dim=1).to(device)
    manifest = Manifest({}, {}, {})
    for rank, of_rank in enumerate(all_gather_varying(local_B3)):
        for sample_id, tokens, response in of_rank.tolist():
            manifest.homes[sample_id] = rank
            manifest.tokens[sample_id], manifest.responses[sample_id] = tokens, response
    return manifest
