"""Access to the whole optimizer state of each parameter, independent of its distribution in Megatron.

Megatron's `load_state_dict` cannot be used with the Adam of torch (0.16.1 / 0.19.2, distrib_optimizer.py:642/839,
940/1225, 825/1032). It expects a state that a new optimizer does not have, and copies into leaf tensors that require
gradients. It also sets one shared `step` for all parameters, which then counts all of their updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from megappo.megatron.local_shards import LocalShard
from megappo.megatron.optimizer.host_optimizer import PartlyOnHost
from megappo.runtime.ranks.exchange import all_gather_varying

MOMENTS = ("exp_avg", "exp_avg_sq")
Read = Callable[[Tensor, slice], Tensor]
"""Function that reads elements of a flattened tensor in any location."""


@dataclass(frozen=True)
class _Main:
    """Part of a parameter's optimizer state on this rank."""

    adam: torch.optim.Optimizer | None
    """Optimizer of the part; None if this rank has no part."""
    tensor: Tensor | None
    """Tensor that `adam` updates: the parameter, its float32 copy on the device or on the host, or a part of one of
    these tensors. None if this rank has no part."""
    part: slice
    """Elements of the flattened parameter with state on this rank."""


class OptimizerState:
    """Float32 weights and moments of Adam for the parameters of a role on one rank."""

    def __init__(
        self, inners: Sequence[MegatronOptimizer], replicas: dist.ProcessGroup, expert_replicas: dist.ProcessGroup
    ) -> None:
        """Create the access to the state of a role. `inners` are Megatron's optimizers, `replicas` is the data
        parallel group, and `expert_replicas` is the group of ranks with the same experts."""
        self._inners, self._replicas, self._expert_replicas = inners, replicas, expert_replicas
        self._is_shared = any(isinstance(inner, DistributedOptimizer) for inner in self._inners)
        """Whether the state is distributed over data parallel ranks."""
        self._owners = {id(main): inner for inner in inners for main in inner.get_parameters()}

    def mains(self) -> Iterator[tuple[Tensor, Mapping[str, Tensor]]]:
        """Yield the main weights of the device part of the optimizer, each with its moments. Main weights are weights,
        their float32 copies, or parts of these tensors. There are no moments before the first update."""
        for inner in self._inners:
            for main in inner.get_parameters():
                adam, home = _whereabouts(inner.optimizer, main)
                state = adam.state.get(main, {})
                if home is main:
                    yield main, {name: state[name] for name in MOMENTS if name in state}

    def whole(self, local: LocalShard, read: Read, *, moments: bool) -> dict[str, Tensor]:
        """Return `weight`, and with `moments` also `exp_avg` and `exp_avg_sq`, in float32 and in the shape of the
        shard. `read` reads the elements. A shard that is not trained has no moments.

        With a distributed optimizer, all ranks with the same parameter must call this method.
        """
        if not local.is_trained:
            whole = read(local.parameter.detach(), slice(0, local.parameter.numel()))
            return {"weight": local.part_of(whole.view(local.parameter.shape)).float()}
        main = self._find(local.parameter)
        is_expert = not getattr(local.parameter, "allreduce", True)
        replicas = self._expert_replicas if is_expert else self._replicas
        mine, _ = _overlap(main.part, local.elements)
        tensors: dict[str, Tensor] = {}
        for name in ("weight", *(MOMENTS if moments else ())):
            if main.adam is None or main.tensor is None:
                piece = torch.empty(0, dtype=torch.float32, device=local.parameter.device)
            else:
                state = main.tensor if name == "weight" else main.adam.state[main.tensor][name]
                piece = read(state, mine).to(local.parameter.device)
            if self._is_shared:
                piece = torch.cat(all_gather_varying(piece, group=replicas))
            tensors[name] = piece.float().view(local.shape)
        return tensors

    def restore(self, local: LocalShard, tensors: Mapping[str, Tensor], updates: int) -> None:
        """Restore the tensors of `whole`, which were read after `updates` updates. Before the first update, there are
        no moments."""
        local.shard.copy_(tensors["weight"])
        if not local.is_trained:
            return
        main = self._find(local.parameter)
        if main.adam is None or main.tensor is None:
            return
        mine, source = _overlap(main.part, local.elements)
        states = {"weight": main.tensor.data, **(_moments(main.adam, main.tensor, updates) if updates else {})}
        for name, state in states.items():
            state.view(-1)[mine].copy_(tensors[name].flatten()[source])

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
    """Return the optimizer of a main weight, and the tensor that this optimizer updates."""
    return optimizer.whereabouts(main) if isinstance(optimizer, PartlyOnHost) else (optimizer, main)


def _overlap(part: slice, other: slice) -> tuple[slice, slice]:
    """Return the positions of the common elements of two slices in the first slice and in the second slice."""
    start = max(part.start, other.start)
    stop = max(start, min(part.stop, other.stop))
    return slice(start - part.start, stop - part.start), slice(start - other.start, stop - other.start)


def _moments(adam: torch.optim.Optimizer, main: Tensor, updates: int) -> dict[str, Tensor]:
    """Return the allocated moments of a tensor for `restore`, and set the step count to `updates`."""
    state = adam.state[main]
    if isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
        state["step"] = torch.tensor(float(updates))  # a shared tensor would count the steps of all parameters
    else:  # fused implementations count once per group
        for group in adam.param_groups:
            group["step"] = updates
    return {name: state.setdefault(name, torch.zeros_like(main)) for name in MOMENTS}
