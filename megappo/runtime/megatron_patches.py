"""Functions of stock Megatron-Core 0.16 to 0.19 that are replaced at run time, on GPUs and on CPUs alike.

Each says which version needs it and why. Those for machines without CUDA alone are in `megatron_cpu`.
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
    """Suppress warnings that importing and using Megatron-Core prints every time, and that users can do nothing about.

    Transformer Engine and Apex are missing; a default of its own and GPTModel are deprecated (0.19), and so are two
    collectives of sequence parallelism and the distributed optimizer (torch 2.14); a model that is never made is
    experimental; and CUDA extensions, which nobody builds, have no CUDA.
    """
    noise = "Transformer Engine|Apex|full scope is deprecated|MimoModelConfig is experimental"
    noise += "|distributed.all_gather_into_tensor. is deprecated|distributed.reduce_scatter_tensor. is deprecated"
    warnings.filterwarnings("ignore", message=f".*({noise}).*")
    for logger, words in (
        ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED"),
        ("torch.utils.cpp_extension", "No CUDA runtime is found"),
    ):
        logging.getLogger(logger).addFilter(functools.partial(_lacks, words))


def _lacks(words: str, record: logging.LogRecord) -> bool:
    return words not in str(record.msg)


@functools.cache
def fix_router() -> None:
    """Let routers run without Transformer Engine. 0.16.1 reads `te_general_gemm` (moe_utils.py:1192, 1225), a name that
    is only defined with Transformer Engine installed; None is Megatron's own value for "not there"."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


@functools.cache
def fix_gradient_norm() -> None:
    """Make a gradient norm wait for the device once. Without Apex and Transformer Engine Megatron's own function
    (utils.py:1200, in 0.19.2 1325) reads a number of every parameter on the host."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _norm_of_all


def _norm_of_all(
    _chunk_size: int, _noop_flag: torch.Tensor, tensor_lists: Sequence[Sequence[torch.Tensor]], _per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """(1,) L2 norm of all tensors together, on their device."""
    norms = [norm for tensors in tensor_lists for norm in torch._foreach_norm(list(tensors))]
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


class PipelineSends:
    """Keeps tensors that a stage sends while it computes until they are sent, and completes all sends before the stage
    goes on.

    The interleaved schedule frees an output whose send has only begun (`deallocate_pipeline_outputs`; 0.16.1,
    schedules.py:1522, 1600), and forgets the last send of a pass that does not train. Gloo starts reading when the
    receiver is ready: it would send whatever has reused the memory, or nothing. torch's work on NCCL keeps the tensor,
    but the schedule replaces its storage. Nothing is kept where sends are waited for at once.
    """

    def __init__(self, communicator: P2PCommunicator) -> None:
        self._communicate = communicator._communicate
        self._sends: list[_Send] = []
        communicator._communicate = self

    def __call__(
        self, *, tensor_send_next: torch.Tensor | None, tensor_send_prev: torch.Tensor | None, **rest: Any
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, Mapping[str, dist.Work | _Send] | Sequence[dist.Work]]:
        """Replaces `P2PCommunicator._communicate` of Megatron."""
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
        """Wait for sends that the schedule has not waited for."""
        for send in self._sends:
            send.wait()
        self._sends = []


class _Send:
    """A handle that keeps the sent tensor and may be waited for twice, which gloo's may not."""

    def __init__(self, work: dist.Work, tensor: torch.Tensor | None) -> None:
        self._held: tuple[dist.Work, torch.Tensor | None] | None = (work, tensor)

    @property
    def is_open(self) -> bool:
        return self._held is not None

    def wait(self) -> None:
        if self._held is not None:
            self._held[0].wait()
            self._held = None


def rotate_packed_by(rotation: Callable[..., torch.Tensor]) -> None:
    """Make models with `apply_rope_fusion` rotate packed queries and keys by `rotation(x, cu_seqlens, freqs, ...)`.

    Megatron has a hook for such a kernel (rope_utils.py:24/27), which is filled where Transformer Engine is installed.
    Its own rotation reads the segments' lengths on the host in every layer (rope_utils.py:178-190).
    """
    from megatron.core.models.common.embeddings import rope_utils

    rope_utils.fused_apply_rotary_pos_emb_thd = rotation


@contextmanager
def param_groups_of_role(role: dist.ProcessGroup) -> Iterator[None]:
    """Within the context, ranks of a role agree on parameter groups among themselves.

    Megatron gathers them over the default group (optimizer/__init__.py, `_get_param_groups`), once for dense and once
    for expert parameters, and ranks without the role would have to take part as often.
    """
    gather = dist.all_gather_object

    def gather_in_role(object_list: list[T], obj: T, group: dist.ProcessGroup | None = None) -> None:
        found = [obj] * dist.get_world_size(role)
        gather(found, obj, group=role)
        object_list[:] = found

    with replaced_attributes(dist, all_gather_object=gather_in_role):
        yield
