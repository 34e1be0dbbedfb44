"""Angles of rotary positions."""

from __future__ import annotations

import torch

from megappo.families.rope import Rope
from megappo.megatron.rotary import PackedRotary
from tests.support.kernels import relative


def test_angles_stay_float32() -> None:
    """What SGLang has, and nearer to float64 at position 32,767 than bfloat16 can be."""
    frequencies = 1e6 ** -(torch.arange(32) / 32)
    positions = torch.tensor([0, 1, 32_767])
    found = PackedRotary([Rope(frequencies, 1.0)])(positions, packed_seq=True, cp_group=None)
    angles = positions.double()[:, None] * frequencies.double()
    true = torch.stack([f(torch.cat([angles, angles], -1))[:, None] for f in (torch.cos, torch.sin)])
    assert found.dtype == torch.float32 and found.shape == (2, 3, 1, 64)
    assert relative(found, true) < 0.3 * relative(true.bfloat16(), true)
