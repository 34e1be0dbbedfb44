"""Latent, linear and wide attention, and attention sinks: sizes in the plan, and settings that are refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megappo.config import ConfigError, load_config
from megappo.config.derive import derive
from megappo.config.pipeline import even_layers
from megappo.families.adapters import LoraShape
from megappo.families.declaration import ArchitectureConfig
from megappo.families.deepseek_v3 import softmax_scale
from megappo.families.flops import forward_flops, recurrence_flops, sample_cost
from megappo.families.parameters import Parameter, Piece, model_parameters, pieces, tensor_shapes
from megappo.families.rope import rotary
from megappo.families.served import Served
from megappo.megatron.layers.router import RouterChoice
from megappo.models.model_files import read_architecture
from megappo.plan.bytes.servers import token_bytes
from megappo.plan.bytes.sizes import generation_flops_of_pair, model_sizes, state_bytes
from megappo.plan.inputs import make_setup
from megappo.plan.planner import read_models
from megappo.reshard.slices import EngineShape
from megappo.reshard.sources import RandomSource
from tests.support.configurations import assert_refused
from tests.support.models import write_model
from tests.support.places import ROOT

MODELS = ROOT / "configs" / "models"
DEEPSEEK = MODELS / "DeepSeek-V3"
LATENT = ROOT / "configs" / "deepseek_v3_32node_dapo_math.yaml"
LINEAR = ROOT / "configs" / "qwen3_next_80b_a3b_4node_dapo_math.yaml"
WIDE = ROOT / "configs" / "gemma4_31b_2node_math.yaml"


@pytest.mark.parametrize(
    ("path", "ranks", "override", "message"),
    [
        (LATENT, 256, "actor.lora={rank: 4, alpha: 8}", "adapters of a deepseek_v3 are not supported; train its w"),
        (LATENT, 256, "actor.layout={tensor_parallel: 256, sequence_parallel: true}",
         "tensor_parallel 256 does not divide 128 (heads)"),
        (LATENT, 256, "rollout.servers={tensor_parallel: 16, nodes: 2, data_parallel_attention: 4}",
         "data_parallel_attention is 4, which SGLang supports for"),
        (LINEAR, 32, "actor.layout={context_parallel: 2}",
         "actor.layout.context_parallel 2 splits a sample between ranks, but the linear attention of a"),
        (LINEAR, 32, "rollout.servers={tensor_parallel: 8}",
         "rollout.servers.verify is true, but SGLang stores the weights of a qwen3_next in a different order"),
        (LINEAR, 32, "rollout.servers={tensor_parallel: 32, verify: false}",
         "32 does not divide 16 (heads) or 16 (key heads of"),
        (LINEAR, 32, "actor.lora={rank: 4, alpha: 8}", "adapters of a qwen3_next are not supported; train its weights"),
        (LINEAR, 32, "actor.layout={tensor_parallel: 4, sequence_parallel: true}",
         "tensor_parallel 4 does not divide 2 (KV heads)"),
        (WIDE, 16, "actor.lora={rank: 4, alpha: 8}", "adapters of a gemma4_text are not supported; train its weights"),
        (WIDE, 16, "actor.layout={tensor_parallel: 8, sequence_parallel: true}",
         "tensor_parallel 8 does not divide 4 (KV heads of full attention)"),
    ],
)  # fmt: skip
def test_unsupported_settings_are_refused(path: Path, ranks: int, override: str, message: str) -> None:
    assert_refused(path, [override], ranks, message)


# Multi-head latent attention


def test_weights_are_counted_on_their_ranks() -> None:
    """Check DeepSeek-V3 as transformers builds the model: 671 billion weights, 37 billion per token. Each tensor
    parallel rank has whole matrices and norms of the latents."""
    config = AutoConfig.from_pretrained(DEEPSEEK)
    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    run = load_config(LATENT)
    models = read_models(run, MODELS).models
    biases = 58 * 256
    total = sum(p.numel() for p in model.parameters()) + biases
    assert model_sizes(models.actor)[0] == total == pytest.approx(671e9, rel=0.001)
    active = sum(model_sizes(models.actor)[1:])
    assert active == pytest.approx(37e9, rel=0.02)
    role = make_setup(run, models, 256, on_cuda=True).actor
    grid, experts = role.grid, 3 * 7168 * 2048
    whole = 7168 * (1536 + 576) + 1536 + 512 + 2 * 7168
    of_heads = 128 * (192 * 1536 + 256 * 512 + 128 * 7168) // grid.tp
    of_expert_layer = 256 * 7168 + 256 + 3 * 7168 * 2048 // grid.tp + 256 // grid.ep * experts
    starts = [0, *itertools.accumulate(role.chunk_layers or even_layers(61, grid.pp))]
    for stage, (first, last) in enumerate(itertools.pairwise(starts)):
        dense = sum(layer < 3 for layer in range(first, last))
        expected = (last - first) * (whole + of_heads) + (last - first - dense) * of_expert_layer
        expected += dense * 3 * 7168 * 18432 // grid.tp
        expected += (stage in (0, grid.pp - 1)) * role.padded_vocab // grid.tp * 7168 + 7168 * (stage == grid.pp - 1)
        assert role.parameters(stage) == expected


def test_cache_and_flops_of_latents() -> None:
    """Each rank of a server keeps 512 numbers of the latent and 64 of a key in each of 61 layers. For each previous
    token, SGLang multiplies the queries of 128 heads by both, and sums the latents. The embedded engine computes the
    keys and values of the heads."""
    arch = read_models(load_config(LATENT), MODELS).models.actor
    assert token_bytes(arch, 1, 2) == token_bytes(arch, 16, 2) == 2 * 61 * 576
    assert generation_flops_of_pair(arch, served=True) == 2 * 61 * 128 * (576 + 512)
    assert generation_flops_of_pair(arch, served=False) == 2 * 61 * 128 * (192 + 128 + 512 * 256)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, "computes rope type 'linear' as yarn"),
        (YARN | {"mscale": 0.7}, "by 1.09704, but mscale 0.7 of config.json's rope_parameters require 1.13863"),
        (YARN | {"mscale_all_dim": 0.7}, "by 1.03791, but mscale_all_dim 0.7 of config.json's rope_parameters require"),
        (YARN | {"attention_factor": 1.5}, "by 1.13863, but attention_factor 1.5 of config.json's"),
        (YARN | {"truncate": False}, "ignores truncate: false"),
        (YARN | {"mscale": 0.0, "mscale_all_dim": 0.0}, "by 1, but mscale 0.0 and mscale_all_dim 0.0 of config.json's"),
        (YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}, ""),
        (YARN, ""),
        ({"rope_type": "default", "rope_theta": 1e4}, ""),
    ],
)
def test_ropes_with_a_different_reading_in_sglang_are_refused(
    tmp_path: Path, rope: dict[str, Any], message: str
) -> None:
    arch = read_architecture(write_model(tmp_path / "m", "deepseek_v3", 1, num_hidden_layers=2, rope_parameters=rope))
    problem = arch.declaration.unserved(arch, Served(on_cuda=True, tokens=40))
    assert message in problem and bool(message) == bool(problem)


@pytest.mark.parametrize("mscale_all_dim", [None, 0.7, 1.0])
def test_scores_are_scaled_as_in_transformers(tmp_path: Path, mscale_all_dim: float | None) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 16}
    rope |= {} if mscale_all_dim is None else {"mscale_all_dim": mscale_all_dim}
    folder = write_model(tmp_path / "m", "deepseek_v3", 1, rope_parameters=rope)
    scaling = AutoModelForCausalLM.from_pretrained(folder).model.layers[0].self_attn.scaling
    assert softmax_scale(read_architecture(folder)) == pytest.approx(scaling, rel=1e-9)


def test_best_groups_have_the_experts(tmp_path: Path) -> None:
    """The router of transformers chooses the same experts, although single experts of other groups have higher scores.
    K differs from two per group."""
    folder = write_model(
        tmp_path / "m", "deepseek_v3", 1, n_routed_experts=24, n_group=6, topk_group=2, num_experts_per_tok=7
    )
    router = AutoModelForCausalLM.from_pretrained(folder).model.layers[1].mlp.gate
    scores, _, experts = router(torch.randn(50, 32, generator=torch.Generator().manual_seed(2)))
    config = SimpleNamespace(moe_router_pre_softmax=False, moe_router_score_function="sigmoid")
    ours = SimpleNamespace(config=config, correction_bias=router.e_score_correction_bias)
    layer: Any = SimpleNamespace(
        mlp=SimpleNamespace(router=ours, moe_layer_recompute=False), register_forward_pre_hook=lambda *_, **__: None
    )

    def largest(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.topk(scores, k=k, dim=1)

    values, chosen = RouterChoice(layer, 0, 0).get_replay_topk(scores.sigmoid(), 7, 6, 2, largest)
    assert torch.equal(chosen.sort(1).values, experts.sort(1).values)
    assert torch.equal(values, scores.sigmoid().gather(1, chosen))
    alone = (scores.sigmoid() + router.e_score_correction_bias).topk(7).indices
    assert not torch.equal(alone.sort(1).values, chosen.sort(1).values)


# Linear attention in most layers


@pytest.mark.parametrize("layers", ["auto", "[11, 13, 12, 12]"])
def test_linear_attention_layers_are_counted_on_their_stages(layers: str) -> None:
    """In Qwen3-Next, as transformers builds the model, every fourth layer has attention. The other layers are
    larger."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODELS / "Qwen3-Next-80B-A3B-Instruct"))
    per_layer = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    layout = f"pipeline_parallel: 2, virtual_pipeline_chunks: 2, expert_parallel: 8, pipeline_layers: {layers}"
    config = load_config(LINEAR, [f"actor.layout={{{layout}}}"])
    models = read_models(config, MODELS).models
    assert model_sizes(models.actor)[0] == sum(p.numel() for p in model.parameters())
    active = sum(model_sizes(models.actor)[1:]) + 151936 * 2048
    assert active == pytest.approx(3.9e9, rel=0.02)  # 3 billion per token, and the vocabulary twice
    role = make_setup(config, models, 16, on_cuda=True).actor
    counts = role.chunk_layers or even_layers(48, 4)
    starts = [0, *itertools.accumulate(counts)]
    for stage in range(2):
        layers_of_stage = [n for chunk in (stage, stage + 2) for n in range(starts[chunk], starts[chunk + 1])]
        expected = sum(per_layer[n] for n in layers_of_stage) + 151936 * 2048 + (2048 if stage == 1 else 0)
        shared = role.parameters(stage) - role.expert_parameters(stage)
        assert shared + 8 * role.expert_parameters(stage) == expected


def test_cache_and_state_of_a_sequence() -> None:
    """Keys and values exist in 12 of 48 layers. The other layers have a state of 32 heads of 128 x 128 in float32.
    Their convolution keeps queries, keys and values of four tokens."""
    arch = read_models(load_config(LINEAR), MODELS).models.actor
    assert arch.attention_layers == tuple(range(3, 48, 4))
    assert token_bytes(arch, 1, 2) == 2 * 2 * 12 * 2 * 256
    assert state_bytes(arch, 2) == 36 * (4 * 32 * 128 * 128 + 2 * 4 * (2 * 2048 + 4096))
    # Of each token and head: products with 64 keys of the chunk and their update, a triangle of 64 x 64, and three
    # products with the state. Each of the 16 key heads has two products of 64 keys.
    of_heads = 32 * (64 * 256 + 2 * 64 * 128 + 3 * 2 * 128 * 128)
    assert recurrence_flops(arch) == 36 * (of_heads + 16 * 2 * 2 * 64 * 128)


# Layers with heads of different sizes: the sizes of Gemma-4-31B, computed by hand

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


SHIPPED = ROOT / "configs" / "gpt_oss_20b_8gpu_gsm8k.yaml"


def test_parameter_counts_match_transformers() -> None:
    """The counts include sinks and biases on each rank."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODELS / "gpt-oss-20b"))
    per_layer = sum(p.numel() for p in model.model.layers[0].parameters())
    of_experts = sum(p.numel() for p in model.model.layers[0].mlp.experts.parameters())
    config = load_config(SHIPPED, ["actor.layout={pipeline_parallel: 2, expert_parallel: 4}"])
    models = read_models(config, MODELS).models
    total, *active = model_sizes(models.actor)
    assert total == sum(p.numel() for p in model.parameters()) == 20_914_757_184
    embedding = 201088 * 2880
    assert sum(active) == total - embedding - 24 * of_experts * 28 // 32  # 4 of 32 experts and no embedding
    role = make_setup(config, models, 8, on_cuda=True).actor
    for stage in range(2):
        assert role.expert_parameters(stage) == 12 * of_experts // 4
        shared = role.parameters(stage) - role.expert_parameters(stage)
        assert shared == 12 * (per_layer - of_experts) + embedding + (2880 if stage else 0)


def test_random_weights_have_random_sinks_and_zero_biases(tmp_path: Path) -> None:
    """The distribution matches transformers."""
    arch = read_architecture(write_model(tmp_path / "m", "gpt_oss", 1))
    source = RandomSource(arch, 3)
    sinks = torch.cat([source.read(Piece(f"model.layers.{n}.self_attn.sinks", 0, 0, 4)) for n in range(4)])
    assert len(sinks.unique()) == 16 and 0.05 < float(sinks.std()) < 0.4  # expected 0.15
    biases = [name for name in tensor_shapes(arch) if name.endswith(".bias")]
    assert len(biases) == 4 * (4 + 1 + 8 * 3)
    assert not any(source.read(Piece(name, 0, 0, tensor_shapes(arch)[name][0])).any() for name in biases)


@pytest.mark.parametrize("targets", ["all", "[q_proj]"])
def test_adapters_are_rejected(targets: str) -> None:
    arch = read_models(load_config(SHIPPED), MODELS).models.actor
    assert LoraShape.of(arch, 4, 8.0, "all").targets  # only the rule rejects adapters
    settings = load_config(SHIPPED, [f"actor.lora={{rank: 4, alpha: 8, targets: {targets}}}"])
    with pytest.raises(ConfigError, match="adapters of a gpt_oss are not supported; train its weights, and remove"):
        derive(settings, 8, arch)
