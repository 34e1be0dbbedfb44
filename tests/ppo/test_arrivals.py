"""Tests of records of arrivals and their replay."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megappo.ppo.rollout.arrivals import ReplayedArrivals
from megappo.ppo.rollout.in_flight_state import KEY, read_state
from megappo.ppo.rollout.scheduler import RolloutScheduler, step_samples_of
from megappo.types import Rollouts
from tests.support.in_flight import StandIn, parts, sync, trained

pytestmark = pytest.mark.usefixtures("world_of_one")


def test_replay_reproduces_recorded_steps(tmp_path: Path) -> None:
    """The replay has the same samples in every round, the same metrics and the same cursor. A run that resumes without
    the record trains the prompts that were in flight."""
    engine = StandIn(ticks=2)
    components = parts(engine, "rollout.record_arrivals=true", f"run.directory={tmp_path}", steps=5)
    responses, steps = RolloutScheduler(components), list[tuple[list[Rollouts], dict[str, float], dict[str, Any]]]()
    for step in range(1, 6):
        rounds = [responses.of_step(step, weights_changed=False), responses.more(step, 1, 1)]
        steps.append((rounds, responses.metrics(), responses.cursor_state()))
        responses.forget(step)
        sync(responses, engine)
    folder = tmp_path / "arrivals"
    replay = parts(None, f"rollout.replay_arrivals={folder}")
    again = step_samples_of(replay)
    assert isinstance(again, ReplayedArrivals)
    for step, (rounds, metrics, cursor) in enumerate(steps[:3], 1):
        replayed = [again.of_step(step, weights_changed=False), again.more(step, 1, 1)]
        assert any(one.token_versions_BR is not None and one.token_versions_BR.unique().numel() > 1 for one in replayed)
        for name in (each.name for each in fields(Rollouts)):
            for one, other in zip(rounds, replayed, strict=True):
                assert_equal(getattr(one, name), getattr(other, name))
        assert (again.metrics(), again.cursor_state()) == (metrics, cursor)
        again.forget(step)
    halves = list[int]()
    for rank in (0, 1):  # a replay on two ranks
        replay.runtime = SimpleNamespace(rank=rank, world_size=2, is_main=not rank)
        of_rank = ReplayedArrivals(replay, folder).of_step(2, weights_changed=False)
        assert of_rank.sequences
        for n, sequence in zip(of_rank.sample_ids_B.tolist(), of_rank.sequences, strict=True):
            assert torch.equal(sequence, steps[1][0][0].sequences[n])
            halves.append(n)
    assert sorted(halves) == [0, 1, 2, 3]
    replay.runtime = components.runtime
    again.of_step(3, weights_changed=False)
    with pytest.raises(ValueError, match=r"round 3 of step 3 is not in .*, because rewards or rollout"):
        again.more(3, 2, 1)
    with pytest.raises(ValueError, match="has no step 6; end the replay before that step by run.steps"):
        again.of_step(6, weights_changed=False)
    for setting in ("temperature=0.5", "min_response_tokens=1"):
        other = parts(None, f"rollout.replay_arrivals={folder}", f"rollout.{setting}")
        with pytest.raises(ValueError, match=r"was recorded with another rollout\.temperature, min_response_tokens or"):
            ReplayedArrivals(other, folder).of_step(1, weights_changed=False)
    components = parts(StandIn(version=4))
    components.cursor.load_state_dict(again.cursor_state())
    live, state = RolloutScheduler(components), again.state_dict(4)
    live.load_state_dict([state])
    before = [prompt for rounds, _, _ in steps[:3] for one in rounds for prompt in trained(one)[::2]]
    later = [prompt for step in (4, 5, 6) for prompt in trained(live.of_step(step, weights_changed=False))[::2]]
    assert sorted(before + later) == list(range(15))
    again.load_state_dict([live.state_dict(7)])  # the earlier run has no record
    left = read_state(live.state_dict(7)[KEY])[0]
    in_flight_prompts = [group.prompt for group, step, _ in left.groups]
    assert read_state(again.state_dict(7)[KEY])[0].returned == [*in_flight_prompts, *left.returned]
    (folder / "step-000002" / "rank-00000.safetensors").write_bytes(b"12345678")
    with pytest.raises(ValueError, match="rank-00000.safetensors is incomplete"):
        again.of_step(2, weights_changed=False)


def assert_equal(one: Any, other: Any) -> None:
    """Compare tensors, tuples or plain values exactly."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, tuple):
        assert len(one) == len(other)
        for x, y in zip(one, other, strict=True):
            assert_equal(x, y)
    else:
        assert one == other
