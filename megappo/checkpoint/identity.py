"""Digests and fields that identify the model of a run and the meaning of its weights."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from megappo.checkpoint.files import Marker
from megappo.config import Config
from megappo.config.reading.explain import explain
from megappo.config.role_models import model_paths, role_folder
from megappo.families.declaration import ArchitectureConfig
from megappo.families.rope import Rope, rotary
from megappo.files.json_values import JSONValue
from megappo.models.model_files import read_config_json
from megappo.runtime.ranks.objects import all_gather_objects

_WITHOUT_MEANING = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures")
_ROPES, _ROUNDING = "ropes", 1e-5
BASE = "'s base"
"""Suffix of a role's name, for the digest of the base weights of adapters. No checkpoint contains base weights."""
MTP = "'s further layers"
"""Suffix of a role's name, for the digest of multi-token prediction layers. No checkpoint contains these layers."""


def architecture_digest(folder: Path) -> str:
    """Return the sha256 of a model's config.json, without entries that do not change the model."""
    fields = {name: value for name, value in read_config_json(folder).items() if name not in _WITHOUT_MEANING}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def architecture_fields(arch: ArchitectureConfig) -> dict[str, JSONValue]:
    """Return all fields that determine the function of an architecture's weights, in JSON types.

    The result contains all inputs of the model: the fields of the family, the settings and the activation for
    Megatron-Core, and the ropes. Therefore the result covers all settings of config.json.
    """
    fields = {f.name: getattr(arch, f.name) for f in dataclasses.fields(arch) if f.compare}
    layers = arch.declaration.megatron(arch)
    assert not fields.keys() & (layers.keys() | {_ROPES}), "each name has one meaning"
    return _of_json({**fields, **layers, _ROPES: [_numbers(rope) for rope in rotary(arch)]})


def recorded_fields(record: Mapping[str, JSONValue], arch: ArchitectureConfig) -> dict[str, JSONValue]:
    """Return the `architecture_fields` of a checkpoint, for the comparison with the fields of `arch`.

    Checkpoints of older versions lack some fields. A missing field of ArchitectureConfig has the default value. Older
    checkpoints contain `rope_parameters` instead of ropes, and no settings of layers. Missing settings of layers are
    not compared. The old name of `extensions` is `beyond`.
    """
    defaults = {
        f.name: f.default for f in dataclasses.fields(ArchitectureConfig) if f.default is not dataclasses.MISSING
    }
    renamed = {"extensions" if name == "beyond" else name: value for name, value in record.items()}
    complete = {**_of_json(defaults), **renamed}
    if _ROPES not in record:
        same_rope = record.get("rope_parameters") == _of_json(arch.hf_config.rope_parameters)
        layers = _of_json(arch.declaration.megatron(arch))
        complete |= layers | {_ROPES: architecture_fields(arch)[_ROPES] if same_rope else None}
    return complete


def differing_fields(fields: Mapping[str, JSONValue], own: Mapping[str, JSONValue]) -> list[str]:
    """Return the names of the fields of `own` that differ in `fields`. Ropes may differ by rounding between
    machines."""

    def is_same(name: str) -> bool:
        other, mine = fields.get(name), own[name]
        if name != _ROPES or not isinstance(other, list) or not isinstance(mine, list):
            return other == mine
        pairs = list(zip_longest(*([x for rope in ropes for x in rope] for ropes in (other, mine)), fillvalue=math.nan))
        return len(other) == len(mine) and all(math.isclose(a, b, rel_tol=_ROUNDING) for a, b in pairs)

    return [name for name in own if not is_same(name)]


def _numbers(rope: Rope) -> list[float]:
    """Return the factor of cosine and sine, followed by the inverse frequencies."""
    return [rope.scale, *rope.inverse_frequencies.tolist()]


def _of_json(fields: Mapping[str, Any]) -> dict[str, JSONValue]:
    converted: dict[str, JSONValue] = json.loads(json.dumps(fields, default=_described))
    return converted


def _described(value: Any) -> JSONValue:
    """Return JSON for a dataclass or an activation function: name and settings."""
    if isinstance(value, functools.partial):
        return [_described(value.func), list(value.args), value.keywords]
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return [_described(type(value)), vars(value)]


class OwnCode(NamedTuple):
    """Code that the user of a command allows to run. A checkpoint of unknown origin cannot allow code."""

    family: str | None = None
    """Import path of a model family."""
    trust_remote_code: bool = False
    """Whether code in the folder of the model or of its tokenizer may run."""


NO_CODE = OwnCode()


def model_of(marker: Marker, role: str, own: OwnCode = NO_CODE) -> tuple[Config, Path]:
    """Return the settings of a checkpoint, with only `own` code for the model, and the model folder of a role. The
    folder may lack the weights.

    Raises ValueError if config.json in the folder differs from the start of the run, or if the settings are invalid.
    """
    settings = settings_of(marker)
    try:
        config = Config.model_validate({**settings, "model": {**settings["model"], **own._asdict()}})
    except ValidationError as error:
        raise ValueError(f"the settings in the checkpoint are invalid: {explain(error)[0]}") from None
    folder = role_folder(config, role, weights=False)
    key = role if role != "actor" and role in model_paths(config) else "model"
    before = marker.content.get("identity", {}).get(key)
    digest = architecture_digest(folder)
    if before not in (None, digest):
        raise ValueError(
            f"the config.json in {folder} differs from the start of the run (sha256 {digest[:12]}, at the start "
            f"{before[:12]}); restore the folder"
        )
    return config, folder


def settings_of(marker: Marker) -> dict[str, Any]:
    """Return the settings of a checkpoint. Raises ValueError if the settings or their section `model` are missing."""
    settings = marker.content.get("settings")
    if not isinstance(settings, dict) or not isinstance(settings.get("model"), dict):
        raise ValueError("the checkpoint contains no settings; name a checkpoint of a megappo run")
    return settings


def weights_digest(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the sha256 of whole tensors and their names, equal for all layouts. A collective of all ranks.

    `named_tensors`: tensors of this rank.
    """
    own = {name: tensor_digest(tensor) for name, tensor in named_tensors}
    return whole_digest({name: digest for part in all_gather_objects(own) for name, digest in part.items()})


def tensor_digest(tensor: Tensor) -> str:
    """Return the sha256 of the bytes of a tensor."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(data.data).hexdigest()


def whole_digest(of_tensors: Mapping[str, str]) -> str:
    """Return the sha256 of the digests of all tensors of a model, by name."""
    return hashlib.sha256(json.dumps(dict(of_tensors), sort_keys=True).encode()).hexdigest()
