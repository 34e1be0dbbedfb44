"""Tests of the hit rate of prefix caches for the prompts of a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.engines.protocol import CacheUse
from megappo.ppo.cache_gauge import CacheGauge
from megappo.runtime.process import Runtime

RUNTIME = Runtime(0, 1, 0, torch.device("cpu"))


class Counting:
    """Counts cached tokens in place of an engine."""

    def __init__(self, *servers: int) -> None:
        self.cache_use = {server: CacheUse() for server in servers}

    def count(self, server: int, prompt_tokens: int, cached_tokens: int) -> None:
        self.cache_use[server] += CacheUse(prompt_tokens, cached_tokens)


@pytest.fixture(autouse=True)
def world(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_hit_rate_is_per_step_without_evaluations() -> None:
    engine: Any = Counting(0, 3)
    engine.count(0, 1000, 1000)
    gauge = CacheGauge(engine, RUNTIME)
    gauge.metrics()
    assert gauge.metrics() == {}, "no requests were sent"
    engine.count(0, 30, 12)
    with gauge.left_out():
        engine.count(0, 500, 500)
        engine.count(3, 500, 0)
    engine.count(3, 70, 63)
    assert gauge.metrics() == {
        "rollout/cache_hit_rate": pytest.approx(0.75),
        "rollout/cache_hit_rate_min": pytest.approx(0.4),
        "rollout/cache_hit_rate_max": pytest.approx(0.9),
    }
    engine.count(3, 10, 1)
    assert gauge.metrics() == dict.fromkeys(
        ("rollout/cache_hit_rate", "rollout/cache_hit_rate_min", "rollout/cache_hit_rate_max"), pytest.approx(0.1)
    )


def test_engine_without_caches_has_no_rate() -> None:
    gauge = CacheGauge(object(), RUNTIME)  # type: ignore[arg-type]
    with gauge.left_out():
        pass
    assert gauge.metrics() == {}
