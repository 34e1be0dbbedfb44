"""Build a tiny model on a layout and compare it with transformers; see test_models.py.

Usage (under torchrun): model_worker.py CASE.json FOUND.json
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.identity_op import IdentityOp
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

from megappo.config.grid import Grid
from megappo.config.role_models import load_architecture
from megappo.config.schema import ModelSettings
from megappo.families.architecture import padded_vocab_size
from megappo.families.flops import SampleCost
from megappo.megatron import build
from megappo.megatron.build import BuildOptions, RoleModel, build_model
from megappo.megatron.context import whole_output
from megappo.megatron.layers.swiglu import mlp_submodules
from megappo.megatron.layout import Cut, Layout, Outside, make_layouts
from megappo.megatron.roles import AbsentRole, LocalRole, Placement, Role
from megappo.megatron.schedule import PackedBatch, PlacedSample, pack_samples, run_schedule
from megappo.observe.terminal.progress import PROGRESS
from megappo.reshard.slices import EngineShape, Receiver
from megappo.reshard.sources import SafetensorsSource
from megappo.reshard.stream import WeightStream
from megappo.runtime.process import Runtime
from megappo.runtime.ranks.objects import all_gather_objects
from megappo_kernels.backend import use_backend
from megappo_kernels.gpu import layers as kernels
from tests.support.models import expert_by_expert
from tests.support.workers import answer

local_layers = build.layer_spec
LAUNCHES = ("launch_swiglu", "launch_swiglu_gradient", "launch_rotation")


def sequences(vocab: int, lengths: Sequence[int] = (9, 12, 5, 41)) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab, (n,), generator=g) for n in lengths]


def expected(folder: Path, tokens: list[torch.Tensor]) -> torch.Tensor:
    """Return (N, 1) log-probabilities of every token except the first, from transformers in float64."""
    # The fused expert kernels do not support float64.
    exact: dict[str, Any] = {"dtype": torch.float64, "experts_implementation": "eager", "attn_implementation": "eager"}
    if value_head := value_head_of(folder):
        trunk = AutoModel.from_pretrained(folder, **exact).eval()
        with torch.no_grad():
            hidden = torch.cat([trunk(sequence[None]).last_hidden_state[0, :-1] for sequence in tokens])
        return hidden @ value_head[0].double().T + value_head[1]
    model = AutoModelForCausalLM.from_pretrained(folder, **exact).eval()
    rows = []
    for sequence in tokens:
        with torch.no_grad():
            logp = model(sequence[None]).logits[0, :-1].log_softmax(-1)
        rows.append(logp.gather(1, sequence[1:, None]))
    return torch.cat(rows)


def value_head_of(folder: Path) -> tuple[torch.Tensor, float] | None:
    """Return the weight and bias of a value head with any of the known names."""
    stems = ("score", "v_head.summary", "value_head")
    tensors = dict(stored_tensors(folder))
    weight = next((tensors[f"{stem}.weight"] for stem in stems if f"{stem}.weight" in tensors), None)
    bias = next((float(tensors[f"{stem}.bias"]) for stem in stems if f"{stem}.bias" in tensors), 0.0)
    return None if weight is None else (weight, bias)


def stored_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the folder by their names in files, split by expert."""
    yield from expert_by_expert(load_file(folder / "model.safetensors"))


class NormAndLinear(ColumnParallelLinear):
    """A linear layer that contains its norm, with the name of Transformer Engine for the weight of the norm."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **settings: Any) -> None:
        super().__init__(input_size, output_size, config=config, **settings)
        self.layer_norm_weight = nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.eps = config.layernorm_epsilon

    def forward(self, input_: torch.Tensor, *rest: Any, **settings: Any) -> Any:
        normed = nn.functional.rms_norm(input_, (input_.shape[-1],), self.layer_norm_weight, self.eps)
        return super().forward(normed, *rest, **settings)


def fused_layers(*arguments: Any) -> Any:
    """Return the local layers with the names and positions of the parameters in Transformer Engine."""
    block = local_layers(*arguments)
    layer = block.layer_specs[0].submodules  # all are one
    layer.self_attention.submodules.linear_qkv = NormAndLinear
    mlp_submodules(block.layer_specs[0]).linear_fc1 = NormAndLinear
    layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
    return block


def outputs(head: Any, hidden_t1H: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of the output layer as the report, and their sum for a gradient."""
    output_N, _ = head(hidden_t1H, batch)
    return output_N.sum(), output_N.detach().clone()


def forward(model: RoleModel, layout: Layout, tokens: list[torch.Tensor], train: bool) -> torch.Tensor | None:
    samples = [PlacedSample(i, s, len(s) - 1) for i, s in enumerate(tokens)]
    batches = [
        pack_samples(part, torch.device("cpu"), shard=layout.shard, multiple_of=layout.token_multiple)
        for part in (samples[:3], samples[3:])
    ]
    before = PROGRESS.parts
    reports = run_schedule(model.chunks, layout, batches, outputs, train=train)
    assert PROGRESS.parts - before == len(batches) * len(model.chunks)  # the watchdog counts each part
    if not layout.reports_losses:
        return None
    totals = [sum(batch.response_lengths) for batch in batches]
    whole = [
        whole_output(output_N, batch.own_N, total, layout.groups.cp)[:, None]
        for output_N, batch, total in zip(reports, batches, totals, strict=True)
    ]
    return torch.cat(whole) if layout.hands_out_results else None


def check(case: dict[str, Any], runtime: Runtime) -> dict[str, Any] | None:
    """Return the errors of one case on the rank that returns results, and None on other ranks."""
    folder = Path(case["folder"])
    arch = load_architecture(folder, ModelSettings(path=str(folder), family=case.get("family")))
    cp = case.get("cp", 1)
    ranks = tuple(range(case["tp"] * case["pp"] * case.get("dp", 1) * cp))
    vpp, sp = case.get("vpp", 1), case.get("sp", False)
    grid = Grid(ranks, case["tp"], case["pp"], case.get("ep", 1), cp)
    layout = make_layouts({"actor": Cut(grid, vpp, sp)}, "cpu", 120)["actor"]
    vocab = padded_vocab_size(arch.vocab_size, case["tp"], 8 * case["tp"])
    options = BuildOptions(
        getattr(torch, case.get("dtype", "float32")), runtime.device, vocab, recompute=case.get("recompute", "none"),
        value_head_std=case.get("value_head_std"),
        chunk_layers=tuple(case["chunk_layers"]) if "chunk_layers" in case else None,
    )  # fmt: skip
    placement = Placement("actor", grid, budget_tokens=1, microbatch_multiple=1, cost=SampleCost(1, 0))
    role: Role = AbsentRole(placement, arch, options, runtime)
    output, tokens = None, sequences(arch.vocab_size, *([case["tokens"]] if "tokens" in case else []))
    launches = {name: Mock(wraps=getattr(kernels, name)) for name in LAUNCHES}
    if isinstance(layout, Layout):
        layers = fused_layers if case.get("fused") else local_layers
        with ExitStack() as stack:
            stack.enter_context(patch.object(build, "layer_spec", layers))
            if case.get("kernels"):
                stack.enter_context(use_backend("triton"))
                stack.enter_context(patch.multiple(kernels, **launches))
            model = build_model(arch, layout, options, SafetensorsSource(folder, arch))
            role = LocalRole(placement, model, runtime)
            output = forward(model, layout, tokens, case.get("train", False))
            if case.get("train"):
                check_tracker()
    streamed = stream_counted(WeightStream(role, case.get("bucket_bytes", 10_000)))
    if isinstance(layout, Outside) or not layout.hands_out_results:
        return None
    assert output is not None
    plain = Path(case.get("plain", folder))
    truth = expected(plain, tokens)
    source = dict(stored_tensors(plain))
    if "value_head_std" in case:
        source = {name: tensor for name, tensor in source.items() if name.startswith("model.")}
    assert streamed.keys() == source.keys(), streamed.keys() ^ source.keys()
    return {
        "error": float((output - truth).abs().max()),
        "largest": float(truth.abs().max()),
        "launches": [launches[name].call_count for name in LAUNCHES],
        "stream": max(float((streamed[n] - p.to(options.dtype)).abs().max()) for n, p in source.items()),
        "float32": sorted(name for name, tensor in streamed.items() if tensor.dtype == torch.float32),
        "unrounded": sorted(name for name, p in source.items() if torch.equal(streamed[name], p)),
    }


def stream_counted(stream: WeightStream) -> dict[str, torch.Tensor]:
    """Return the streamed model of this rank. Also stream the parts of ranks of an engine to the last rank. The
    received bytes and the slices must agree with the plan."""
    world, rank, tp = dist.get_world_size(), dist.get_rank(), 2 - stream.arch.kv_heads % 2
    parts_before = PROGRESS.parts
    whole = {name: tensor.clone() for name, tensor in stream}
    assert PROGRESS.parts > parts_before
    check_received(stream, [Receiver(rank) for rank in range(world)], 0)
    before, shape = stream.received_bytes, EngineShape(stream.arch, tp)
    receivers = [Receiver(world - 1, tp, n) for n in range(tp)]
    parts = [(name, tensor.clone()) for name, tensor in stream.to(receivers)]
    check_received(stream, receivers, before)
    assert len(parts) == (tp * len(whole) if rank == world - 1 else 0)
    planned_slices = [{s.name: s for p in stream.holdings.parameters for s in shape.pieces(p, n)} for n in range(tp)]
    for name, tensor in parts:
        pieces = [part[name] for part in planned_slices]
        assert any(torch.equal(tensor, whole[name].narrow(s.dim, s.start, s.size)) for s in pieces), name
    return whole


def check_received(stream: WeightStream, receivers: list[Receiver], before: int) -> None:
    """Check that the bytes received since `before` equal the plan."""
    mine = [receiver for receiver in receivers if receiver.rank == dist.get_rank()]
    planned = sum(stream.holdings.sources(receiver, stream.dtype.itemsize).total() for receiver in mine)
    assert stream.received_bytes - before == planned
    if not mine:
        assert stream.received_bytes == before


def check_tracker() -> None:
    """Check that fork() of the random state of Megatron switches the generator and restores it."""
    before = torch.get_rng_state()
    with get_cuda_rng_tracker().fork():
        torch.rand(3)
    assert torch.equal(before, torch.get_rng_state())


def first_result(case: dict[str, Any], runtime: Runtime) -> dict[str, Any]:
    return next(result for result in all_gather_objects(check(case, runtime)) if result is not None)


if __name__ == "__main__":
    answer(first_result)
