"""Tests of the detection of outlier updates."""

from __future__ import annotations

from megappo.config.algorithm import JumpSettings
from megappo.ppo.jumps import JumpWatch


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
