"""Random models: a family, fields of config.json, a layout and options, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from megappo.families import FAMILIES

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {}, "tp2": {"tensor_parallel": 2, "sequence_parallel": False},
    "sp2": {"tensor_parallel": 2, "sequence_parallel": True}, "pp2": {"pipeline_parallel": 2},
    "vpp2": {"pipeline_parallel": 2, "virtual_pipeline_chunks": 2}, "cp2": {"context_parallel": 2},
    "ep2": {"expert_parallel": 2}, "tp2-ep2": {"tensor_parallel": 2, "expert_parallel": 2},
    "cp2-ep2": {"context_parallel": 2, "expert_parallel": 2},
}  # fmt: skip
"""Layouts of two ranks."""
PARTLY_ROTATED = ("glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
BY_LAYER_TYPES = ("qwen2", "qwen3", "gpt_oss", "gemma2", "gemma3_text")
EXPERTS = ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "gpt_oss", "qwen3_next", "qwen3_5_moe_text")


@dataclass(frozen=True)
class RandomModel:
    """A model with its layout and settings."""

    seed: int
    family: str
    fields: dict[str, Any]
    """Differences of config.json from the tiny model of the family."""
    layout: str
    settings: tuple[str, ...]
    """Overrides of the actor."""

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.family} on {self.layout}, {self.fields}, {self.settings}"


def random_model(seed: int) -> RandomModel:
    """Return the model of a seed."""
    draw = random.Random(seed)
    family = draw.choice(sorted(FAMILIES))
    sizes = _sizes(draw, family)
    fields = {**sizes, **_of_family(draw, family, sizes["num_hidden_layers"])}
    if family not in ("gemma3_text", "gemma4_text"):
        fields["rope_parameters"] = _rope(draw, partly=family in PARTLY_ROTATED)
    elif family == "gemma3_text":
        fields["rope_parameters"] = {
            kind: _rope(draw, partly=False, kinds=("default", "linear", "linear", "yarn"))
            for kind in ("full_attention", "sliding_attention")
        }
    layouts = list(LAYOUTS) if family in EXPERTS else [name for name in LAYOUTS if "ep2" not in name]
    layout = draw.choice(layouts)
    settings = [f"actor.layout.{name}={str(value).lower()}" for name, value in LAYOUTS[layout].items()]
    settings.append(f"actor.recompute={draw.choice(('none', 'none', 'selective', 'full'))}")
    settings.append(f"actor.optimizer.distributed={draw.choice(('true', 'false'))}")
    settings.append(f"actor.optimizer.weight_decay={draw.choice((0, 0.1))}")
    settings.append(f"actor.optimizer.clip_grad_norm={draw.choice((0, 0.5))}")
    settings.append(f"rollout.temperature={draw.choice((1.0, 0.7, 1.6))}")
    return RandomModel(seed, family, fields, layout, tuple(settings))


def _sizes(draw: random.Random, family: str) -> dict[str, Any]:
    heads = draw.choice((2, 4, 4))
    sizes: dict[str, Any] = {
        "num_hidden_layers": draw.choice((2, 3, 4, 4, 4)), "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([n for n in (1, 2, 2, 2, 4, 4) if n <= heads]),
        "head_dim": draw.choice((8, 8, 16, 16, 12)), "vocab_size": draw.choice((97, 131, 160)),
        "tie_word_embeddings": draw.choice((False, True)), "rms_norm_eps": draw.choice((1e-6, 1e-5, 1e-3)),
        "max_position_embeddings": draw.choice((64, 128)),
    }  # fmt: skip
    if family in DELTA:
        sizes["rms_norm_eps"] = 1e-3  # norms of small numbers enlarge rounding errors of float32
    if family == "deepseek_v3":
        sizes |= {"num_key_value_heads": heads, "head_dim": 8}
    if family == "gemma4_text":
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": draw.choice((2, 4)), "head_dim": 8}
    return sizes


def _rope(draw: random.Random, *, partly: bool, kinds: tuple[str, ...] = ()) -> dict[str, Any]:
    kind = draw.choice(kinds or (*4 * ("default",), *4 * ("linear",), *4 * ("llama3",), *8 * ("yarn",), "dynamic"))
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": draw.choice((500.0, 1e4))}
    if kind != "default":
        rope["factor"] = draw.choice((2.0, 4.0, 8.0))
    if kind == "llama3":
        rope |= {"low_freq_factor": draw.choice((1.0, 2.0)), "high_freq_factor": draw.choice((4.0, 8.0))}
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = draw.choice((8, 16, 32))
    if kind == "yarn":
        optional: dict[str, tuple[Any, ...]] = {
            "attention_factor": (1.0, 1.3), "mscale": (1.0, 0.7), "mscale_all_dim": (1.0, 0.4), "beta_fast": (32, 8),
            "beta_slow": (1, 2), "truncate": (True, False),
        }  # fmt: skip
        rope |= {name: draw.choice(values) for name, values in optional.items() if draw.random() < 0.3}
    if partly or draw.random() < 0.02:
        rope["partial_rotary_factor"] = draw.choice((0.25, 0.5, 0.5, 0.75, 1.0))
    return rope


def _of_family(draw: random.Random, family: str, layers: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if family in BY_LAYER_TYPES and draw.random() < 0.5:
        fields["sliding_window"] = draw.choice((3, 7, 40))
        if family in ("qwen2", "qwen3"):
            fields |= {
                "use_sliding_window": draw.choice((True, True, False)),
                "max_window_layers": draw.choice((0, 1, 2)),
            }
        if draw.random() < 0.4:
            kinds = ("full_attention", "sliding_attention")
            fields["layer_types"] = [draw.choice(kinds) for _ in range(layers)]
    if family in ("mistral", "mixtral", "qwen3_moe"):
        fields["sliding_window"] = draw.choice((None, 7))
        fields["use_sliding_window"] = fields["sliding_window"] is not None
    if family in ("llama", "qwen3", "qwen3_moe", "glm4_moe") and draw.random() < 0.3:
        fields["attention_bias"] = draw.choice((True, False))
    if family in EXPERTS:
        experts = draw.choice((4, 8))
        names = {"mixtral": "num_local_experts", "gpt_oss": "num_local_experts"}
        count = names.get(family, "n_routed_experts" if family in ("glm4_moe", "deepseek_v3") else "num_experts")
        fields |= {
            count: experts,
            "num_experts_per_tok": draw.choice((1, 2, 3)),
            "moe_intermediate_size": draw.choice((24, 40)),
        }
        fields["norm_topk_prob"] = draw.choice((True, True, False))
    if family in ("glm4_moe", "deepseek_v3"):
        groups = draw.choice((1, 2))
        fields |= {
            "n_group": groups, "topk_group": draw.choice((1, groups)), "n_shared_experts": draw.choice((1, 2)),
            "first_k_dense_replace": draw.choice((0, 1)), "routed_scaling_factor": draw.choice((1.0, 2.5)),
            "num_nextn_predict_layers": 0,
        }  # fmt: skip
    if family == "glm4_moe":
        fields["use_qk_norm"] = draw.choice((True, False))
    if family == "deepseek_v3":
        fields |= {"q_lora_rank": draw.choice((None, 12)), "rope_interleave": draw.choice((True, False))}
        fields["v_head_dim"] = draw.choice((6, 9))
    if family in DELTA:
        fields |= {"linear_num_value_heads": draw.choice((2, 4)), "linear_conv_kernel_dim": draw.choice((2, 4))}
    if family == "gpt_oss":
        fields |= {"swiglu_alpha": draw.choice((1.702, 1.3)), "swiglu_limit": draw.choice((0.6, 7.0))}
    if family.startswith("gemma2"):
        fields |= {
            "attn_logit_softcapping": draw.choice((None, 2.0)),
            "final_logit_softcapping": draw.choice((None, 5.0)),
        }
    return fields
