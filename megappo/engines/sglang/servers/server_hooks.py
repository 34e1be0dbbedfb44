"""Hooks in the SGLang servers that sample for a run, on any device. This module runs in the processes of the servers.

SGLang calls `register_sampling_hooks` in every process through the entry point of `cpu_platform`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from megappo.engines.sglang.version import is_tried

if TYPE_CHECKING:
    from sglang.srt.sampling.penaltylib import BatchedMinNewTokensPenalizer

SAMPLES_FOR_A_RUN = "MEGAPPO_SAMPLES_FOR_A_RUN"
"""Environment variable of the servers that sample for a run. Other servers, for example of a judge, are not changed."""
HOOKS_LABEL = {"megappo_hooks": "1"}
"""Label of a server with these hooks; see SGLang's `--extra-metric-labels`."""


def register_sampling_hooks() -> None:
    """Register the hooks in this process if the process belongs to a server that samples for a run.

    - After a retraction, a request already has tokens, but SGLang counts `min_new_tokens` from 0 again
      (sampling/penaltylib/min_new_tokens.py:76). More positions would then exclude the stop tokens.
    - SGLang attaches additional stop tokens to some tokenizers (utils/hf_transformers/common.py:778). These tokens end
      a response, and are excluded at its first positions, although no request contains them.
    """
    if SAMPLES_FOR_A_RUN not in os.environ or not is_tried():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    penalizer = "sglang.srt.sampling.penaltylib.min_new_tokens.BatchedMinNewTokensPenalizer"
    HookRegistry.register(f"{penalizer}._prepare", _count_existing_tokens, HookType.AFTER)
    attach = "sglang.srt.utils.hf_transformers.common.attach_additional_stop_token_ids"
    HookRegistry.register(attach, _attach_no_stop_tokens, HookType.REPLACE)


def _count_existing_tokens(_result: None, penalizer: BatchedMinNewTokensPenalizer) -> None:
    """Start the count at the number of tokens that each request already has."""
    lengths = [[len(request.output_ids)] for request in penalizer.orchestrator.reqs()]
    counts = penalizer.len_output_tokens
    penalizer.len_output_tokens = torch.tensor(lengths, dtype=counts.dtype, device=counts.device).view(counts.shape)


def _attach_no_stop_tokens(tokenizer: Any) -> None:
    tokenizer.additional_stop_token_ids = None
