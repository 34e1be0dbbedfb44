"""Replacement of CUDA calls of Megatron on machines without CUDA."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megappo.megatron.patches.cpu import install

pytestmark = [pytest.mark.versions, pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without CUDA")]


@pytest.fixture(autouse=True)
def installed() -> None:
    install()


def test_tensors_for_cuda_are_on_the_cpu() -> None:
    counter = torch.zeros(3, dtype=torch.int, device="cuda")
    index = torch.tensor([2, 0], device="cpu", pin_memory=True).cuda(non_blocking=True)
    assert counter.device.type == index.device.type == "cpu" and index.tolist() == [2, 0]
    assert torch.empty_like(counter, device=torch.device("cuda:1")).device.type == "cpu"


def test_tensor_types_have_cuda_names() -> None:
    x = torch.ones(2)
    assert x.type() == "torch.cuda.FloatTensor" and x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert x.type(torch.float64).dtype == torch.float64
    with FakeTensorMode():
        assert torch.ones(2).type() == "torch.cuda.FloatTensor"


def test_other_devices_are_not_changed() -> None:
    with torch.device("meta"):
        assert torch.zeros(3).device.type == torch.empty_like(torch.ones(2)).device.type == "meta"
    assert torch.ones(2, device="meta").device.type == "meta"
