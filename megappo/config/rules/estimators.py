"""Rules between an advantage estimator and the settings."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.algo.estimators import NAMES, Estimator, builtin
from megappo.config.schema import Config
from megappo.errors import either
from megappo.plugins import is_import_path


def estimator_rules(config: Config, estimator: Estimator) -> Iterator[str]:
    """Check the settings that the estimator needs in other sections."""
    if estimator.needs_critic and config.critic is None:
        without = either(name for name in NAMES if not builtin(name).needs_critic)
        yield f"algorithm.estimator '{estimator.name}' needs a critic; add the section critic, or set {without}"
    if not estimator.takes_values and config.critic is not None:
        own = ", give the function the argument values," if is_import_path(estimator.name) else ""
        yield (
            f"critic is given but algorithm.estimator '{estimator.name}' has none; "
            f"remove it (critic=null){own} or set algorithm.estimator to gae"
        )
    samples = config.rollout.samples_per_prompt
    if estimator.compares_samples and samples < 2:
        yield (
            f"rollout.samples_per_prompt is {samples}, but algorithm.estimator '{estimator.name}' compares the samples "
            "of a prompt; set at least 2"
        )
    if not config.algorithm.lam.is_one and not estimator.has_critic_lam:
        yield (
            f"algorithm.lam differs between actor and critic, but algorithm.estimator '{estimator.name}' uses one "
            "lambda; set one number, or set algorithm.estimator to gae"
        )
    if config.algorithm.discount_at == "turn":
        yield from _turn_rules(config, estimator)


def _turn_rules(config: Config, estimator: Estimator) -> Iterator[str]:
    if config.rollout.episodes is None:
        yield (
            "algorithm.discount_at is turn, but without rollout.environment a response is one turn; set it to token, "
            "or add the environment"
        )
    elif not estimator.discounts_by_turn:
        yield (
            f"algorithm.discount_at is turn, but algorithm.estimator '{estimator.name}' does not use `gae`, which "
            "finds the ends of turns; set it to token, or algorithm.estimator to gae or reinforce_plus_plus"
        )
