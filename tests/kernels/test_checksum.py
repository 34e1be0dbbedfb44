"""Checksums of weights on a GPU match the checksums of SGLang servers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from megappo_kernels.gpu.checksum import TILE, tensor_checksum
from tests.support.places import ROOT

RAMP = 5163133808615962038
"""Checksum of SGLang 0.5.23 for int32 values from 0 to 29,999."""


class OnCuda(Tensor):
    """A tensor that reports a GPU device, so that GPU kernels accept the tensor in Triton's interpreter."""

    is_cuda = True


def drawn(n: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)


@pytest.mark.waits  # importing SGLang looks for a free port
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("n", [0, 1, 3, 2 * TILE, 2 * TILE + 1, 40_003])
def test_checksum_matches_sglang(n: int, dtype: torch.dtype) -> None:
    """The sizes include partial words and partial tiles."""
    theirs = pytest.importorskip("sglang.kernels.ops.memory.gpu_tensor_hash").gpu_tensor_hash
    tensor = drawn(n, dtype)
    assert tensor_checksum(tensor) == theirs(tensor.as_subclass(OnCuda))


def test_checksum_depends_only_on_the_content() -> None:
    """The memory layout and adjacent values do not change the checksum. A changed bit or a changed order does."""
    ramp = torch.arange(30_000, dtype=torch.int32)
    assert tensor_checksum(ramp) == RAMP
    padded = torch.full((30_000, 3), -1, dtype=torch.int32)
    padded[:, 1] = ramp
    assert tensor_checksum(padded[:, 1]) == RAMP
    for changed in (ramp ^ (torch.arange(30_000) == 29_999).int(), ramp.roll(1), ramp[:-1]):
        assert tensor_checksum(changed) != RAMP


@pytest.mark.slow
@pytest.mark.waits
def test_checksum_does_not_import_sglang() -> None:
    """The import of SGLang takes seconds and fails if transformers 5.17 finds no torchvision."""
    program = """
import sys, torch
from megappo.engines.sglang.weights.fingerprint import fingerprint
torch.Tensor.is_cuda = True
print(fingerprint([torch.arange(5.0)]), [name for name in sys.modules if name.startswith("sglang")])
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    digits, imported = done.stdout.split(maxsplit=1)
    assert int(digits, 16) == tensor_checksum(torch.arange(5.0)) and imported.strip() == "[]"
