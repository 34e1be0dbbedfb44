"""Arguments of SGLang in other trainers, which pass them with a prefix."""

from __future__ import annotations

from megappo.config.foreign.answers import SERVERS, answer

PROGRAM = "the servers are SGLang"
MEMORY = "sglang_mem_fraction_static"
"""Share of a GPU for weights, keys and values. Several trainers use the name."""
VERL = ("engine_kwargs.sglang", "engine_kwargs.sglang.attention_backend")
"""Arguments in verl."""
_OTHERS = (
    "sglang_enable_metrics sglang_enable_dp_lm_head sglang_moe_dense_tp_size sglang_attention_backend "
    "sglang_moe_runner_backend sglang_speculative_algorithm sglang_speculative_num_steps "
    "sglang_speculative_eagle_topk sglang_speculative_num_draft_tokens"
)
SLIME = {
    **answer("rollout.servers.expert_parallel", "sglang_ep_size"),
    **answer("rollout.servers.data_parallel_attention", "sglang_enable_dp_attention", "sglang_dp_size"),
    **answer("rollout.servers.arguments", "sglang_cuda_graph_max_bs", "sglang_cuda_graph_bs",
             note="{cuda-graph-max-bs: 256}"),
    **answer("rollout.servers.arguments", "sglang_max_running_requests", note="{max-running-requests: 256}"),
    **answer("rollout.servers.arguments", "sglang_chunked_prefill_size", note="{chunked-prefill-size: 4096}"),
    **answer("rollout.servers.arguments", *_OTHERS.split(), note=SERVERS),
}  # fmt: skip
"""Answers for slime and miles."""
