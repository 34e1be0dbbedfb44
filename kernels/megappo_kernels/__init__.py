"""Per-token mathematics of PPO on large vocabularies; needs torch only and nothing of megappo."""

from megappo_kernels.lm_head import linear_logprob

__all__ = ["linear_logprob"]
