"""Weights of a run as a Hugging Face folder, from the running actor or from the shards it left behind."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megappo.architecture import ArchitectureConfig, architecture
from megappo.config import Config, load_config
from megappo.models.roles import Role
from megappo.reshard.hf_map import hf_shape, model_parameters, pieces, scatter_shard

_FILE_BYTES = 4 * 2**30
_INDEX = "model.safetensors.index.json"


def write_hf_folder(
    out: Path,
    arch: ArchitectureConfig,
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer_path: Path | str,
    *,
    trust_remote_code: bool = False,
) -> None:
    """Write config, tokenizer and safetensors (files of at most 4 GiB) that transformers loads.

    Raises ValueError where a tensor of the architecture is missing or of another shape: an export is whole or not at
    all.
    """
    out.mkdir(parents=True, exist_ok=True)
    files: list[dict[str, Tensor]] = [{}]
    shapes: dict[str, tuple[int, ...]] = {}
    weight_map: dict[str, int] = {}
    size, total = 0, 0
    for name, tensor in tensors:
        n_bytes = tensor.numel() * tensor.element_size()
        if files[-1] and size + n_bytes > _FILE_BYTES:
            _save(out, files, len(files) - 1)
            files.append({})
            size = 0
        files[-1][name] = tensor.detach().cpu().clone()
        shapes[name], weight_map[name] = tuple(tensor.shape), len(files) - 1
        size, total = size + n_bytes, total + n_bytes
        dtype = tensor.dtype
    wanted = {n: hf_shape(arch, n) for p in model_parameters(arch) for n in p.hf}
    if shapes != wanted:
        wrong = sorted(n for n in wanted.keys() | shapes.keys() if wanted.get(n) != shapes.get(n))
        raise ValueError(f"the weights do not make a whole model: {', '.join(wrong[:5])}; the export was not finished")
    _finish(out, files, weight_map, total)
    arch.hf_config.dtype = dtype
    arch.hf_config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[arch.family]]
    arch.hf_config.save_pretrained(out)
    AutoTokenizer.from_pretrained(tokenizer_path, trust_remote_code=trust_remote_code).save_pretrained(out)


def _save(out: Path, files: list[dict[str, Tensor]], number: int) -> None:
    save_file(files[number], out / f"part-{number:05d}.safetensors", metadata={"format": "pt"})
    files[number] = {}


def _finish(out: Path, files: list[dict[str, Tensor]], weight_map: dict[str, int], total: int) -> None:
    """Save the last file and give all of them the names transformers looks for."""
    _save(out, files, len(files) - 1)
    if len(files) == 1:
        (out / "part-00000.safetensors").rename(out / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for i, name in enumerate(names):
        (out / f"part-{i:05d}.safetensors").rename(out / name)
    index = {"metadata": {"total_size": total}, "weight_map": {n: names[i] for n, i in weight_map.items()}}
    (out / _INDEX).write_text(json.dumps(index, indent=2))


def save_shards(role: Role, directory: Path) -> None:
    """Save a role's Megatron shards without gathering: one file per stage and tensor rank of its first replica, and one
    per stage and share of the experts."""
    layout, model = role.placement.layout, role.model
    if layout is None or model is None:
        return
    directory.mkdir(parents=True, exist_ok=True)
    dense: dict[str, Tensor] = {}
    experts: dict[str, Tensor] = {}
    for entry, parameter in model.parameters_here():
        shards = dense if entry.expert is None else experts
        shards[entry.megatron] = parameter.detach().cpu().contiguous()
    grid = layout.grid
    metadata = {"tp": grid.tp, "pp": grid.pp, "ep": grid.ep, "padded_vocab": model.options.padded_vocab}
    words = {name: str(number) for name, number in metadata.items()}
    if layout.replica == 0:
        save_file(dense, directory / f"stage-{layout.stage}-tensor-{layout.tensor_rank}.safetensors", metadata=words)
    if experts and layout.expert_replica == 0:
        save_file(experts, directory / f"stage-{layout.stage}-experts-{layout.expert_rank}.safetensors", metadata=words)


def export_run(run_dir: str, out: str) -> None:
    """`megappo export RUN_DIR OUT`: the actor of a run as a Hugging Face folder, by one process without GPUs.

    Raises ValueError where the directory holds no finished run or some of its shards are gone.
    """
    directory = Path(run_dir)
    if not (directory / "config.yaml").exists():
        raise ValueError(f"{directory} holds no config.yaml; name the directory of a run")
    config: Config = load_config(directory / "config.yaml", [])
    shards = directory / "weights" / "actor"
    if not shards.is_dir():
        raise ValueError(f"{directory} holds no weights/actor; the run has not finished, let it end first")
    from megappo.model_files import model_folder

    folder = model_folder(config.model.path)
    arch = architecture(AutoConfig.from_pretrained(folder, trust_remote_code=config.model.trust_remote_code))
    write_hf_folder(
        Path(out),
        arch,
        _merge_shards(shards, arch),
        config.model.tokenizer or folder,
        trust_remote_code=config.model.trust_remote_code,
    )


def _merge_shards(directory: Path, arch: ArchitectureConfig) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors from the shards of a directory, one parameter at a time."""
    opened = {path.name: safe_open(path, framework="pt") for path in sorted(directory.glob("*.safetensors"))}
    if not opened:
        raise ValueError(f"{directory} is empty; the run did not save its weights")
    metadata = next(iter(opened.values())).metadata()
    # Runs of before there were experts say nothing of `ep`.
    tp, pp, ep, padded_vocab = (int(metadata.get(k, "1")) for k in ("tp", "pp", "ep", "padded_vocab"))
    expected = {f"stage-{s}-tensor-{t}.safetensors" for s in range(pp) for t in range(tp)}
    if arch.experts:
        expected |= {f"stage-{s}-experts-{e}.safetensors" for s in range(pp) for e in range(ep)}
    if expected - opened.keys():
        raise ValueError(f"{directory} lacks {', '.join(sorted(expected - opened.keys()))}; copy the whole run")
    holders: dict[str, list[str]] = {}
    for file in sorted(expected):
        for name in opened[file].keys():  # noqa: SIM118
            holders.setdefault(name, []).append(file)
    for parameter in model_parameters(arch):
        whole: dict[str, Tensor] = {}
        # In the order of tensor ranks; the experts' matrices are whole.
        for tensor_rank, file in enumerate(sorted(holders[parameter.megatron], key=_number)):
            shard = opened[file].get_tensor(parameter.megatron)
            whole = whole or {n: torch.empty(hf_shape(arch, n), dtype=shard.dtype) for n in parameter.hf}
            scatter_shard(shard, pieces(arch, parameter, tensor_rank, tp, padded_vocab), whole)
        yield from whole.items()


def _number(file: str) -> int:
    """12 of `stage-0-tensor-12.safetensors`."""
    return int(file.removesuffix(".safetensors").rpartition("-")[2])
