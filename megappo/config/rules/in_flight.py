"""Rules for prompts that are always in flight: `rollout.ahead` of 2 and more."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.config.rules.arrivals import arrivals_rules
from megappo.config.schema import Config, RolloutSettings
from megappo.families.architecture import ModelShape


def longest_lag(config: Config) -> int:
    """Most syncs between the weights that began a response and the weights that are trained on it.

    The default is 1 with `gae`: a return mixes rewards with the current critic's values of states that an older policy
    visited.
    """
    rollout = config.rollout
    if rollout.max_lag is not None:
        return rollout.max_lag
    return 1 if config.algorithm.estimator == "gae" else rollout.ahead


def in_flight_rules(config: Config, shape: ModelShape) -> Iterator[str]:
    """Rules on settings that exclude prompts in flight; `shape` is the actor's."""
    rollout = config.rollout
    yield from arrivals_rules(config)
    if rollout.has_servers:
        yield from _pause_rules(rollout)
    if not rollout.in_flight:
        if rollout.max_lag is not None:
            yield (
                f"rollout.max_lag is {rollout.max_lag}, but with rollout.ahead {rollout.ahead} no response is older "
                f"than {rollout.ahead}; remove it, or set ahead to 2 or more"
            )
        return
    ahead, lag = rollout.ahead, longest_lag(config)
    if ahead > lag:
        default = ", its default with algorithm.estimator gae," if rollout.max_lag is None else ""
        yield (
            f"rollout.ahead {ahead} is above rollout.max_lag {lag}{default} so that responses would be too old when "
            f"their turn comes; set max_lag to at least {ahead}, or ahead to {lag}"
        )
    if config.algorithm.replays_routing(shape.experts):
        yield (
            f"rollout.ahead is {ahead}, but a response of several weights has no routing to replay; set "
            "algorithm.router_replay to false, or rollout.ahead to 1"
        )
    if rollout.when_stopped == "keep":
        yield f"rollout.when_stopped is keep, but with rollout.ahead {ahead} all that is finished is kept; remove it"


def _pause_rules(rollout: RolloutSettings) -> Iterator[str]:
    """Rules on `rollout.sglang.pause`: servers that keep requests over a sync answer nothing else until they continue
    them."""
    servers, pause = rollout.servers, rollout.servers.pause
    if not servers.holds:
        return
    if not rollout.in_flight:
        yield (
            f"rollout.sglang.pause is {pause}, but with rollout.ahead {rollout.ahead} nothing is under way when "
            "weights change; set pause to abort, or ahead to 2 or more"
        )
    if not servers.verify or servers.probe:
        yield (
            f"rollout.sglang.pause is {pause}, with which servers generate before any probe is answered; set probe to "
            "false and verify to true, so that checksums alone prove a sync, or pause to abort"
        )
    if rollout.episodes is not None:
        yield (
            f"rollout.sglang.pause is {pause}, but turns of episodes are broken off when weights change; set pause to "
            "abort"
        )
    if servers.urls:
        yield (
            f"rollout.sglang.pause is {pause}, but servers of rollout.sglang.urls would stay paused if the run ended "
            "during a sync; set pause to abort"
        )
