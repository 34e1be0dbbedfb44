"""Packed attention, and every step of the acceptance command, on a real GPU. Skipped without a GPU."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

import megappo.megatron  # noqa: F401
from megappo.megatron.layers.attention import attend_pack, takes_packs
from megappo.megatron.segments import packed_segments, segment_tensors
from megappo.runtime.memory.transfer import to_device
from tests.gpu.acceptance.registry import STEPS, Place, Step
from tests.gpu.acceptance.runner import environment, run_steps
from tests.gpu.acceptance.table import Report

pytestmark = pytest.mark.slow


LENGTHS = (130, 1, 517, 64)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("window", "groups", "width"), itertools.product((None, 100), (4, 1), (64, 128)))
def test_attention_of_a_pack(window: int | None, groups: int, width: int) -> None:
    assert takes_packs(torch.bfloat16, width, torch.cuda.get_device_capability())
    device, g = torch.device("cuda"), torch.Generator().manual_seed(1)
    segments, total = packed_segments(LENGTHS, to_device(segment_tensors(LENGTHS), device)), sum(LENGTHS)
    inputs = [torch.randn(total, n, width, generator=g).to(device, torch.bfloat16) for n in (4, groups, groups)]
    leaves = [x.requires_grad_() for x in inputs]
    query, key, value = leaves
    out = attend_pack(query, key, value, segments, scale=width**-0.5, window=window)
    weights = torch.randn(out.shape, generator=g).to(device)
    gradients = torch.autograd.grad((out.float() * weights).sum(), leaves)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    pieces = []
    for q, k, v in zip(*(x.split(LENGTHS) for x in exact), strict=True):
        k, v = (x.repeat_interleave(4 // groups, dim=1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * width**-0.5
        places = torch.arange(len(q), device=device)
        distance = places[None] - places[:, None]
        hidden = (distance > 0) | (distance <= -(window or len(q)))
        pieces.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    truth = torch.cat(pieces)
    true_gradients = torch.autograd.grad((truth * weights).sum(), exact)
    for mine, theirs in zip((out, *gradients), (truth, *true_gradients), strict=True):
        assert float((mine.float() - theirs).norm() / theirs.norm()) < 0.02


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all steps share, so models are written only once."""
    return tmp_path_factory.mktemp("models")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_step(step: Step, scratch: Path, tmp_path: Path) -> None:
    report = Report(tmp_path / step.name, {"device": torch.cuda.get_device_name()})
    place = Place("cuda", False, str(scratch))
    run_steps([step], place, report, seconds=step.most_seconds, variables=environment(), log=tmp_path / "log")
    failed = [f"{row.what}: {row.result}" for row in report.rows if row.verdict == "failed"]
    assert report.rows and not failed, "\n".join(failed) + (tmp_path / "log").read_text()[-3000:]
