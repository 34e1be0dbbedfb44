"""The map between Hugging Face tensors and Megatron shards, without processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from distributed.models import VOCAB, stored_parameters, write_model
from megappo.architecture import architecture, padded_vocab_size
from megappo.reshard.hf_map import (
    expert_share,
    hf_shape,
    model_parameters,
    multiplied_parameters,
    pieces,
    scatter_shard,
    shard_shape,
)
from megappo.reshard.sources import RandomSource, SafetensorsSource, read_shard


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "qwen3_moe"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_cutting_and_joining_gives_the_model_back(tmp_path: Path, family: str, tied: bool, tp: int) -> None:
    folder = write_model(tmp_path / "m", family, 1, tie_word_embeddings=tied)
    arch = architecture(AutoConfig.from_pretrained(folder))
    reference = dict(stored_parameters(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)))
    source = SafetensorsSource(folder, arch)
    vocab = padded_vocab_size(VOCAB, tp, 8)
    joined = {}
    for entry in model_parameters(arch):
        whole = {n: torch.full(hf_shape(arch, n), float("nan")) for n in entry.hf}
        for rank in range(tp):
            like = torch.empty(shard_shape(arch, entry, tp, vocab))
            shard = read_shard(source, arch, entry, like, rank, tp, vocab)
            scatter_shard(shard, pieces(arch, entry, rank, tp, vocab), whole)
        joined |= whole
    assert joined.keys() == reference.keys()
    for name, tensor in joined.items():
        assert torch.equal(tensor, reference[name]), name


def test_random_weights_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    arch = architecture(AutoConfig.from_pretrained(write_model(tmp_path / "m", "qwen3", 1)))
    entry = next(p for p in model_parameters(arch) if p.kind == "glu")
    whole = read_shard(RandomSource(arch, 3), arch, entry, torch.empty(shard_shape(arch, entry, 1, VOCAB)), 0, 1, VOCAB)
    half = read_shard(
        RandomSource(arch, 3), arch, entry, torch.empty(shard_shape(arch, entry, 2, VOCAB + 1)), 1, 2, VOCAB + 1
    )
    gate, up = whole.chunk(2)
    assert torch.equal(half, torch.cat([gate[24:], up[24:]]))
    assert abs(float(whole.std()) - arch.initializer_range) < 0.02
    other = read_shard(RandomSource(arch, 4), arch, entry, whole, 0, 1, VOCAB)
    assert not torch.equal(other, whole)


def test_experts_are_shared_out_whole(tmp_path: Path) -> None:
    arch = architecture(AutoConfig.from_pretrained(write_model(tmp_path / "m", "qwen3_moe", 1)))
    experts = [p for p in model_parameters(arch) if p.expert is not None]
    assert sum(torch.Size(hf_shape(arch, n)).numel() for p in experts[:2] for n in p.hf) == arch.expert_parameters
    assert all(shard_shape(arch, p, 4, VOCAB + 1) == shard_shape(arch, p, 1, VOCAB) for p in experts)
    assert [expert_share(arch, p, 4) for p in experts[::2] if p.layer == 1] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {expert_share(arch, p, 4) for p in model_parameters(arch) if p.expert is None} == {None}
    every = sum(torch.Size(hf_shape(arch, n)).numel() for p in model_parameters(arch) for n in p.hf)
    # Two of eight experts work for a token, and its embedding is looked up.
    assert multiplied_parameters(arch) == every - 4 * 6 * arch.expert_parameters - VOCAB * 32


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2 with mlp_only_layers"),
        ({"mlp_only_layers": [0]}, "use a model with experts in every layer"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 of num_experts 8 is not supported"),
        ({"attention_bias": True}, "attention_bias: true is not supported"),
    ],
)
def test_experts_that_are_not_covered_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    config = AutoConfig.from_pretrained(write_model(tmp_path / "m", "qwen3_moe", 1))
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=words.replace("[", "\\[")):
        architecture(config)


def test_padding_rows_are_zero(tmp_path: Path) -> None:
    arch = architecture(AutoConfig.from_pretrained(write_model(tmp_path / "m", "llama", 1)))
    entry = next(iter(model_parameters(arch)))
    like = torch.empty(80, 32)
    shard = read_shard(RandomSource(arch, 3), arch, entry, like, 1, 2, 160)
    assert (shard[: VOCAB - 80] != 0).any()
    assert (shard[VOCAB - 80 :] == 0).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"intermediate_size": 64}, "do not fit the configuration"),
        ({"num_hidden_layers": 5}, "has no tensor 'model.layers.4"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path: Path, changes: dict[str, int], words: str) -> None:
    folder = write_model(tmp_path / "m", "llama", 1)
    config = AutoConfig.from_pretrained(folder)
    for name, value in changes.items():
        setattr(config, name, value)
    arch = architecture(config)
    source = SafetensorsSource(folder, arch)
    with pytest.raises(ValueError, match=words):
        for entry in model_parameters(arch):
            for piece in pieces(arch, entry, 0, 1, VOCAB):
                source.read(piece)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    arch = architecture(AutoConfig.from_pretrained(write_model(tmp_path / "m", "llama", 1)))
    with pytest.raises(ValueError, match="holds no model.safetensors; save the model as safetensors"):
        SafetensorsSource(tmp_path, arch)
