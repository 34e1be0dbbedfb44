"""Read, initialise and write adapters in the format of PEFT, and merge adapters into whole weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megappo.errors import first_of, reason, show, writing
from megappo.families.adapters import WEIGHT, A, B, LoraShape, adapter_tensors, ambiguous_targets, initial_bound
from megappo.families.declaration import ArchitectureConfig
from megappo.families.parameters import OUTPUT_LAYER, Piece, model_parameters
from megappo.families.weights import ValueHeadWeights, WeightSource
from megappo.files.folder_texts import read_object
from megappo.files.json_values import JSONValue
from megappo.models.hub import HubName
from megappo.models.weight_files import finite
from megappo.reshard.sources import generator_of
from megappo.reshard.writer import save_tensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_WITHOUT_EFFECT = frozenset({
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "target_modules", "exclude_modules", "layers_pattern", "lora_dropout", "megatron_config",
    "megatron_core", "runtime_config", "qalora_group_size", "init_lora_weights", "loftq_config", "eva_config",
    "corda_config", "lora_ga_config", "ensure_weight_tying",
})  # fmt: skip
"""Fields of PEFT 0.21's LoraConfig that are checked separately, or that do not affect the computation of trained
adapters. Any other field must be empty, so that variants of later PEFT versions are rejected."""
_PLAIN_BIAS = ("none", None)
_WITHOUT_BASE = (None, True, False, "gaussian", "orthogonal", "eva", "mica")
"""Initialisations that do not change the base weights. With any other initialisation (PiSSA, OLoRA, CorDA, LoftQ,
LoRA-GA), PEFT changes the base weights when it loads the folder (`LoraLayer.update_layer` of PEFT 0.21.2)."""


class FreshAdapters:
    """Fresh adapters. A is drawn from the distribution of PEFT and depends only on a seed and the name of the tensor.
    All layouts therefore start from the same values. B is zero."""

    def __init__(self, arch: ArchitectureConfig, lora: LoraShape, seed: int) -> None:
        self._shapes, self._seed = adapter_tensors(arch, lora), seed
        self._whole = lru_cache(maxsize=3)(self._draw)

    def _draw(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name.endswith(B):
            return torch.zeros(shape)
        bound = initial_bound(shape[1])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator_of(self._seed, name))

    def read(self, piece: Piece) -> Tensor:
        """Return the slice in float32."""
        return self._whole(piece.name).narrow(piece.dim, piece.start, piece.size)

    def value_head(self) -> None:
        """Return None. A new head is drawn, or is loaded with the weights of the critic."""


class PeftSource:
    """The adapters in a PEFT folder.

    Raises ValueError if the adapters are not plain LoRA with the given rank, alpha and targets for this architecture.
    """

    def __init__(self, folder: Path, arch: ArchitectureConfig, lora: LoraShape) -> None:
        _check_config(folder, lora)
        self._path = folder / WEIGHTS
        self._file = _opened(folder / WEIGHTS)
        stored_names, expected_shapes = set(self._file.keys()), adapter_tensors(arch, lora)
        if strange := sorted(stored_names ^ {_PREFIX + name for name in expected_shapes}):
            which = f"{first_of(strange, 3)} {'is' if len(strange) == 1 else 'are'} in only one set"
            raise ValueError(f"the tensors in {folder / WEIGHTS} differ from the adapters of this model: {which}")
        for name, shape in expected_shapes.items():
            stored_shape = tuple(self._file.get_slice(_PREFIX + name).get_shape())
            if stored_shape != shape:
                raise ValueError(
                    f"tensor '{name}' in {folder / WEIGHTS} has shape {stored_shape}, must be {shape}; the adapters "
                    "belong to another model"
                )

    def read(self, piece: Piece) -> Tensor:
        """Return the slice in the stored type. Raises ValueError if the slice is not finite."""
        tensor = self._file.get_slice(_PREFIX + piece.name)
        part: Tensor = tensor[piece.start : piece.stop] if piece.dim == 0 else tensor[:, piece.start : piece.stop]
        return finite(part, _PREFIX + piece.name, self._path)

    def value_head(self) -> None:
        """Return None, because PEFT folders of causal language models have no head."""


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read ({reason(error)}); save the adapters as safetensors") from error


def _check_config(folder: Path, lora: LoraShape) -> None:
    config = read_object(folder / CONFIG)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{folder / CONFIG} has peft_type {show(config.get('peft_type'))}, must be LORA")
    for name, value in config.items():
        if (value if name != "bias" else value not in _PLAIN_BIAS) and name not in _WITHOUT_EFFECT:
            raise ValueError(
                f"{folder / CONFIG} has {name} {show(value)}, which is more than plain LoRA; {_MERGE_INSTEAD}"
            )
    _check_initialisation(folder, config.get("init_lora_weights"))
    targets = config.get("target_modules")
    listed = sorted(targets) if isinstance(targets, list) else targets
    for name, stored, configured in (
        ("r", config.get("r"), lora.rank),
        ("lora_alpha", config.get("lora_alpha"), lora.alpha),
        ("target_modules", listed, sorted(lora.targets)),
    ):
        if stored != configured:
            raise ValueError(
                f"{folder / CONFIG} has {name} {show(stored)}, the settings have {show(configured)}; use the same value"
            )


_MERGE_INSTEAD = "merge the adapters into their base (PEFT's merge_and_unload) and name that folder as the model's path"


def _check_initialisation(folder: Path, initialisation: JSONValue) -> None:
    """Raise ValueError for an initialisation that changes the base weights."""
    name = initialisation.lower() if isinstance(initialisation, str) else initialisation
    if not any(name is plain or (isinstance(plain, str) and name == plain) for plain in _WITHOUT_BASE):
        raise ValueError(
            f"{folder / CONFIG} has init_lora_weights {show(initialisation)}, which changes the base weights; "
            "convert the adapters to plain LoRA (PEFT's path_initial_model_for_weight_conversion), or "
            f"{_MERGE_INSTEAD}"
        )


def write_peft(
    out: Path, arch: ArchitectureConfig, lora: LoraShape, tensors: Iterable[tuple[str, Tensor]], base: str
) -> None:
    """Write adapters as a folder that PEFT loads onto `base`. `base` is a folder or a hub name.

    Raises ValueError if PEFT would load only a part of the adapters (PEFT 0.21 with transformers 5).
    """
    if unclear := ambiguous_targets(arch, lora):
        raise ValueError(
            "PEFT would load only a part of these adapters, because both experts and other matrices of a "
            f"{arch.family} are named {first_of(list(unclear), 3)}; omit --format peft to merge the adapters"
        )
    base, revision = (base, None) if Path(base).is_dir() else HubName.of(base)
    out.mkdir(parents=True, exist_ok=True)
    save_tensors({_PREFIX + name: tensor.contiguous() for name, tensor in tensors}, out / WEIGHTS)
    content: dict[str, JSONValue] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "revision": revision,
        "r": lora.rank, "lora_alpha": lora.alpha, "target_modules": sorted(lora.targets), "lora_dropout": 0.0,
        "bias": "none", "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True, "use_rslora": False,
        "use_dora": False, "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
    }  # fmt: skip
    with writing(out):
        (out / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class MergedSource:
    """Whole weights: the weights of a base with merged adapters."""

    arch: ArchitectureConfig
    lora: LoraShape
    base: WeightSource
    adapters_from: WeightSource
    is_critic: bool
    dtype: torch.dtype
    """Type of the weights of the run."""

    def read(self, piece: Piece) -> Tensor:
        """Return the slice in float32, rounded like the weights of the run."""
        tensor = self.base.read(piece).to(self.dtype).float()
        pair = self._pairs.get(piece.name)
        if pair is None:
            return tensor
        a, b = pair
        if piece.dim == 0:
            b = replace(b, start=piece.start, stop=piece.stop)
        else:
            a = replace(a, dim=1, start=piece.start, stop=piece.stop)
        b_OR, a_RI = (self.adapters_from.read(part).to(self.dtype).float() for part in (b, a))
        return torch.add(tensor, b_OR @ a_RI, alpha=self.lora.scale).to(self.dtype).float()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the model in Hugging Face order and float32, rounded like the weights of the run."""
        yield from ((piece.name, self.read(piece)) for piece in self._whole_tensors())

    def base_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the base model, in the type of the run."""
        yield from ((piece.name, self.base.read(piece).to(self.dtype)) for piece in self._whole_tensors())

    def _whole_tensors(self) -> Iterator[Piece]:
        for parameter in model_parameters(self.arch):
            if not (self.is_critic and parameter.megatron == OUTPUT_LAYER):
                yield from (Piece(name, 0, 0, shape[0]) for name, shape in parameter.tensors.items())

    @cached_property
    def _pairs(self) -> dict[str, tuple[Piece, Piece]]:
        """Whole A and B of each adapted matrix."""
        wholes = {name: Piece(name, 0, 0, shape[0]) for name, shape in adapter_tensors(self.arch, self.lora).items()}
        names = (name.removesuffix(A) for name in wholes if name.endswith(A))
        return {name + WEIGHT: (wholes[name + A], wholes[name + B]) for name in names}

    def value_head(self) -> ValueHeadWeights | None:
        """Return the head of the critic, which is trained together with the adapters."""
        return self.adapters_from.value_head()
