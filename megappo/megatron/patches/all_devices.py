"""Functions of unmodified Megatron-Core 0.16 to 0.19 that megappo replaces at run time, on GPUs and on CPUs.

Each function documents the affected versions and the reason. Replacements only for machines without CUDA are in
`cpu`.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from megappo.runtime.attributes import replaced_attributes

if TYPE_CHECKING:
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

T = TypeVar("T")


def silence_megatron() -> None:
    """Suppress warnings of every import and use of Megatron-Core to which a user cannot respond.

    - Transformer Engine and Apex are missing.
    - A default and the class GPTModel are deprecated (0.19).
    - Two collectives of sequence parallelism and the distributed optimizer are deprecated (torch 2.14).
    - A model that megappo does not use is experimental.
    - CUDA extensions that megappo does not build cannot find CUDA.
    """
    noise = "Transformer Engine|Apex|full scope is deprecated|MimoModelConfig is experimental"
    noise += "|distributed.all_gather_into_tensor. is deprecated|distributed.reduce_scatter_tensor. is deprecated"
    warnings.filterwarnings("ignore", message=f".*({noise}).*")
    for logger, text in (
        ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED"),
        ("torch.utils.cpp_extension", "No CUDA runtime is found"),
    ):
        logging.getLogger(logger).addFilter(functools.partial(_lacks, text))


def _lacks(text: str, record: logging.LogRecord) -> bool:
    return text not in str(record.msg)


@functools.cache
def fix_router() -> None:
    """Make routers work without Transformer Engine. 0.16.1 reads `te_general_gemm` (moe_utils.py:1192, 1225), which is
    only defined if Transformer Engine is installed. None is Megatron's own value for a missing function."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


@functools.cache
def fix_gradient_norm() -> None:
    """Make the gradient norm synchronize with the device only once. Without Apex and Transformer Engine, Megatron's own
    function (utils.py:1200, in 0.19.2 1325) copies a number of every parameter to the host."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _norm_of_all


def _norm_of_all(
    _chunk_size: int, _noop_flag: torch.Tensor, tensor_lists: Sequence[Sequence[torch.Tensor]], _per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """Return the L2 norm of all tensors together, (1,), on their device."""
    norms = [norm for tensors in tensor_lists for norm in torch._foreach_norm(list(tensors))]
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


class PipelineSends:
    """Sends of a pipeline stage: keeps asynchronously sent tensors until their sends complete, and completes all sends
    before the stage continues.

    The interleaved schedule frees an output when its send has only begun (`deallocate_pipeline_outputs`; 0.16.1,
    schedules.py:1522, 1600). The schedule also does not wait for the last send of a forward-only pass. Gloo reads the
    memory when the receiver is ready, so gloo would send the new content of reused memory, or nothing. On NCCL, torch's
    work object keeps the tensor, but the schedule replaces its storage. Synchronous sends keep no tensors.
    """

    def __init__(self, communicator: P2PCommunicator) -> None:
        self._communicate = communicator._communicate
        self._sends: list[_Send] = []
        communicator._communicate = self

    def __call__(
        self, *, tensor_send_next: torch.Tensor | None, tensor_send_prev: torch.Tensor | None, **rest: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, Mapping[str, dist.Work | _Send] | Sequence[dist.Work]]:
        """Replace `P2PCommunicator._communicate` of Megatron."""
        sent = {"send_next": tensor_send_next, "send_prev": tensor_send_prev}
        sent = {name: tensor if tensor is None else tensor.detach() for name, tensor in sent.items()}
        received_prev, received_next, works = self._communicate(
            tensor_send_next=sent["send_next"], tensor_send_prev=sent["send_prev"], **rest
        )
        for name in sent.keys() & works.keys() if isinstance(works, dict) else ():
            works[name] = _Send(works[name], sent[name])
            self._sends = [*(send for send in self._sends if send.is_open), works[name]]
        return received_prev, received_next, works

    def finish(self) -> None:
        """Wait for all sends that the schedule has not waited for."""
        for send in self._sends:
            send.wait()
        self._sends = []


class _Send:
    """Handle that keeps the sent tensor. In contrast to a handle of gloo, a second `wait` is allowed."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor | None) -> None:
        self._pending: tuple[dist.Work, torch.Tensor | None] | None = (work, tensor)

    @property
    def is_open(self) -> bool:
        return self._pending is not None

    def wait(self) -> None:
        if self._pending is not None:
            self._pending[0].wait()
            self._pending = None


def rotate_packed_by(rotation: Callable[..., torch.Tensor]) -> None:
    """Make models with `apply_rope_fusion` rotate packed queries and keys by `rotation(x, cu_seqlens, freqs, ...)`.

    Megatron has a hook for such a kernel (rope_utils.py:24/27), which is set if Transformer Engine is installed.
    Megatron's own rotation reads the lengths of the segments on the host in every layer (rope_utils.py:178-190).
    """
    from megatron.core.models.common.embeddings import rope_utils

    rope_utils.fused_apply_rotary_pos_emb_thd = rotation


@contextmanager
def param_groups_of_role(role: dist.ProcessGroup) -> Iterator[None]:
    """Make Megatron gather parameter groups among the ranks of a role within the context.

    Megatron gathers them over the default group (optimizer/__init__.py, `_get_param_groups`), once for dense and once
    for expert parameters. Ranks without the role would have to take part in each gather.
    """
    gather = dist.all_gather_object

    def gather_in_role(object_list: list[T], obj: T, group: dist.ProcessGroup | None = None) -> None:
        of_ranks = [obj] * dist.get_world_size(role)
        gather(of_ranks, obj, group=role)
        object_list[:] = of_ranks

    with replaced_attributes(dist, all_gather_object=gather_in_role):
        yield
