"""Per-token mathematics of PPO on large vocabularies; needs torch and Triton, and nothing of megappo."""

from megappo_kernels.backend import use_backend
from megappo_kernels.gae import gae
from megappo_kernels.lm_head import linear_logprob
from megappo_kernels.logits import logits_logprob
from megappo_kernels.losses import (
    POLICY_METRICS,
    VALUE_METRICS,
    Loss,
    PolicyInputs,
    PolicyObjective,
    policy_loss,
    value_loss,
)
from megappo_kernels.ppo_head import HeadLoss, ppo_head_loss
from megappo_kernels.whiten import masked_whiten, masked_whiten_stats, merge_whiten_stats

__all__ = [
    "POLICY_METRICS",
    "VALUE_METRICS",
    "HeadLoss",
    "Loss",
    "PolicyInputs",
    "PolicyObjective",
    "gae",
    "linear_logprob",
    "logits_logprob",
    "masked_whiten",
    "masked_whiten_stats",
    "merge_whiten_stats",
    "policy_loss",
    "ppo_head_loss",
    "use_backend",
    "value_loss",
]
