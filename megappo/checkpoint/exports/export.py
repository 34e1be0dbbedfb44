"""Exports a checkpoint of a run as a Hugging Face folder, a PEFT folder or a checkpoint of Megatron-LM."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from megappo.checkpoint.exports.card import write_card
from megappo.checkpoint.files import Marker, checkpoints_directory
from megappo.checkpoint.identity import BASE, MTP, NO_CODE, OwnCode, model_of, settings_of, tensor_digest, whole_digest
from megappo.checkpoint.select import find_checkpoint
from megappo.checkpoint.source import CheckpointSource
from megappo.checkpoint.torch_dist.writer import write_torch_dist
from megappo.config import Config
from megappo.config.role_models import load_architecture, load_tokenizer, model_paths, role_folder
from megappo.errors import show
from megappo.families.adapters import LoraShape
from megappo.families.declaration import ArchitectureConfig
from megappo.families.parameters import wide_tensors
from megappo.families.weights import TensorSource, WeightSource
from megappo.megatron.build import DTYPES
from megappo.models.model_files import resolve_stop_token_ids
from megappo.reshard.mtp import MTPLayers, mtp_layers_in
from megappo.reshard.peft import MergedSource, write_peft
from megappo.reshard.sources import RandomSource, SafetensorsSource
from megappo.reshard.value_heads import EXPORTED
from megappo.reshard.writer import write_critic, write_policy

ROLES = ("actor", "critic")
FORMATS = ("huggingface", "torch_dist", "peft")


def export_run(
    run_dir: str,
    out: str,
    role: str = "actor",
    step: str = "latest",
    form: str = FORMATS[0],
    *,
    without_mtp: bool = False,
    own: OwnCode = NO_CODE,
) -> list[str]:
    """Export an actor or critic (`megappo export RUN_DIR OUT`), in one process without GPUs. The run may be unfinished.

    Args:
        run_dir: directory of the run.
        out: output folder, missing or empty. A failed export leaves nothing in the folder.
        role: `actor` or `critic`.
        step: step number, `best` or `latest`.
        form: one of FORMATS.
        without_mtp: exclude multi-token prediction layers.
        own: code that may run. Code that only the checkpoint names does not run.

    Return messages for the user. Raises ValueError if the checkpoint or the role does not exist, if the model family
    differs from `own`, if the model's config.json or multi-token prediction layers have changed, or if the output
    folder is not empty.
    """
    directory, target = Path(run_dir), Path(out)
    if not (directory / "config.yaml").exists():
        raise ValueError(f"{directory} contains no config.yaml; name the directory of a run")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is not an empty folder; name a new folder")
    folder, marker, sentences = find_checkpoint(checkpoints_directory(directory), step)
    _require_own_family(folder, marker, own)
    config, model = model_of(marker, role, own)
    arch = load_architecture(model, config.model)
    settings = config.trained[role].lora if role in config.trained else None
    lora = None if settings is None else settings.of(arch)
    stored = CheckpointSource(folder, role, arch, lora)
    if form == "peft":
        _check_peft(lora, role)
    source = stored if lora is None or form == "peft" else _merged(stored, lora, arch, config, marker, role)
    mtp = MTPLayers(arch)
    if role == "actor" and form == FORMATS[0] and not without_mtp:
        mtp = _mtp_layers(arch, config, marker)
    with ExitStack() as undo:
        undo.callback(_undo_export, target, keep=target.exists())
        if lora is not None and form == "peft":
            dtype = DTYPES[config.model.dtype]
            write_peft(target, arch, lora, ((n, t.to(dtype)) for n, t in stored.tensors()), model_paths(config)[role])
        elif form == "torch_dist":
            write_torch_dist(target, arch, source, DTYPES[config.model.dtype], role=role, step=marker.step)
        else:
            _write_huggingface(target, mtp, source, config, model, role)
        if form != "torch_dist":
            sentences += write_card(target, config, directory, role=role, step=marker.step, adapters=form == "peft")
        undo.pop_all()
    return [*sentences, f"the {role} after step {marker.step} is in {target}"]


def _require_own_family(folder: Path, marker: Marker, own: OwnCode) -> None:
    named = settings_of(marker)["model"].get("family")
    if own.family != named:
        remedy = "remove --family" if named is None else f"set --family {named} if you trust this code"
        raise ValueError(f"{folder} has model.family {show(named)}, but --family is {show(own.family)}; {remedy}")


def _check_peft(lora: LoraShape | None, role: str) -> None:
    if lora is None:
        raise ValueError(f"the run trained all weights of the {role} and no adapters; remove --format peft")
    if role == "critic":
        raise ValueError(
            "a PEFT folder cannot contain the value head of a critic; remove --format peft to merge the adapters"
        )


def _merged(
    adapters: CheckpointSource, lora: LoraShape, arch: ArchitectureConfig, config: Config, marker: Marker, role: str
) -> MergedSource:
    """Return the adapters merged into their base. Raises ValueError if the base weights differ from the start of the
    run."""
    folder = role_folder(config, role)
    if config.model.init == "random":
        base: WeightSource = RandomSource(arch, config.run.seed)
    else:
        base = SafetensorsSource(folder, arch)
    merged = MergedSource(arch, lora, base, adapters, role == "critic", DTYPES[config.model.dtype])
    _require_same(
        merged.base_tensors(),
        marker.content["identity"][role + BASE],
        f"the weights in {folder} differ from the base of the run's adapters",
        "restore the folder, or export with --format peft",
    )
    return merged


def _mtp_layers(arch: ArchitectureConfig, config: Config, marker: Marker) -> MTPLayers:
    """Return the multi-token prediction layers of the run's model, if any. Raises ValueError if the layers differ from
    the start of the run. Checkpoints of older versions do not record these layers, and are exported without them."""
    before, none = marker.content.get("identity", {}).get("actor" + MTP), whole_digest({})
    if before in (None, none):
        return MTPLayers(arch)
    remedy = "restore the folder, or export without these layers (--without-mtp)"
    try:
        layers = mtp_layers_in(role_folder(config, "actor"), arch)
    except ValueError as error:
        raise ValueError(
            f"the multi-token prediction layers are only in {config.model.path}, which cannot be read: "
            f"{error}; {remedy}"
        ) from error
    problem = f"the multi-token prediction layers in {config.model.path} differ from the start of the run"
    _require_same(layers.tensors(), before, problem, remedy)
    return layers


def _require_same(tensors: Iterable[tuple[str, Tensor]], before: str, problem: str, remedy: str) -> None:
    """Compare the digest of tensors with the digest of the run. Raises ValueError if the digests differ."""
    digest = whole_digest({name: tensor_digest(tensor) for name, tensor in tensors})
    if digest != before:
        raise ValueError(f"{problem} (sha256 {digest[:12]}, at the start {before[:12]}); {remedy}")


def _write_huggingface(
    target: Path, mtp: MTPLayers, source: TensorSource, config: Config, model: Path, role: str
) -> None:
    arch = mtp.arch
    dtype, wide, tokenizer = DTYPES[config.model.dtype], wide_tensors(arch), load_tokenizer(config)
    tensors = ((name, tensor.to(torch.float32 if name in wide else dtype)) for name, tensor in source.tensors())
    if role == "critic":
        write_critic(target, arch, chain(tensors, _head_tensors(source, dtype)), tokenizer)
        return
    stops = resolve_stop_token_ids(model, tokenizer, config.rollout.stop_token_ids)
    whole = chain(tensors, mtp.exported(dtype))
    write_policy(target, arch, whole, tokenizer, started_from=model, stop_token_ids=stops)


def _undo_export(folder: Path, *, keep: bool) -> None:
    """Remove the content of an export folder. Unless `keep`, also remove the folder."""
    for part in list(folder.glob("*")):
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink()
    if not keep and folder.exists():
        folder.rmdir()


def _head_tensors(source: TensorSource, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    head = source.value_head()
    assert head is not None, "a critic's checkpoint has a value head"
    for name, tensor in zip(EXPORTED, head, strict=True):
        yield name, tensor.to(dtype)
