"""Low-rank adapters on Megatron's parallel layers and on grouped experts.

A layer computes W x + scale B A x, and W requires no gradient. Later operations of the layer, such as the norms after
Gemma's products, apply to this sum. Between A and B, there are only `rank` numbers for each token and matrix. Tensor
parallel ranks exchange these numbers:

- Column parallel: A is replicated and gets the rank's part of the sequence. The output of A is gathered along the
  sequence, or copied with a sum in the backward pass. The result is multiplied by the rows of B that correspond to the
  rank's rows of W.
- Row parallel: A has the rank's columns, and its output is summed over ranks (and scattered along the sequence). B is
  replicated.

The gradient of a replicated factor is the gradient of all tokens. With sequence parallelism, it is the gradient of the
rank's tokens, and Megatron sums it over ranks in the same way as for norms (`sequence_parallel`).

Shape legend: P rows of all A of a parameter, O rows of its B, I inputs, L experts of this rank, R rows for these
experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.nn.functional import linear

from megappo.families.adapters import Adapter, LoraShape, RowOrder, adapters
from megappo.families.declaration import ArchitectureConfig, Shape
from megappo.families.parameters import Parameter, shard_shape
from megappo.megatron.layers.parallel import expert_products, whole_input
from megappo.megatron.layout import Layout
from megappo.megatron.local_shards import LocalShard

if TYPE_CHECKING:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

Product = Callable[[Tensor, Tensor], Tensor]
"""Product of inputs with a matrix or with a stack of matrices."""


class Switch:
    """Switch that turns the adapters of a model on and off."""

    def __init__(self) -> None:
        self.is_on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """Turn the adapters off within the context. The model then computes bit-identical results to a model without
        adapters."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True


class LowRank(nn.Module):
    """Adapter matrices A and B of one parameter of Megatron.

    `add_to` calls the module, because Megatron's hooks wait for weights from other ranks only in module calls.
    """

    def __init__(self, a: Tensor, b: Tensor, scale: float, order: RowOrder, switch: Switch) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(a), nn.Parameter(b)
        self.scale, self.order, self.switch = scale, order, switch

    def add_to(self, output: Tensor, *inputs: Tensor) -> Tensor:
        """Return the output of the layer, plus the output of the adapters if they are on."""
        added: Tensor = self(output, *inputs) if self.switch.is_on else output
        return added

    def _expanded(self, low: Tensor, product: Product) -> Tensor:
        """Convert (..., P) to (..., outputs of the parameter). The output of each A is multiplied by its B and placed
        at the rows of its matrix."""
        order, lead = self.order, self.b.shape[:-2]
        lows = iter((low * self.scale).chunk(sum(order.adapted), dim=-1))
        of_groups = self.b.view(*lead, order.groups, -1, self.b.shape[-1])
        adapted = [rows for rows, has_one in zip(order.rows, order.adapted, strict=True) if has_one]
        bs = iter(of_groups.split(adapted, dim=-2))
        parts = []
        for rows, has_one in zip(order.rows, order.adapted, strict=True):
            if has_one:
                part = product(next(lows).contiguous(), next(bs).reshape(*lead, order.groups * rows, -1))
                parts.append(part.unflatten(-1, (order.groups, rows)))
            else:
                parts.append(low.new_zeros(*low.shape[:-1], order.groups, rows))
        return torch.cat(parts, dim=-1).flatten(-2)


class LinearAdapter(LowRank):
    """Adapter of a tensor parallel layer."""

    def __init__(self, *parts: Any, layout: Layout, of_rows: bool) -> None:
        super().__init__(*parts)
        self._layout, self._of_rows = layout, of_rows

    def forward(self, output: Tensor, inputs: Tensor) -> Tensor:
        """Add the output of the adapters to the output of the layer."""
        return output + self._expanded(self._between_ranks(linear(inputs, self.a)), linear)

    def _between_ranks(self, low: Tensor) -> Tensor:
        group = self._layout.groups.tp
        if self._layout.grid.tp == 1:
            return low
        if not self._of_rows:
            return whole_input(low, group, sequence_parallel=self._layout.sequence_parallel)
        if self._layout.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(low, group=group)
        return reduce_from_tensor_model_parallel_region(low, group=group)


class ExpertAdapter(LowRank):
    """Adapter of all experts of this rank."""

    def forward(self, output_RO: Tensor, rows_RI: Tensor, counts_L: Tensor) -> Tensor:
        """Add the output of the adapters to the output of the experts' matrix."""

        def product(rows: Tensor, matrix: Tensor) -> Tensor:
            return expert_products(rows, matrix, counts_L)

        return output_RO + self._expanded(product(rows_RI, self.a), product)


def attach_adapters(
    arch: ArchitectureConfig, layout: Layout, lora: LoraShape, chunks: Sequence[GPTModel], *, is_critic: bool
) -> Switch:
    """Attach uninitialised adapters to the matrices of the chunks, and freeze all weights except the head of
    a critic."""
    switch = Switch()
    templates = list(adapters(arch, lora, experts=range(min(1, arch.experts))))
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(is_critic and name.startswith("output_layer."))
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(_begin_gradients)
        layers = {layer.layer_number - 1: layer for layer in chunk.decoder.layers}
        for adapter in templates:
            if adapter.base.layer in layers:
                order = RowOrder.of(arch, adapter, layout.grid.tp)
                shapes = [shard_shape(arch, p, layout.grid.tp, arch.vocab_size) for p in (adapter.a, adapter.b)]
                _attach(layers[adapter.base.layer], adapter, shapes, (lora.scale, order, switch), layout)
    return switch


def freeze(shards: Iterable[LocalShard], frozen: Iterable[Parameter], chunks: Sequence[GPTModel]) -> None:
    """Stop training the frozen parameters of a rank."""
    names = {parameter.megatron for parameter in frozen}
    for shard in shards:
        if shard.entry.megatron in names:
            shard.parameter.requires_grad_(False)
    if names and chunks[0].pre_process:
        chunks[0].embedding.register_forward_hook(_begin_gradients)


def _begin_gradients(_embedding: nn.Module, _inputs: tuple[Tensor, ...], hidden: Tensor) -> None:
    """Make the output of the embedding require a gradient. Layers with recomputation in the backward pass get no
    gradient if no input requires one."""
    if torch.is_grad_enabled():
        hidden.requires_grad_()


def _attach(
    layer: nn.Module, adapter: Adapter, shapes: Sequence[Shape], rest: tuple[float, RowOrder, Switch], layout: Layout
) -> None:
    """Attach an adapter to one parameter of a layer."""
    base = adapter.base
    path = base.megatron.split(".")[3:]
    if base.expert is not None:  # all experts share one parameter: mlp.experts.0.weight1 is in mlp.experts.weight1
        experts = layer.get_submodule(".".join(path[:-2]))
        weight = getattr(experts, path[-1])
        a, b = (weight.new_empty(len(weight), *shape) for shape in shapes)
        setattr(experts, path[-1].replace("weight", "lora"), ExpertAdapter(a, b, *rest))
        return
    parallel: ColumnParallelLinear | RowParallelLinear = layer.get_submodule(".".join(path[:-1]))
    a, b = (parallel.weight.new_empty(shape) for shape in shapes)
    lora = LinearAdapter(a, b, *rest, layout=layout, of_rows=base.kind == "row")
    if layout.sequence_parallel:
        whole: Any = lora.b if base.kind == "row" else lora.a
        whole.sequence_parallel = True
    parallel.lora = lora

    def add(
        _layer: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        return lora.add_to(output[0], inputs[0]), *output[1:]

    parallel.register_forward_hook(add, prepend=True)  # before a norm, which is also a hook


def merged(weight_OI: Tensor, a_PI: Tensor, b_OR: Tensor, scale: float, order: RowOrder) -> Tensor:
    """Return the shard of a matrix with its adapters added in float32 as a new tensor. The result is rounded once."""
    matrices = iter(a_PI.float().chunk(sum(order.adapted)))
    adapted = [rows for rows, has_one in zip(order.rows, order.adapted, strict=True) if has_one]
    columns = iter(b_OR.float().view(order.groups, -1, b_OR.shape[-1]).split(adapted, dim=1))
    parts = [
        next(columns) @ next(matrices) if has_one else weight_OI.new_zeros(order.groups, rows, 1).float()
        for rows, has_one in zip(order.rows, order.adapted, strict=True)
    ]
    width = weight_OI.shape[1]
    product_OI = torch.cat([part.expand(-1, -1, width) for part in parts], dim=1).flatten(0, 1)
    return torch.add(weight_OI.float(), product_OI, alpha=scale).to(weight_OI.dtype)
