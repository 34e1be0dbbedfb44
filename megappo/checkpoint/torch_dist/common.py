"""Arguments of Megatron-LM in a checkpoint, read with a list of allowed names.

The arguments are in `common.pt`. Since Megatron-Core 0.19, they are in the bytes `common_state` among the tensors.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TypeGuard

from torch.distributed.checkpoint.metadata import Metadata

from megappo.checkpoint.safe_unpickle import (
    PICKLE_ERRORS,
    InertUnpickler,
    Pickled,
    PickledRecord,
    UnlistedNameError,
    inert_names,
)
from megappo.errors import show
from megappo.families.declaration import ArchitectureConfig
from megappo.files.json_values import JSONValue
from megappo.megatron.layers.swiglu import is_swiglu

COMMON = "common.pt"
_COMMON_BYTES = "common_state/shard_0_1"
_LARGEST_PICKLE_BYTES = 2**30


class _Entries(dict[Pickled, Pickled]):
    """Replacement for other types of dictionaries."""

    def __init__(self, *_arguments: Pickled) -> None:
        super().__init__()


# Names in the data of Megatron-LM without tensors: arguments, optimizer settings, the state for reruns of a step, and
# random states. The list contains the names of megatron/core/safe_globals.py, and more names from arguments.
_ENUMERATIONS = ("ModelType", "LayerType", "AttnType", "AttnMaskType", "AttnBackend", "CudaGraphScope",
                 "CudaGraphModule", "InferenceCudaGraphScope")  # fmt: skip
_BUILT_IN = ("getattr", "set", "frozenset", "bytearray", "slice", "range", "xrange", "complex", "list", "dict", "int")
_NAMES: Mapping[tuple[str, str], type] = inert_names({
    "argparse": ("Namespace",),
    "types": ("SimpleNamespace",),
    "megatron.core.enums": ("ModelType", "Fp8Recipe", "Fp4Recipe"),
    "megatron.core.transformer.enums": _ENUMERATIONS,
    "megatron.core.transformer.pipeline_parallel_layer_layout": ("PipelineParallelLayerLayout",),
    "megatron.core.optimizer.optimizer_config": (
        "OptimizerConfig", "AdamOptimizerConfig", "SGDOptimizerConfig", "ParamKey",
    ),
    "megatron.core.rerun_state_machine": ("RerunDiagnostic", "RerunMode", "RerunState"),
    "signal": ("Signals",),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath"),  # Python 3.13
    "datetime": ("timedelta",),
    "_io": ("BytesIO",),
    "_codecs": ("encode",),
    "__builtin__": _BUILT_IN,  # name in protocol 2 of pickle
    "builtins": _BUILT_IN,
    "numpy": ("ndarray", "dtype"),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy.dtypes": ("UInt32DType",),
    "torch": ("Size", "device", "FloatStorage", "DoubleStorage", "HalfStorage", "BFloat16Storage", "LongStorage",
              "IntStorage", "ShortStorage", "ByteStorage", "CharStorage", "BoolStorage"),
    "torch.storage": ("UntypedStorage",),
    "torch._utils": ("_rebuild_tensor_v2", "_rebuild_parameter"),
    "torch.serialization": ("_get_layout",),
}) | {("collections", name): _Entries for name in ("OrderedDict", "defaultdict")}  # fmt: skip
_NONE_IS_VALUE = ("num_experts", "window_size", "window_attn_skip_freq", "rotary_seq_len_interpolation_factor")
"""Arguments for which None is a value. For other arguments, None means unknown."""

RENAMED = {"norm_epsilon": "layernorm_epsilon", "apply_layernorm_1p": "layernorm_zero_centered_gamma"}
"""Old and new names of Megatron-LM's arguments. The new names are from the settings of Megatron-Core."""


class _CommonUnpickler(InertUnpickler):
    def persistent_load(self, pid: Pickled) -> None:
        """Return None instead of the data of a tensor, which is not needed."""


def read_arguments(folder: Path, metadata: Metadata) -> Mapping[str, Pickled] | None:
    """Return the arguments of Megatron-LM by name, or None for a checkpoint of another program.

    Raises ValueError if the file contains data that Megatron-LM does not write.
    """
    path, start, length = _place(folder, metadata)
    try:
        with path.open("rb") as file:
            file.seek(start)
            archive = BytesIO(file.read(length))
        content = _CommonUnpickler(BytesIO(_pickle_of(archive)), _NAMES).load()
        (content,) = content if isinstance(content, list) else (content,)
        arguments = content.get("args")
        if arguments is None:
            return None
        values = arguments.state if isinstance(arguments, PickledRecord) else arguments
        return {str(name): value for name, value in values.items()}
    except UnlistedNameError as error:
        raise ValueError(
            f"{path} names {error}, which Megatron-LM does not write; check the origin of the file"
        ) from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (*PICKLE_ERRORS, zipfile.BadZipFile, RuntimeError) as error:
        raise ValueError(
            f"{path} has content that Megatron-LM does not write ({type(error).__name__}: {error})"
        ) from error


def _place(folder: Path, metadata: Metadata) -> tuple[Path, int, int]:
    """Return file, offset and length of the archive with the pickle. A length of -1 means the rest of the file."""
    if not (folder / COMMON).is_file():
        for index, location in metadata.storage_data.items():
            if index.fqn == _COMMON_BYTES:
                return folder / location.relative_path, location.offset, location.length
    return folder / COMMON, 0, -1


def _pickle_of(file: BytesIO) -> bytes:
    """Return the pickle of an archive of torch.save."""
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(names) != 1:
            raise ValueError("no archive of torch.save")
        if archive.getinfo(names[0]).file_size > _LARGEST_PICKLE_BYTES:
            raise ValueError("a pickle of more than 1 GiB")
        return archive.read(names[0])


def megatron_arguments(arch: ArchitectureConfig) -> dict[str, JSONValue]:
    """Return the arguments of Megatron-LM for an architecture. Raises ValueError if Megatron-LM's arguments cannot
    describe the architecture."""
    if not arch.is_standard:
        raise ValueError(
            f"a {arch.family} has layers, caps, sinks, scales or norms that Megatron-LM's format cannot contain; "
            "use the Hugging Face format"
        )
    built = arch.declaration.megatron(arch)
    rope = arch.hf_config.rope_parameters
    arguments: dict[str, JSONValue] = {
        "num_layers": arch.layers,
        "hidden_size": arch.hidden_size,
        "num_attention_heads": arch.heads,
        "group_query_attention": True,
        "num_query_groups": arch.kv_heads,
        "kv_channels": arch.head_dim,
        "num_experts": arch.experts or None,
        "ffn_hidden_size": arch.ffn_hidden_size,
        "moe_ffn_hidden_size": arch.ffn_hidden_size if arch.experts else None,
        "normalization": "RMSNorm",
        "norm_epsilon": arch.norm_eps,
        "apply_layernorm_1p": False,
        "swiglu": is_swiglu(built),
        "add_bias_linear": False,
        "add_qkv_bias": bool(built.get("add_qkv_bias")),
        "qk_layernorm": bool(built.get("qk_layernorm")),
        "multi_latent_attention": False,
        "window_size": built.get("window_size"),
        "window_attn_skip_freq": built.get("window_attn_skip_freq"),
        "position_embedding_type": "yarn" if rope["rope_type"] == "yarn" else "rope",
        "rotary_base": rope["rope_theta"],
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": rope["factor"] if rope["rope_type"] == "linear" else None,
        "use_rope_scaling": rope["rope_type"] == "llama3",
        "untie_embeddings_and_output_weights": not arch.tied_embeddings,
    }
    if rope["rope_type"] == "llama3":
        arguments["rope_scaling_factor"] = rope["factor"]
    if arch.experts:
        arguments |= {
            **{name: built.get(name) for name in ("moe_router_topk", "moe_router_pre_softmax")},
            "moe_router_score_function": "softmax",
            "moe_router_topk_scaling_factor": None,
        }
    return arguments


def require_arguments(saved: Mapping[str, Pickled], arch: ArchitectureConfig, stored_tokens: int, role: str) -> None:
    """Compare the arguments of a checkpoint with the architecture. Missing arguments are not checked.

    `stored_tokens`: rows of the embedding, including padding. Raises ValueError if arguments contradict the
        architecture.
    """
    different = [*_differences(_completed(saved), arch, role), *_of_vocabulary(saved, arch, stored_tokens)]
    if different:
        raise ValueError(
            f"its arguments contradict the {role}'s config.json: {', '.join(different)}; use a model of the same "
            "architecture"
        )


def _completed(saved: Mapping[str, Pickled]) -> dict[str, Pickled]:
    """Return the arguments with Megatron-LM's defaults for missing arguments."""
    complete = {old: saved[new] for old, new in RENAMED.items() if new in saved} | dict(saved)
    if saved.get("group_query_attention") is False and "num_attention_heads" in saved:
        complete["num_query_groups"] = saved["num_attention_heads"]
    if saved.get("num_experts") is not None and saved.get("moe_ffn_hidden_size") is None:
        complete["moe_ffn_hidden_size"] = saved.get("ffn_hidden_size")
    return complete


def _differences(complete: Mapping[str, Pickled], arch: ArchitectureConfig, role: str) -> Iterator[str]:
    # Megatron-LM's `ffn_hidden_size` applies to dense layers. Supported models with experts have no dense layers.
    ignored = {"group_query_attention", "ffn_hidden_size" if arch.experts else "moe_ffn_hidden_size"}
    if role == "critic":  # a critic has no output layer to tie
        ignored.add("untie_embeddings_and_output_weights")
    for name, value in megatron_arguments(arch).items():
        if name not in complete or name in ignored or (complete[name] is None and name not in _NONE_IS_VALUE):
            continue
        if not _same(complete[name], value):
            yield f"{name} {_shown(complete[name])} (config.json: {show(value)})"


def _of_vocabulary(saved: Mapping[str, Pickled], arch: ArchitectureConfig, stored: int) -> Iterator[str]:
    """Yield differences of vocabularies. Rows that padding does not explain are tokens outside of the model's
    vocabulary."""
    tokens, multiple, tp = (
        saved.get(name) for name in ("vocab_size", "make_vocab_size_divisible_by", "tensor_model_parallel_size")
    )
    if type(tokens) is int and tokens > arch.vocab_size:
        yield f"vocab_size {tokens} (config.json: {arch.vocab_size})"
    elif type(multiple) is int and type(tp) is int and stored - arch.vocab_size >= multiple * tp:
        yield f"{stored} tokens, padded in steps of {multiple * tp} (config.json: vocab_size {arch.vocab_size})"


def _same(saved: Pickled, value: JSONValue) -> bool:
    if saved is None or value is None:
        return saved is value
    if _is_number(saved) and _is_number(value):
        return math.isclose(saved, value, rel_tol=1e-9)
    if isinstance(saved, Sequence) and isinstance(value, Sequence) and not isinstance(saved, str):
        return list(saved) == list(value)
    return type(saved) is type(value) and bool(saved == value)


def _is_number(value: Pickled | JSONValue) -> TypeGuard[float]:
    return type(value) in (int, float)


def _shown(value: Pickled) -> str:
    return type(value).__name__ if isinstance(value, PickledRecord) else show(value)
