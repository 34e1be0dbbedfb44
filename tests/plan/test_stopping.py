"""The planned time to stop a run, and the planned interval of checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from megappo.config import load_config
from megappo.plan.costs import StageCost
from megappo.plan.hardware.machines import ASSUMED, MACHINES
from megappo.plan.inputs import Setup
from megappo.plan.planner import Plan, make_plan, read_models
from megappo.plan.stopping import Stopping, stopping
from tests.support.places import ROOT
from tests.support.plan import HIDDEN, arch, machine, role, work

MIDDLE = ROOT / "tests/support/qwen3_8b_8gpu.yaml"
WEIGHTS = 8_190_735_360
CRITIC_WEIGHTS = WEIGHTS - 151_936 * 4096 + 4096 + 1
"""The weights of the critic, which has a value head instead of the output matrix."""
"""Both are sizes of Qwen3-8B."""


def plan(*overrides: str, gpus: int = 8) -> Plan:
    config = load_config(MIDDLE, overrides)
    return make_plan(config, read_models(config, ROOT / "configs" / "models").models, MACHINES["h100"], gpus)


def seconds(result: Plan, *stages: str) -> float:
    return sum(stage.seconds for stage in result.stages if stage.name in stages)


def test_lead_covers_uninterrupted_stages_and_two_checkpoints() -> None:
    result = plan()
    stopping = result.stopping
    assert stopping.uninterruptible_seconds == pytest.approx(seconds(result, "update_critic", "update_actor", "sync"))
    assert stopping.checkpoint_bytes == 12 * (WEIGHTS + CRITIC_WEIGHTS)  # two moments each, all in float32
    assert stopping.checkpoint_seconds == stopping.checkpoint_bytes / ASSUMED.checkpoint_bytes_per_second
    assert stopping.lead_seconds >= 60 + stopping.uninterruptible_seconds + 2 * stopping.checkpoint_seconds
    assert stopping.lead_seconds % 60 == 0


def test_checkpoint_includes_a_changing_reference() -> None:
    """The reference is saved in float32."""
    kl = ("reference={}", "algorithm.kl_in_loss={coef: 0.01}")
    fixed, changing = plan(*kl).stopping, plan(*kl, "reference.refresh_every_steps=10").stopping
    assert fixed.checkpoint_bytes == plan().stopping.checkpoint_bytes
    assert changing.checkpoint_bytes == fixed.checkpoint_bytes + 4 * WEIGHTS


def test_longer_stages_take_longer_to_stop() -> None:
    base = plan().stopping.lead_seconds
    assert plan("actor.epochs=4", "critic.epochs=4").stopping.lead_seconds > base
    assert plan(gpus=32).stopping.lead_seconds < base  # more nodes write, and updates are shorter
    longer = plan("rollout.prompts_per_step=512", "rollout.servers.max_inflight_sequences=8")
    assert longer.stopping.lead_seconds == base  # generation is interrupted


def test_checkpoints_follow_the_time_of_a_step() -> None:
    for overrides in ((), ("rollout.servers.max_inflight_sequences=1",), ("rollout.prompts_per_step=128",)):
        result = plan(*overrides)
        lost = result.stopping.every_steps * result.step_seconds
        assert lost <= 1800 or result.stopping.every_steps == 1
        assert lost >= result.stopping.checkpoint_seconds


def test_plan_reports_the_time_to_stop(output_of: Callable[..., str]) -> None:
    arguments = ["plan", "configs/qwen3_8b_8gpu_math.yaml", "--machine", "h100", "--gpus", "8"]
    stopping = json.loads(output_of(*arguments, "--json"))["plan"]["stopping"]
    lead, every, lost = stopping["lead_seconds"], stopping["every_steps"], stopping["lost_seconds"]
    assert 0 < lost <= 1800
    for override, message in (
        ([], f"every {every} steps loses at most {lost / 60:.2g} minutes"),
        (
            ["checkpoint.every_steps=200"],
            f"is written every 200 steps; checkpoint.every_steps={every} suits the time of a step",
        ),
        (["checkpoint=null"], "checkpoint is null, and a run that ends early is lost"),
    ):
        out = output_of(*arguments, *override)
        assert f"stopping takes up to {lead} seconds: sbatch --signal=USR1@{lead}; " in out and message in out


def test_step_longer_than_half_an_hour_is_lost() -> None:
    overrides = (
        "rollout.servers.max_inflight_sequences=1",
        "rollout.prompts_per_step=4096",
        "checkpoint.every_steps=1",
    )
    result = plan(*overrides)
    minutes = result.step_seconds / 60
    assert minutes > 30
    message = result.stopping.sentence(load_config(MIDDLE, overrides))
    assert message.endswith(f" every step loses at most {minutes:.2g} minutes")


def by_hand(gigabytes: float, step_seconds: float, cuda: bool = True, forward: float = 0.0) -> Stopping:
    """Return the stopping plan of a step with updates and a sync of 6, 5 and 4 seconds, on 29 ranks in five nodes.
    Nearly all weights are two matrices of the vocabulary, with 12 bytes per weight."""
    model = arch(vocab_size=round(gigabytes * 1e9 / 12 / 2 / HIDDEN))
    seconds = {"rollout": 99.0, "forward": forward, "update_critic": 6.0, "update_actor": 5.0, "sync": 4.0}
    stages = [StageCost(name, 0.0, 0.0, 0.0, s, "compute") for name, s in seconds.items()]
    return stopping(Setup(role(model), None, None, work()), stages, machine(shared_by_ranks=not cuda), step_seconds)


@pytest.mark.parametrize(
    ("step_seconds", "write_seconds", "every"),
    [
        (36.0, 10.0, 50),  # half an hour
        (36.1, 10.0, 20),
        (1800.0, 10.0, 1),
        (2000.0, 10.0, 1),  # a step is lost in any case
        (100.0, 150.0, 10),
        (1000.0, 3000.0, 5),  # longer than half an hour, so that a checkpoint is complete before the next one starts
        (1000.0, 1900.0, 2),
        (1.0, 100.0, 50),  # the longest interval
        (3000.0, 200_000.0, 50),
    ],
)
def test_interval_of_checkpoints(step_seconds: float, write_seconds: float, every: int) -> None:
    actual = by_hand(write_seconds * 5 * 2, step_seconds)
    assert actual.checkpoint_seconds == pytest.approx(write_seconds, rel=1e-4)
    assert (actual.every_steps, actual.lost_seconds) == (every, every * step_seconds)


def test_time_to_stop_by_hand() -> None:
    """The lead is the time of updates and sync, or of the forward pass, and of two checkpoints. Half of the time is
    added as a margin. The sum is rounded up to whole minutes, and one more minute is added."""
    for gigabytes, forward, lead in ((100, 0, 60 * 2), (124, 0, 60 * 2), (126, 0, 60 * 3), (124, 16, 60 * 3)):
        actual = by_hand(gigabytes, 100.0, forward=forward)
        assert actual.uninterruptible_seconds == max(6 + 5 + 4, forward)
        assert actual.checkpoint_seconds == pytest.approx(gigabytes / 10, rel=1e-3)
        assert actual.lead_seconds == lead, (gigabytes, forward)
    assert by_hand(100, 100.0, cuda=False).checkpoint_seconds == pytest.approx(50, rel=1e-3)  # one disk, one writer


def test_bytes_of_a_checkpoint() -> None:
    """Weights and moments are saved in float32 for any dtype of the run. tests/runs has the sizes of real
    checkpoints."""
    assert by_hand(12, 100.0).checkpoint_bytes == pytest.approx(12e9, rel=1e-3)
    stages = [StageCost(name, 0.0, 0.0, 0.0, 1.0, "compute") for name in ("forward", "sync")]
    wide, narrow = (Setup(role(dtype_bytes=n), None, None, work()) for n in (4, 2))
    assert len({stopping(setup, stages, machine(), 1.0).checkpoint_bytes for setup in (wide, narrow)}) == 1
    config = load_config(MIDDLE)
    for gigabytes, size in ((1.5, "1.5 GB"), (1.001, "1 GB"), (0.4991, "500 MB")):
        assert f"a checkpoint of {size} every" in by_hand(gigabytes, 300.0).sentence(config)
