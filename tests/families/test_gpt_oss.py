"""gpt-oss in the planner and in the rules: parameter counts of transformers, and unsupported settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megappo.config import ConfigError, load_config
from megappo.config.derive import derive
from megappo.config.model_files import read_architecture
from megappo.families.adapters import LoraShape
from megappo.families.parameters import Piece, tensor_shapes
from megappo.plan.inputs import make_setup
from megappo.plan.planner import read_models
from megappo.plan.sizes import model_sizes
from megappo.reshard.sources import RandomSource
from tests.support.models import write_model
from tests.support.places import ROOT

MODELS = ROOT / "configs" / "models"
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
