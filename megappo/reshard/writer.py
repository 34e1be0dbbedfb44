"""Write models as Hugging Face folders."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
)

from megappo.errors import writing
from megappo.families.declaration import ArchitectureConfig
from megappo.families.packed import packed_tensors, stored_shapes
from megappo.families.rope import earlier_rope_fields
from megappo.files.folder_texts import read_object
from megappo.files.json_values import JSONValue
from megappo.models.weight_files import INDEX, SINGLE
from megappo.reshard.value_heads import EXPORTED

_FILE_BYTES = 4 * 2**30
_GENERATION = "generation_config.json"
_OF_OTHER_HEADS = ("normalize_reward", "mean", "std", "value_head_prefix")
"""Head settings in OpenRLHF's config.json. `SafetensorsSource.value_head` has already scaled the weights by these
settings, so an export drops the settings."""


def write_policy(
    out: Path,
    arch: ArchitectureConfig,
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    started_from: Path,
    stop_token_ids: Sequence[int],
) -> None:
    """Write a causal language model in the format of transformers: config, generation_config, tokenizer and
    safetensors.

    Args:
        tensors: Tensors of the model, and optionally of multi-token prediction layers, which config.json then
            mentions.
        started_from: Folder whose generation settings are kept, except for the stop tokens.
        stop_token_ids: Tokens that end a response.

    Raises ValueError if a tensor of the architecture is missing or has another shape. An export is complete or fails.
    """
    extra_prefixes = tuple(arch.declaration.mtp_layers(arch))
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[arch.family]
    with writing(out):
        written = _write_tensors(out, packed_tensors(arch, tensors), stored_shapes(arch), extra_prefixes)
        _write_config(out, arch, written, model_class, {})
        _write_generation(out, arch, started_from, stop_token_ids)
        _write_tokenizer(out, tokenizer)


def write_critic(
    out: Path, arch: ArchitectureConfig, tensors: Iterable[tuple[str, Tensor]], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write a value model in the format of AutoModelForTokenClassification. The single logit at a token is the value
    of the state after this token. For a family without such a class in transformers, only megappo can load the model.
    Raises ValueError as `write_policy`."""
    expected_shapes = stored_shapes(arch, output_layer=False)
    expected_shapes |= zip(EXPORTED, ((1, arch.hidden_size), (1,)), strict=True)
    classifiers = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
    model_class = classifiers.get(arch.family, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[arch.family])
    settings = {"num_labels": 1, "classifier_dropout": 0.0, "token_classification_bias": True}
    with writing(out):
        written = _write_tensors(out, packed_tensors(arch, tensors), expected_shapes)
        _write_config(out, arch, written, model_class, settings, without=_OF_OTHER_HEADS)
        _write_tokenizer(out, tokenizer)


class _Written(NamedTuple):
    """Content of the files of an export."""

    dtype: torch.dtype
    """Type of all tensors, except tensors that the family declares as float32."""
    has_mtp_layers: bool


def _write_config(
    out: Path,
    arch: ArchitectureConfig,
    written: _Written,
    model_class: str,
    changes: Mapping[str, JSONValue],
    *,
    without: Sequence[str] = (),
) -> None:
    config = copy.deepcopy(arch.hf_config)
    declared, fields = arch.declaration, {**changes, "dtype": written.dtype, "architectures": [model_class]}
    count = getattr(config, declared.mtp_count_field, None) if declared.mtp_count_field else None
    if count is not None:
        fields[declared.mtp_count_field] = count if written.has_mtp_layers else 0
    for name, value in {**declared.extra_config(config), **fields}.items():
        setattr(config, name, value)
    for name in without:
        if hasattr(config, name):
            delattr(config, name)
    config.save_pretrained(out)
    _add_earlier_fields(out / "config.json")


def _add_earlier_fields(file: Path) -> None:
    """Add the rope settings and the dtype under the names of transformers 4. Transformers 5 reads both forms."""
    content = read_object(file)
    content |= {"torch_dtype": content["dtype"], **earlier_rope_fields(content)}
    _write_json(file, content)


def _write_tokenizer(out: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the tokenizer with the names of transformers 4. Transformers 5 reads both forms."""
    tokenizer.save_pretrained(out)
    file = out / "tokenizer_config.json"
    content = read_object(file)
    if content.get("tokenizer_class") == "TokenizersBackend":
        content["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(content.get("extra_special_tokens"), list):
        content["additional_special_tokens"] = content.pop("extra_special_tokens")
    _write_json(file, content)


def _write_json(file: Path, content: Mapping[str, JSONValue]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_generation(out: Path, arch: ArchitectureConfig, folder: Path, stop_token_ids: Sequence[int]) -> None:
    """Write generation_config.json as JSON, because transformers' class rejects the files of some published models."""
    if (folder / _GENERATION).exists():
        content = read_object(folder / _GENERATION)
    else:
        special = {name: getattr(arch.hf_config, name, None) for name in ("bos_token_id", "pad_token_id")}
        content = {name: token for name, token in special.items() if token is not None}
    if stop_token_ids:
        content["eos_token_id"] = list(stop_token_ids) if len(stop_token_ids) > 1 else stop_token_ids[0]
    _write_json(out / _GENERATION, content)


def _write_tensors(
    out: Path,
    tensors: Iterable[tuple[str, Tensor]],
    expected_shapes: dict[str, tuple[int, ...]],
    extra_prefixes: tuple[str, ...] = (),
) -> _Written:
    """Write safetensors of at most 4 GiB each. Tensors whose names begin with one of `extra_prefixes` are not
    checked. All other tensors must have the expected shapes."""
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("*.safetensors"), *out.glob(INDEX)):  # remains of an earlier export, possibly with more files
        old.unlink()
    files: list[dict[str, Tensor]] = [{}]
    shapes: dict[str, tuple[int, ...]] = {}
    weight_map: dict[str, int] = {}
    size, total = 0, 0
    dtype: torch.dtype | None = None  # type of the embedding
    for name, tensor in tensors:
        n_bytes = tensor.numel() * tensor.element_size()
        if files[-1] and size + n_bytes > _FILE_BYTES:
            _save(out, files, len(files) - 1)
            files.append({})
            size = 0
        files[-1][name] = tensor.detach().cpu().clone()
        shapes[name], weight_map[name] = tuple(tensor.shape), len(files) - 1
        size, total = size + n_bytes, total + n_bytes
        dtype = dtype or tensor.dtype
    own = {name: shape for name, shape in shapes.items() if not name.startswith(extra_prefixes)}
    if own != expected_shapes:
        wrong = sorted(n for n in expected_shapes.keys() | own.keys() if expected_shapes.get(n) != own.get(n))
        raise ValueError(
            f"the weights do not form a complete model: {', '.join(wrong[:5])}; the export was not finished"
        )
    _finish(out, files, weight_map, total)
    assert dtype is not None, "a model has tensors"
    return _Written(dtype, len(own) < len(shapes))


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write one safetensors file with the permissions of the umask. Raises OSError with the name of the file."""
    path.touch()
    mode = path.stat().st_mode  # safetensors would restrict the mode to the owner
    with writing(path):
        save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(mode)


def _save(out: Path, files: list[dict[str, Tensor]], number: int) -> None:
    save_tensors(files[number], out / f"part-{number:05d}.safetensors")
    files[number] = {}


def _finish(out: Path, files: list[dict[str, Tensor]], weight_map: dict[str, int], total: int) -> None:
    """Save the last file, and rename all files to the names that transformers expects."""
    _save(out, files, len(files) - 1)
    if len(files) == 1:
        (out / "part-00000.safetensors").rename(out / SINGLE)
        return
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for i, name in enumerate(names):
        (out / f"part-{i:05d}.safetensors").rename(out / name)
    index = {"metadata": {"total_size": total}, "weight_map": {n: names[i] for n, i in weight_map.items()}}
    (out / INDEX).write_text(json.dumps(index, indent=2))
