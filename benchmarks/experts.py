#!/usr/bin/env python3
"""Compare the speed of grouped experts with Megatron's sequential experts.

Usage: python -m benchmarks.experts [--shapes 64x32 2048x768] [--dtypes bfloat16 float32] [--experts 128] [--chosen
8]
           [--tokens 512] [--device cuda|cpu] [--threads N] [--repeat 7] [--json FILE]

A shape is a hidden size and the size of an expert. The program measures forward and backward in turns, `repeat`
times each, with the same weights. It measures the experts alone on rows that are sorted by expert (Megatron's
`SequentialMLP` and `GroupedExperts`), and the whole layer with router and dispatcher (Megatron's and megappo's). The
weights are random, so experts have different numbers of rows. The program prints medians, speedups, and the largest
difference of the outputs relative to the largest output. Use one thread on a CPU with other load, because each of
hundreds of products waits for the slowest thread.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.kernel_timing import Machine, Provider
from benchmarks.report import parser_of, print_table, versions, write_json
from megappo.config.grid import Grid
from megappo.config.schema import RuntimeSettings
from megappo.megatron.build import DTYPES
from megappo.megatron.layers.experts import use_grouped_experts
from megappo.megatron.layers.routing import TokenDispatcher
from megappo.megatron.layout import Cut, Layout, make_layouts
from megappo.megatron.patches.all_devices import fix_router
from megappo.runtime.process import start_runtime


@dataclass(frozen=True)
class Shape:
    """Sizes of a measured layer."""

    hidden: int
    ffn: int
    dtype: str
    experts: int
    chosen: int
    tokens: int


@dataclass(frozen=True)
class Row:
    """Median seconds of forward and backward."""

    what: str
    shape: Shape
    megatron_seconds: float
    grouped_seconds: float
    speedup: float
    difference: float
    """Largest difference of the outputs, relative to the largest output."""


def configuration(shape: Shape, device: torch.device) -> Any:
    """Return Megatron's configuration of a model with one layer."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1, num_attention_heads=1, hidden_size=shape.hidden, ffn_hidden_size=shape.ffn,
        moe_ffn_hidden_size=shape.ffn, num_moe_experts=shape.experts, moe_router_topk=shape.chosen,
        moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0, moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall", gated_linear_unit=True, activation_func=nn.functional.silu,
        add_bias_linear=False, bias_activation_fusion=False, gradient_accumulation_fusion=False,
        params_dtype=DTYPES[shape.dtype], bf16=shape.dtype == "bfloat16", perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
    )  # fmt: skip


def make_layer(config: Any, groups: Any, *, grouped: bool) -> Any:
    """Build the router, dispatcher and experts of a layer, from megappo (`grouped`) or from Megatron."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization="RMSNorm")
    if grouped:
        use_grouped_experts(spec)
    mlp = spec.submodules.mlp
    arguments = {"config": config, "pg_collection": groups}
    layer = build_module(mlp, **arguments) if isinstance(mlp, ModuleSpec) else mlp(**arguments)
    if grouped:
        layer.token_dispatcher = TokenDispatcher(config, groups)
    return layer


def share_weights(ours: Any, theirs: Any) -> None:
    """Initialise the weights of one layer randomly, and share them with the other layer."""
    generator = torch.Generator(device=ours.experts.weight1.device).manual_seed(0)
    for weight in (ours.router.weight, ours.experts.weight1, ours.experts.weight2):
        weight.data.normal_(std=weight.shape[-1] ** -0.5, generator=generator)
    theirs.router.weight.data = ours.router.weight.data
    for number, expert in enumerate(theirs.experts.local_experts):
        expert.linear_fc1.weight.data = ours.experts.weight1.data[number]
        expert.linear_fc2.weight.data = ours.experts.weight2.data[number]


class Work:
    """Forward and backward of a module on fixed inputs."""

    def __init__(self, layers: list[Any], leaves: list[Tensor], call: Callable[[list[Tensor]], Tensor]) -> None:
        self.layers, self.leaves, self.call = layers, leaves, call
        self.output: Tensor | None = None

    def prepare(self, _round: int) -> Callable[[], None]:
        """Drop the gradients of all layers. Return the call to be timed."""
        for layer in self.layers:
            layer.zero_grad(set_to_none=True)
        leaves = [leaf.detach().clone().requires_grad_() for leaf in self.leaves]

        def run() -> None:
            output = self.call(leaves)
            output.backward(torch.ones_like(output))
            self.output = output.detach()

        return run


def works_of(shape: Shape, groups: Any, device: torch.device) -> dict[str, tuple[Work, Work]]:
    """Return pairs of Megatron's and megappo's work: for the experts alone, and for the whole layer."""
    config = configuration(shape, device)
    ours, theirs = (make_layer(config, groups, grouped=grouped).to(device) for grouped in (True, False))
    share_weights(ours, theirs)
    tokens = torch.randn(shape.tokens, 1, shape.hidden, device=device).to(config.params_dtype)
    with torch.no_grad():
        dispatcher = ours.token_dispatcher
        probs, chosen = ours.router(tokens)
        rows = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(tokens, chosen, probs))
        sorted_rows, counts, weights = dispatcher.dispatch_postprocess(*rows)

    def alone(experts: Any) -> Work:
        return Work([ours, theirs], [sorted_rows, weights], lambda leaves: experts(leaves[0], counts, leaves[1])[0])

    def whole(layer: Any) -> Work:
        return Work([ours, theirs], [tokens], lambda leaves: layer(leaves[0])[0])

    return {"experts": (alone(theirs.experts), alone(ours.experts)), "layer": (whole(theirs), whole(ours))}


def measure(shape: Shape, groups: Any, machine: Machine) -> list[Row]:
    """Return all rows of a shape. The modules alternate."""
    works = works_of(shape, groups, machine.device)
    providers = {
        what: [Provider(f"{what} {side}", work.prepare) for side, work in zip(("theirs", "ours"), pair, strict=True)]
        for what, pair in works.items()
    }
    machine.time([provider for pair in providers.values() for provider in pair])
    rows = []
    for what, pair in providers.items():
        if failed := next((p for p in pair if p.failure is not None), None):
            raise RuntimeError(f"{failed.name}: {failed.failure}")
        theirs, ours = (statistics.median(provider.seconds) for provider in pair)
        outputs = [work.output for work in works[what]]
        assert outputs[0] is not None and outputs[1] is not None
        difference = (outputs[0] - outputs[1]).abs().max() / outputs[0].abs().max()
        rows.append(Row(what, shape, theirs, ours, theirs / ours, float(difference)))
    return rows


def measure_all(shapes: list[Shape], device: str, repeat: int, threads: int | None) -> tuple[list[Row], int]:
    """Return all rows, and the number of CPU threads."""
    rows = []
    settings = RuntimeSettings.model_validate({"device": device, "threads_per_rank": threads})
    with start_runtime(settings):
        layout = make_layouts({"actor": Cut(Grid((0,), 1, 1))}, device, 120)["actor"]
        assert isinstance(layout, Layout)
        fix_router()
        for shape in shapes:
            rows += measure(shape, layout.groups, Machine(device, repeat))
        return rows, torch.get_num_threads()


def print_rows(rows: list[Row], title: str) -> None:
    """Print the rows as a table."""
    cells = []
    for r in rows:
        times = (f"{1e3 * seconds:.3g}" for seconds in (r.megatron_seconds, r.grouped_seconds))
        size = f"{r.shape.hidden} x {r.shape.ffn}"
        cells.append((r.what, size, r.shape.dtype, *times, f"{r.speedup:.2f}", f"{r.difference:.1e}"))
    print_table(title, ("", "hidden x expert", "type", "Megatron ms", "grouped ms", "speedup", "differ by"), cells)


def main() -> int:
    cuda = torch.cuda.is_available()
    parser = parser_of(__doc__, has_config=False)
    parser.add_argument("--shapes", nargs="+", default=["64x32", "2048x768"], metavar="HIDDENxEXPERT")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--chosen", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192 if cuda else 512)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if cuda else "cpu")
    parser.add_argument("--threads", type=int, help="CPU threads; default: all cores")
    parser.add_argument("--repeat", type=int, default=30 if cuda else 7)
    arguments = parser.parse_args()
    sizes = [tuple(int(number) for number in size.split("x")) for size in arguments.shapes]
    shapes = [
        Shape(hidden, ffn, dtype, arguments.experts, arguments.chosen, arguments.tokens)
        for hidden, ffn in sizes
        for dtype in arguments.dtypes
    ]
    rows, threads = measure_all(shapes, arguments.device, arguments.repeat, arguments.threads)
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{threads} thread{'s' * (threads > 1)}"
    routed = f"{arguments.tokens} tokens to {arguments.chosen} of {arguments.experts} experts"
    print_rows(rows, f"{routed}, {where}, medians of {arguments.repeat}")
    write_json(arguments, {**versions(), "rows": [asdict(r) for r in rows]})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
