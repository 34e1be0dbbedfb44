"""Angles of rotary position embeddings."""

from __future__ import annotations

import torch

from megappo.families.rope import Rope
from megappo.megatron.rotary import PackedRotary
from tests.support.kernels import relative


def test_angles_stay_float32() -> None:
    """Angles are float32 as in SGLang. At position 32,767 they are closer to float64 than bfloat16."""
    frequencies = 1e6 ** -(torch.arange(32) / 32)
    positions = torch.tensor([0, 1, 32_767])
    result = PackedRotary([Rope(frequencies, 1.0)])(positions, packed_seq=True, cp_group=None)
    angles = positions.double()[:, None] * frequencies.double()
    true = torch.stack([f(torch.cat([angles, angles], -1))[:, None] for f in (torch.cos, torch.sin)])
    assert result.dtype == torch.float32 and result.shape == (2, 3, 1, 64)
    assert relative(result, true) < 0.3 * relative(true.bfloat16(), true)
