"""Weights that a run's models begin with: of another run, a Hugging Face folder or Megatron-LM (`start_from`).

The kind of a path is recognised by its content. `register_origin` adds another kind.
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
from megappo.config.model_files import load_tokenizer, read_architecture, require_same_tokens
from megappo.errors import link_to_nothing, show
from megappo.families import FAMILIES
from megappo.families.adapters import LoraShape
from megappo.families.architecture import ArchitectureConfig
from megappo.families.weights import WeightSource
from megappo.observe.json_values import JSONValue
from megappo.reshard.peft import CONFIG, PeftSource
from megappo.reshard.sources import SafetensorsSource
from megappo.runtime.objects import agreed
from megappo.runtime.process import Runtime

_WITHOUT_MEANING = ("max_position_embeddings", "initializer_range")
"""Fields of config.json that may differ between models whose weights are interchangeable."""


@dataclass(frozen=True)
class Wanted:
    """Request to an origin: weights of a role, or adapters."""

    role: str
    arch: ArchitectureConfig
    step: str | None
    """Text after the path's `@`: a step or `best`; None: there was none."""
    runtime: Runtime | None
    """The run's ranks, which all read; None: this process reads alone."""
    lora: LoraShape | None = None
    """Shape of the wanted adapters; None: weights are wanted."""


@dataclass(frozen=True)
class Origin:
    """Weights, or adapters, that a model begins with."""

    source: WeightSource
    """Source of weights, or of adapters where these are wanted."""
    summary: str
    tokens_from: Path | None = None
    """Folder whose tokenizer made the tokens that the weights were trained on; None: unknown."""


@dataclass(frozen=True)
class OriginKind:
    """A kind of place that holds weights."""

    summary: str
    recognises: Callable[[Path], bool]
    """Whether an existing path is such a place, judged by its content."""
    open: Callable[[Path, Wanted], Origin]
    """Open the place; a collective of the world where there is a runtime. Raises ValueError on every rank where it
    cannot be used."""


def register_origin(name: str, kind: OriginKind) -> None:
    """Add a kind of place that `start_from` may name; the first that recognises a path opens it."""
    _KINDS[name] = kind


def open_origin(
    text: str, role: str, arch: ArchitectureConfig, runtime: Runtime | None = None, lora: LoraShape | None = None
) -> Origin:
    """Weights, or adapters of shape `lora`, that `<role>.start_from: text` names; a collective of the world where there
    is a runtime.

    Raises ValueError on every rank where one finds none, or none of this architecture.
    """
    try:
        path, step = _split(text)
        kind = _kind(path) if runtime is None else agreed(lambda: _kind(path))
        wanted = Wanted(role, arch, step, runtime, lora)
        return kind.open(path, wanted) if runtime is None else agreed(lambda: kind.open(path, wanted))
    except (ValueError, OSError) as error:
        raise ValueError(f"{role}.start_from '{text}': {error}") from error


def open_start(
    config: Config, role: str, arch: ArchitectureConfig, runtime: Runtime | None = None, lora: LoraShape | None = None
) -> Origin | None:
    """`open_origin` of a role's `start_from`, whose tokenizer must number the tokens as the run's does; None without
    the setting. Raises ValueError or ConfigError on every rank where one refuses."""
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
    """`runs/a@120` -> (runs/a, 120), unless a folder has that whole name. Raises ValueError where one of the two is
    empty."""
    path, at, step = text.rpartition("@")
    if not at or Path(text).exists():
        return Path(text), None
    if not path or not step:
        raise ValueError("the @ stands between a run and its step; give RUN@STEP, RUN@best, or RUN alone")
    return Path(path), step


def _open_run(path: Path, wanted: Wanted) -> Origin:
    folder, marker, sentences = find_checkpoint(checkpoints_directory(path), wanted.step or "latest", wanted.runtime)
    _require_same_adapters(marker, wanted)
    source = CheckpointSource(folder, wanted.role, wanted.arch, wanted.lora)
    other = marker.content.get("architectures", {}).get(wanted.role)
    if other is None:  # not in checkpoints of earlier versions
        _, model = model_of(marker, wanted.role)
        other = architecture_fields(_read(model, wanted))
    _require_same(recorded_fields(other, wanted.arch), wanted)
    what = "that" if wanted.lora is None else "the adapters"
    model = settings_of(marker)["model"]
    tokens_from = Path(model.get("tokenizer") or model["path"])
    return Origin(source, ". ".join([*sentences, f"the {wanted.role} begins with {what} of {folder}"]), tokens_from)


def _require_same_adapters(marker: Marker, wanted: Wanted) -> None:
    """Raises ValueError unless the run trained what is wanted: all weights, or adapters of the same shape."""
    settings = Config.model_validate(marker.content["settings"]).trained.get(wanted.role)
    lora = None if settings is None or settings.lora is None else settings.lora.of(wanted.arch)
    if lora is not None and wanted.lora is None:
        raise ValueError(
            f"its {wanted.role} has adapters alone, and without {wanted.role}.lora all weights are trained; set "
            f"{wanted.role}.lora as it was there, or merge them (`megappo export`) and name that folder"
        )
    if lora is None and wanted.lora is not None:
        raise ValueError(_WHOLE.format(role=wanted.role, place="`megappo export` it and name that folder"))
    if lora != wanted.lora:
        raise ValueError(f"its adapters are {show(vars(lora))}, {wanted.role}.lora wants {show(vars(wanted.lora))}")


_WHOLE = (
    "it holds whole weights, and {role}.lora trains adapters of the model that the settings name; {place} as the "
    "model's path in place of start_from"
)


def _open_peft(path: Path, wanted: Wanted) -> Origin:
    if wanted.step is not None:
        raise ValueError("a PEFT folder has no steps; remove what follows the @")
    if wanted.lora is None:
        raise ValueError(
            f"it holds adapters alone, and without {wanted.role}.lora all weights are trained; set {wanted.role}.lora "
            "to their rank, alpha and targets, or merge them into their base (PEFT's merge_and_unload) and name that "
            "folder"
        )
    source = PeftSource(path, wanted.arch, wanted.lora)
    return Origin(source, f"the {wanted.role} begins with the adapters of {path}", path)


def _open_folder(path: Path, wanted: Wanted) -> Origin:
    if wanted.step is not None:
        raise ValueError("a Hugging Face folder has no steps; remove what follows the @")
    _refuse_adapters(wanted)
    other = _read(path, wanted)
    _require_same(architecture_fields(other), wanted)
    source = SafetensorsSource(path, other)
    source.check(with_output_layer=wanted.role != "critic")
    return Origin(source, f"the {wanted.role} begins with {path}", path)


def _refuse_adapters(wanted: Wanted) -> None:
    if wanted.lora is not None:
        raise ValueError(_WHOLE.format(role=wanted.role, place="name it"))


def _open_megatron(path: Path, wanted: Wanted) -> Origin:
    _refuse_adapters(wanted)
    folder = find_iteration(path, wanted.step)
    return Origin(TorchDistSource(folder, wanted.role, wanted.arch), f"the {wanted.role} begins with {folder}", path)


def _read(folder: Path, wanted: Wanted) -> ArchitectureConfig:
    """Read a folder's architecture, without running code from the folder, which may be somebody else's."""
    return read_architecture(folder, {**FAMILIES, wanted.arch.family: wanted.arch.declaration}, key="the model")


def _require_same(other: Mapping[str, JSONValue], wanted: Wanted) -> None:
    """Raises ValueError where weights of the other architecture would compute something else in the wanted one."""
    # A critic has no output layer to tie.
    without_meaning = (*_WITHOUT_MEANING, "tied_embeddings") if wanted.role == "critic" else _WITHOUT_MEANING
    own = {name: v for name, v in architecture_fields(wanted.arch).items() if name not in without_meaning}
    different = differing_fields(other, own)
    if different:
        raise ValueError(
            f"it differs in {', '.join(different)} from the {wanted.role}'s config.json; give a model of the same "
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
