"""Reports of a run: stages, unusual updates, and the hit rate of prefix caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.config import derive_run, load_config
from megappo.config.sections.algorithm import JumpSettings
from megappo.engines.absent import AbsentEngine
from megappo.engines.protocol import CacheUse, EngineUsage
from megappo.ppo.reports.jumps import JumpWatch
from megappo.ppo.reports.reporting import Reporter
from megappo.ppo.rollout.cache_gauge import CacheGauge
from megappo.runtime.process import Runtime
from tests.support.places import ROOT


def test_progress_restarts_the_limit_of_a_stage(tmp_path: Path) -> None:
    """Each minibatch reports the stage to the watchdog again. Ranks without output do the same."""
    config = load_config(ROOT / "configs/quickstart.yaml", [f"run.directory={tmp_path}"])
    runtime, stages = Runtime(1, 2, 1, torch.device("cpu")), list[tuple[str, str]]()
    reporter = Reporter(config, derive_run(config, 2), runtime, lambda *stage: stages.append(stage))
    with reporter.stage("update_actor", "the slowest rank"):
        reporter.goes_on()
    assert stages == [("update_actor", "the slowest rank")] * 2
    reporter.close()


@pytest.mark.parametrize(
    ("blocked", "sentence"), [(False, "the profile of the step is in "), (True, "the step is not traced: ")]
)
@pytest.mark.usefixtures("world_of_one")
def test_traced_step_reports_its_page_or_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], blocked: bool, sentence: str
) -> None:
    if blocked:
        (tmp_path / "profile").touch()  # the path of the folder of traces
    overrides = [f"run.directory={tmp_path}", "logging.profile_steps=[1]", "logging.tensorboard=false"]
    config = load_config(ROOT / "configs/quickstart.yaml", overrides)
    reporter = Reporter(config, derive_run(config, 2), Runtime(0, 1, 0, torch.device("cpu")))
    experience: Any = None  # no logger shows distributions
    reporter.begin_step(1)
    with reporter.stage("rollout"):
        pass
    reporter.end_step({"step_tokens": 1.0, "step_samples": 1.0}, experience)
    reporter.close()
    output = "".join(capsys.readouterr())
    assert sentence in output and str(tmp_path / "profile") in output


def test_gradient_norm_far_above_usual_is_a_jump() -> None:
    watch = JumpWatch(JumpSettings(grad_norm_ratio=3.0, kl_nats=None), 1.0)
    assert watch.judge(100.0, None) == ()  # no usual value yet
    for number in range(50):
        assert watch.judge(1.0 + 0.004 * number, 9.0) == ()
    assert watch.judge(2.9, None) == ()
    assert watch.judge(4.0, None) == ("gradient norm 4, usually 1.1",)
    assert watch.judge(1.0, None) == ()


def test_gradients_that_are_not_clipped_are_no_jumps() -> None:
    """Late in a run, most gradients are tiny, and one wrong answer gives an ordinary gradient."""
    watch, unclipped = (JumpWatch(JumpSettings(grad_norm_ratio=3.0), norm) for norm in (1.0, 0.0))
    for _ in range(20):
        assert watch.judge(1e-4, None) == unclipped.judge(1e-4, None) == ()
    assert watch.judge(0.9, None) == ()
    assert unclipped.judge(0.9, None) == ("gradient norm 0.9, usually 0.0001",)
    assert watch.judge(1.1, None) == ("gradient norm 1.1, usually 0.0001",)


def test_a_norm_is_no_jump_after_a_larger_one() -> None:
    watch = JumpWatch(JumpSettings(grad_norm_ratio=3.0), 1.0)
    for _ in range(20):
        watch.judge(1e-4, None)
    assert watch.judge(5.0, None) == ("gradient norm 5, usually 0.0001",)
    assert watch.judge(4.0, None) == watch.judge(5.0, None) == ()
    assert watch.judge(6.0, None) == ("gradient norm 6, usually 0.0001",)
    for _ in range(50):
        watch.judge(1e-4, None)
    assert watch.judge(4.0, None) == ("gradient norm 4, usually 0.0001",), "the larger norms are 50 updates old"


def test_kl_above_the_bound_is_a_jump() -> None:
    watch = JumpWatch(JumpSettings(grad_norm_ratio=None, kl_nats=0.2), 1.0)
    assert watch.judge(1.0, 0.19) == ()
    assert watch.judge(1.0, None) == ()
    assert watch.judge(1.0, 0.3) == ("KL to the old policy 0.3 nats per token, above 0.2",)


def test_usual_norm_follows_the_run_across_checkpoints() -> None:
    watch = JumpWatch(JumpSettings(grad_norm_ratio=2.0), 1.0)
    for _ in range(50):
        watch.judge(1.0, 0.0)
    for _ in range(50):
        watch.judge(10.0, 0.0)
    again = JumpWatch(JumpSettings(grad_norm_ratio=2.0), 1.0)
    again.load_state_dict(watch.state_dict())
    assert len(again.state_dict()) == 50
    assert watch.judge(19.0, 0.0) == again.judge(19.0, 0.0) == ()
    assert watch.judge(21.0, 0.0) == again.judge(21.0, 0.0) == ("gradient norm 21, usually 10",)


RUNTIME = Runtime(0, 1, 0, torch.device("cpu"))


class Counting:
    """Counts cached tokens in place of an engine."""

    def __init__(self, *servers: int) -> None:
        self.usage = EngineUsage(cache={server: CacheUse() for server in servers})

    def count(self, server: int, prompt_tokens: int, cached_tokens: int) -> None:
        cache = self.usage.cache
        self.usage = EngineUsage(cache={**cache, server: cache[server] + CacheUse(prompt_tokens, cached_tokens)})


@pytest.mark.usefixtures("world_of_one")
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
    rate = "rollout/cache_hit_rate"
    assert gauge.metrics() == pytest.approx({rate: 0.75, f"{rate}_min": 0.4, f"{rate}_max": 0.9})
    engine.count(3, 10, 1)
    assert gauge.metrics() == pytest.approx(dict.fromkeys((rate, f"{rate}_min", f"{rate}_max"), 0.1))


@pytest.mark.usefixtures("world_of_one")
def test_engine_without_caches_has_no_rate() -> None:
    gauge = CacheGauge(AbsentEngine(), RUNTIME)
    with gauge.left_out():
        pass
    assert gauge.metrics() == {}
