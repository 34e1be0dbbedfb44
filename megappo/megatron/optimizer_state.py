"""Reads and writes the whole optimizer state of each parameter, however Megatron distributes it.

Megatron's own `load_state_dict` cannot be used with torch's Adam: it expects a state that a fresh optimizer lacks,
copies into leaves that need gradients, and gives all parameters one shared `step`, which then counts all of their
updates (0.16.1 / 0.19.2, distrib_optimizer.py:642/839, 940/1225, 825/1032).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from megappo.megatron.host_optimizer import PartlyOnHost
from megappo.megatron.local_shards import LocalShard
from megappo.runtime.exchange import all_gather_varying

MOMENTS = ("exp_avg", "exp_avg_sq")
Read = Callable[[Tensor, slice], Tensor]
"""Reads elements of a flattened tensor, wherever it is."""


@dataclass(frozen=True)
class _Main:
    """This rank's part of a parameter's optimizer state."""

    adam: torch.optim.Optimizer | None
    """Optimizer that updates it; None where this rank has no part."""
    tensor: Tensor | None
    """Tensor that `adam` updates: the parameter, its float32 copy on the device or on the host, or a part of one of
    them; None where this rank has no part."""
    part: slice
    """Elements of the flattened parameter whose state is on this rank."""


class OptimizerState:
    """Float32 weights and Adam's moments of a role's parameters on one rank."""

    def __init__(
        self, inners: Sequence[MegatronOptimizer], replicas: dist.ProcessGroup, expert_replicas: dist.ProcessGroup
    ) -> None:
        """`inners`: Megatron's optimizers. `replicas`: the data parallel group. `expert_replicas`: the ranks with the
        same experts."""
        self._inners, self._replicas, self._expert_replicas = inners, replicas, expert_replicas
        self._is_shared = any(isinstance(inner, DistributedOptimizer) for inner in self._inners)
        """Whether the state is distributed over data parallel ranks."""
        self._owners = {id(main): inner for inner in inners for main in inner.get_parameters()}

    def mains(self) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        """Main weights that the device's part of the optimizer updates, each with its moments: weights, their float32
        copies, or parts of them. There are no moments before the first update."""
        for inner in self._inners:
            for main in inner.get_parameters():
                adam, home = _whereabouts(inner.optimizer, main)
                state = adam.state.get(main, {})
                if home is main:
                    yield main, {name: state[name] for name in MOMENTS if name in state}

    def whole(self, held: LocalShard, read: Read, *, moments: bool) -> dict[str, Tensor]:
        """`weight`, and with `moments` also `exp_avg` and `exp_avg_sq`, in the shard's shape and float32. `read` gets
        the elements; a shard that is not trained has no moments.

        A collective of the ranks with the same parameter where the optimizer is distributed.
        """
        if not held.is_trained:
            whole = read(held.parameter.detach(), slice(0, held.parameter.numel()))
            return {"weight": held.part_of(whole.view(held.parameter.shape)).float()}
        main = self._find(held.parameter)
        is_expert = not getattr(held.parameter, "allreduce", True)
        replicas = self._expert_replicas if is_expert else self._replicas
        mine, _ = _overlap(main.part, held.elements)
        tensors: dict[str, Tensor] = {}
        for name in ("weight", *(MOMENTS if moments else ())):
            if main.adam is None or main.tensor is None:
                piece = torch.empty(0, dtype=torch.float32, device=held.parameter.device)
            else:
                state = main.tensor if name == "weight" else main.adam.state[main.tensor][name]
                piece = read(state, mine).to(held.parameter.device)
            if self._is_shared:
                piece = torch.cat(all_gather_varying(piece, group=replicas))
            tensors[name] = piece.float().view(held.shape)
        return tensors

    def restore(self, held: LocalShard, tensors: Mapping[str, Tensor], updates: int) -> None:
        """Restore the tensors of `whole`, taken after so many updates; before the first update there are no moments."""
        held.shard.copy_(tensors["weight"])
        if not held.is_trained:
            return
        main = self._find(held.parameter)
        if main.adam is None or main.tensor is None:
            return
        mine, given = _overlap(main.part, held.elements)
        kept = {"weight": main.tensor.data, **(_moments(main.adam, main.tensor, updates) if updates else {})}
        for name, state in kept.items():
            state.view(-1)[mine].copy_(tensors[name].flatten()[given])

    def _find(self, parameter: nn.Parameter) -> _Main:
        if not self._is_shared:
            main = getattr(parameter, "main_param", parameter)
            adam, home = _whereabouts(self._owners[id(main)].optimizer, main)
            return _Main(adam, home, slice(0, parameter.numel()))
        for inner in self._inners:
            if parameter in inner.model_param_gbuf_map:
                group, index = inner.model_param_group_index_map[parameter]
                span = inner._get_model_param_range_map(parameter)["param"]
                main = inner.optimizer.param_groups[group]["params"][index]
                adam, home = _whereabouts(inner.optimizer, main)
                return _Main(adam, home, slice(span.start, span.end))
        return _Main(None, None, slice(0, 0))


def _whereabouts(optimizer: torch.optim.Optimizer | PartlyOnHost, main: Tensor) -> tuple[torch.optim.Optimizer, Tensor]:
    """The optimizer that updates a main weight, and the tensor that this optimizer updates."""
    return optimizer.whereabouts(main) if isinstance(optimizer, PartlyOnHost) else (optimizer, main)


def _overlap(part: slice, wanted: slice) -> tuple[slice, slice]:
    """Where the common elements of two slices are in the first one, and where in the second."""
    start = max(part.start, wanted.start)
    stop = max(start, min(part.stop, wanted.stop))
    return slice(start - part.start, stop - part.start), slice(start - wanted.start, stop - wanted.start)


def _moments(adam: torch.optim.Optimizer, main: Tensor, updates: int) -> dict[str, Tensor]:
    """Moments of a tensor, allocated for `restore` to fill, with the step count set to `updates`."""
    state = adam.state[main]
    if isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
        state["step"] = torch.tensor(float(updates))  # not shared: it would count all parameters' steps
    else:  # the fused implementations count once per group
        for group in adam.param_groups:
            group["step"] = updates
    return {name: state.setdefault(name, torch.zeros_like(main)) for name in MOMENTS}
