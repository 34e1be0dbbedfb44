"""Rules on what the algorithm needs of other sections."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.algo.estimators import NAMES, builtin
from megappo.config.rules.estimators import estimator_rules
from megappo.config.schema import Config


def algorithm_rules(config: Config) -> Iterator[str]:
    """Rules on what the algorithm needs of the other sections; nothing of the user's code is imported."""
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
            f"algorithm.kl_in_reward.horizon {kl.horizon} must be at least the {samples} samples of a step, over which "
            f"the weight is to move by no more than a fifth; set it to {samples} or more"
        )


_MOST_NATS_PER_TOKEN, _LEAST_NATS_PER_RESPONSE = 1.0, 0.1
"""Largest sensible target per token, smallest per response: a policy above the first has left its reference, and one
held below the second cannot move."""


def kl_target_notes(config: Config) -> Iterator[str]:
    """A note on a target of the adaptive KL that is plausible only in the other unit."""
    kl = config.algorithm.kl_in_reward
    if kl is None or kl.controller != "adaptive":
        return
    target, key = kl.target_nats, "algorithm.kl_in_reward"
    if kl.per == "token" and target > _MOST_NATS_PER_TOKEN:
        yield (
            f"{key}.target {target:g} is in nats per token, where a policy near its reference stays below "
            f"{_MOST_NATS_PER_TOKEN:g}; set {key}.per: response if it is meant per response, or leave the target out"
        )
    if kl.per == "response" and target < _LEAST_NATS_PER_RESPONSE:
        yield (
            f"{key}.target {target:g} is in nats per response, which below {_LEAST_NATS_PER_RESPONSE:g} holds the "
            f"policy still; set {key}.per: token if it is meant per token, or leave the target out"
        )
