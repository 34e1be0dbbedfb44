"""Advice for unusual metrics: the meaning of the metrics, and settings to try."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from megappo.config.sections.algorithm import AlgorithmSettings
from megappo.plugins import is_import_path
from megappo_kernels.surrogates import POLICY_LOSSES

_PATIENCE_STEPS = 10
_QUIET_STEPS = 20
_EARLY_STEPS = 5
_MUCH_LEFT_OUT = 0.2
_OVERSHOT = -1.0  # explained variance if errors have twice the variance of the returns
_LARGE_REWARD = 1e9  # largest reward of environments; squares of much larger rewards overflow float32
# Rewards are equal up to rounding if their standard deviation is below this share of their size.
_EQUAL = 1e-6

ADVICE = {
    "clipfrac": "More than half of the tokens hit the clip range, so most of the update is thrown away: "
    "lower actor.optimizer.learning_rate or actor.epochs.",
    "masked": "More than a fifth of the tokens lie outside the policy loss's band and are left out, because the "
    "policy is far from the sampling policy: lower rollout.ahead, actor.epochs or "
    "actor.optimizer.learning_rate, or widen algorithm.band.",
    "explained_variance": "For ten steps the critic has predicted the returns of new samples worse than the mean "
    "return, so advantages are noise: "
    "raise critic.optimizer.learning_rate or critic.epochs, or give it a head start with critic.warmup_steps.",
    "critic_overshoots": "For ten steps the critic's values have had a larger spread than the returns, within a step "
    "or across steps, so the updates of the critic are too large: lower critic.optimizer.learning_rate, or scale "
    "returns by reward.scale.",
    "kl_target": "KL to the reference has been above its target for many steps, so the policy drifts: "
    "lower actor.optimizer.learning_rate, or algorithm.kl_in_reward.horizon to let the weight rise faster.",
    "entropy": "Entropy fell below a tenth of its initial value, so the policy hardly explores: raise "
    "algorithm.entropy_coef or lower actor.optimizer.learning_rate.",
    "same_reward": "All rewards of a step have been equal for many steps, so there is nothing to learn from: look "
    "at responses and scores of the run's samples, then check reward.function, use prompts of "
    "another difficulty in data.train, or raise rollout.max_response_tokens if answers are cut.",
    "same_in_groups": "The samples of each prompt have had equal rewards for many steps, and they are compared "
    "with one another, so there is nothing to learn from: look at scores of the run's samples, "
    "then raise rollout.samples_per_prompt or rollout.temperature, or use prompts of another "
    "difficulty in data.train.",
    "truncated": "More than half of the responses hit the length limit and were cut: raise "
    "rollout.max_response_tokens, or let reward.function pay less for long answers.",
    "total_limit": "More than half of the responses hit the limit of prompt and response together and were cut: "
    "raise rollout.max_total_tokens, or data.max_prompt_tokens if agents write longer prompts.",
    "turn_cut": "More than half of the episodes ended with a turn that the limit of a turn cut: "
    "raise rollout.environment.max_turn_tokens.",
    "mismatch": "Engine and trainer disagree on the probabilities of sampled tokens, so the ratios are biased: "
    "try rollout.dtype: float32 or algorithm.old_logprob: corrected.",
    "actor_nonfinite": "An update of the actor was refused because its loss or gradient was not finite: "
    "lower actor.optimizer.learning_rate, or compute with model.dtype: float32.",
    "critic_nonfinite": "An update of the critic was refused because its loss or gradient was not finite: "
    "lower critic.optimizer.learning_rate, or compute with model.dtype: float32.",
    "own_estimator": "An update was refused because the user function algorithm.estimator returned advantages or "
    "returns that are not finite: correct the function.",
    "own_loss": "An update of the actor was refused because its loss or gradient was not finite, and "
    "algorithm.policy_loss is a user function: correct the function, for example a division by 0 or a "
    "log of 0.",
    "large_reward": "An update was refused because its loss or gradient was not finite, in a step with rewards "
    "beyond 1e9: scale the rewards of reward.function down.",
}
"""Advice for each condition. Dotted names are settings."""
GUIDES = {
    "clipfrac": "troubleshoot 'the policy moves too far'",
    "masked": "troubleshoot 'the policy moves too far'",
    "explained_variance": "gae 'the critic learns too slowly'",
    "critic_overshoots": "gae 'the critic overshoots'",
    "kl_target": "troubleshoot 'kl explodes'",
    "entropy": "troubleshoot 'entropy collapses'",
    "same_reward": "troubleshoot 'the reward is flat'",
    "same_in_groups": "troubleshoot 'the reward is flat'",
    "truncated": "troubleshoot 'lengths run away'",
    "total_limit": "troubleshoot 'lengths run away'",
    "turn_cut": "troubleshoot 'lengths run away'",
    "mismatch": "troubleshoot 'the mismatch grows'",
    "actor_nonfinite": "troubleshoot 'an update is not finite'",
    "critic_nonfinite": "troubleshoot 'an update is not finite'",
    "own_estimator": "troubleshoot 'an update is not finite'",
    "own_loss": "troubleshoot 'an update is not finite'",
    "large_reward": "troubleshoot 'an update is not finite'",
}
"""Guide on each condition: arguments of `megappo guide`, which are a topic and the words of a heading."""


def advice_text(name: str) -> str:
    """Return the advice on a condition, and the command that prints the guide."""
    return f"{ADVICE[name]} More: megappo guide {GUIDES[name]}"


def largest_reward(metrics: Mapping[str, float]) -> float:
    """Return the largest absolute reward of a step, or 0 if the rewards are unknown."""
    return max(abs(metrics.get(f"reward/{end}", 0.0)) for end in ("min", "max"))


def refusal(role: str, metrics: Mapping[str, float], sums: Mapping[str, float], algorithm: AlgorithmSettings) -> str:
    """Return the message about a non-finite update of a role in a step with these metrics.

    `sums` are the sums of the update.
    """
    return (
        f"the {role}'s loss or gradient is not finite; its weights did not change. "
        f"{_remedy_of_nonfinite(role, metrics, sums, algorithm)}, or set algorithm.on_nonfinite: skip to continue."
    )


def _remedy_of_nonfinite(
    role: str, metrics: Mapping[str, float], sums: Mapping[str, float], algorithm: AlgorithmSettings
) -> str:
    largest = largest_reward(metrics)
    if largest > _LARGE_REWARD:
        return f"The rewards of this step are up to {largest:.3g} in size: scale the rewards down"
    if _own_estimator_fails(algorithm, metrics):
        return (
            f"algorithm.estimator '{algorithm.estimator}' returned advantages or returns that are not finite: correct "
            "this function"
        )
    if role == "actor" and is_import_path(algorithm.policy_loss) and math.isfinite(sums.get("ppo_kl", math.nan)):
        what = "slopes" if math.isfinite(sums.get("pg_loss", math.nan)) else "values"
        return f"The {what} of algorithm.policy_loss '{algorithm.policy_loss}' are not finite: correct this function"
    return f"Lower {role}.optimizer.learning_rate"


def _own_estimator_fails(algorithm: AlgorithmSettings, metrics: Mapping[str, float]) -> bool:
    """Return whether a user estimator returned non-finite numbers."""
    means = (metrics.get(name, 0.0) for name in ("advantage/mean", "return/mean"))
    return is_import_path(algorithm.estimator) and not all(map(math.isfinite, means))


class Advisor:
    """Observes the metrics of a run. The same advice is given at most every 20 steps."""

    def __init__(self, algorithm: AlgorithmSettings) -> None:
        kl = algorithm.kl_in_reward
        self._kl_target = kl.target_nats if kl is not None and kl.controller == "adaptive" else None
        self._kl_name = "kl/per_response" if kl is not None and kl.per == "response" else "kl/mean"
        loss = POLICY_LOSSES.get(algorithm.policy_loss)
        self._leaves_out = loss is not None and loss.ignores_outside
        self._algorithm = algorithm
        self._mismatch_warn_nats = algorithm.mismatch_warn_nats
        self._streaks: dict[str, int] = defaultdict(int)
        self._last_steps: dict[str, int] = {}
        self._first_entropies: list[float] = []
        self._value_bias = math.nan
        """Mean value minus mean return of the last step."""

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Return advice on the metrics of a step."""
        advice = []
        for name in self._conditions(metrics):
            if step - self._last_steps.get(name, -_QUIET_STEPS) >= _QUIET_STEPS:
                self._last_steps[name] = step
                advice.append(advice_text(name))
        return advice

    def _conditions(self, metrics: Mapping[str, float]) -> list[str]:
        def value(name: str) -> float:
            return metrics.get(name, math.nan)  # NaN makes every comparison false

        def nonfinite(role: str) -> bool:
            return value(f"{role}/skipped_updates") > 0 or not math.isfinite(metrics.get(f"{role}/grad_norm", 0.0))

        is_equal = value("reward/std") <= _EQUAL * max(1.0, abs(metrics.get("reward/mean", 0.0)))
        is_large = largest_reward(metrics) > _LARGE_REWARD

        explained = value("critic/explained_variance")
        at_total = value("response/position_limit") > 0.5
        swings = not is_equal and self._swing_of_values(metrics) > value("reward/std")
        overshoots = self._lasting("critic_overshoots", explained < _OVERSHOT or swings)

        of_estimator = _own_estimator_fails(self._algorithm, metrics)
        of_loss = is_import_path(self._algorithm.policy_loss) and math.isfinite(value("actor/ppo_kl"))

        conditions = {
            "clipfrac": value("actor/clipfrac") > 0.5 and not self._leaves_out,
            "masked": self._leaves_out and value("actor/masked_below") + value("actor/masked_above") > _MUCH_LEFT_OUT,
            "truncated": value("response/truncated") > 0.5 and not at_total,
            "total_limit": at_total,
            "turn_cut": value("episode/limit_turn_tokens") > 0.5,
            "mismatch": value("mismatch/own_weights" if value("rollout/lag") > 0 else "mismatch/mean")
            > self._mismatch_warn_nats,
            "actor_nonfinite": nonfinite("actor") and not (is_large or of_estimator or of_loss),
            "critic_nonfinite": nonfinite("critic") and not (is_large or of_estimator),
            "own_estimator": of_estimator and not is_large and (nonfinite("actor") or nonfinite("critic")),
            "own_loss": of_loss and nonfinite("actor") and not (is_large or of_estimator),
            "large_reward": is_large and (nonfinite("actor") or nonfinite("critic")),
            "explained_variance": self._lasting("explained_variance", explained < 0) and not overshoots,
            "critic_overshoots": overshoots,
            "same_reward": self._lasting("same_reward", is_equal),
            "same_in_groups": self._lasting("same_in_groups", value("reward/group_spread") == 0 and not is_equal),
            "kl_target": self._kl_target is not None
            and self._lasting("kl_target", value(self._kl_name) > self._kl_target),
            "entropy": self._entropy_fell(value("actor/entropy")),
        }
        return [name for name, is_true in conditions.items() if is_true]

    def _swing_of_values(self, metrics: Mapping[str, float]) -> float:
        """Return the change of the critic's mean error since the last step.

        Updates that are too large shift all values together. Explained variance does not show this shift.
        """
        before = self._value_bias
        self._value_bias = metrics.get("critic/value_mean", math.nan) - metrics.get("return/mean", math.nan)
        return abs(self._value_bias - before)

    def _lasting(self, name: str, is_true: bool) -> bool:
        self._streaks[name] = self._streaks[name] + 1 if is_true else 0
        return self._streaks[name] >= _PATIENCE_STEPS

    def _entropy_fell(self, entropy: float) -> bool:
        if not math.isfinite(entropy):
            return False
        if len(self._first_entropies) < _EARLY_STEPS:
            self._first_entropies.append(entropy)
            return False
        return entropy < 0.1 * sum(self._first_entropies) / _EARLY_STEPS
