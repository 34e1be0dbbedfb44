"""Linear attention in most layers: the sizes in the plan, and settings that are refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megappo.config import load_config
from megappo.config.pipeline import even_layers
from megappo.families.flops import recurrence_flops
from megappo.plan.inputs import make_setup
from megappo.plan.planner import read_models
from megappo.plan.servers import token_bytes
from megappo.plan.sizes import model_sizes, state_bytes
from tests.support.configurations import assert_refused
from tests.support.places import ROOT

MODELS = ROOT / "configs" / "models"
PATH = MODELS / "Qwen3-Next-80B-A3B-Instruct"
SHIPPED = ROOT / "configs" / "qwen3_next_80b_a3b_4node_dapo_math.yaml"


@pytest.mark.parametrize("layers", ["auto", "[11, 13, 12, 12]"])
def test_linear_attention_layers_are_counted_on_their_stages(layers: str) -> None:
    """In Qwen3-Next, as transformers builds the model, every fourth layer has attention. The other layers are
    larger."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(PATH))
    per_layer = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    layout = f"pipeline_parallel: 2, virtual_pipeline_chunks: 2, expert_parallel: 8, pipeline_layers: {layers}"
    config = load_config(SHIPPED, [f"actor.layout={{{layout}}}"])
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
    arch = read_models(load_config(SHIPPED), MODELS).models.actor
    assert arch.attention_layers == tuple(range(3, 48, 4))
    assert token_bytes(arch, 1, 2) == 2 * 2 * 12 * 2 * 256
    assert state_bytes(arch, 2) == 36 * (4 * 32 * 128 * 128 + 2 * 4 * (2 * 2048 + 4096))
    # Of each token and head: products with 64 keys of the chunk and their update, a triangle of 64 x 64, and three
    # products with the state. Each of the 16 key heads has two products of 64 keys.
    of_heads = 32 * (64 * 256 + 2 * 64 * 128 + 3 * 2 * 128 * 128)
    assert recurrence_flops(arch) == 36 * (of_heads + 16 * 2 * 2 * 64 * 128)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["actor.layout={context_parallel: 2}"],
            "actor.layout.context_parallel 2 splits a sample between ranks, but the linear attention of a",
        ),
        (
            ["rollout.sglang={tensor_parallel: 8}"],
            "rollout.sglang.verify is true, but SGLang stores the weights of a qwen3_next in a different order",
        ),
        (["rollout.sglang={tensor_parallel: 32, verify: false}"], "32 does not divide 16 (heads) or 16 (key heads of"),
        (["actor.lora={rank: 4, alpha: 8}"], "adapters of a qwen3_next are not supported; train its weights"),
        (
            ["actor.layout={tensor_parallel: 4, sequence_parallel: true}"],
            "tensor_parallel 4 does not divide 2 (KV heads)",
        ),
    ],
)
def test_unsupported_settings_are_refused(overrides: list[str], message: str) -> None:
    assert_refused(SHIPPED, overrides, 32, message)
