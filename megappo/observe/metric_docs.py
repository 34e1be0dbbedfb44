"""What every metric means; README.md beside this file shows it as a table."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megappo.observe.charts import mean
from megappo_kernels.objectives import POLICY_METRICS, VALUE_METRICS, Metric


class MetricDoc(NamedTuple):
    """One metric."""

    unit: str
    meaning: str
    healthy: str
    """What to expect of a run that goes well."""


def _of_updates(role: str, declared: Mapping[str, Metric]) -> dict[str, MetricDoc]:
    """What the role's objective reports, as it declares it."""
    return {f"{role}/{name}": MetricDoc(*metric[1:]) for name, metric in declared.items() if metric.kind != "spread"}


def _of_experts(role: str) -> dict[str, MetricDoc]:
    return {
        f"{role}/experts_max_load": MetricDoc(
            "1",
            "Tokens of the busiest expert by those of the mean one, in the layer where that is most.",
            "steady",
        ),
        f"{role}/router_aux_loss": MetricDoc(
            "1",
            f"Load-balancing loss of a layer, in the mean over layers and updates (`{role}.router_aux_loss_coef`).",
            "near 1, where tokens are spread evenly",
        ),
        f"{role}/experts_unused": MetricDoc(
            "fraction", "Experts of all layers to which no token of the step was sent.", "near 0"
        ),
    }


EPISODES = {
    "episode/turns": MetricDoc("turns", "Mean number of turns of an episode that did not fail.", "as the task"),
    "episode/turns_max": MetricDoc("turns", "Most turns of an episode.", "at most `rollout.environment.max_turns`"),
    "episode/trajectories": MetricDoc(
        "trajectories",
        "Conversations of an episode that do not go on from one another, in the mean; the last is trained on.",
        "1; more where an agent changes what was said",
    ),
    "episode/left_out_tokens": MetricDoc(
        "tokens", "What the model said in the other trajectories of an episode, in the mean.", "near 0"
    ),
    "episode/begun_anew": MetricDoc(
        "episodes",
        "Of a run that goes on with episodes in flight: those that were not over, which begin anew.",
        "0 but for the first step after a start",
    ),
    "episode/observed_tokens": MetricDoc(
        "tokens", "What the environment said in an episode, in the mean.", "steady; counts in `response/length`"
    ),
    "episode/seconds": MetricDoc("seconds", "Mean time in the environment, engine and tools aside.", "near 0"),
    "episode/seconds_max": MetricDoc("seconds", "The longest of them.", "well below `rollout.environment.max_seconds`"),
    "episode/failures": MetricDoc(
        "fraction", "Episodes that failed; nothing of them is trained on.", "0; at most `max_failure_fraction`"
    ),
    "episode/raised": MetricDoc("fraction", "Of all: those whose environment raised.", "0"),
    "episode/hung": MetricDoc("fraction", "Of all: those that passed `rollout.environment.max_seconds`.", "0"),
    "episode/nonsense": MetricDoc("fraction", "Of all: those that gave no rewards, tokens or turns.", "0"),
    "episode/limit_turns": MetricDoc(
        "fraction", "Episodes that `rollout.environment.max_turns` ended.", "near 0, or as the task"
    ),
    "episode/limit_calls": MetricDoc("fraction", "Episodes that `rollout.environment.max_calls` ended.", "near 0"),
    "episode/limit_turn_tokens": MetricDoc(
        "fraction",
        "Episodes that ended by themselves after a turn that `rollout.environment.max_turn_tokens` cut.",
        "near 0; advice above 0.5",
    ),
    "episode/limit_tokens": MetricDoc(
        "fraction", "Episodes that `rollout.max_response_tokens` or `rollout.max_total_tokens` ended.", "near 0"
    ),
    "turn/tokens": MetricDoc("tokens", "Mean length of a turn of the model.", "as the task"),
    "turn/reward": MetricDoc("score", "Mean reward that the environment gave for a turn.", "rises"),
    "tool/NAME/calls": MetricDoc("calls", "Calls of this tool in an episode, in the mean.", "above 0 where it helps"),
    "tool/NAME/failures": MetricDoc(
        "fraction", "Of its calls: those that raised, or took more time, memory or processes than they may.", "near 0"
    ),
    "tool/NAME/seconds": MetricDoc("seconds", "Mean time of a call, waiting for a worker aside.", "small"),
}
"""Metrics of runs with an environment (`rollout.environment`); NAME is a tool's."""


SOURCES = {
    "source/NAME/prompts": MetricDoc("prompts", "Prompts of this source in the step.", "as its weight"),
    "source/NAME/reward_mean": MetricDoc(
        "score", "Mean score of the responses to them; the mean of all sources is `reward/mean`.", "rises"
    ),
    "source/NAME/response_length": MetricDoc("tokens", "Mean length of these responses.", "like response/length"),
    "source/NAME/right": MetricDoc("prompts", "Those of this source in `curriculum/right`.", "rises"),
    "curriculum/right": MetricDoc(
        "prompts",
        "Prompts of the step, in all its rounds, with a mean score above `data.curriculum.right_above`; they rest.",
        "rises",
    ),
    "curriculum/resting": MetricDoc(
        "prompts", "Prompts that the passes under way leave out.", "below `data.curriculum.most_resting` of the data"
    ),
}
"""Metrics of runs with several data sources (`data.mixture`), of which NAME is one, and with `data.curriculum`."""


METRICS: dict[str, MetricDoc] = {
    "reward/mean": MetricDoc(
        "score", "Mean score of the step's responses, KL not subtracted; without episodes that failed.", "rises"
    ),
    "reward/std": MetricDoc("score", "Spread of the scores.", "above 0; at 0 there is nothing to learn from"),
    "reward/group_spread": MetricDoc(
        "fraction",
        "Prompts whose samples have different rewards, where the estimator compares them.",
        "above 0; at 0 there is nothing to learn from",
    ),
    "reward/min": MetricDoc("score", "Lowest score.", "within the range of the reward function"),
    "reward/max": MetricDoc("score", "Highest score.", "above the mean until the task is solved"),
    "reward/failures": MetricDoc(
        "fraction",
        "Rewards that failed and got `reward.failure_score`, time-outs included; with `rollout.load_from`, "
        "failures of the saved samples.",
        "0",
    ),
    "reward/timeouts": MetricDoc("fraction", "Rewards that passed `reward.timeout_seconds`.", "0"),
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
        "Time that this judge took on the slowest rank, in the longest round of the step; NAME is `judge` for a single "
        "judge.",
        "steady",
    ),
    "reward/overlong": MetricDoc(
        "score", "What answers near the length limit lose in the mean (`reward.overlong`).", "rises to 0"
    ),
    "reward/given": MetricDoc(
        "score", "Mean score as functions gave it, where training makes others of it (`reward.scale`, ...).", "rises"
    ),
    "reward/running_mean": MetricDoc(
        "score", "Mean of all scores so far that `reward.normalize` goes by; after penalties.", "rises"
    ),
    "reward/running_std": MetricDoc("score", "Their standard deviation.", "steady"),
    "reward/clipped": MetricDoc("fraction", "Scores beyond `reward.clip`.", "near 0"),
    **SOURCES,
    "group/spread": MetricDoc(
        "fraction",
        "Of the prompts drawn for a step, those whose samples' rewards differ (`rollout.dynamic_sampling`).",
        "above 0.3; near 0 or falling, the prompts are too hard or too easy",
    ),
    "group/rounds": MetricDoc("count", "Rounds of prompts that the step took.", "below `max_rounds`"),
    "group/filled": MetricDoc("fraction", "Of the step's prompts, those kept though their rewards are equal.", "0"),
    "advantage/mean": MetricDoc("score", "Mean advantage per token, after whitening.", "near 0"),
    "advantage/std": MetricDoc("score", "Spread of the advantages, after whitening.", "near 1 where whitened"),
    "advantage/std_raw": MetricDoc(
        "score",
        "Spread of the advantages per token before whitening; equal to `advantage/std` without whitening.",
        "steady; where it falls towards 0, whitening amplifies noise",
    ),
    "return/mean": MetricDoc(
        "score", "Mean return per token: what the critic learns to predict.", "follows reward/mean"
    ),
    "critic/value_mean": MetricDoc(
        "score", "Mean value per token, before the step's first update.", "near return/mean"
    ),
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
    "critic/skipped_updates": MetricDoc("updates", "Critic updates refused as not finite.", "0"),
    **_of_experts("critic"),
    **_of_updates("actor", POLICY_METRICS),
    "actor/grad_norm": MetricDoc("1", "Mean L2 norm of the actor's gradient before clipping.", "steady; no jumps"),
    "actor/learning_rate": MetricDoc("1", "Learning rate of the step's last actor update.", "as scheduled"),
    "actor/updates": MetricDoc(
        "updates", "Actor updates applied in the step.", "epochs x minibatches, less after `algorithm.target_kl`"
    ),
    "actor/skipped_updates": MetricDoc("updates", "Actor updates refused as not finite.", "0"),
    **_of_experts("actor"),
    "actor/penalty_coef": MetricDoc("1", "Weight of KL(old || new) with `policy_loss: penalty`.", "settles"),
    "actor/final_kl": MetricDoc(
        "nats per token",
        "KL(old || new) after the last update of the step (k3), with `policy_loss: penalty`; moves the weight.",
        "near `algorithm.penalty.target`",
    ),
    "kl/mean": MetricDoc(
        "nats per token",
        "KL to the reference before the updates, by `kl_in_reward.kind`, or k1 without `kl_in_reward`.",
        "rises slowly; near `algorithm.kl_in_reward.target` where adaptive",
    ),
    "kl/per_response": MetricDoc(
        "nats per response",
        "The same summed over a response, mean over responses that are scored.",
        "near that target with `per: response`",
    ),
    "kl/coef": MetricDoc("1", "Weight of the KL in the reward.", "settles where adaptive"),
    "response/length": MetricDoc("tokens", "Mean length of a response.", "well below `rollout.max_response_tokens`"),
    "response/length_max": MetricDoc("tokens", "Longest response.", "at most `rollout.max_response_tokens`"),
    "response/truncated": MetricDoc(
        "fraction",
        "Responses and episodes that `rollout.max_response_tokens` or `rollout.max_total_tokens` ended; the limits of "
        "turns and tool calls do not count.",
        "below 0.1; advice above 0.5",
    ),
    "response/position_limit": MetricDoc(
        "fraction", "Of all: those that the limit of prompt and response together ended.", "near 0; advice above 0.5"
    ),
    "response/special_tokens": MetricDoc(
        "tokens", "Special tokens inside a response, in the mean; decoding hides them.", "0, unless the task has some"
    ),
    "prompt/length": MetricDoc("tokens", "Mean length of a prompt.", "as the data"),
    "prompt/dropped": MetricDoc(
        "prompts", "Training prompts left out as longer than `data.max_prompt_tokens`.", "few of the data set"
    ),
    "rollout/lag": MetricDoc(
        "versions",
        "Syncs between the weights that sampled and the actor's; of tokens, where a response may be of several.",
        "0; 1 with `rollout.ahead: 1`, less than `rollout.max_lag` above",
    ),
    "rollout/lag_max": MetricDoc("versions", "Of the oldest token.", "at most `rollout.max_lag`"),
    "rollout/several_versions": MetricDoc(
        "fraction", "Responses with tokens of several weight versions.", "few where a step takes longer than an answer"
    ),
    "rollout/in_flight": MetricDoc(
        "prompts", "Prompts under way when the step has taken its own.", "at most `ahead` x `prompts_per_step`"
    ),
    "rollout/waiting": MetricDoc(
        "prompts", "Prompts whose responses are finished and wait for a later step.", "near 0 where engines are slower"
    ),
    "rollout/dropped": MetricDoc(
        "prompts", "Prompts given up because they were too old, which are sent again.", "0 while settings stay"
    ),
    "rollout/partial": MetricDoc(
        "responses",
        "Responses that the last sync broke off after their first token.",
        "fewer than sent",
    ),
    "rollout/cache_hit_rate": MetricDoc(
        "fraction",
        "Tokens of prompts, an episode's turns included, that the servers' prefix caches had, of those that all ranks "
        "sent (SGLang).",
        "steady; above 0.5 with several samples of long prompts, or several turns",
    ),
    "rollout/cache_hit_rate_min": MetricDoc(
        "fraction", "Of the server with the lowest rate (SGLang).", "near the mean"
    ),
    "rollout/cache_hit_rate_max": MetricDoc(
        "fraction", "Of the server with the highest rate (SGLang).", "near the mean"
    ),
    **EPISODES,
    "mismatch/mean": MetricDoc(
        "nats per token", "Mean |engine - trainer| log-probability.", "below 0.001 in float32, 0.05 in bfloat16"
    ),
    "mismatch/own_weights": MetricDoc(
        "nats per token",
        "Mean gap of the tokens that the actor's own weights made, where others are of older ones (`rollout.ahead`). "
        "The run is warned and stopped by it.",
        "as mismatch/mean without `ahead`",
    ),
    "mismatch/max": MetricDoc("nats", "Largest such gap of a token.", "below 1"),
    "mismatch/k3": MetricDoc("nats per token", "KL(engine || trainer), the k3 estimate.", "below 0.001"),
    "mismatch/truncated": MetricDoc(
        "fraction", "Tokens whose trainer / engine ratio is above `algorithm.correction.cap`.", "below 0.01"
    ),
    "mismatch/router_changed": MetricDoc(
        "fraction",
        "Share of the replayed tokens for which the actor's router selects different experts; per layer.",
        "below 0.01 in float32, 0.1 in bfloat16",
    ),
    "mismatch/router_replayed": MetricDoc(
        "fraction",
        "Tokens that use the experts of the engine (`algorithm.router_replay`); per layer.",
        "all but one token of each sample",
    ),
    "correction/weight_mean": MetricDoc(
        "1", "Mean importance weight for the engine's gap, over all tokens, rejected ones included.", "near 1"
    ),
    "correction/truncated": MetricDoc(
        "fraction", "Tokens with a weight at `algorithm.correction.cap`, rejected ones included.", "below 0.01"
    ),
    "correction/rejected": MetricDoc(
        "fraction",
        "Tokens left out by `algorithm.correction.reject_above` or `algorithm.correction.reject_below`.",
        "below 0.01",
    ),
    "sync/seconds": MetricDoc(
        "seconds",
        "Time of the last weight sync of the step, including failed attempts. This metric and its parts are measured "
        "on the slowest rank.",
        "small compared with time/step",
    ),
    "sync/transfer_seconds": MetricDoc(
        "seconds", "Part of it: the transfer of all weights in the last attempt.", "most of it"
    ),
    "sync/gigabytes_per_second": MetricDoc(
        "GB/s (1e9 bytes)", "The actor's weights, divided by `sync/transfer_seconds`.", "steady"
    ),
    "sync/version": MetricDoc("count", "Version of the weights in the engine.", "step + 1"),
    "sync/gather_seconds": MetricDoc(
        "seconds",
        "Part of it: gathering and converting shards; includes the wait for other ranks (SGLang).",
        "most of it",
    ),
    "sync/load_seconds": MetricDoc("seconds", "Part of it: waiting for servers to load buckets (SGLang).", "small"),
    "sync/verify_seconds": MetricDoc(
        "seconds", "Part of it: checksums that do not overlap with the transfer (SGLang).", "small"
    ),
    "sync/session_seconds": MetricDoc(
        "seconds", "Part of it: opening and closing sessions, flushing caches (SGLang).", "below 0.1"
    ),
    "sync/wake_seconds": MetricDoc(
        "seconds",
        "Part of it: trainers release memory, dead servers restart, and servers allocate memory (SGLang).",
        "steady; the largest part if servers use the GPUs of trainers",
    ),
    "sync/probe_gap": MetricDoc(
        "nats", "Largest gap of a probe's log-probabilities after the sync (SGLang).", "as mismatch/max"
    ),
    "sync/probe_seconds": MetricDoc("seconds", "Part of it: that probe (SGLang).", "a few tokens' generation"),
    "engine/restarts": MetricDoc("count", "Servers started again since the run began (SGLang).", "0"),
    "balance/imbalance": MetricDoc(
        "fraction",
        "By how much the replicas with most FLOPs of a forward pass or update have more than all on average.",
        "below 0.05; more where a minibatch has few samples per replica",
    ),
    "time/rollout": MetricDoc("seconds", "Generation.", "often the largest part"),
    "time/reward": MetricDoc("seconds", "Reward functions or model.", "small beside time/step"),
    "time/forward": MetricDoc("seconds", "Old and reference log-probabilities, values.", "below the updates"),
    "time/advantages": MetricDoc("seconds", "KL, advantages, whitening.", "near 0"),
    "time/update_critic": MetricDoc("seconds", "All critic updates.", "like time/update_actor"),
    "time/update_actor": MetricDoc("seconds", "All actor updates.", "steady at steady lengths"),
    "time/sync": MetricDoc("seconds", "Weight stream into the engine.", "small beside time/step"),
    "time/evaluate": MetricDoc("seconds", "Validation, in steps that have one.", "rare enough not to matter"),
    "time/checkpoint": MetricDoc(
        "seconds", "How long training stood still for the checkpoint before the step.", "below 5% of time/step"
    ),
    "time/export": MetricDoc(
        "seconds", "How long training stood still for the actor in Hugging Face's format.", "rare enough not to matter"
    ),
    "time/step": MetricDoc("seconds", "The whole step.", "a little more than its stages"),
    "tokens_per_second": MetricDoc(
        "tokens/s", "Prompt and response tokens of the step by its time, all ranks.", "steady"
    ),
    "samples_per_second": MetricDoc("samples/s", "Responses of the step by its time, all ranks.", "steady"),
    "mfu": MetricDoc(
        "fraction",
        "Share of the devices' dense bfloat16 peak that the model's arithmetic used.",
        "0.2 to 0.5 in updates",
    ),
    "memory/peak_gigabytes": MetricDoc(
        "GB (1e9 bytes)", "Peak memory of the first rank: of its device, on CPU of its process.", "below the device's"
    ),
    "memory/NAME/peak_gigabytes": MetricDoc(
        "GB (1e9 bytes)",
        "The same within a stage, such as `rollout` or `update_actor`; on CPU what its process has at the end of it.",
        "steady at steady lengths",
    ),
    "memory/reserved_gigabytes": MetricDoc(
        "GB (1e9 bytes)",
        "What the first rank keeps from others when the step ends: torch's allocator, on CPU the process.",
        "steady",
    ),
    "memory/free_gigabytes": MetricDoc(
        "GB (1e9 bytes)",
        "Free then on its device, where servers are awake again; on CPU of the machine.",
        "steady and above 0",
    ),
    "eval/reward_mean": MetricDoc(
        "score", "Mean score of greedy answers to the validation prompts, those without a grade aside.", "rises"
    ),
    "eval/failures": MetricDoc("fraction", "Answers without a grade: their reward or episode failed.", "0"),
    "eval/dropped": MetricDoc("prompts", "Validation prompts left out as longer than `data.max_prompt_tokens`.", "0"),
    "eval/response_length": MetricDoc("tokens", "Mean length of those answers.", "like response/length"),
    "eval/NAME/reward_mean": MetricDoc(
        "score", "Mean score of the answers to one of several validation sets (`data.validation_sets`).", "rises"
    ),
    "eval/NAME/failures": MetricDoc("fraction", "Answers of that set without a grade.", "0"),
    "eval/NAME/dropped": MetricDoc("prompts", "Prompts of that set left out as too long.", "0"),
    "eval/NAME/response_length": MetricDoc("tokens", "Mean length of those answers.", "like response/length"),
    "eval/NAME/pass@K": MetricDoc(
        "fraction",
        "How probable it is that one of K answers is right, in the mean over the prompts of that set.",
        "rises, for large K less",
    ),
}
"""Every metric that a run writes."""

_PATTERNS = tuple(
    (re.compile(re.escape(name).replace("NAME", "[^/]+").replace("@K", r"@\d+")), name)
    for name in METRICS
    if "NAME" in name or "@K" in name
)


def documented(name: str) -> str | None:
    """The name under which a metric is documented; None for one of the user's own."""
    if name in METRICS:
        return name
    return next((of for pattern, of in _PATTERNS if pattern.fullmatch(name)), None)


_MAXIMA = re.compile(r".*(/max|_max|_max_load|peak_gigabytes)|sync/(probe_gap|version)|engine/restarts")
_MINIMA = re.compile(r".*[/_]min")


def over_steps(name: str, values: Sequence[float]) -> float:
    """Combine the values of a metric over several steps: the largest value for maxima and counters, the smallest value
    for minima, and the mean for all other metrics. Values that are not finite are ignored; NaN if no value is finite.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return math.nan
    if _MAXIMA.fullmatch(name):
        return max(finite)
    if _MINIMA.fullmatch(name):
        return min(finite)
    return mean(finite)
