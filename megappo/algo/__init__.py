"""The mathematics of PPO on plain tensors; imports torch and nothing of megappo.

Conventions: tensor arguments are keyword-only; (B, T) is samples by response tokens unless said otherwise; masks are
bool; log-probabilities and divergences are in nats. Masked positions may hold anything, NaN included: they change
neither a result nor a gradient.
"""

from megappo.algo.advantages import (
    ESTIMATORS,
    GAE,
    Estimator,
    WhitenStats,
    compute_gae,
    get_estimator,
    masked_mean,
    masked_whiten,
    register_estimator,
    whiten_stats,
)
from megappo.algo.correction import importance_weights
from megappo.algo.kl import (
    KL_KINDS,
    AdaptiveKLController,
    FixedKLController,
    PenaltyController,
    apply_kl_to_rewards,
    kl_penalty,
)
from megappo.algo.losses import (
    AGGREGATIONS,
    PolicyLoss,
    ValueLoss,
    aggregate,
    policy_loss,
    token_weights,
    value_loss,
)

__all__ = [
    "AGGREGATIONS",
    "ESTIMATORS",
    "GAE",
    "KL_KINDS",
    "AdaptiveKLController",
    "Estimator",
    "FixedKLController",
    "PenaltyController",
    "PolicyLoss",
    "ValueLoss",
    "WhitenStats",
    "aggregate",
    "apply_kl_to_rewards",
    "compute_gae",
    "get_estimator",
    "importance_weights",
    "kl_penalty",
    "masked_mean",
    "masked_whiten",
    "policy_loss",
    "register_estimator",
    "token_weights",
    "value_loss",
    "whiten_stats",
]
