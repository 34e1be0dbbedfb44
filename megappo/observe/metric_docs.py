"""Descriptions of all metrics. The README.md of this folder contains them as a table."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megappo.observe.terminal.charts import mean
from megappo_kernels.objectives import POLICY_METRICS, VALUE_METRICS, Metric


class MetricDoc(NamedTuple):
    """Description of a metric."""

    unit: str
    meaning: str
    healthy: str
    """Expected values in a good run."""


def _of_updates(role: str, declared: Mapping[str, Metric]) -> dict[str, MetricDoc]:
    """Return the descriptions of the metrics that a role's objective declares."""
    return {f"{role}/{name}": MetricDoc(*metric[1:]) for name, metric in declared.items() if metric.kind != "spread"}


def _of_experts(role: str) -> dict[str, MetricDoc]:
    return {
        f"{role}/experts_max_load": MetricDoc(
            "1", "Tokens of the busiest expert, divided by the mean over experts. The maximum over layers.", "steady"
        ),
        f"{role}/router_aux_loss": MetricDoc(
            "1",
            f"Mean load-balancing loss over layers and updates (`{role}.router_aux_loss_coef`).",
            "near 1, the value for an even load",
        ),
        f"{role}/experts_unused": MetricDoc("fraction", "Experts of all layers without a token in the step.", "near 0"),
    }


EPISODES = {
    "episode/turns": MetricDoc("turns", "Mean number of turns of the episodes that did not fail.", "as the task"),
    "episode/turns_max": MetricDoc("turns", "Most turns in an episode.", "at most `rollout.environment.max_turns`"),
    "episode/trajectories": MetricDoc(
        "trajectories",
        "Mean number of separate conversations of an episode. Only the last is trained on.",
        "1; more if an agent rewrites its conversation",
    ),
    "episode/left_out_tokens": MetricDoc(
        "tokens", "Mean number of generated tokens in the other trajectories of an episode.", "near 0"
    ),
    "episode/begun_anew": MetricDoc(
        "episodes",
        "Unfinished episodes that a resumed run starts from the beginning.",
        "0, except in the first step after a resume",
    ),
    "episode/observed_tokens": MetricDoc(
        "tokens", "Mean number of tokens from the environment in an episode. `response/length` includes them.", "steady"
    ),
    "episode/seconds": MetricDoc("seconds", "Mean time in the environment, without engine and tools.", "near 0"),
    "episode/seconds_max": MetricDoc("seconds", "Longest such time.", "well below `rollout.environment.max_seconds`"),
    "episode/failures": MetricDoc("fraction", "Failed episodes (not trained on).", "0; at most `max_failure_fraction`"),
    "episode/raised": MetricDoc("fraction", "Episodes in which the environment raised an exception.", "0"),
    "episode/hung": MetricDoc("fraction", "Episodes that exceeded `rollout.environment.max_seconds`.", "0"),
    "episode/nonsense": MetricDoc("fraction", "Episodes with invalid rewards, tokens or turns.", "0"),
    "episode/limit_turns": MetricDoc(
        "fraction", "Episodes that ended at `rollout.environment.max_turns`.", "near 0, or as the task"
    ),
    "episode/limit_calls": MetricDoc("fraction", "Episodes that ended at `rollout.environment.max_calls`.", "near 0"),
    "episode/limit_turn_tokens": MetricDoc(
        "fraction",
        "Episodes that the environment ended after `rollout.environment.max_turn_tokens` cut a turn.",
        "near 0; advice above 0.5",
    ),
    "episode/limit_tokens": MetricDoc(
        "fraction", "Episodes that ended at `rollout.max_response_tokens` or `rollout.max_total_tokens`.", "near 0"
    ),
    "turn/tokens": MetricDoc("tokens", "Mean length of a turn of the model.", "as the task"),
    "turn/reward": MetricDoc("score", "Mean reward of a turn from the environment.", "rises"),
    "tool/NAME/calls": MetricDoc("calls", "Mean calls of this tool per episode.", "above 0 for a useful tool"),
    "tool/NAME/failures": MetricDoc(
        "fraction", "Calls of this tool that raised or exceeded a limit of time, memory or processes.", "near 0"
    ),
    "tool/NAME/seconds": MetricDoc("seconds", "Mean time of a call, without the wait for a worker.", "small"),
}
"""Metrics of runs with an environment (`rollout.environment`). NAME is the name of a tool."""


SOURCES = {
    "source/NAME/prompts": MetricDoc("prompts", "Prompts of this source in the step.", "as the weight of the source"),
    "source/NAME/reward_mean": MetricDoc(
        "score", "Mean score of the responses to these prompts; `reward/mean` covers all sources.", "rises"
    ),
    "source/NAME/response_length": MetricDoc("tokens", "Mean length of these responses.", "like response/length"),
    "source/NAME/right": MetricDoc("prompts", "Part of `curriculum/right`: prompts of this source.", "rises"),
    "curriculum/right": MetricDoc(
        "prompts",
        "Prompts of all rounds of the step with a mean score above `data.curriculum.right_above`. These prompts rest.",
        "rises",
    ),
    "curriculum/resting": MetricDoc(
        "prompts", "Prompts that the current epochs skip.", "below `data.curriculum.most_resting` of the data"
    ),
}
"""Metrics of runs with several data sources (`data.mixture`) or with `data.curriculum`. NAME is a data source."""


METRICS: dict[str, MetricDoc] = {
    "reward/mean": MetricDoc(
        "score", "Mean score of the step's responses, before KL is subtracted. Failed episodes do not count.", "rises"
    ),
    "reward/std": MetricDoc("score", "Standard deviation of the scores.", "above 0; equal scores teach nothing"),
    "reward/group_spread": MetricDoc(
        "fraction",
        "Prompts with unequal rewards, for estimators that compare the samples of a prompt.",
        "above 0; equal rewards teach nothing",
    ),
    "reward/min": MetricDoc("score", "Lowest score.", "within the range of the reward function"),
    "reward/max": MetricDoc("score", "Highest score.", "above the mean until the task is solved"),
    "reward/failures": MetricDoc(
        "fraction",
        "Rewards that failed or timed out and became `reward.failure_score`. With `rollout.load_from`, failures of the "
        "saved samples.",
        "0",
    ),
    "reward/timeouts": MetricDoc("fraction", "Rewards that exceeded `reward.timeout_seconds`.", "0"),
    "reward/NAME": MetricDoc(
        "score",
        "Mean score of one of several functions (`reward.functions`) before the weight is applied, over the samples "
        "that the function graded.",
        "rises",
    ),
    "reward/NAME/unreadable": MetricDoc(
        "fraction",
        "Answers for which this judge returned a truncated text or a text without a verdict.",
        "near 0, or the prompt is unclear or `max_tokens` too small",
    ),
    "reward/NAME/seconds": MetricDoc(
        "seconds",
        "Time of this judge on the slowest rank, in the longest round of the step. NAME is `judge` for a single judge.",
        "steady",
    ),
    "reward/overlong": MetricDoc("score", "Mean penalty for long responses (`reward.overlong`).", "rises to 0"),
    "reward/given": MetricDoc("score", "Mean score before shaping (`reward.scale` and similar settings).", "rises"),
    "reward/running_mean": MetricDoc("score", "Mean of scores so far, after penalties (`reward.normalize`).", "rises"),
    "reward/running_std": MetricDoc("score", "Standard deviation of the same scores.", "steady"),
    "reward/clipped": MetricDoc("fraction", "Scores outside `reward.clip`.", "near 0"),
    **SOURCES,
    "group/spread": MetricDoc(
        "fraction",
        "Share of the drawn prompts with unequal rewards (`rollout.dynamic_sampling`).",
        "above 0.3; if near 0 or falling, prompts are too hard or too easy",
    ),
    "group/rounds": MetricDoc("count", "Rounds of prompts in the step.", "below `max_rounds`"),
    "group/filled": MetricDoc("fraction", "Prompts of the step with equal rewards, used to fill the step.", "0"),
    "advantage/mean": MetricDoc("score", "Mean advantage per token, after whitening.", "near 0"),
    "advantage/std": MetricDoc("score", "Standard deviation of advantages, after whitening.", "near 1 with whitening"),
    "advantage/std_raw": MetricDoc(
        "score",
        "Standard deviation of the advantages per token, before whitening. Equal to `advantage/std` without whitening.",
        "steady; if near 0, whitening amplifies noise",
    ),
    "return/mean": MetricDoc("score", "Mean return per token, the target of the critic.", "follows reward/mean"),
    "critic/value_mean": MetricDoc("score", "Mean value per token before the step's first update.", "near return/mean"),
    "critic/explained_variance": MetricDoc(
        "1",
        "1 - Var(return - value) / Var(return) over the step's tokens. The values are computed before the step's "
        "first update. The returns are discounted sums of rewards (lambda 1). Absent if all returns are equal.",
        "rises from 0 towards 1",
    ),
    **_of_updates("critic", VALUE_METRICS),
    "critic/held_out_explained_variance": MetricDoc(
        "1",
        "Explained variance on the held-out samples of value pretraining after the updates of the step.",
        "rises towards 1; above 0.5 the critic is ready",
    ),
    "critic/grad_norm": MetricDoc("1", "Mean L2 norm of the critic's gradient before clipping.", "steady; no jumps"),
    "critic/learning_rate": MetricDoc("1", "Learning rate of the step's last critic update.", "as scheduled"),
    "critic/updates": MetricDoc("updates", "Critic updates applied in the step.", "epochs x minibatches"),
    "critic/skipped_updates": MetricDoc("updates", "Critic updates skipped as not finite.", "0"),
    **_of_experts("critic"),
    **_of_updates("actor", POLICY_METRICS),
    "actor/grad_norm": MetricDoc("1", "Mean L2 norm of the actor's gradient before clipping.", "steady; no jumps"),
    "actor/learning_rate": MetricDoc("1", "Learning rate of the step's last actor update.", "as scheduled"),
    "actor/updates": MetricDoc(
        "updates", "Actor updates applied in the step.", "epochs x minibatches, or fewer with `algorithm.target_kl`"
    ),
    "actor/skipped_updates": MetricDoc("updates", "Actor updates skipped as not finite.", "0"),
    **_of_experts("actor"),
    "actor/penalty_coef": MetricDoc("1", "Weight of KL(old || new) with `policy_loss: penalty`.", "settles"),
    "actor/final_kl": MetricDoc(
        "nats per token",
        "KL(old || new) after the last update of the step (k3), with `policy_loss: penalty`. Adjusts the weight.",
        "near `algorithm.penalty.target`",
    ),
    "kl/mean": MetricDoc(
        "nats per token",
        "KL to the reference before the updates, by `kl_in_reward.kind`, or k1 without `kl_in_reward`.",
        "rises slowly; near `algorithm.kl_in_reward.target` if the weight is adaptive",
    ),
    "kl/per_response": MetricDoc(
        "nats per response",
        "The same KL, summed over each response. Mean over scored responses.",
        "near the target with `per: response`",
    ),
    "kl/coef": MetricDoc("1", "Weight of the KL in the reward.", "settles if adaptive"),
    "response/length": MetricDoc("tokens", "Mean length of a response.", "well below `rollout.max_response_tokens`"),
    "response/length_max": MetricDoc("tokens", "Longest response.", "at most `rollout.max_response_tokens`"),
    "response/truncated": MetricDoc(
        "fraction",
        "Responses and episodes that ended at `rollout.max_response_tokens` or `rollout.max_total_tokens`. Limits of "
        "turns and tool calls do not count.",
        "below 0.1; advice above 0.5",
    ),
    "response/position_limit": MetricDoc(
        "fraction", "Responses that ended at the limit of prompt plus response.", "near 0; advice above 0.5"
    ),
    "response/special_tokens": MetricDoc(
        "tokens", "Mean number of special tokens in a response, hidden by decoding.", "0, unless the task uses them"
    ),
    "prompt/length": MetricDoc("tokens", "Mean length of a prompt.", "as the data"),
    "prompt/dropped": MetricDoc(
        "prompts", "Skipped training prompts, longer than `data.max_prompt_tokens`.", "a small share"
    ),
    "rollout/lag": MetricDoc(
        "versions",
        "Mean staleness: weight syncs between the sampling weights and the actor's weights. Mean over tokens if a "
        "response can have tokens of several versions.",
        "0; 1 with `rollout.ahead: 1`; below `rollout.max_lag` for larger values",
    ),
    "rollout/lag_max": MetricDoc("versions", "Staleness of the oldest token.", "at most `rollout.max_lag`"),
    "rollout/several_versions": MetricDoc(
        "fraction", "Responses with tokens of several weight versions.", "small if steps take longer than responses"
    ),
    "rollout/in_flight": MetricDoc(
        "prompts", "Unfinished prompts after the step took its own prompts.", "at most `ahead` x `prompts_per_step`"
    ),
    "rollout/waiting": MetricDoc(
        "prompts", "Prompts with finished responses for later steps.", "near 0 if engines are slower than training"
    ),
    "rollout/dropped": MetricDoc(
        "prompts", "Prompts that became stale and were queued again.", "0, unless a resume changes settings"
    ),
    "rollout/partial": MetricDoc(
        "responses", "Responses that the last sync interrupted after the first token.", "below the number sent"
    ),
    "rollout/cache_hit_rate": MetricDoc(
        "fraction",
        "Share of the prompt tokens of all ranks that were in the servers' prefix caches. In episodes, prompt tokens "
        "include earlier turns (servers).",
        "steady; above 0.5 with several turns, or with several samples of a long prompt",
    ),
    "rollout/cache_hit_rate_min": MetricDoc("fraction", "Lowest hit rate of a server.", "near the mean"),
    "rollout/cache_hit_rate_max": MetricDoc("fraction", "Highest hit rate of a server.", "near the mean"),
    **EPISODES,
    "mismatch/mean": MetricDoc(
        "nats per token", "Mean |engine - trainer| log-probability.", "below 0.001 in float32, 0.05 in bfloat16"
    ),
    "mismatch/own_weights": MetricDoc(
        "nats per token",
        "Mean over tokens of the current weights. Absent if all tokens are of these weights (`rollout.ahead`). "
        "Warnings and `algorithm.mismatch_stop_nats` use this metric.",
        "as mismatch/mean without `ahead`",
    ),
    "mismatch/max": MetricDoc("nats", "Largest difference of a token.", "below 1"),
    "mismatch/k3": MetricDoc("nats per token", "KL(engine || trainer), the k3 estimate.", "below 0.001"),
    "mismatch/truncated": MetricDoc(
        "fraction", "Tokens whose trainer / engine ratio is above `algorithm.correction.cap`.", "below 0.01"
    ),
    "mismatch/router_changed": MetricDoc(
        "fraction",
        "Share of the replayed tokens for which the actor's router selects different experts, counted per layer.",
        "below 0.01 in float32, 0.1 in bfloat16",
    ),
    "mismatch/router_replayed": MetricDoc(
        "fraction",
        "Tokens that use the experts of the engine (`algorithm.router_replay`), counted per layer.",
        "all but one token of each sample",
    ),
    "correction/weight_mean": MetricDoc("1", "Mean importance weight, including rejected tokens.", "near 1"),
    "correction/truncated": MetricDoc(
        "fraction", "Tokens with a weight at `algorithm.correction.cap`, including rejected tokens.", "below 0.01"
    ),
    "correction/rejected": MetricDoc(
        "fraction",
        "Tokens that `algorithm.correction.reject_above` or `algorithm.correction.reject_below` excludes.",
        "below 0.01",
    ),
    "sync/seconds": MetricDoc(
        "seconds",
        "Time of the last weight sync of the step, including failed attempts. This metric and its parts are measured "
        "on the slowest rank.",
        "small compared with time/step",
    ),
    "sync/transfer_seconds": MetricDoc(
        "seconds", "Part of sync/seconds: the transfer of all weights in the last attempt.", "most of sync/seconds"
    ),
    "sync/gigabytes_per_second": MetricDoc(
        "GB/s (1e9 bytes)", "The actor's weights, divided by `sync/transfer_seconds`.", "steady"
    ),
    "sync/version": MetricDoc("count", "Version of the weights in the engine.", "step + 1"),
    "sync/gather_seconds": MetricDoc(
        "seconds",
        "Part of sync/seconds: gathering and converting shards, including the wait for other ranks (servers).",
        "most of sync/seconds",
    ),
    "sync/load_seconds": MetricDoc("seconds", "Part of sync/seconds: waiting for servers to load.", "small"),
    "sync/verify_seconds": MetricDoc(
        "seconds", "Part of sync/seconds: checksums that do not overlap with the transfer (servers).", "small"
    ),
    "sync/session_seconds": MetricDoc(
        "seconds", "Part of sync/seconds: opening and closing sessions, flushing caches (servers).", "below 0.1"
    ),
    "sync/wake_seconds": MetricDoc(
        "seconds",
        "Part of sync/seconds: trainers release memory, dead servers restart, and servers allocate memory.",
        "steady; the largest part if servers use the GPUs of trainers",
    ),
    "sync/probe_gap": MetricDoc(
        "nats", "Largest gap of a probe's log-probabilities after the sync (servers).", "as mismatch/max"
    ),
    "sync/probe_seconds": MetricDoc("seconds", "Part of sync/seconds: the probe (servers).", "time of a few tokens"),
    "engine/restarts": MetricDoc("count", "Server restarts since the run began.", "0"),
    "balance/imbalance": MetricDoc(
        "fraction",
        "FLOPs of the busiest replicas of each forward pass and update, divided by the mean over replicas, minus 1.",
        "below 0.05; higher if a replica has few samples",
    ),
    "time/rollout": MetricDoc("seconds", "Generation of responses.", "often the largest part"),
    "time/reward": MetricDoc("seconds", "Reward functions or reward model.", "small compared with time/step"),
    "time/forward": MetricDoc("seconds", "Old and reference log-probabilities, values.", "below the updates"),
    "time/advantages": MetricDoc("seconds", "KL, advantages, whitening.", "near 0"),
    "time/update_critic": MetricDoc("seconds", "All critic updates.", "like time/update_actor"),
    "time/update_actor": MetricDoc("seconds", "All actor updates.", "steady at steady lengths"),
    "time/sync": MetricDoc("seconds", "Weight sync to the engine.", "small compared with time/step"),
    "time/evaluate": MetricDoc("seconds", "Validation, only in steps with a validation.", "a small part of all steps"),
    "time/checkpoint": MetricDoc("seconds", "Pause for the checkpoint before the step.", "below 5% of time/step"),
    "time/export": MetricDoc(
        "seconds", "Pause for the export of the actor in the Hugging Face format.", "a small part of all steps"
    ),
    "time/step": MetricDoc("seconds", "The whole step.", "slightly above the sum of the stages"),
    "tokens_per_second": MetricDoc(
        "tokens/s", "Prompt and response tokens of all ranks, divided by `time/step`.", "steady"
    ),
    "samples_per_second": MetricDoc("samples/s", "Responses of all ranks, divided by `time/step`.", "steady"),
    "mfu": MetricDoc(
        "fraction", "Model FLOPs utilization: share of the dense bfloat16 peak of the devices.", "0.2 to 0.5 in updates"
    ),
    "memory/peak_gigabytes": MetricDoc(
        "GB (1e9 bytes)", "Peak memory of the first rank: of the device, on CPU of the process.", "below the device's"
    ),
    "memory/NAME/peak_gigabytes": MetricDoc(
        "GB (1e9 bytes)",
        "Peak memory within a stage, such as `rollout`. On CPU, memory of the process at the end of the stage.",
        "steady at steady lengths",
    ),
    "memory/reserved_gigabytes": MetricDoc(
        "GB (1e9 bytes)",
        "Memory that the first rank reserves at the end of the step: torch's allocator, or the process on CPU.",
        "steady",
    ),
    "memory/free_gigabytes": MetricDoc(
        "GB (1e9 bytes)",
        "Free memory of the device at the end of the step, after servers wake up. On CPU, free memory of the machine.",
        "steady and above 0",
    ),
    "eval/reward_mean": MetricDoc(
        "score", "Mean score of the greedy responses to validation prompts, without failures.", "rises"
    ),
    "eval/failures": MetricDoc("fraction", "Responses without a score, because the reward or the episode failed.", "0"),
    "eval/dropped": MetricDoc("prompts", "Skipped validation prompts, longer than `data.max_prompt_tokens`.", "0"),
    "eval/response_length": MetricDoc("tokens", "Mean length of these responses.", "like response/length"),
    "eval/NAME/reward_mean": MetricDoc(
        "score", "Mean score of the responses to one of several validation sets (`data.validation_sets`).", "rises"
    ),
    "eval/NAME/failures": MetricDoc("fraction", "Responses of the set without a score.", "0"),
    "eval/NAME/dropped": MetricDoc("prompts", "Skipped prompts of the set.", "0"),
    "eval/NAME/response_length": MetricDoc("tokens", "Mean length of these responses.", "like response/length"),
    "eval/NAME/pass@K": MetricDoc(
        "fraction",
        "Probability that at least one of K responses is right, averaged over the prompts of the set.",
        "rises, less for large K",
    ),
}
"""Descriptions of all metrics of a run by name."""

_PATTERNS = tuple(
    (re.compile(re.escape(name).replace("NAME", "[^/]+").replace("@K", r"@\d+")), name)
    for name in METRICS
    if "NAME" in name or "@K" in name
)


def documented(name: str) -> str | None:
    """Return the documented name of a metric, or None for a metric of the user."""
    if name in METRICS:
        return name
    return next((of for pattern, of in _PATTERNS if pattern.fullmatch(name)), None)


_MAXIMA = re.compile(r".*(/max|_max|_max_load|peak_gigabytes)|sync/(probe_gap|version)|engine/restarts")
_MINIMA = re.compile(r".*[/_]min")


def over_steps(name: str, values: Sequence[float]) -> float:
    """Combine the values of a metric over several steps: the largest value for maxima and counters, the smallest value
    for minima, and the mean for all other metrics. Values that are not finite are ignored. Return NaN if no value is
    finite.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return math.nan
    if _MAXIMA.fullmatch(name):
        return max(finite)
    if _MINIMA.fullmatch(name):
        return min(finite)
    return mean(finite)
