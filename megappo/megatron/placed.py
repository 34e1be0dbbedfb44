"""Samples of a step on the ranks of a role. The samples are sent once and used by all forward passes and updates of
the step.

Lengths are announced once for all roles. Lengths and minibatches determine the replicas of each sample: a sample is
sent to the replicas that process it in the forward pass or in a minibatch of the step. There are at most 1 + epochs of
these replicas, plus the replicas that use the sample as a filler. A rank therefore has at most (1 + epochs) / replicas
of the batch, and each minibatch has its own balanced plan.
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
from megappo.runtime.ranks.exchange import Routes, all_gather_varying, exchange, make_routes
from megappo.runtime.ranks.objects import broadcast_object
from megappo.types import RoutingShape, Samples


@dataclass(frozen=True)
class Announced:
    """Samples of this rank, and the metadata of the samples of all ranks. The order is that of the ranks and of each
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
    """Send the ids and lengths of this rank's samples to all ranks. Sample ids are unique over all ranks. All ranks
    must call this function."""
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
    """Samples of all ranks on the ranks of one role. All ranks must call each method except `for_role`."""

    role: Role
    announced: Announced
    local_samples: Mapping[int, PlacedSample]
    """Samples that this rank processes, by id, in host memory."""
    minibatches: tuple[Collection[int], ...]
    """Sample ids of each update of the step."""
    forward_plan: MicrobatchPlan
    update_plans: tuple[MicrobatchPlan, ...]
    """Microbatches of each minibatch, in the order of `minibatches`."""
    sample_routes: Routes
    """Routes of the samples from the rank that generated them to the ranks of the role that process them."""
    result_routes: Routes
    """Routes of the results of the forward pass, from the output ranks to the rank of each sample."""

    @property
    def samples(self) -> Samples:
        """Samples that this rank generated and sent."""
        return self.announced.samples

    def forward(self) -> Tensor:
        """Return the output of the model at each response token of this rank's samples. The output of a policy is the
        log-probabilities of the sampled tokens, and the output of a critic is the values. The tensor is (B, R) float32
        on the CPU, padded with 0. R is 1 if there is no sample."""
        outputs = self.role.run_forward(self.forward_plan, self.local_samples)
        device = self.role.runtime.device
        received = exchange(outputs, self.result_routes, self.announced.responses, dtype=torch.float32, device=device)
        lengths = self.samples.response_lengths_B.tolist()
        output_BR = torch.zeros(len(lengths), max(lengths, default=1))
        for output_R, sample_id, n in zip(output_BR, self.samples.sample_ids_B.tolist(), lengths, strict=True):
            output_R[:n] = received[sample_id]
        return output_BR

    def for_role(self, role: Role) -> PlacedBatch:
        """Return the batch for another role with the same placement. No data is sent."""
        assert role.placement == self.role.placement
        return replace(self, role=role)

    def with_fields(self, fields_BR: Mapping[str, Tensor]) -> PlacedBatch:
        """Return the batch with additional values for each response token. The values are sent to the ranks with the
        samples.

        All ranks pass the same names in the same order.
        """
        fields_FBR = torch.stack([values_BR.float() for values_BR in fields_BR.values()])
        mine = zip(self.samples.sample_ids_B.tolist(), self.samples.response_lengths_B.tolist(), strict=True)
        outgoing = {sample_id: fields_FBR[:, b, :n] for b, (sample_id, n) in enumerate(mine)}
        sizes = {sample_id: len(fields_BR) * n for sample_id, n in self.announced.responses.items()}
        values = exchange(outgoing, self.sample_routes, sizes, dtype=torch.float32, device=self.role.runtime.device)
        local_samples = {
            sample_id: replace(
                sample, fields=dict(zip(fields_BR, values[sample_id].view(len(fields_BR), -1), strict=True))
            )
            for sample_id, sample in self.local_samples.items()
        }
        return replace(self, local_samples=local_samples)

    def update(
        self, number: int, task: Task[Head, Mapping[str, Tensor]], *, stop_above: tuple[str, float] | None = None
    ) -> Update:
        """Run one optimizer update on the samples of a minibatch.

        Args:
            number: index of the minibatch in `minibatches`.
            task: computes the weighted sum to differentiate and its metrics, including `loss` and `count`.
            stop_above: a metric and its limit; the update is skipped if the mean of the metric per `count` is above it.
        """
        role, mine = self.role, None
        if isinstance(role, TrainedRole):
            mine = role.run_update(self.update_plans[number], self.local_samples, task, stop_above)
        update = broadcast_object(mine, src=role.placement.grid.ranks[0])
        assert update is not None, f"{role.placement.name} is not trained"
        return update


def place(role: Role, announced: Announced, minibatches: Iterable[Collection[int]] = ()) -> PlacedBatch:
    """Send the samples of every rank to the ranks of the role. All ranks must call this function.

    Args:
        minibatches: sample ids of each planned update, the same on every rank.
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
    sample_routes = make_routes(announced.homes, replicas, ranks_of=grid.replica_ranks, own=grid.replica_of(rank))
    outgoing = dict(zip(samples.sample_ids_B.tolist(), samples.sequences, strict=True))
    sequences = exchange(outgoing, sample_routes, tokens, dtype=torch.int64, device=role.runtime.device)
    routing, marks = _send_routing(role, announced, replicas), _send_marks(role, announced, sample_routes)
    answering = {i: grid.output_rank(replica) for i, replica in plans[0].replica_of().items()}
    responses = announced.responses
    return PlacedBatch(
        role=role,
        announced=announced,
        local_samples={
            i: PlacedSample(i, tokens_T, responses[i], routing=routing.get(i), below_minimum_R=marks.get(i))
            for i, tokens_T in sequences.items()
        },
        minibatches=minibatches,
        forward_plan=plans[0],
        update_plans=tuple(plans[1:]),
        sample_routes=sample_routes,
        result_routes=make_routes(answering, {i: (home,) for i, home in announced.homes.items()}, own=rank),
    )


def _replicas(plans: Iterable[MicrobatchPlan]) -> dict[int, list[int]]:
    """Return the replicas that process each sample in any of the plans, in ascending order."""
    replicas_of_samples: defaultdict[int, set[int]] = defaultdict(set)
    for plan in plans:
        for replica, microbatches in enumerate(plan.replicas):
            for sample_id in (i for microbatch in microbatches for i in microbatch.sample_ids):
                replicas_of_samples[sample_id].add(replica)
    return {sample_id: sorted(replicas) for sample_id, replicas in replicas_of_samples.items()}


def _send_marks(role: Role, announced: Announced, routes: Routes) -> dict[int, Tensor]:
    """Return `below_minimum` of each sample that this rank processes. The result is empty for a role that excludes no
    token."""
    samples = announced.samples
    if samples.below_minimum is None or not role.options.stop_token_ids:
        return {}
    outgoing = dict(zip(samples.sample_ids_B.tolist(), [m.byte() for m in samples.below_minimum], strict=True))
    received = exchange(outgoing, routes, announced.responses, dtype=torch.uint8, device=role.runtime.device)
    return {sample_id: marks_R.bool() for sample_id, marks_R in received.items()}


def _send_routing(role: Role, announced: Announced, replicas: Mapping[int, Collection[int]]) -> dict[int, Tensor]:
    """Return the recorded routing of each sample that this rank processes, for the layers of this rank. The result is
    empty if the role does not replay the routing."""
    samples, grid, layers = announced.samples, role.placement.grid, role.placement.stage_layers
    if samples.routing is None or not role.options.replays_routing:
        return {}
    shape, place = RoutingShape.of(role.arch), grid.place(role.runtime.rank)
    assert shape is not None
    # Each stage receives only its own layers. The id of such a part is sample x stages + stage. Stages of replicas are
    # numbered in the same way.
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
    received = exchange(outgoing, routes, sizes, dtype=torch.uint8, device=role.runtime.device)
    return {
        i // grid.pp: flat.view(shape.dtype).view(-1, len(layers[i % grid.pp]), shape.experts_per_token)
        for i, flat in received.items()
    }
