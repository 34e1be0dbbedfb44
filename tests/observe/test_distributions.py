"""Distributions of a step: bins are equal on all ranks, counts are correct, and loggers receive the counts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megappo.observe.distributions import EDGES, Distribution, counts_of, middles, of_all_ranks
from megappo.observe.ends import End
from megappo.observe.metrics import MetricsLog
from megappo.ppo.measures import distributed_numbers
from megappo.types import Experience, Prompt, Rollouts, Scored

NAN = float("nan")


def test_number_and_spacing_of_bin_edges() -> None:
    assert len(EDGES) <= 512 and all(low < high for low, high in itertools.pairwise(EDGES))
    assert all(0 < high / low - 1 < 0.11 for low, high in itertools.pairwise([edge for edge in EDGES if edge > 0]))
    assert [-edge for edge in reversed(EDGES)] == list(EDGES) and EDGES[-1] >= 1e6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_numbers_are_counted_in_their_bins(dtype: torch.dtype) -> None:
    """Zeros and numbers beyond the edges are counted. Numbers that are not finite are ignored."""
    g = torch.Generator().manual_seed(int(np.random.default_rng().integers(2**31)))
    numbers = torch.cat([torch.randn(500, generator=g) * 10.0**n for n in range(-7, 8)] + [torch.zeros(9)]).to(dtype)
    counts = counts_of(numbers.reshape(3, -1))
    edges = np.asarray(EDGES)
    plain = np.clip(numbers.double().numpy(), np.nextafter(edges[0], 0), edges[-1])
    bins, _ = np.histogram(
        -plain, -edges[::-1]
    )  # bins of numpy include the lower edge, these bins include the upper edge
    assert counts.tolist() == bins[::-1].tolist() and int(counts.sum()) == numbers.numel()
    assert not counts_of(torch.tensor([NAN, float("inf"), float("-inf")])).any()


def of_worlds(experience: Experience, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Distribution]]:
    """Yield the distributions for one rank, and for two ranks with the same experience."""
    for size in (1, 2):
        monkeypatch.setattr("torch.distributed.all_reduce", lambda counts, size=size: counts.mul_(size))
        yield of_all_ranks(distributed_numbers(experience), torch.device("cpu"))


def test_only_tokens_of_the_model_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values at other tokens are ignored. Without critic or reference, their distributions are
    absent."""
    mask_BR = torch.tensor([[True, True, False], [True, False, False]])
    rollouts = Rollouts(
        prompts=(Prompt(0, (1,), "", None, {}),) * 2,
        sample_ids_B=torch.arange(2),
        group_ids_B=torch.arange(2),
        sequences=(torch.zeros(4),) * 2,
        response_lengths_B=torch.tensor([2, 1]),
        engine_logprob_BR=torch.where(mask_BR, torch.tensor(-1.0), torch.tensor(NAN)),
        response_mask_BR=mask_BR,
        ends=(End.COMPLETE,) * 2,
        weight_versions_B=torch.ones(2, dtype=torch.int64),
        responses=("",) * 2,
        raw_responses=("",) * 2,
        special_tokens_B=torch.zeros(2, dtype=torch.int64),
    )
    garbage_BR = torch.where(mask_BR, torch.tensor(0.5), torch.tensor(777.0))
    scored = Scored(rollouts, torch.tensor([1.0, 0.0]), torch.where(mask_BR, torch.tensor(-1.0), torch.tensor(5.0)),
                    None, None)  # fmt: skip
    experience = Experience(scored, garbage_BR, 2 * garbage_BR, None, mask_BR)
    for ranks, distributions in enumerate(of_worlds(experience, monkeypatch), start=1):
        counts = {name: [(x, n) for x, n in middles(of) if n] for name, of in distributions.items()}
        assert {name: [n // ranks for _, n in of] for name, of in counts.items()} == {
            "reward": [1, 1], "response length": [1, 1], "advantage": [3], "return": [3], "ratio to the engine": [3],
        }  # fmt: skip
        for name, expected in (("advantage", 0.5), ("return", 1.0), ("ratio to the engine", 1.0)):
            assert counts[name][0][0] == pytest.approx(expected, rel=0.1)
        assert all(sum(of.counts) % ranks == 0 for of in distributions.values())


def test_tensorboard_shows_distributions(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path, "r", {})
    log.log(3, {"reward/mean": 0.5})
    log.log_distributions(3, {"value": Distribution((0.0, 1.0, 3.0), (2, 6))})
    log.log_distributions(4, {})
    log.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    events = EventAccumulator(str(file))
    events.Reload()
    (event,) = events.Histograms("distributions/value")
    shown = event.histogram_value
    assert (event.step, shown.min, shown.max, shown.num, shown.sum) == (3, 0.0, 3.0, 8.0, 2 * 0.5 + 6 * 2.0)
    assert (list(shown.bucket_limit), list(shown.bucket)) == ([1.0, 3.0], [2.0, 6.0])
