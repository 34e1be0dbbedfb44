"""Multi-head latent attention: the sizes in the plan, and settings that are refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megappo.config import load_config
from megappo.config.model_files import read_architecture
from megappo.config.pipeline import even_layers
from megappo.families.deepseek_v3 import softmax_scale
from megappo.families.served import Served
from megappo.megatron.router import RouterChoice
from megappo.plan.inputs import make_setup
from megappo.plan.planner import read_models
from megappo.plan.servers import token_bytes
from megappo.plan.sizes import generation_flops_of_pair, model_sizes
from tests.support.configurations import assert_refused
from tests.support.models import write_model
from tests.support.places import ROOT

MODELS = ROOT / "configs" / "models"
PATH = MODELS / "DeepSeek-V3"
SHIPPED = ROOT / "configs" / "deepseek_v3_32node_dapo_math.yaml"


def test_weights_are_counted_on_their_ranks() -> None:
    """Check DeepSeek-V3 as transformers builds the model: 671 billion weights, 37 billion per token. Each tensor
    parallel rank has whole matrices and norms of the latents."""
    config = AutoConfig.from_pretrained(PATH)
    del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    run = load_config(SHIPPED)
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


def test_cache_and_flops_of_a_token() -> None:
    """Each rank of a server keeps 512 numbers of the latent and 64 of a key in each of 61 layers. For each previous
    token, SGLang multiplies the queries of 128 heads by both, and sums the latents. The embedded engine computes the
    keys and values of the heads."""
    arch = read_models(load_config(SHIPPED), MODELS).models.actor
    assert token_bytes(arch, 1, 2) == token_bytes(arch, 16, 2) == 2 * 61 * 576
    assert generation_flops_of_pair(arch, served=True) == 2 * 61 * 128 * (576 + 512)
    assert generation_flops_of_pair(arch, served=False) == 2 * 61 * 128 * (192 + 128 + 512 * 256)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor.lora={rank: 4, alpha: 8}"], "adapters of a deepseek_v3 are not supported; train its weights"),
        (
            ["actor.layout={tensor_parallel: 256, sequence_parallel: true}"],
            "tensor_parallel 256 does not divide 128 (heads)",
        ),
        (
            ["rollout.sglang={tensor_parallel: 16, nodes: 2, data_parallel_attention: 4}"],
            "data_parallel_attention is 4, which SGLang supports for",
        ),
    ],
)
def test_unsupported_settings_are_refused(overrides: list[str], message: str) -> None:
    assert_refused(SHIPPED, overrides, 256, message)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, "computes rope type 'linear' as yarn"),
        (YARN | {"mscale": 0.7}, "by 1.09704, but mscale 0.7 of config.json's rope_parameters require 1.13863"),
        (YARN | {"mscale_all_dim": 0.7}, "by 1.03791, but mscale_all_dim 0.7 of config.json's rope_parameters require"),
        (YARN | {"attention_factor": 1.5}, "by 1.13863, but attention_factor 1.5 of config.json's"),
        (YARN | {"truncate": False}, "ignores truncate: false"),
        (
            YARN | {"mscale": 0.0, "mscale_all_dim": 0.0},
            "by 1, but mscale 0.0 and mscale_all_dim 0.0 of config.json's",
        ),
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
