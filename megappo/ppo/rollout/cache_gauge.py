"""`rollout/cache_hit_rate`: share of a step's prompt tokens that were in the prefix caches of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from megappo.engines.protocol import CacheUse, Engine
from megappo.runtime.process import Runtime
from megappo.runtime.ranks.tally import Tally


class CacheGauge:
    """Computes per-step counts from the cumulative counts of an engine."""

    def __init__(self, engine: Engine, runtime: Runtime) -> None:
        self._engine, self._runtime = engine, runtime
        self._read: Mapping[int, CacheUse] = {}
        """Counts of earlier steps and of evaluations, which do not belong to this step."""

    @property
    def _counted(self) -> dict[int, CacheUse]:
        return dict(self._engine.usage.cache)

    def metrics(self) -> dict[str, float]:
        """Return the hit rate since the last call, and the lowest and highest rate of a server. A collective of the
        world.

        Empty if nothing was generated, or if the engine has no prefix cache.
        """
        counted, tally = self._counted, Tally()
        for server, use in sorted(_difference(counted, self._read).items()):
            tally.total(f"{server}/prompts", float(use.prompt_tokens))
            tally.total(f"{server}/cached", float(use.cached_tokens))
        self._read = counted
        if not counted:
            return {}
        told = tally.reduce(self._runtime.device)
        found = {i: CacheUse(int(told[f"{i}/prompts"]), int(told[f"{i}/cached"])) for i in counted}
        rates = [use.cached_tokens / use.prompt_tokens for use in found.values() if use.prompt_tokens]
        if not rates:
            return {}
        whole = sum(found.values(), CacheUse())
        return {
            "rollout/cache_hit_rate": whole.cached_tokens / whole.prompt_tokens,
            "rollout/cache_hit_rate_min": min(rates),
            "rollout/cache_hit_rate_max": max(rates),
        }

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Context for an evaluation, in which generation is not counted."""
        before = self._counted
        try:
            yield
        finally:
            meanwhile = _difference(self._counted, before)
            self._read = {i: self._read.get(i, CacheUse()) + use for i, use in meanwhile.items()}


def _difference(now: Mapping[int, CacheUse], before: Mapping[int, CacheUse]) -> dict[int, CacheUse]:
    return {server: use - before.get(server, CacheUse()) for server, use in now.items()}
