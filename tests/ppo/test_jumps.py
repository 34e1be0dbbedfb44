"""Tests of the detection of outlier updates."""

from __future__ import annotations

from megappo.config.algorithm import JumpSettings
from megappo.ppo.jumps import JumpWatch


def test_gradient_norm_far_above_usual_is_a_jump() -> None:
    watch = JumpWatch(JumpSettings(grad_norm_ratio=3.0, kl_nats=None))
    assert watch.judge(100.0, None) == ()  # no usual value yet
    for number in range(20):
        assert watch.judge(1.0 + 0.01 * number, 9.0) == ()
    assert watch.judge(2.9, None) == ()
    assert watch.judge(4.0, None) == ("gradient norm 4, usually 1.1",)
    assert watch.judge(1.0, None) == ()


def test_kl_above_the_bound_is_a_jump() -> None:
    watch = JumpWatch(JumpSettings(grad_norm_ratio=None, kl_nats=0.2))
    assert watch.judge(1.0, 0.19) == ()
    assert watch.judge(1.0, None) == ()
    assert watch.judge(1.0, 0.3) == ("KL to the old policy 0.3 nats per token, above 0.2",)


def test_usual_norm_follows_the_run_across_checkpoints() -> None:
    watch = JumpWatch(JumpSettings(grad_norm_ratio=2.0))
    for _ in range(50):
        watch.judge(1.0, 0.0)
    for _ in range(50):
        watch.judge(10.0, 0.0)
    again = JumpWatch(JumpSettings(grad_norm_ratio=2.0))
    again.load_state_dict(watch.state_dict())
    assert len(again.state_dict()) == 50
    assert watch.judge(19.0, 0.0) == again.judge(19.0, 0.0) == ()
    assert watch.judge(21.0, 0.0) == again.judge(21.0, 0.0) == ("gradient norm 21, usually 10",)
