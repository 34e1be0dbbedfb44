"""Layers with heads of different sizes: the sizes of Gemma-4-31B, computed by hand."""

from __future__ import annotations

import pytest
import torch

from megappo.config.model_files import read_architecture
from megappo.families.architecture import ArchitectureConfig
from megappo.families.flops import forward_flops, sample_cost
from megappo.families.parameters import Parameter, Piece, model_parameters, pieces
from megappo.families.rope import rotary
from megappo.plan.servers import token_bytes
from megappo.plan.sizes import model_sizes
from megappo.reshard.slices import EngineShape
from tests.support.configurations import assert_refused
from tests.support.places import ROOT

HIDDEN, FFN, HEADS = 5376, 21504, 32
NEAR, FAR = 50, 10
"""The number of layers with a window, with 16 key/value heads of 256 channels, and without a window, with 4 of 512."""


@pytest.fixture(scope="module")
def arch() -> ArchitectureConfig:
    return read_architecture(ROOT / "configs/models/gemma-4-31B-it")


def matrix(arch: ArchitectureConfig, layer: int) -> Parameter:
    """Return the matrix of queries, keys and, if they differ from the keys, values."""
    name = f"decoder.layers.{layer}.self_attention.linear_qkv.weight"
    return next(p for p in model_parameters(arch) if p.megatron == name)


def test_number_of_weights(arch: ArchitectureConfig) -> None:
    of_both = 3 * HIDDEN * FFN + 4 * HIDDEN + 1
    near = of_both + HIDDEN * 256 * (2 * HEADS + 2 * 16) + 2 * 256
    far = of_both + HIDDEN * 512 * (2 * HEADS + 4) + 2 * 512
    assert model_sizes(arch)[0] == 262144 * HIDDEN + NEAR * near + FAR * far + HIDDEN


def test_cache_and_flops_of_attention(arch: ArchitectureConfig) -> None:
    """Check the bytes of keys and values on a rank of a server, which has at least one head. Check the FLOPs of scores
    and values."""
    assert token_bytes(arch, 1, 2) == 2 * 2 * (NEAR * 16 * 256 + FAR * 4 * 512)
    assert token_bytes(arch, 8, 2) == 2 * 2 * (NEAR * 2 * 256 + FAR * 512)
    _, of_token, _ = forward_flops(arch, 1000, is_critic=False)
    assert of_token * 60 == pytest.approx(4 * HEADS * (NEAR * 256 + FAR * 512) * 1000)
    cost = sample_cost(arch, is_critic=False)
    assert (cost.of_pair, cost.of_far_pair) == (12 * HEADS * NEAR * 256, 12 * HEADS * FAR * 512)
    assert cost.window == 1024


def test_rotary_frequencies(arch: ArchitectureConfig) -> None:
    """Layers without a window rotate the first quarter of the pairs of a head, with the frequencies of the whole
    head."""
    (far, scale_far), (near, scale_near) = rotary(arch)
    assert scale_far == scale_near == 1 and near.shape == (128,) and near.all()
    torch.testing.assert_close(far[:64], 1e6 ** -(torch.arange(64) / 256))
    assert far.shape == (256,) and not far[64:].any()


def test_rows_of_each_rank(arch: ArchitectureConfig) -> None:
    far, near = matrix(arch, 5), matrix(arch, 4)
    assert len(near.hf) == 3 and [name.split(".")[-2] for name in far.hf] == ["q_proj", "k_proj"]
    # Trainers have groups of eight query heads and their key head. The second of two ranks has the last two groups.
    queries, keys = far.hf
    rows = [(queries, 8 * 512), (keys, 512)]
    groups = [Piece(name, 0, group * n, (group + 1) * n) for group in (2, 3) for name, n in rows]
    assert pieces(arch, far, 1, 2, arch.vocab_size) == groups
    # Each of eight server ranks has four heads. Two ranks share each of the four key heads.
    assert EngineShape(arch, 8).pieces(far, 3) == [Piece(queries, 0, 3 * 2048, 4 * 2048), Piece(keys, 0, 512, 1024)]
    of_near = EngineShape(arch, 8).pieces(near, 3)
    assert [(p.start, p.stop) for p in of_near] == [(3 * 1024, 4 * 1024), (3 * 512, 4 * 512), (3 * 512, 4 * 512)]


def test_unsupported_settings_are_refused() -> None:
    shipped = ROOT / "configs" / "gemma4_31b_2node_math.yaml"
    for override, message in (
        ("actor.lora={rank: 4, alpha: 8}", "adapters of a gemma4_text are not supported; train its weights"),
        (
            "actor.layout={tensor_parallel: 8, sequence_parallel: true}",
            "tensor_parallel 8 does not divide 4 (KV heads of full attention)",
        ),
    ):
        assert_refused(shipped, [override], 16, message)
