"""Initial weights of a run's models: from another run, a Hugging Face folder or Megatron-LM (`start_from`).

The content of a path determines its kind. `register_origin` adds a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megappo.checkpoint.files import Marker, checkpoints_directory
from megappo.checkpoint.identity import architecture_fields, differing_fields, model_of, recorded_fields, settings_of
from megappo.checkpoint.select import find_checkpoint
from megappo.checkpoint.source import CheckpointSource
from megappo.checkpoint.torch_dist.folder import find_iteration, is_megatron
from megappo.checkpoint.torch_dist.source import TorchDistSource
from megappo.config import Config
from megappo.config.role_models import load_tokenizer, require_same_tokens
from megappo.errors import link_to_nothing, show
from megappo.families import FAMILIES
from megappo.families.adapters import LoraShape
from megappo.families.declaration import ArchitectureConfig
from megappo.families.weights import WeightSource
from megappo.files.json_values import JSONValue
from megappo.models.model_files import read_architecture
from megappo.reshard.peft import CONFIG, PeftSource
from megappo.reshard.sources import SafetensorsSource
from megappo.runtime.process import Runtime
from megappo.runtime.ranks.objects import agreed

_WITHOUT_MEANING = ("max_position_embeddings", "initializer_range")
"""Fields of config.json that may differ between models with interchangeable weights."""


@dataclass(frozen=True)
class WeightRequest:
    """Request for the weights of a role, or for adapters."""

    role: str
    arch: ArchitectureConfig
    step: str | None
    """Text after the `@` of the path: a step or `best`. None without `@`."""
    runtime: Runtime | None
    """Runtime of the run if all its ranks read. None if only this process reads."""
    lora: LoraShape | None = None
    """Shape of the requested adapters. None requests weights."""


@dataclass(frozen=True)
class Origin:
    """Initial weights or adapters of a model."""

    source: WeightSource
    """Source of the weights, or of the requested adapters."""
    summary: str
    tokens_from: Path | None = None
    """Folder of the tokenizer with which the weights were trained. None if unknown."""


@dataclass(frozen=True)
class OriginKind:
    """Kind of place that contains weights."""

    summary: str
    recognises: Callable[[Path], bool]
    """Checks by content whether an existing path is such a place."""
    open: Callable[[Path, WeightRequest], Origin]
    """Opens the place. A collective of the world with a runtime.

    Raises ValueError on every rank if the place cannot be used.
    """


def register_origin(name: str, kind: OriginKind) -> None:
    """Add a kind of place for `start_from`. The first kind that recognises a path opens the path."""
    _KINDS[name] = kind


def open_origin(
    text: str, role: str, arch: ArchitectureConfig, runtime: Runtime | None = None, lora: LoraShape | None = None
) -> Origin:
    """Open the weights, or the adapters of shape `lora`, that `<role>.start_from: text` names.

    A collective of the world with a runtime. Raises ValueError on every rank if any rank finds no weights of this
    architecture.
    """
    try:
        path, step = _split(text)
        kind = _kind(path) if runtime is None else agreed(lambda: _kind(path))
        request = WeightRequest(role, arch, step, runtime, lora)
        return kind.open(path, request) if runtime is None else agreed(lambda: kind.open(path, request))
    except (ValueError, OSError) as error:
        raise ValueError(f"{role}.start_from '{text}': {error}") from error


def open_start(
    config: Config, role: str, arch: ArchitectureConfig, runtime: Runtime | None = None, lora: LoraShape | None = None
) -> Origin | None:
    """Return `open_origin` of a role's `start_from`. None without this setting.

    The tokenizer of the origin must assign the same token ids as the tokenizer of the run. Raises ValueError or
    ConfigError on every rank if a check fails on any rank.
    """
    settings = config.trained.get(role)
    if settings is None or settings.start_from is None:
        return None
    origin, key = open_origin(settings.start_from, role, arch, runtime, lora), f"{role}.start_from"

    def check() -> None:
        if origin.tokens_from is not None and origin.tokens_from.is_dir():
            require_same_tokens(config, load_tokenizer(config), origin.tokens_from, key)

    check() if runtime is None else agreed(check)
    return origin


def check_origin(text: str) -> None:
    """Raise ValueError if the path does not exist or does not contain weights of a known kind."""
    _kind(_split(text)[0])


def _kind(path: Path) -> OriginKind:
    for kind in _KINDS.values():
        if path.exists() and kind.recognises(path):
            return kind
    if link := link_to_nothing(path):
        raise ValueError(link)
    state = "is of no known kind" if path.exists() else f"does not exist (from {Path.cwd()})"
    raise ValueError(f"{path} {state}; give {', or '.join(k.summary for k in _KINDS.values())}")


def _split(text: str) -> tuple[Path, str | None]:
    """Split `runs/a@120` into (runs/a, 120), unless a folder has the whole name. Raises ValueError if one part is
    empty."""
    path, at, step = text.rpartition("@")
    if not at or Path(text).exists():
        return Path(text), None
    if not path or not step:
        raise ValueError("the @ separates a run from its step; give RUN@STEP, RUN@best, or RUN alone")
    return Path(path), step


def _open_run(path: Path, request: WeightRequest) -> Origin:
    folder, marker, sentences = find_checkpoint(checkpoints_directory(path), request.step or "latest", request.runtime)
    _require_same_adapters(marker, request)
    source = CheckpointSource(folder, request.role, request.arch, request.lora)
    other = marker.content.get("architectures", {}).get(request.role)
    if other is None:  # absent from checkpoints of older versions
        _, model = model_of(marker, request.role)
        other = architecture_fields(_read(model, request))
    _require_same(recorded_fields(other, request.arch), request)
    what = "that" if request.lora is None else "the adapters"
    model = settings_of(marker)["model"]
    tokens_from = Path(model.get("tokenizer") or model["path"])
    return Origin(source, ". ".join([*sentences, f"the {request.role} begins with {what} of {folder}"]), tokens_from)


def _require_same_adapters(marker: Marker, request: WeightRequest) -> None:
    """Raise ValueError unless the run trained what the request needs: all weights, or adapters of the same shape."""
    settings = Config.model_validate(marker.content["settings"]).trained.get(request.role)
    lora = None if settings is None or settings.lora is None else settings.lora.of(request.arch)
    if lora is not None and request.lora is None:
        raise ValueError(
            f"its {request.role} has only adapters, but without {request.role}.lora all weights are trained; set "
            f"{request.role}.lora as in that run, or merge the adapters (`megappo export`) and name the exported "
            "folder"
        )
    if lora is None and request.lora is not None:
        raise ValueError(_WHOLE.format(role=request.role, place="`megappo export` it and name that folder"))
    if lora != request.lora:
        raise ValueError(
            f"its adapters are {show(vars(lora))}, {request.role}.lora requires {show(vars(request.lora))}"
        )


_WHOLE = (
    "it contains whole weights, but {role}.lora trains adapters of the model that the settings name; {place} as "
    "the model's path instead of start_from"
)


def _open_peft(path: Path, request: WeightRequest) -> Origin:
    if request.step is not None:
        raise ValueError("a PEFT folder has no steps; remove the @ and the text after it")
    if request.lora is None:
        raise ValueError(
            f"it contains only adapters, but without {request.role}.lora all weights are trained; set "
            f"{request.role}.lora to their rank, alpha and targets, or merge them into their base (PEFT's "
            "merge_and_unload) and name the merged folder"
        )
    source = PeftSource(path, request.arch, request.lora)
    return Origin(source, f"the {request.role} begins with the adapters of {path}", path)


def _open_folder(path: Path, request: WeightRequest) -> Origin:
    if request.step is not None:
        raise ValueError("a Hugging Face folder has no steps; remove the @ and the text after it")
    _refuse_adapters(request)
    other = _read(path, request)
    _require_same(architecture_fields(other), request)
    source = SafetensorsSource(path, other)
    source.check(with_output_layer=request.role != "critic")
    return Origin(source, f"the {request.role} begins with {path}", path)


def _refuse_adapters(request: WeightRequest) -> None:
    if request.lora is not None:
        raise ValueError(_WHOLE.format(role=request.role, place="name it"))


def _open_megatron(path: Path, request: WeightRequest) -> Origin:
    _refuse_adapters(request)
    folder = find_iteration(path, request.step)
    return Origin(TorchDistSource(folder, request.role, request.arch), f"the {request.role} begins with {folder}", path)


def _read(folder: Path, request: WeightRequest) -> ArchitectureConfig:
    """Read the architecture of a folder. Code in the folder is not run, because the folder may be untrusted."""
    return read_architecture(folder, {**FAMILIES, request.arch.family: request.arch.declaration}, key="the model")


def _require_same(other: Mapping[str, JSONValue], request: WeightRequest) -> None:
    """Raise ValueError if the other architecture gives the weights a different meaning."""
    # A critic has no output layer to tie.
    without_meaning = (*_WITHOUT_MEANING, "tied_embeddings") if request.role == "critic" else _WITHOUT_MEANING
    own = {name: v for name, v in architecture_fields(request.arch).items() if name not in without_meaning}
    different = differing_fields(other, own)
    if different:
        raise ValueError(
            f"it differs in {', '.join(different)} from the {request.role}'s config.json; give a model of the same "
            "architecture"
        )


_KINDS = {
    "run": OriginKind(
        "a run directory (RUN for its newest checkpoint, RUN@STEP or RUN@best)",
        lambda path: (path / "config.yaml").is_file() and checkpoints_directory(path).is_dir(),
        _open_run,
    ),
    "peft": OriginKind("a PEFT folder", lambda path: (path / CONFIG).is_file(), _open_peft),
    "folder": OriginKind("a Hugging Face folder", lambda path: (path / "config.json").is_file(), _open_folder),
    "megatron": OriginKind(
        "a torch_dist checkpoint of Megatron-LM (FOLDER or FOLDER@ITERATION)", is_megatron, _open_megatron
    ),
}
