"""Execution of microbatches with the pipeline schedules of Megatron.

Shape legend: t tokens of a packed microbatch including padding, l of these tokens on this rank; W response tokens in
the microbatch, N of these predicted on this rank. Without context parallelism, l = t and N = W.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn
from torch.nn.functional import pad

from megappo.megatron.context import WHOLE, ContextShard
from megappo.megatron.layers.router import microbatch_routing, routing_tensors
from megappo.megatron.layout import Layout
from megappo.megatron.patches.all_devices import PipelineSends
from megappo.megatron.segments import PackedSegments, packed_segments, segment_tensors
from megappo.observe.terminal.progress import MICROBATCHES, PROGRESS
from megappo.runtime.memory.transfer import to_device

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator


@dataclass(frozen=True)
class PlacedSample:
    """Sample on a rank that processes it, in host memory."""

    sample_id: int
    tokens_T: Tensor
    """Tokens of the prompt and the response (int64)."""
    response_tokens: int
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    """Values per response token that an update needs, (R,) float32 each."""
    routing: Tensor | None = None
    """Experts that the engine used for each token in this rank's layers, (T - 1, L, K). With None, routers choose the
    experts."""
    below_minimum_R: Tensor | None = None
    """Response tokens that were sampled without the stop tokens (bool); None without such tokens."""


@dataclass(frozen=True)
class PackedBatch:
    """Samples packed into one sequence, ready for the model."""

    sample_ids: tuple[int, ...]
    response_lengths: tuple[int, ...]
    tokens_1l: Tensor
    segments: PackedSegments
    rows_N: Tensor
    """Rows of this rank's tokens that predict a response token, (N,) int64."""
    labels_N: Tensor
    """Response token that each row predicts, (N,) int64."""
    sequences_N: Tensor
    """Index in `sample_ids` of the sample of each row, (N,) int64."""
    own_N: Tensor
    """Index of each row's response token among the W response tokens of the pack, (N,) int64."""
    below_minimum_N: Tensor | None
    """Rows with a token that was sampled without the stop tokens, (N,) bool; None without such tokens."""
    fields_W: Mapping[str, Tensor]
    """Concatenated fields of the samples (float32)."""
    is_filler: bool


def pack_samples(
    samples: Sequence[PlacedSample],
    device: torch.device,
    *,
    shard: ContextShard = WHOLE,
    multiple_of: int = 1,
    is_filler: bool = False,
    balance: float | None = None,
) -> PackedBatch:
    """Pack samples with the same fields, and keep the tokens of a context shard. The host does not wait for the
    device.

    With context parallelism, each sample is padded at its end, where no token attends to the padding. An additional
    segment fills a shard up to a multiple of `multiple_of` tokens. The output of this segment is not read. `balance`
    is the weight of a sample in the load-balancing loss, or None for a model without experts.
    """
    responses = [s.response_tokens for s in samples]
    padded = [shard.padded(len(s.tokens_T)) for s in samples]
    ends = [end - n + len(s.tokens_T) for end, n, s in zip(itertools.accumulate(padded), padded, samples, strict=True)]
    tokens = [pad(s.tokens_T, (0, n - len(s.tokens_T))) for n, s in zip(padded, samples, strict=True)]
    if missing := -sum(padded) % math.lcm(shard.padded(1), shard.size * multiple_of):
        tokens.append(torch.zeros(missing, dtype=torch.int64))
        padded.append(missing)
    predicting_W = torch.cat([torch.arange(end - r - 1, end - 1) for end, r in zip(ends, responses, strict=True)])
    labels_W = torch.cat([s.tokens_T[-s.response_tokens :] for s in samples])
    sequences_W = torch.cat([torch.full((r,), i) for i, r in enumerate(responses)])
    rows_N, own_N = shard.find(predicting_W, padded)
    fields = {name: torch.cat([s.fields[name] for s in samples]) for name in samples[0].fields}
    host_tensors = {"rows": rows_N, "labels": labels_W[own_N], "sequences": sequences_W[own_N], "own": own_N}
    marks = [s.below_minimum_R for s in samples if s.below_minimum_R is not None]
    if marks:
        host_tensors["below_minimum"] = torch.cat(marks)[own_N]
    places_l = shard.places(padded)
    host_tensors |= {"tokens": torch.cat(tokens)[places_l], **segment_tensors(padded, shard)}
    if balance is not None:
        lengths, routings = [len(s.tokens_T) for s in samples], [s.routing for s in samples if s.routing is not None]
        host_tensors |= routing_tensors(lengths, padded, places_l, routings, counts=not is_filler, balance=balance)
    tensors = to_device(host_tensors | {f"field {name}": values_W for name, values_W in fields.items()}, device)
    segments = packed_segments(padded, tensors, shard)
    segments.routing = microbatch_routing(tensors, len(samples)) if balance is not None else None
    return PackedBatch(
        sample_ids=tuple(s.sample_id for s in samples),
        response_lengths=tuple(responses),
        tokens_1l=tensors["tokens"].unsqueeze(0),
        segments=segments,
        rows_N=tensors["rows"],
        labels_N=tensors["labels"],
        sequences_N=tensors["sequences"],
        own_N=tensors["own"],
        below_minimum_N=tensors.get("below_minimum"),
        fields_W={name: tensors[f"field {name}"] for name in fields},
        is_filler=is_filler,
    )


Chunk: TypeAlias = "GPTModel | DistributedDataParallel"
"""Chunk of a model. Trained chunks have Megatron's data parallel wrapper."""
Head = TypeVar("Head", bound=nn.Module, contravariant=True)
Report = TypeVar("Report", covariant=True)


class Task(Protocol[Head, Report]):
    """Computation of a pass on the last stage."""

    def __call__(self, head: Head, hidden_t1H: Tensor, batch: PackedBatch) -> tuple[Tensor, Report]:
        """Apply the output layer to the hidden states of a microbatch, which sequence parallelism splits over tensor
        ranks. Return a scalar for differentiation and a report."""


def run_schedule(
    chunks: Sequence[Chunk],
    layout: Layout,
    microbatches: Sequence[PackedBatch],
    task: Task[Head, Report],
    *,
    train: bool,
) -> list[Report]:
    """Run the forward passes (and backward passes) of all microbatches through the pipeline.

    Gradients are summed over microbatches, context ranks and data parallel replicas. On the last stage, return the
    reports of `task` for each microbatch in order. On other stages, return an empty list.
    """

    def forward_step(
        batches: Iterator[PackedBatch], model: Chunk
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Report]]]:
        batch = next(batches)
        gpt = model.module if hasattr(model, "ddp_config") else model
        PROGRESS.add(MICROBATCHES, 1)
        hidden = model(batch.tokens_1l, batch.segments.positions[None], None, packed_seq_params=batch.segments)

        def finish(hidden_t1H: Tensor) -> tuple[Tensor, Tensor, Report]:
            scalar, report = task(gpt.output_layer, hidden_t1H, batch)
            # The function returns three values, because Megatron would multiply the first of two values by the context
            # parallel size (0.16.1 / 0.19.2, schedules.py:269/340). The second value is the token count of Megatron,
            # by which `calculate_per_token_loss` would divide. The first value is a clone, because
            # `deallocate_pipeline_outputs` frees the tensor and cannot free a view.
            return scalar.clone(), torch.zeros((), dtype=torch.int32, device=scalar.device), report

        return hidden, finish

    for chunk in chunks:
        chunk.train(train)
    schedule = get_forward_backward_func(pp_size=layout.grid.pp, vp_size=layout.vpp if layout.vpp > 1 else None)
    iterators = [iter(microbatches) for _ in chunks]
    communicator = _p2p(chunks, layout)
    sends = PipelineSends(communicator) if communicator is not None else None
    with torch.set_grad_enabled(train):
        reports = schedule(
            forward_step_func=forward_step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=list(chunks) if len(chunks) > 1 else chunks[0],
            num_microbatches=len(microbatches),
            seq_length=microbatches[0].tokens_1l.shape[1],
            micro_batch_size=1,
            forward_only=not train,
            pg_collection=layout.groups,
            p2p_communicator=communicator,
        )
    if sends is not None:
        sends.finish()
    return list(reports)


def _p2p(chunks: Sequence[Chunk], layout: Layout) -> P2PCommunicator | None:
    """Return the communicator of the pipeline, which the schedules need together with the process groups. Return None
    for a single stage."""
    if layout.grid.pp == 1:
        return None
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    return P2PCommunicator(pp_group=layout.groups.pp, config=chunks[0].config)


def finalize_summed_grads(models: list[DistributedDataParallel], num_tokens: Tensor | None, **groups: Any) -> None:
    """Finalise gradients with Megatron, without its division by the number of tokens. The loss weights are already
    global."""
    finalize_model_grads(models, None, **groups)
