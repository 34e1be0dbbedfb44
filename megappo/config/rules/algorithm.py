"""Rules between the algorithm section and other sections."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.algo.estimators import NAMES, builtin
from megappo.config.rules.estimators import estimator_rules
from megappo.config.schema import Config


def algorithm_rules(config: Config) -> Iterator[str]:
    """Check the settings that the algorithm needs in other sections. User code is not imported."""
    if config.algorithm.estimator in NAMES:
        yield from estimator_rules(config, builtin(config.algorithm.estimator))
    terms = [f"algorithm.{name}" for name in ("kl_in_reward", "kl_in_loss") if getattr(config.algorithm, name)]
    if terms and config.reference is None:
        yield f"{terms[0]} needs a reference policy; add `reference: {{}}` or set {terms[0]} to null"
    if config.reference is not None and not terms:
        yield (
            "reference is given but no KL term uses it; add algorithm.kl_in_reward or algorithm.kl_in_loss, "
            "or remove it (reference=null)"
        )
    kl, samples = config.algorithm.kl_in_reward, config.rollout.batch_sequences
    if kl is not None and kl.controller == "adaptive" and samples > kl.horizon:
        yield (
            f"algorithm.kl_in_reward.horizon {kl.horizon} must be at least the {samples} samples of a step, so that "
            f"the weight changes by at most a fifth per step; set it to {samples} or more"
        )


_MOST_NATS_PER_TOKEN, _LEAST_NATS_PER_RESPONSE = 1.0, 0.1
"""Largest plausible target per token and smallest per response. Above the first, the policy has diverged from its
reference. Below the second, the policy cannot move."""


def kl_target_notes(config: Config) -> Iterator[str]:
    """Check that the target of the adaptive KL is plausible for its unit (per token or per response)."""
    kl = config.algorithm.kl_in_reward
    if kl is None or kl.controller != "adaptive":
        return
    target, key = kl.target_nats, "algorithm.kl_in_reward"
    if kl.per == "token" and target > _MOST_NATS_PER_TOKEN:
        yield (
            f"{key}.target {target:g} is in nats per token, but a policy close to its reference stays below "
            f"{_MOST_NATS_PER_TOKEN:g}; set {key}.per: response if the target is per response, or remove the target"
        )
    if kl.per == "response" and target < _LEAST_NATS_PER_RESPONSE:
        yield (
            f"{key}.target {target:g} is in nats per response, and a target below {_LEAST_NATS_PER_RESPONSE:g} keeps "
            f"the policy from moving; set {key}.per: token if the target is per token, or remove the target"
        )
