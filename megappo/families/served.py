"""Settings of config.json that SGLang 0.5.23 and transformers read differently. With such settings, SGLang would
silently sample from a different policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rope types whose parameters are supported by SGLang's `get_rope`. Not all of SGLang's models use them."""
_TOP_LEVEL_FAMILIES = ("llama", "mistral")
"""Families for which SGLang prefers `original_max_position_embeddings` at the top level of config.json."""
_SCALE_TOLERANCE = 1e-6
NEEDS_GPU = "needs a GPU, and the run is on a CPU"
"""Text of several `unserved` functions."""


_OWN_OUTPUT_LAYER = ("glm4_moe", "mixtral", "qwen3_moe", "qwen3_next")
"""Families for which SGLang's model always has a separate output layer, independent of tie_word_embeddings. Weight
syncs would not update this layer."""
_TIED_OUTPUT_LAYER = ("gemma2",)
"""Families for which SGLang's model always uses the embedding as output layer."""


class ServedModel(Protocol):
    """Properties of a model that determine whether servers support the model."""

    @property
    def family(self) -> str:
        """`model_type` of config.json."""

    @property
    def tied_embeddings(self) -> bool:
        """Whether the output layer is the embedding."""

    @property
    def sliding_window(self) -> int | None:
        """Size of the attention window in tokens, or None."""

    @property
    def hf_config(self) -> PretrainedConfig:
        """transformers' configuration."""


class Served(NamedTuple):
    """Conditions of generation with SGLang."""

    on_cuda: bool
    """Whether the servers run on GPUs; otherwise on CPUs."""
    tokens: int
    """Length of the longest sequence in tokens."""


def unread_settings(arch: ServedModel, conditions: Served) -> str:
    """Return the common reason of most families, or "" for supported settings; see `Family.unserved`."""
    return unread_ties(arch) or unread_window(arch, conditions) or unread_rope(arch)


def unread_ties(arch: ServedModel) -> str:
    """Return the reason for an output layer that SGLang ties differently, or "" for other output layers."""
    if arch.tied_embeddings and arch.family in _OWN_OUTPUT_LAYER:
        return "has a separate output layer, but tie_word_embeddings of config.json is true"
    if not arch.tied_embeddings and arch.family in _TIED_OUTPUT_LAYER:
        return "uses the embedding as output layer, but tie_word_embeddings of config.json is false"
    return ""


def unread_window(arch: ServedModel, conditions: Served) -> str:
    """Return the reason for an attention window, which most of SGLang's models ignore. Returns "" if sequences are
    shorter."""
    if arch.sliding_window is None or arch.sliding_window >= conditions.tokens:
        return ""
    return f"ignores sliding_window {arch.sliding_window} of config.json"


def unread_rope(arch: ServedModel, types: tuple[str, ...] = ROPE_TYPES) -> str:
    """Return the reason for a rope that SGLang computes differently, or "" for other ropes.

    Args:
        types: rope types that SGLang's model supports.

    A custom family is not checked if its layers have different ropes.
    """
    c = arch.hf_config
    rope: Mapping[str, Any] = getattr(c, "rope_parameters", None) or {}
    if "rope_type" not in rope:
        return ""
    kind = rope["rope_type"]
    if kind not in types:
        return f"ignores rope type '{kind}' of config.json"
    if getattr(c, "dual_chunk_attention_config", None):
        return "reads dual_chunk_attention_config of config.json, which transformers ignores"
    if kind == "default" and rope.get("use_fope"):
        return "reads use_fope of config.json's rope_parameters, which transformers ignores"
    stated = getattr(c, "original_max_position_embeddings", None)
    own = rope.get("original_max_position_embeddings", stated)
    if arch.family in _TOP_LEVEL_FAMILIES and stated is not None and stated != own:
        return (
            f"reads original_max_position_embeddings {stated} from the top level of config.json, but "
            f"rope_parameters contain {own}"
        )
    return unread_yarn(rope, _scale_of_get_rope(rope)) if kind == "yarn" else ""


def unread_yarn(rope: Mapping[str, Any], scale: float | None) -> str:
    """Return the reason for YaRN parameters that SGLang computes differently, or "" for other parameters.

    Args:
        scale: SGLang's factor on cosine and sine. None if `factor` is missing.
    """
    if scale is None:
        return f"requires a number as factor in config.json's rope_parameters, not {rope.get('factor')}"
    for setting in ("attn_factor", "extrapolation_factor"):
        if rope.get(setting, 1) != 1:
            entry = f"{setting} {rope[setting]}"
            return f"reads {entry} of config.json's rope_parameters, which transformers ignores"
    for setting in ("beta_fast", "beta_slow"):
        if setting in rope and not rope[setting]:
            entry = f"{setting} {rope[setting]}"
            return f"uses {entry} of config.json's rope_parameters, but transformers uses the default instead"
    expected = yarn_scale(rope)
    if not math.isclose(scale, expected, rel_tol=_SCALE_TOLERANCE):
        names = [f"{n} {rope[n]}" for n in ("attention_factor", "mscale", "mscale_all_dim") if rope.get(n) is not None]
        return (
            f"multiplies cosine and sine by {scale:.6g}, but {' and '.join(names)} of config.json's "
            f"rope_parameters require {expected:.6g}"
        )
    return ""


def get_mscale(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's temperature (Peng et al. 2023, eq. 22), weighted as in DeepSeek's `mscale`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _scale_of_get_rope(rope: Mapping[str, Any]) -> float | None:
    """Return the factor on cosine and sine in SGLang's YaRNScalingRotaryEmbedding, or None without `factor`."""
    factor, mscale, of_all = (rope.get(name) for name in ("factor", "mscale", "mscale_all_dim"))
    if factor is None:
        return None
    if mscale is None or of_all is None:
        return get_mscale(factor)
    return get_mscale(factor, mscale) / get_mscale(factor, of_all)


def yarn_scale(rope: Mapping[str, Any]) -> float:
    """Return the factor on cosine and sine in transformers' `_compute_yarn_parameters`."""
    stated, factor = rope.get("attention_factor"), rope["factor"]
    if stated is not None:
        return float(stated)
    mscale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    return get_mscale(factor, mscale) / get_mscale(factor, of_all) if mscale and of_all else get_mscale(factor)
