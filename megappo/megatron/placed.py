"""The samples of a step on the ranks of a role: sent there once, used by every forward pass and update of the step.

Lengths are announced once for all roles. Lengths and minibatches determine where each sample goes: to the replicas that
process it in the forward pass or in a minibatch of the step, at most 1 + epochs of them (and those that use it as a
filler). So a rank holds no more than (1 + epochs) / replicas of the batch, and the plan of each minibatch is balanced
on its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megappo.megatron.packing import MicrobatchPlan, plan_microbatches
from megappo.megatron.roles import Role, TrainedRole, Update
from megappo.megatron.schedule import Head, PlacedSample, Task
from megappo.runtime.exchange import Routes, all_gather_varying, exchange, make_routes
from megappo.runtime.objects import broadcast_object
from megappo.types import RoutingShape, Samples


@dataclass(frozen=True)
class Announced:
    """This rank's samples, and what every rank knows about the samples of all ranks, in the order of ranks and of each
    rank's samples."""

    samples: Samples
    """Samples that this rank generated and sends."""
    homes: dict[int, int]
    """Rank that sends each sample and receives its results."""
    tokens: dict[int, int]
    """Length of each sample, prompt and response together."""
    responses: dict[int, int]
    """Length of each response."""


def announce(samples: Samples, device: torch.device) -> Announced:
    """Tell all ranks about this rank's samples, whose ids are unique over all ranks; a collective of the world."""
    tokens_B = torch.tensor([len(s) for s in samples.sequences], dtype=torch.int64)
    local_B3 = torch.stack([samples.sample_ids_B, tokens_B, samples.response_lengths_B], dim=1).to(device)
    announced = Announced(samples, {}, {}, {})
    for rank, of_rank in enumerate(all_gather_varying(local_B3)):
        for sample_id, tokens, response in of_rank.tolist():
            announced.homes[sample_id] = rank
            announced.tokens[sample_id], announced.responses[sample_id] = tokens, response
    return announced


@dataclass(frozen=True)
class PlacedBatch:
    """The samples of all ranks as one role holds them. Every method is a collective of the world, except `for_role`."""

    role: Role
    announced: Announced
    here: Mapping[int, PlacedSample]
    """Samples that this rank processes, by id, in host memory."""
    minibatches: tuple[Collection[int], ...]
    """Sample ids of each update of the step."""
    forward_plan: MicrobatchPlan
    update_plans: tuple[MicrobatchPlan, ...]
    """Microbatches of each minibatch, in the order of `minibatches`."""
    there: Routes
    """Routes of the samples, from the rank that generated each one to the ranks of the role that process it."""
    back: Routes
    """Routes of the forward pass's results, from the output ranks to the rank that each sample came from."""

    @property
    def samples(self) -> Samples:
        """The samples that this rank generated and sent."""
        return self.announced.samples

    def forward(self) -> Tensor:
        """The model's output at each response token of this rank's samples: a policy's log-probabilities of the sampled
        tokens, or a critic's values. (B, R) float32 on the CPU, padded with 0; R is 1 where there is no sample."""
        outputs = self.role.run_forward(self.forward_plan, self.here)
        device = self.role.runtime.device
        found = exchange(outputs, self.back, self.announced.responses, dtype=torch.float32, device=device)
        lengths = self.samples.response_lengths_B.tolist()
        output_BR = torch.zeros(len(lengths), max(lengths, default=1))
        for output_R, sample_id, n in zip(output_BR, self.samples.sample_ids_B.tolist(), lengths, strict=True):
            output_R[:n] = found[sample_id]
        return output_BR

    def for_role(self, role: Role) -> PlacedBatch:
        """The batch for another role with the same placement; nothing is sent."""
        assert role.placement == self.role.placement
        return replace(self, role=role)

    def with_fields(self, fields_BR: Mapping[str, Tensor]) -> PlacedBatch:
        """The batch with further numbers for each response token, which are sent to the ranks that have the samples.

        All ranks pass the same names in the same order.
        """
        fields_FBR = torch.stack([values_BR.float() for values_BR in fields_BR.values()])
        mine = zip(self.samples.sample_ids_B.tolist(), self.samples.response_lengths_B.tolist(), strict=True)
        outgoing = {sample_id: fields_FBR[:, b, :n] for b, (sample_id, n) in enumerate(mine)}
        sizes = {sample_id: len(fields_BR) * n for sample_id, n in self.announced.responses.items()}
        found = exchange(outgoing, self.there, sizes, dtype=torch.float32, device=self.role.runtime.device)
        here = {
            sample_id: replace(
                sample, fields=dict(zip(fields_BR, found[sample_id].view(len(fields_BR), -1), strict=True))
            )
            for sample_id, sample in self.here.items()
        }
        return replace(self, here=here)

    def update(
        self, number: int, task: Task[Head, Mapping[str, Tensor]], *, stop_above: tuple[str, float] | None = None
    ) -> Update:
        """Run one optimizer update on the samples of a minibatch.

        Args:
            number: index of the minibatch in `minibatches`.
            task: computes the weighted sum to differentiate and its metrics, `loss` and `count` among them.
            stop_above: a metric and the mean per `count` above which the update is refused.
        """
        role, mine = self.role, None
        if isinstance(role, TrainedRole):
            mine = role.run_update(self.update_plans[number], self.here, task, stop_above)
        update = broadcast_object(mine, src=role.placement.grid.ranks[0])
        assert update is not None, f"{role.placement.name} is not trained"
        return update


def place(role: Role, announced: Announced, minibatches: Iterable[Collection[int]] = ()) -> PlacedBatch:
    """Send every rank's samples to the ranks of the role; a collective of the world.

    Args:
        minibatches: sample ids of each update to come, the same on every rank.
    """
    minibatches, placement = tuple(minibatches), role.placement
    grid, tokens = placement.grid, announced.tokens
    plans = [
        plan_microbatches(
            {i: grid.padded(tokens[i]) for i in minibatch},
            cost=placement.cost,
            replicas=grid.dp,
            budget_tokens=placement.budget_tokens,
            multiple_of=placement.microbatch_multiple,
            in_step=grid.replicas_in_step,
        )
        for minibatch in (tokens, *minibatches)
    ]
    samples, rank = announced.samples, role.runtime.rank
    replicas = _replicas(plans)
    there = make_routes(announced.homes, replicas, ranks_of=grid.replica_ranks, own=grid.replica_of(rank))
    outgoing = dict(zip(samples.sample_ids_B.tolist(), samples.sequences, strict=True))
    found = exchange(outgoing, there, tokens, dtype=torch.int64, device=role.runtime.device)
    routing, marks = _send_routing(role, announced, replicas), _send_marks(role, announced, there)
    answering = {i: grid.output_rank(replica) for i, replica in plans[0].replica_of().items()}
    responses = announced.responses
    return PlacedBatch(
        role=role,
        announced=announced,
        here={
            i: PlacedSample(i, tokens_T, responses[i], routing=routing.get(i), below_minimum_R=marks.get(i))
            for i, tokens_T in found.items()
        },
        minibatches=minibatches,
        forward_plan=plans[0],
        update_plans=tuple(plans[1:]),
        there=there,
        back=make_routes(answering, {i: (home,) for i, home in announced.homes.items()}, own=rank),
    )


def _replicas(plans: Iterable[MicrobatchPlan]) -> dict[int, list[int]]:
    """Replicas that process each sample in any of the plans, in ascending order."""
    found: defaultdict[int, set[int]] = defaultdict(set)
    for plan in plans:
        for replica, microbatches in enumerate(plan.replicas):
            for sample_id in (i for microbatch in microbatches for i in microbatch.sample_ids):
                found[sample_id].add(replica)
    return {sample_id: sorted(replicas) for sample_id, replicas in found.items()}


def _send_marks(role: Role, announced: Announced, there: Routes) -> dict[int, Tensor]:
    """`below_minimum` of each sample that this rank processes; empty for a role that excludes no token."""
    samples = announced.samples
    if samples.below_minimum is None or not role.options.stop_token_ids:
        return {}
    outgoing = dict(zip(samples.sample_ids_B.tolist(), [m.byte() for m in samples.below_minimum], strict=True))
    received = exchange(outgoing, there, announced.responses, dtype=torch.uint8, device=role.runtime.device)
    return {sample_id: marks_R.bool() for sample_id, marks_R in received.items()}


def _send_routing(role: Role, announced: Announced, replicas: Mapping[int, Collection[int]]) -> dict[int, Tensor]:
    """Recorded routing of each sample that this rank processes, for this rank's layers; empty where the role does not
    replay it."""
    samples, grid, layers = announced.samples, role.placement.grid, role.placement.stage_layers
    if samples.routing is None or not role.options.replays_routing:
        return {}
    shape, place = RoutingShape.of(role.arch), grid.place(role.runtime.rank)
    assert shape is not None
    # Each stage is sent its own layers. The id of such a part is sample x stages + stage; stages of replicas are
    # numbered alike.
    stages = range(grid.pp)
    homes = {i * grid.pp + stage: home for i, home in announced.homes.items() for stage in stages}
    to_stages = {
        i * grid.pp + stage: [r * grid.pp + stage for r in replicas[i]] for i in announced.homes for stage in stages
    }
    outgoing = {
        i * grid.pp + stage: routing_TLK[:, layers[stage]].contiguous().view(torch.uint8)
        for i, routing_TLK in zip(samples.sample_ids_B.tolist(), samples.routing, strict=True)
        for stage in stages
    }
    of_token = [len(of_stage) * shape.experts_per_token * shape.dtype.itemsize for of_stage in layers]
    sizes = {i: (announced.tokens[i // grid.pp] - 1) * of_token[i % grid.pp] for i in homes}
    routes = make_routes(
        homes,
        to_stages,
        ranks_of=lambda group: grid.stage_of_replica(*divmod(group, grid.pp)),
        own=None if place is None else place[0] * grid.pp + place[1],
    )
    found = exchange(outgoing, routes, sizes, dtype=torch.uint8, device=role.runtime.device)
    return {
        i // grid.pp: flat.view(shape.dtype).view(-1, len(layers[i % grid.pp]), shape.experts_per_token)
        for i, flat in found.items()
    }
