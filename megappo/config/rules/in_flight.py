"""Rules for runs that always have prompts in flight (`rollout.ahead` of at least 2)."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.config.rollout import RolloutSettings
from megappo.config.rules.arrivals import arrivals_rules
from megappo.config.schema import Config
from megappo.families.architecture import ModelShape


def longest_lag(config: Config) -> int:
    """Return the largest number of weight syncs between the start of a response and training on the response.

    The default is 1 with `gae`, because a return combines rewards with the current critic's values of states that an
    older policy visited.
    """
    rollout = config.rollout
    if rollout.max_lag is not None:
        return rollout.max_lag
    return 1 if config.algorithm.estimator == "gae" else rollout.ahead


def in_flight_rules(config: Config, shape: ModelShape) -> Iterator[str]:
    """Check the settings that exclude prompts in flight. `shape` describes the actor's model."""
    rollout = config.rollout
    yield from arrivals_rules(config)
    if rollout.capabilities.separate_processes:
        yield from _pause_rules(rollout)
    if not rollout.in_flight:
        if rollout.max_lag is not None:
            yield (
                f"rollout.max_lag is {rollout.max_lag}, but with rollout.ahead {rollout.ahead} no response has a "
                f"lag above {rollout.ahead}; remove max_lag, or set ahead to 2 or more"
            )
        return
    ahead, lag = rollout.ahead, longest_lag(config)
    if ahead > lag:
        default = ", its default with algorithm.estimator gae," if rollout.max_lag is None else ""
        yield (
            f"rollout.ahead {ahead} is above rollout.max_lag {lag}{default} so that responses would be too old for "
            f"their training step; set max_lag to at least {ahead}, or ahead to {lag}"
        )
    if config.algorithm.replays_routing(shape.experts):
        yield (
            f"rollout.ahead is {ahead}, but a response from several weight versions has no routing to replay; set "
            "algorithm.router_replay to false, or rollout.ahead to 1"
        )
    if rollout.when_stopped == "keep":
        yield f"rollout.when_stopped is keep, but rollout.ahead {ahead} keeps all finished responses; remove it"


def _pause_rules(rollout: RolloutSettings) -> Iterator[str]:
    """Check `rollout.servers.pause`. Servers that retain requests during a sync answer no other requests until
    generation continues."""
    servers, pause = rollout.server_settings, rollout.server_settings.pause
    if not servers.keeps_requests:
        return
    if not rollout.capabilities.keeps_requests:
        yield (
            f"rollout.servers.pause is {pause}, but the engine '{rollout.engine_name}' does not keep requests during "
            "a weight sync; set pause to abort, or set `keeps_requests` in its capabilities"
        )
    if not rollout.in_flight:
        yield (
            f"rollout.servers.pause is {pause}, but with rollout.ahead {rollout.ahead} no request is running when "
            "weights change; set pause to abort, or ahead to 2 or more"
        )
    if not servers.verify or servers.probe:
        yield (
            f"rollout.servers.pause is {pause}, so servers continue to generate before they can answer a probe; set "
            "probe to false and verify to true to check a sync by checksums alone, or set pause to abort"
        )
    if rollout.episodes is not None:
        yield (
            f"rollout.servers.pause is {pause}, but turns of episodes are aborted when weights change; set pause to "
            "abort"
        )
    if servers.urls:
        yield (
            f"rollout.servers.pause is {pause}, but servers of rollout.servers.urls would stay paused if the run ended "
            "during a sync; set pause to abort"
        )
