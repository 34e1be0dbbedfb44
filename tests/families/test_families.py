"""The config.json of a family is read like in transformers or rejected. Users can define families."""

from __future__ import annotations

import ast
import copy
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import silu
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megappo.config import ConfigError, load_config
from megappo.config.role_models import load_architecture
from megappo.config.schema import ModelSettings
from megappo.families import FAMILIES, architecture
from megappo.families.declaration import ArchitectureConfig
from megappo.families.parameters import tensor_shapes
from megappo.families.rope import rotary, rotary_scales
from megappo.families.served import Served
from megappo.models.model_files import read_architecture
from megappo.plan.bytes.sizes import model_sizes
from megappo.plan.engines import other_engine
from megappo.plan.hardware.machines import MACHINES
from megappo.plan.inputs import Models, make_setup
from megappo.ppo.assembly.origins import open_origin
from megappo.reshard.writer import write_policy
from megappo_kernels.clamped import ClampedSwiGLU
from tests.support.models import OWN, write_model
from tests.support.places import ROOT, TINY

SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "vocab_size": 131, "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
TOKENS = 24
WINDOW = 7
SLIDING = {"layer_types": ["sliding_attention"]}
FULL = {"layer_types": ["full_attention"]}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
LINEAR_ROPE = {**PLAIN, "rope_type": "linear", "factor": 8.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
MIXED = {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2}
ON = {"sliding_window": WINDOW, "use_sliding_window": True}
TRAITS: list[dict[str, Any]] = [
    {}, FULL, SLIDING, {"sliding_window": None}, {"sliding_window": WINDOW}, ON, ON | {"max_window_layers": 0},
    ON | SLIDING, ON | FULL, {"sliding_window": None} | SLIDING,
]  # fmt: skip


LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
OF_TWO_KINDS = (*LINEAR, "gemma4_text")
OF_ONE_LAYER: dict[str, dict[str, Any]] = {
    "glm4_moe": {"first_k_dense_replace": 0},
    "deepseek_v3": {"first_k_dense_replace": 0},
    # One layer has attention, and one layer has linear attention or a window.
    **{family: {"num_hidden_layers": 2} for family in OF_TWO_KINDS},
}


def written(folder: Path, family: str, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    content = SIZES | OWN.get(family, {}) | OF_ONE_LAYER.get(family, {}) | {"model_type": family} | changes
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def seen_tokens(config: Any) -> int:
    """Return the number of tokens that a token attends to in a transformers model of one layer, including itself."""
    torch.manual_seed(0)
    implementation = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, **implementation).eval()
    tokens = torch.arange(2, 2 + TOKENS)[None]
    other = tokens.clone()
    other[0, 0] = 1
    with torch.no_grad():
        moved = (model(tokens).logits - model(other).logits)[0].abs().amax(-1) > 1e-9
    return int(moved.sum())


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in OF_TWO_KINDS])
def test_windows_match_transformers_or_are_rejected(tmp_path: Path, family: str) -> None:
    accepted = 0
    for number, traits in enumerate(TRAITS):
        config = AutoConfig.from_pretrained(written(tmp_path / str(number), family, **traits))
        try:
            window = architecture(config).sliding_window
        except ValueError as error:
            assert "sliding_window" in str(error) or "'ministral' is not supported" in str(error), traits
            continue
        accepted += 1
        assert seen_tokens(config) == (TOKENS if window is None else min(window, TOKENS)), traits
    assert accepted >= 3


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"sliding_window": WINDOW}, "sliding_window 7 is ignored by transformers for llama"),
        ("llama", SLIDING, "layer_types of 'sliding_attention' contradicts the settings that transformers uses"),
        ("qwen3", {"sliding_window": 0, "use_sliding_window": True}, "sliding_window 0 must be at least 1 token"),
        ("qwen3_moe", ON | FULL, "layer_types of 'full_attention' contradicts"),
        ("qwen3_moe", SLIDING, "no sliding_window; make layer_types and sliding_window of config.json"),
        # transformers reads the model as a family with different layers.
        ("mistral", SLIDING, "model_type 'ministral' is not supported"),
        ("qwen2", {"layer_types": ["chunked_attention"]}, "layer_types of 'chunked_attention' is not supported"),
        ("llama", {"layer_types": ["linear_attention"]}, "layer_types of 'linear_attention' is not supported"),
        ("qwen3", MIXED, "layer_types of 'sliding_attention' contradicts the settings that transformers uses"),
        ("qwen3_moe", ON | MIXED, "layer_types of 'full_attention' contradicts"),
        ("mixtral", {"sliding_window": WINDOW} | MIXED, "layer_types of 'full_attention' contradicts"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
         "partial_rotary_factor 0.25 is not supported"),
        ("qwen3", FULL | {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
         "rope_parameters of 'full_attention' are not supported"),
        ("mistral", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ("mistral", {"attention_bias": True}, "attention_bias: true is not supported"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias: true is not supported"),
        ("mixtral", {"sliding_window": WINDOW} | FULL, "layer_types of 'full_attention' contradicts"),
        ("gemma2", {"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not supported"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping 0.0 must be above 0, or null"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar 0 must be at least 1"),
        ("gemma2", {"attention_bias": True}, "attention_bias: true is not supported"),
        ("gemma2", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "layer_types"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is ignored by transformers"),
        ("gemma3_text", {"rope_parameters": {"full_attention": YARN}}, "rope type 'yarn' is not supported for this"),
        ("gemma3_text", {"sliding_window": None}, "layer_types of 'sliding_attention' contradicts"),
        ("gemma4_text", {"hidden_size_per_layer_input": 4}, "hidden_size_per_layer_input 4 adds embeddings"),
        ("gemma4_text", {"num_kv_shared_layers": 1}, "num_kv_shared_layers 1 adds layers that share keys"),
        ("gemma4_text", {"enable_moe_block": True}, "enable_moe_block True adds experts, which is not"),
        ("gemma4_text", {"attention_k_eq_v": False}, "attention_k_eq_v: false is not supported; use a model with"),
        ("gemma4_text", {"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "is not supported: tokens would attend to"),
        ("gemma4_text", {"final_logit_softcapping": -1.0}, "final_logit_softcapping -1.0 must be above 0, or null"),
        ("gemma4_text", {"attention_bias": True}, "attention_bias: true is not supported for this family"),
        ("gemma4_text", {"layer_types": ["full_attention"] * 2}, "layer_types of only 'full_attention' is not supp"),
        ("gemma4_text", {"layer_types": ["chunked_attention", "full_attention"]}, "layer_types of 'chunked_attention'"),
        ("gemma4_text", {"num_global_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads 3"),
        ("gemma4_text", {"rope_parameters": {"sliding_attention": PLAIN, "full_attention": YARN}},
         "rope type 'yarn' of full_attention is not supported for this family; use proportional"),
        ("gemma4_text", {"per_layer_config": {"1": {"head_dim": 16, "intermediate_size": 16}}},
         "per_layer_config of intermediate_size is not supported; use a model whose layers differ only in"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step 2 with mlp_only_layers"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "use a model with experts in every layer"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 of num_experts 8 is not supported"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias: true is not supported"),
        ("mixtral", {"router_jitter_noise": 0.01}, "router_jitter_noise 0.01 changes the trained policy"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 of num_local_experts 8 is not supported"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; use a model with silu"),
        ("glm4_moe", {"n_group": 3, "topk_group": 2}, "n_group 3 and topk_group 2 cannot select num_experts_per_tok 3"),
        ("deepseek_v3", {"n_group": 8, "topk_group": 4}, "groups must have equal sizes of at least 2"),
        ("deepseek_v3", {"topk_group": 1}, "n_group 4 and topk_group 1 cannot select num_experts_per_tok 3 of 8 exper"),
        ("deepseek_v3", {"topk_group": 5}, "n_group 4 and topk_group 5 cannot select num_experts_per_tok 3 of 8 exper"),
        ("deepseek_v3", {"n_group": None}, "n_group None and topk_group 2 cannot select num_experts_per_tok 3 of 8 ex"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob: false is not supported for this family"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method greedy is ignored by transformers for deepseek_v3"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func softmax is ignored by transformers for deepseek"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq 2 is ignored by transformers for deepseek_v3; use a"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads 2 is not num_attention_heads 4, but"),
        ("deepseek_v3", {"qk_rope_head_dim": 4}, "qk_rope_head_dim 4 with head_dim 8 is not supported; use the same"),
        ("deepseek_v3", {"v_head_dim": 15}, "v_head_dim 15 is not supported; use a model with 1 to 14 channels"),
        ("deepseek_v3", {"q_lora_rank": 0}, "q_lora_rank 0 is not supported; use a model with at least 1"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias: true is not supported for this family"),
        ("deepseek_v3", {"first_k_dense_replace": 1}, "first_k_dense_replace 1 leaves none of num_hidden_layers 1"),
        ("deepseek_v3", {"sliding_window": WINDOW}, "sliding_window 7 is ignored by transformers for deepseek_v3"),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob: false is not supported for this family"),
        ("glm4_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok 1 is not supported; use a model with at least 2"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts 0 is not supported; use a model with at least 1"),
        ("glm4_moe", {"first_k_dense_replace": 1}, "first_k_dense_replace 1 leaves none of num_hidden_layers 1"),
        ("glm4_moe", {"partial_rotary_factor": 0.4}, "partial_rotary_factor 0.4 rotates 3 of the 8 channels of a head"),
        ("glm4_moe", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; use a model with silu"),
        ("glm4_moe", {"sliding_window": WINDOW}, "sliding_window 7 is ignored by transformers for glm4_moe"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias: false is not supported for this family; use a model"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act 'gelu' is ignored by transformers for gpt_oss"),
        ("gpt_oss", {"swiglu_limit": 0.0}, "swiglu_limit 0.0 must be above 0"),
        ("gpt_oss", {"swiglu_alpha": -1.0}, "swiglu_alpha -1.0 must be above 0"),
        ("gpt_oss", {"attention_dropout": 0.1}, "attention_dropout 0.1 changes the trained policy"),
        ("gpt_oss", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 of num_local_experts 8 is not supported"),
        ("gpt_oss", SLIDING | {"sliding_window": None}, "layer_types of 'sliding_attention' contradicts"),
        ("gpt_oss", {"layer_types": ["chunked_attention"]}, "layer_types of 'chunked_attention' is not supported"),
        ("gpt_oss", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, "quant_method awq is not supported"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
         "quantization_config of fp8 is not supported for this family; use its plain weights, or those in mxfp4"),
        ("llama", {"quantization_config": {"quant_method": "mxfp4"}}, "quant_method mxfp4 is not supported"),
        ("qwen3_next", MIXED, "layer_types of 'sliding_attention' is not supported; use a model of lin"),
        ("qwen3_5_text", {"full_attention_interval": 1}, "layer_types of only 'full_attention' is not supported"),
        ("qwen3_next", {"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not a multiple of linear_num_key_"),
        ("qwen3_next", {"linear_conv_kernel_dim": 8}, "linear_conv_kernel_dim 8 is not supported; use a model with 2"),
        ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; use a model with silu"),
        ("qwen3_next", {"mlp_only_layers": [0]}, "with mlp_only_layers [0] mixes dense layers"),
        ("qwen3_next", {"sliding_window": WINDOW}, "sliding_window 7 is ignored by transformers for qwen3_next"),
        ("qwen3_next", {"attention_bias": True}, "attention_bias: true is not supported for this family"),
        ("qwen3_5_moe_text", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size 0 is not supp"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate: false is not supported; use a model whose"),
        ("qwen3_5", {}, "model_type 'qwen3_5' is not supported; save its language model, a qwen3"),
        ("llama", {"per_layer_config": {"0": {"intermediate_size": 16}}}, "per_layer_config is not supported"),
        ("llama", {"is_causal": False}, "is_causal: false is not supported"),
    ],
)  # fmt: skip
def test_unsupported_fields_are_rejected(tmp_path: Path, family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_architecture(written(tmp_path / "m", family, **changes))
    assert len(caught.value.problems) == 1
    assert message in caught.value.problems[0]


def test_disabled_windows_are_none(tmp_path: Path) -> None:
    """Windows are disabled if config.json and transformers disable them. Mistral always has windows."""
    off = {"sliding_window": WINDOW, "use_sliding_window": False}
    for family, window in (("llama", None), ("qwen2", None), ("mistral", WINDOW)):
        config = AutoConfig.from_pretrained(written(tmp_path / family, family, **off))
        assert architecture(config).sliding_window == window
        assert seen_tokens(config) == (window or TOKENS)


def test_matching_fields_are_accepted(tmp_path: Path) -> None:
    fields = {"partial_rotary_factor": 1.0, "attention_bias": False, "mlp_bias": False, "is_causal": True}
    for family in FAMILIES:
        kinds = {} if family in ("mistral", "mixtral", *OF_TWO_KINDS) else FULL
        family_fields: dict[str, Any] = {} if family == "gemma4_text" else {"sliding_window": None}
        family_fields["attention_bias"] = family == "gpt_oss"  # gpt_oss has biases
        folder = written(tmp_path / family, family, **(fields | family_fields), **kinds)
        assert read_architecture(folder).layers == (2 if family in OF_TWO_KINDS else 1)


def test_planned_rope_scales_match_transformers(tmp_path: Path) -> None:
    ropes = [PLAIN, LINEAR_ROPE, YARN, YARN | {"attention_factor": 1.5}, YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}]
    ropes.append(YARN | {"factor": None, "original_max_position_embeddings": 8})
    for number, rope in enumerate(ropes):
        arch = read_architecture(written(tmp_path / str(number), "llama", rope_parameters=rope))
        (scale,) = rotary_scales(arch)
        assert (scale,) == tuple(rope.scale for rope in rotary(arch)) and (scale == 1) == (number < 2), rope
    for model in sorted((ROOT / "configs" / "models").iterdir()):
        arch = read_architecture(model)
        assert rotary_scales(arch) == tuple(rope.scale for rope in rotary(arch)), model


def test_megatron_arguments_of_a_layer(tmp_path: Path) -> None:
    """A token is part of its own window. The factor of YaRN scales cosine and sine, not attention scores."""
    experts = {"num_moe_experts": 8, "moe_ffn_hidden_size": 24, "moe_router_topk": 2, "moe_router_dtype": "fp32"}
    experts |= {"moe_router_pre_softmax": False, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("llama", {}, {}),
        ("llama", {"rope_parameters": YARN}, {}),
        ("mistral", {"sliding_window": WINDOW}, {"window_size": (WINDOW - 1, 0)}),
        ("qwen2", {}, {"add_qkv_bias": True}),
        ("qwen2", ON | MIXED, {"add_qkv_bias": True, "window_size": (WINDOW - 1, 0), "window_attn_skip_freq": [0, 1]}),
        ("qwen3", {}, {"qk_layernorm": True}),
        ("mixtral", {}, {**experts, "moe_ffn_hidden_size": 48}),
        ("qwen3_moe", {"norm_topk_prob": True}, {"qk_layernorm": True, **experts}),
        (
            "glm4_moe",
            {"num_hidden_layers": 3, "first_k_dense_replace": 2, "use_qk_norm": False},
            {
                "add_qkv_bias": True, **experts, "moe_router_topk": 3, "moe_router_score_function": "sigmoid",
                "moe_router_topk_scaling_factor": 1.5, "moe_layer_freq": [0, 0, 1],
                "moe_shared_expert_intermediate_size": 48,
            },
        ),
        ("qwen3_moe", {"norm_topk_prob": False}, {"qk_layernorm": True, **experts, "moe_router_pre_softmax": True}),
        (
            "gpt_oss",
            FULL,
            {
                "add_qkv_bias": True, "add_bias_linear": True, **experts, "moe_ffn_hidden_size": 48,
                "moe_router_topk": 3, "activation_func": ClampedSwiGLU(1.3, 0.6),
            },
        ),
    ]  # fmt: skip
    usual = {"window_size": None, "softmax_scale": None, "gated_linear_unit": True, "activation_func": silu}
    for number, (family, changes, expected) in enumerate(cases):
        arch = read_architecture(written(tmp_path / str(number), family, **changes))
        arguments = arch.declaration.megatron(arch)
        assert arguments == usual | expected, (family, changes)


def arcee(folder: Path, family: str) -> ArchitectureConfig:
    return load_architecture(folder, ModelSettings(path=str(folder), family=f"tests.support.outside_family:{family}"))


def test_family_of_the_user_is_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "arcee", "arcee", 1, tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"model_type 'arcee' is not supported; use a model of .* or qwen3_5_moe_t"):
        read_architecture(folder)
    arch = arcee(folder, "FAMILY")
    assert arch.family == "arcee"
    stored = sum(tensor.numel() for tensor in AutoModelForCausalLM.from_pretrained(folder).parameters())
    assert model_sizes(arch)[0] == stored
    assert arcee(write_model(tmp_path / "llama", "llama", 1), "FAMILY").family == "llama"
    # The family of the run also reads the initial weights.
    assert open_origin(str(folder), "actor", arch).summary == f"the actor begins with {folder}"
    with pytest.raises(ConfigError, match="hidden_act 'silu', mlp_bias False: use a model with relu2"):
        arcee(write_model(tmp_path / "silu", "arcee", 1, hidden_act="silu"), "FAMILY")


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("FAMILIE", "has no family 'FAMILIE'; did you mean 'tests.support.outside_family:FAMILY'?"),
        ("SquaredReluMlp", "has no family 'SquaredReluMlp'; it has FAMILY"),
        ("", "model.family 'tests.support.outside_family:' is not the path of a family; write package.module:family"),
    ],
)
def test_invalid_family_is_rejected(tmp_path: Path, family: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        arcee(tmp_path, family)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma2", {}, "SGLang's gemma2 needs a GPU, and the run is on a CPU"),
        ("gemma3_text", {}, "SGLang's gemma3_text has errors of at least 0.3 nats on a CPU"),
        ("gemma4_text", {}, "SGLang's gemma4_text supports Gemma 4 only with images"),
        ("mixtral", {"sliding_window": WINDOW}, "SGLang's mixtral ignores sliding_window 7"),
        ("mixtral", {"rope_parameters": YARN}, "SGLang's mixtral ignores rope type 'yarn'"),
        ("mixtral", {"head_dim": 16}, "SGLang's mixtral ignores head_dim 16"),
        ("qwen3", ON | MIXED, "SGLang's qwen3 ignores sliding_window 7"),
        ("gpt_oss", {}, "SGLang's gpt_oss loads the experts of a layer as one tensor, but weights are sent expert"),
        ("qwen3_next", {}, "SGLang's qwen3_next needs a GPU, and the run is on a CPU"),
        ("deepseek_v3", {}, "SGLang's deepseek_v3 needs a GPU, and the run is on a CPU"),
        ("qwen3_5_text", {}, "SGLang's qwen3_5_text supports Qwen3.5 only with images"),
        ("mixtral", {"rope_parameters": {**PLAIN, "rope_theta": 1e4 + 0.5}}, "to 10000"),
        ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.5}}, "by 1.13863, but attention_factor 1.5 of"),
        ("qwen3", {"rope_parameters": {**YARN, "mscale": 0.0, "mscale_all_dim": 1.0}}, "require 1.13863"),
        ("qwen2", {"rope_parameters": {**YARN, "attn_factor": 1.2}}, "reads attn_factor 1.2 of config.json's rope_p"),
        ("glm4_moe", {"rope_parameters": {**YARN, "extrapolation_factor": 0.5}}, "reads extrapolation_factor 0.5 of"),
        ("qwen3_moe", {"rope_parameters": {**YARN, "beta_slow": 0}}, "uses beta_slow 0 of config.json's rope_param"),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 8}}, "reads dual_chunk_attention_config of config"),
        ("qwen3", {"rope_parameters": {**PLAIN, "use_fope": True}}, "reads use_fope"),
        ("llama", {"rope_parameters": YARN, "original_max_position_embeddings": 32}, "32 from the top level of conf"),
        ("llama", {"rope_parameters": YARN}, ""),
        ("qwen2", {"rope_parameters": {**YARN, "attention_factor": 0.1 * math.log(4) + 1}}, ""),
        ("qwen3", {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 16}}, ""),
        ("mixtral", {}, ""),
        ("mistral", {"sliding_window": 40}, ""),  # longer than each sequence
    ],
)
def test_models_without_sglang_support_are_rejected(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    """The error is raised before the run starts and only with SGLang."""
    arch = read_architecture(written(tmp_path / "m", family, **changes))
    models = Models(arch, arch, arch)
    config = load_config(
        ROOT / "configs/sglang_quickstart.yaml", ["data.max_prompt_tokens=16", "rollout.max_response_tokens=24"]
    )
    if message:
        served = "rollout.servers.kind is sglang, but SGL.*; set rollout.engine to tr"
        with pytest.raises(ConfigError, match=served) as error:
            make_setup(config, models, 2, on_cuda=False)
        assert message in str(error.value)
        embedded = config.rollout.model_copy(update={"engine": "transformers", "servers": None})
        other = config.model_copy(update={"rollout": embedded})
        assert message in other_engine(other, models, MACHINES["cpu"], 2).sentence
        make_setup(other, models, 2, on_cuda=False)
    else:
        make_setup(config, models, 2, on_cuda=False)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma2", {"rope_parameters": LINEAR_ROPE}, "rope type 'linear'"),
        ("gemma2", {}, ""),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": LINEAR_ROPE, "full_attention": PLAIN}},
         "rope type 'linear' of sliding_attention"),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": PLAIN, "full_attention": LINEAR_ROPE}}, ""),
        ("qwen3_next", {"rope_parameters": {**YARN, "attention_factor": 1.5, "partial_rotary_factor": 0.5}}, "by 1.13"),
        *((family, TIED, "has a separate output layer, but tie_word_embeddings")
          for family in ("qwen3_moe", "mixtral", "glm4_moe", "qwen3_next")),
        ("gemma2", UNTIED, "uses the embedding as output layer, but tie_word_embeddings"),
        *((family, TIED, "") for family in ("llama", "mistral", "qwen2", "qwen3", "deepseek_v3", "gemma2")),
        ("qwen3_moe", UNTIED, ""), ("gemma3_text", UNTIED, ""),
    ],
)  # fmt: skip
def test_unsupported_sglang_models_on_gpus(tmp_path: Path, family: str, changes: dict[str, Any], message: str) -> None:
    arch = read_architecture(written(tmp_path / "m", family, **changes))
    problem = arch.declaration.unserved(arch, Served(on_cuda=True, tokens=5))
    assert message in problem and bool(message) == bool(problem)


def test_families_without_rope_are_supported(tmp_path: Path) -> None:
    arch = read_architecture(written(tmp_path / "m", "llama"))
    for ropes in (None, {"full_attention": LINEAR_ROPE}):
        other = replace(arch, hf_config=copy.deepcopy(arch.hf_config))
        other.hf_config.rope_parameters = ropes
        assert other.declaration.unserved(other, Served(on_cuda=True, tokens=5)) == ""


def test_export_includes_fields_for_sglang(tmp_path: Path) -> None:
    for family, fields in (
        ("gemma2", {"hidden_act": "gelu_pytorch_tanh"}),
        # The rope_parameters rotate one half. Transformers also writes the default of one quarter.
        ("qwen3_next", {"full_attention_interval": 2, "partial_rotary_factor": 0.5}),
        ("deepseek_v3", {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}),
        ("llama", {}),
    ):
        arch = read_architecture(written(tmp_path / family, family))
        assert arch.declaration.extra_config(arch.hf_config).items() >= fields.items()
        tokenizer = AutoTokenizer.from_pretrained(TINY)
        tensors = ((name, torch.zeros(shape)) for name, shape in tensor_shapes(arch).items())
        out = tmp_path / f"{family}-out"
        write_policy(out, arch, tensors, tokenizer, started_from=tmp_path / family, stop_token_ids=[1])
        assert json.loads((out / "config.json").read_text()).items() >= fields.items()


def test_only_the_families_package_depends_on_families() -> None:
    """Other packages use only the declaration. They read no traits, import no blocks, and compare no family names."""
    room, traits = ROOT / "megappo" / "families", {"sliding_window", "normalized_experts", "norm_topk_prob"}
    for path in (ROOT / "megappo").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text()))) if room not in path.parents else []
        attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        assert not attributes & traits and not texts & FAMILIES.keys(), path
        assert not imported & {f"megappo.families.{name}" for name in ("blocks", "reading", *FAMILIES)}, path
