"""Where a run's models begin: with the weights of another run or of a Hugging Face folder (`start_from`).

What a path names is recognised by what lies there. Another kind joins with `register_origin`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megappo.architecture import ArchitectureConfig
from megappo.checkpoint import CheckpointSource, find_checkpoint
from megappo.model_files import load_architecture
from megappo.reshard.sources import SafetensorsSource, WeightSource
from megappo.runtime import Runtime

_WITHOUT_MEANING = ("max_position_embeddings", "initializer_range", "stored_blocks")
"""What no weight depends on, once it is read."""


@dataclass(frozen=True)
class Wanted:
    """What a role needs."""

    role: str
    arch: ArchitectureConfig
    step: str | None
    """What follows the path's `@`."""
    runtime: Runtime | None
    """None: for this process alone."""


@dataclass(frozen=True)
class Origin:
    """Weights to begin with."""

    source: WeightSource
    words: str


@dataclass(frozen=True)
class OriginKind:
    """A kind of place that holds weights."""

    words: str
    recognises: Callable[[Path], bool]
    """By what lies at an existing path."""
    open: Callable[[Path, Wanted], Origin]
    """A collective of the world where there is a runtime. Raises ValueError for what cannot be used, on every rank."""


_KINDS: dict[str, OriginKind] = {}


def register_origin(name: str, kind: OriginKind) -> None:
    """Let `start_from` name another kind of place; the first that recognises a path takes it."""
    _KINDS[name] = kind


def open_origin(text: str, role: str, arch: ArchitectureConfig, runtime: Runtime | None = None) -> Origin:
    """The weights that `<role>.start_from: text` names; a collective of the world where there is a runtime.

    Raises ValueError where there are none, or none of this architecture.
    """
    path, step = _split(text)
    for kind in _KINDS.values():
        if path.exists() and kind.recognises(path):
            try:
                return kind.open(path, Wanted(role, arch, step, runtime))
            except ValueError as error:
                raise ValueError(f"{role}.start_from '{text}': {error}") from error
    state = "is of no known kind" if path.exists() else f"does not exist (from {Path.cwd()})"
    raise ValueError(f"{role}.start_from '{text}' {state}; give {', or '.join(k.words for k in _KINDS.values())}")


def _split(text: str) -> tuple[Path, str | None]:
    """`runs/a@120` -> (runs/a, 120), unless there is a folder of that whole name."""
    path, at, step = text.rpartition("@")
    return (Path(text), None) if not at or Path(text).exists() else (Path(path), step)


def _open_run(path: Path, wanted: Wanted) -> Origin:
    folder, _, sentences = find_checkpoint(path / "checkpoints", wanted.step or "latest", wanted.runtime)
    source = CheckpointSource(folder, wanted.role, wanted.arch)
    return Origin(source, ". ".join([*sentences, f"the {wanted.role} begins with that of {folder}"]))


def _open_folder(path: Path, wanted: Wanted) -> Origin:
    if wanted.step is not None:
        raise ValueError("a Hugging Face folder has no steps; remove what follows the @")
    other = load_architecture(path, trust_remote_code=False)
    different = [
        f.name
        for f in dataclasses.fields(other)
        if f.compare and f.name not in _WITHOUT_MEANING and getattr(other, f.name) != getattr(wanted.arch, f.name)
    ]
    if other.hf_config.rope_parameters != wanted.arch.hf_config.rope_parameters:
        different.append("rope_parameters")
    if wanted.role == "critic" and "tied_embeddings" in different:
        different.remove("tied_embeddings")  # there is no output layer to tie
    if different:
        raise ValueError(
            f"it differs in {', '.join(different)} from the {wanted.role}'s config.json; give a model of the same "
            "architecture"
        )
    source = SafetensorsSource(path, other)
    source.check(with_output_layer=wanted.role != "critic")
    return Origin(source, f"the {wanted.role} begins with {path}")


register_origin(
    "run",
    OriginKind(
        "a run directory (RUN for its newest checkpoint, RUN@STEP or RUN@best)",
        lambda path: (path / "config.yaml").is_file() and (path / "checkpoints").is_dir(),
        _open_run,
    ),
)
register_origin(
    "folder", OriginKind("a Hugging Face folder", lambda path: (path / "config.json").is_file(), _open_folder)
)
