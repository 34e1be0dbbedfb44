"""Settings of config.json that SGLang 0.5.23 and transformers read differently. With such settings, SGLang would
silently sample from a different policy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from megappo.families.architecture import ArchitectureConfig

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rope types whose parameters SGLang's `get_rope` reads, where a model passes them on."""
_TOP_LEVEL_FAMILIES = ("llama", "mistral")
"""Families whose `original_max_position_embeddings` SGLang takes from the top level of config.json, where it is
there."""
_SCALE_TOLERANCE = 1e-6
NEEDS_GPU = "needs a GPU, and the run is on a CPU"
"""What several families say in `unserved`."""


_OWN_OUTPUT_LAYER = ("glm4_moe", "mixtral", "qwen3_moe", "qwen3_next")
"""Families whose models in SGLang have an output layer of their own, whatever tie_word_embeddings says: the layer would
keep the weights with which the server started."""
_TIED_OUTPUT_LAYER = ("gemma2",)
"""Families whose models in SGLang have no output layer but the embedding."""


class Served(NamedTuple):
    """Conditions under which SGLang is to generate with a model."""

    on_cuda: bool
    """Whether it runs on GPUs; otherwise on a CPU."""
    tokens: int
    """Tokens of the longest sequence."""


def unread_settings(arch: ArchitectureConfig, asked: Served) -> str:
    """Return the common reason of most families, or "" for supported settings; see `Family.unserved`."""
    return unread_ties(arch) or unread_window(arch, asked) or unread_rope(arch)


def unread_ties(arch: ArchitectureConfig) -> str:
    """What is said of an output layer that SGLang ties, or does not tie, to the embedding; "" of others."""
    if arch.tied_embeddings and arch.family in _OWN_OUTPUT_LAYER:
        return "has an output layer of its own, where tie_word_embeddings of config.json makes it the embedding"
    if not arch.tied_embeddings and arch.family in _TIED_OUTPUT_LAYER:
        return "takes the embedding for the output layer, where tie_word_embeddings of config.json is false"
    return ""


def unread_window(arch: ArchitectureConfig, asked: Served) -> str:
    """What is said of a window, which most of SGLang's models do not read; "" where it makes no difference."""
    if arch.sliding_window is None or arch.sliding_window >= asked.tokens:
        return ""
    return f"takes no account of sliding_window {arch.sliding_window} in config.json"


def unread_rope(arch: ArchitectureConfig, types: tuple[str, ...] = ROPE_TYPES) -> str:
    """What is said of a rope that SGLang computes differently from transformers; "" of others.

    `types`: the rope types that the family's model passes on. A user's own family without one rope for all layers is
    not checked.
    """
    c = arch.hf_config
    rope: Mapping[str, Any] = getattr(c, "rope_parameters", None) or {}
    if "rope_type" not in rope:
        return ""
    kind = rope["rope_type"]
    if kind not in types:
        return f"takes no account of rope type '{kind}' in config.json"
    if getattr(c, "dual_chunk_attention_config", None):
        return "reads dual_chunk_attention_config of config.json, which transformers does not"
    if kind == "default" and rope.get("use_fope"):
        return "reads use_fope of config.json's rope_parameters, which transformers does not"
    stated = getattr(c, "original_max_position_embeddings", None)
    own = rope.get("original_max_position_embeddings", stated)
    if arch.family in _TOP_LEVEL_FAMILIES and stated is not None and stated != own:
        return (
            f"takes original_max_position_embeddings {stated} from the top level of config.json, where "
            f"rope_parameters have {own}"
        )
    return unread_yarn(rope, _scale_of_get_rope(rope)) if kind == "yarn" else ""


def unread_yarn(rope: Mapping[str, Any], scale: float | None) -> str:
    """What is said of YaRN's parameters that SGLang computes differently; "" of others.

    `scale`: its factor on cosine and sine; None where `factor` does not say it.
    """
    if scale is None:
        return f"needs a number as factor in config.json's rope_parameters, which have {rope.get('factor')}"
    for setting in ("attn_factor", "extrapolation_factor"):
        if rope.get(setting, 1) != 1:
            said = f"{setting} {rope[setting]}"
            return f"reads {said} of config.json's rope_parameters, which transformers does not"
    for setting in ("beta_fast", "beta_slow"):
        if setting in rope and not rope[setting]:
            said = f"{setting} {rope[setting]}"
            return f"takes {said} of config.json's rope_parameters as it is, where transformers has its default"
    wanted = yarn_scale(rope)
    if not math.isclose(scale, wanted, rel_tol=_SCALE_TOLERANCE):
        given = [f"{n} {rope[n]}" for n in ("attention_factor", "mscale", "mscale_all_dim") if rope.get(n) is not None]
        return (
            f"multiplies cosine and sine by {scale:.6g}, where {' and '.join(given)} of config.json's "
            f"rope_parameters mean {wanted:.6g}"
        )
    return ""


def get_mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's temperature (Peng et al. 2023, eq. 22), weighted as DeepSeek's `mscale` weights it."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _scale_of_get_rope(rope: Mapping[str, Any]) -> float | None:
    """Factor on cosine and sine in SGLang's YaRNScalingRotaryEmbedding; None without `factor`."""
    factor, mscale, of_all = (rope.get(name) for name in ("factor", "mscale", "mscale_all_dim"))
    if factor is None:
        return None
    if mscale is None or of_all is None:
        return get_mscale(factor)
    return get_mscale(factor, mscale) / get_mscale(factor, of_all)


def yarn_scale(rope: Mapping[str, Any]) -> float:
    """Factor on cosine and sine in transformers' `_compute_yarn_parameters`."""
    stated, factor = rope.get("attention_factor"), rope["factor"]
    if stated is not None:
        return float(stated)
    mscale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    return get_mscale(factor, mscale) / get_mscale(factor, of_all) if mscale and of_all else get_mscale(factor)
