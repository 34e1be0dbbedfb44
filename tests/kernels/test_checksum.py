"""Checksums of weights on a GPU are those that SGLang's servers compute."""

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
"""What SGLang 0.5.23 gives int32 from 0 to 29,999."""


class OnCuda(Tensor):
    """Says that it is on a GPU, so that a kernel for GPUs takes it in Triton's interpreter."""

    is_cuda = True


def drawn(n: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)


@pytest.mark.waits  # importing SGLang looks for a free port
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("n", [0, 1, 3, 2 * TILE, 2 * TILE + 1, 40_003])
def test_it_is_sglangs_own_checksum(n: int, dtype: torch.dtype) -> None:
    """Of bytes that fill words and tiles, and of bytes that do not."""
    theirs = pytest.importorskip("sglang.kernels.ops.memory.gpu_tensor_hash").gpu_tensor_hash
    tensor = drawn(n, dtype)
    assert tensor_checksum(tensor) == theirs(tensor.as_subclass(OnCuda))


def test_it_is_that_of_the_content_alone() -> None:
    """Where it lies in memory, and what is beside it, changes nothing; one bit of it, or its place, does."""
    ramp = torch.arange(30_000, dtype=torch.int32)
    assert tensor_checksum(ramp) == RAMP
    beside = torch.full((30_000, 3), -1, dtype=torch.int32)
    beside[:, 1] = ramp
    assert tensor_checksum(beside[:, 1]) == RAMP
    for changed in (ramp ^ (torch.arange(30_000) == 29_999).int(), ramp.roll(1), ramp[:-1]):
        assert tensor_checksum(changed) != RAMP


@pytest.mark.slow
@pytest.mark.waits
def test_a_checksum_imports_nothing_of_sglang() -> None:
    """Importing it takes a trainer seconds, and fails where transformers finds no torchvision (5.17)."""
    program = """
import sys, torch
from megappo.engines.sglang.fingerprint import fingerprint
torch.Tensor.is_cuda = True
print(fingerprint([torch.arange(5.0)]), [name for name in sys.modules if name.startswith("sglang")])
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    digits, imported = done.stdout.split(maxsplit=1)
    assert int(digits, 16) == tensor_checksum(torch.arange(5.0)) and imported.strip() == "[]"
