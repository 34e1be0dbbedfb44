"""Updates that stand out are told from those that do not."""

from __future__ import annotations

from megappo.config.algorithm import JumpSettings
from megappo.ppo.jumps import JumpWatch


def test_a_gradient_far_above_the_usual_one() -> None:
    watch = JumpWatch(JumpSettings(grad_norm_ratio=3.0, kl_nats=None))
    assert watch.judge(100.0, None) == ()  # nothing is usual yet
    for number in range(20):
        assert watch.judge(1.0 + 0.01 * number, 9.0) == ()
    assert watch.judge(2.9, None) == ()
    assert watch.judge(4.0, None) == ("gradient norm 4, usually 1.1",)
    assert watch.judge(1.0, None) == ()


def test_a_kl_above_the_bound() -> None:
    watch = JumpWatch(JumpSettings(grad_norm_ratio=None, kl_nats=0.2))
    assert watch.judge(1.0, 0.19) == ()
    assert watch.judge(1.0, None) == ()
    assert watch.judge(1.0, 0.3) == ("KL to the old policy 0.3 nats per token, above 0.2",)


def test_what_is_usual_follows_the_run_and_survives_it() -> None:
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
