"""Rotary positions (rope): the frequencies of each type, and checks of the numbers in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from megappo.errors import show
from megappo.families.architecture import ModelShape
from megappo.families.declaration import ArchitectureConfig
from megappo.families.served import yarn_scale

if TYPE_CHECKING:  # plans read factors without importing torch
    from torch import Tensor


_YARN_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_PLAIN = ("rope_theta", "partial_rotary_factor")
_NUMBERS = {
    "default": _PLAIN,
    "proportional": (*_PLAIN, "factor"),
    "linear": (*_PLAIN, "factor"),
    "llama3": (*_PLAIN, "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (*_PLAIN, "factor", "original_max_position_embeddings", *_YARN_OPTIONAL),
}
"""Numbers that transformers reads for each rope type (`modeling_rope_utils`). transformers refuses a rope if a required
number is missing."""
_LARGEST = 1e300
_TOP_LEVEL = (*_PLAIN, "rope_local_base_freq", "original_max_position_embeddings")
"""Numbers of ropes at the top level of config.json, in files of earlier versions of transformers."""
_NULLABLE = {"yarn": ("factor", *_YARN_OPTIONAL)}
"""Numbers for which null selects a default."""
_LEAST = {
    "rope_theta": (1.0, "a number above 1"),
    "rope_local_base_freq": (1.0, "a number above 1"),
    "mscale": (0.0, "a number from 0"),
    "mscale_all_dim": (0.0, "a number from 0"),
}
"""Lower limits and their texts in errors. All other numbers have a limit of 0."""
_ZEROS = ("mscale", "mscale_all_dim", "beta_fast", "beta_slow")
"""Numbers for which 0 selects a default."""


class Rope(NamedTuple):
    """Rotary positions of one kind of layer, as transformers computes them."""

    inverse_frequencies: Tensor
    """(rotated channels/2,), float32, in radians per position."""
    scale: float
    """Factor on cosine and sine (YaRN's temperature). It scales the rotated channels only."""


def check_rope_numbers(content: Mapping[str, Any]) -> None:
    """Check the ropes of a config.json, including the ropes of a nested model (`text_config`).

    Raises ValueError for values that are not numbers or out of range, which would result in NaN. Entries that the type
    of the rope does not read are not checked.
    """
    inner = content.get("text_config")
    if isinstance(inner, Mapping):
        check_rope_numbers(inner)
    for name in _TOP_LEVEL:
        is_read = name == "rope_theta" and not isinstance(content.get("rope_parameters"), Mapping)
        if content.get(name) is not None or (name in content and is_read):
            _check_number(name, content[name], "of config.json", "for any rope type")
    for field in ("rope_parameters", "rope_scaling"):
        ropes = content.get(field)
        if isinstance(ropes, Mapping):
            for rope in (ropes, *ropes.values()):
                if isinstance(rope, Mapping):
                    _check_rope(rope, field)


def _check_rope(rope: Mapping[str, Any], field: str) -> None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    names = _NUMBERS.get(kind, ()) if isinstance(kind, str) else ()
    for name in names:
        if name in rope and not (rope[name] is None and name in _NULLABLE.get(kind, ())):
            _check_number(name, rope[name], f"of {field}", f"for rope type '{kind}'")
    low, high = rope.get("low_freq_factor"), rope.get("high_freq_factor")
    if "low_freq_factor" in names and low is not None and high is not None and high <= low:
        raise ValueError(f"high_freq_factor {high} of {field} must exceed low_freq_factor {low}; fix config.json")


def _check_number(name: str, value: Any, place: str, reader: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST
    least, rule = _LEAST.get(name, (0.0, "a number above 0"))
    if not is_number or value < least or (value == least and name not in _ZEROS):
        raise ValueError(f"{name} {place} is {show(value)}, must be {rule} {reader}; fix config.json")


def scaled_positions(shape: ModelShape) -> int:
    """Return the number of positions that the rope scaling of config.json describes. Returns 0 if positions are not
    scaled.

    YaRN multiplies `original_max_position_embeddings` by `factor`. Linear scaling multiplies
    `max_position_embeddings`. Model cards describe how to enable YaRN, and usually do not change
    `max_position_embeddings`.
    """
    rope: Mapping[str, Any] = getattr(getattr(shape, "hf_config", None), "rope_parameters", None) or {}
    factor, kind = rope.get("factor"), rope.get("rope_type")
    if factor is None or kind not in ("yarn", "linear"):
        return 0
    original = rope.get("original_max_position_embeddings") if kind == "yarn" else shape.max_position_embeddings
    return int(factor * (original or 0))


def earlier_rope_fields(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json from which transformers 4 reads the ropes. transformers 5 reads
    `rope_parameters`.

    Without the fields, transformers 4 uses its defaults and prints no warning. Returns an empty dictionary for
    models without ropes, and for models that transformers 4 does not support.
    """
    ropes: Mapping[str, Any] = content.get("rope_parameters") or {}
    if "rope_type" in ropes:
        main, local = ropes, {}
    elif content["model_type"] == "gemma3_text":
        main, local = ropes["full_attention"], ropes["sliding_attention"]
    else:
        return {}
    fields = {name: main[name] for name in _PLAIN if name in main}
    scaling = {name: value for name, value in main.items() if name not in _PLAIN}
    fields["rope_scaling"] = None if main["rope_type"] == "default" else scaling
    return {**fields, "rope_local_base_freq": local["rope_theta"]} if local else fields


def rotary(arch: ArchitectureConfig) -> tuple[Rope, ...]:
    """Return the rope of each kind of layer, in the order of `rope_kinds`. Models without kinds have one rope.

    Megatron-Core's own scaling is not used, because it supports only the constants of Llama 3.
    """
    return tuple(_of_kind(arch, kind) for kind in rope_kinds(arch) or (None,))


def rotary_scales(arch: ArchitectureConfig) -> tuple[float, ...]:
    """Return the `scale` of each rope in `rotary`, without importing torch."""
    parameters = arch.hf_config.rope_parameters
    return tuple(_scale(arch, parameters if kind is None else parameters[kind]) for kind in rope_kinds(arch) or (None,))


def _scale(arch: ArchitectureConfig, rope: Mapping[str, Any]) -> float:
    if rope["rope_type"] != "yarn":
        return 1.0
    if rope["factor"] is None:
        stretch = arch.hf_config.max_position_embeddings / rope["original_max_position_embeddings"]
        return yarn_scale({**rope, "factor": stretch})
    return yarn_scale(rope)


def rope_kinds(arch: ArchitectureConfig) -> tuple[str, ...]:
    """Return the kinds of rope in a model's layers, in the order of `rotary`. Returns () for models with one rope."""
    return tuple(sorted(set(arch.extensions.ropes)))


def _of_kind(arch: ArchitectureConfig, kind: str | None) -> Rope:
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = arch.hf_config.rope_parameters
    rope = parameters if kind is None else parameters[kind]
    if rope["rope_type"] == "default":
        channels = arch.rotary_channels or arch.head_dim
        exponents = torch.arange(0, channels, 2, dtype=torch.int64).float() / channels
        return Rope(1.0 / (rope["rope_theta"] ** exponents), 1.0)
    of_layers = {} if kind is None else {"layer_type": kind}
    compute = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
    with torch.device("cpu"):  # some functions create tensors on the default device
        inverse_frequencies, scale = compute(arch.hf_config, torch.device("cpu"), **of_layers)
    return Rope(inverse_frequencies, float(scale))


def has_own_layers(arch: ArchitectureConfig) -> bool:
    """Return whether a model requires megappo's own layers. Other models may use Transformer Engine's layers, which
    support neither extensions nor a factor on cosine and sine."""
    return not arch.is_standard or any(scale != 1 for scale in rotary_scales(arch))
