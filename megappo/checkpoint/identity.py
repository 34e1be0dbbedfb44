"""Digests and fields by which a run recognises its model, and whether weights still mean the same in it."""

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
from megappo.config.explain import explain
from megappo.config.model_files import model_paths, read_config_json, role_folder
from megappo.families.architecture import ArchitectureConfig
from megappo.families.rope import Rope, rotary
from megappo.observe.json_values import JSONValue
from megappo.runtime.objects import all_gather_objects

_WITHOUT_MEANING = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures")
_ROPES, _ROUNDING = "ropes", 1e-5
BASE = "'s base"
"""Suffix of a role's name for the digest of the weights under its adapters, which are in no checkpoint."""
MTP = "'s further layers"
"""Suffix of a role's name for the digest of its model's multi-token prediction layers, which are in no checkpoint."""


def architecture_digest(folder: Path) -> str:
    """sha256 of a model folder's config.json, without entries that do not change the model."""
    kept = {name: value for name, value in read_config_json(folder).items() if name not in _WITHOUT_MEANING}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def architecture_fields(arch: ArchitectureConfig) -> dict[str, JSONValue]:
    """Everything that determines what an architecture's weights compute, in JSON's types.

    It is derived from all that the model is built of: the fields that the family reads, the settings and the activation
    that its blocks give to Megatron-Core, and the ropes. So no setting of config.json can be forgotten.
    """
    fields = {f.name: getattr(arch, f.name) for f in dataclasses.fields(arch) if f.compare}
    layers = arch.declaration.megatron(arch)
    assert not fields.keys() & (layers.keys() | {_ROPES}), "one meaning for each name"
    return _of_json({**fields, **layers, _ROPES: [_numbers(rope) for rope in rotary(arch)]})


def recorded_fields(record: Mapping[str, JSONValue], arch: ArchitectureConfig) -> dict[str, JSONValue]:
    """The `architecture_fields` in a checkpoint, to be compared with those of `arch`.

    Checkpoints of earlier versions lack some of them. A missing field of ArchitectureConfig has its default. Such a
    checkpoint records `rope_parameters` instead of the ropes, and no settings of layers, which are not compared then.
    `extensions` was once called `beyond`.
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
    """Names of the fields of `own` that differ in `fields`. Ropes may differ by the rounding of another machine."""

    def is_same(name: str) -> bool:
        other, mine = fields.get(name), own[name]
        if name != _ROPES or not isinstance(other, list) or not isinstance(mine, list):
            return other == mine
        pairs = list(zip_longest(*([x for rope in ropes for x in rope] for ropes in (other, mine)), fillvalue=math.nan))
        return len(other) == len(mine) and all(math.isclose(a, b, rel_tol=_ROUNDING) for a, b in pairs)

    return [name for name in own if not is_same(name)]


def _numbers(rope: Rope) -> list[float]:
    """The factor on cosine and sine, then the inverse frequencies."""
    return [rope.scale, *rope.inverse_frequencies.tolist()]


def _of_json(fields: Mapping[str, Any]) -> dict[str, JSONValue]:
    converted: dict[str, JSONValue] = json.loads(json.dumps(fields, default=_described))
    return converted


def _described(value: Any) -> JSONValue:
    """A value that is no JSON: a dataclass or an activation function, by its name and settings."""
    if isinstance(value, functools.partial):
        return [_described(value.func), list(value.args), value.keywords]
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return [_described(type(value)), vars(value)]


class OwnCode(NamedTuple):
    """Code that the user of a command allows to run. A checkpoint, which may be somebody else's, cannot allow any."""

    family: str | None = None
    """Import path of a model family."""
    trust_remote_code: bool = False
    """Whether code in the folder of the model or of its tokenizer may run."""


NO_CODE = OwnCode()


def model_of(marker: Marker, role: str, own: OwnCode = NO_CODE) -> tuple[Config, Path]:
    """The settings of a checkpoint's run, with no other code than `own` in its model, and the folder of a role's model,
    perhaps without its weights.

    Raises ValueError where the folder's config.json is not the one that the run began with, and for settings that are
    none.
    """
    settings = settings_of(marker)
    try:
        config = Config.model_validate({**settings, "model": {**settings["model"], **own._asdict()}})
    except ValidationError as error:
        raise ValueError(f"the settings in the checkpoint are none of a run: {explain(error)[0]}") from None
    folder = role_folder(config, role, weights=False)
    key = role if role != "actor" and role in model_paths(config) else "model"
    before = marker.content.get("identity", {}).get(key)
    digest = architecture_digest(folder)
    if before not in (None, digest):
        raise ValueError(
            f"the config.json in {folder} is not the one the run began with (sha256 {digest[:12]}, then "
            f"{before[:12]}); bring back the folder as it was"
        )
    return config, folder


def settings_of(marker: Marker) -> dict[str, Any]:
    """The settings of a checkpoint's run, at least their sections and the model's. Raises ValueError where there are
    none."""
    settings = marker.content.get("settings")
    if not isinstance(settings, dict) or not isinstance(settings.get("model"), dict):
        raise ValueError("the checkpoint holds no settings of a run; name one that a run of megappo wrote")
    return settings


def weights_digest(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 over whole tensors and their names, the same for every layout; a collective of the world.

    `named_tensors`: this rank's share of them.
    """
    own = {name: tensor_digest(tensor) for name, tensor in named_tensors}
    return whole_digest({name: digest for part in all_gather_objects(own) for name, digest in part.items()})


def tensor_digest(tensor: Tensor) -> str:
    """sha256 of a tensor's bytes."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.sha256(data.data).hexdigest()


def whole_digest(of_tensors: Mapping[str, str]) -> str:
    """sha256 of the digests of all of a model's tensors, by their names."""
    return hashlib.sha256(json.dumps(dict(of_tensors), sort_keys=True).encode()).hexdigest()
