"""Megatron-LM's arguments, which it stores beside the tensors, read through a list of the names that may occur there.

They are in `common.pt`; from Megatron-Core 0.19 on in bytes of the name `common_state` among the tensors.
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
from megappo.families.architecture import ArchitectureConfig
from megappo.megatron.swiglu import is_swiglu
from megappo.observe.json_values import JSONValue

COMMON = "common.pt"
_COMMON_BYTES = "common_state/shard_0_1"
_LARGEST_PICKLE_BYTES = 2**30


class _Entries(dict[Pickled, Pickled]):
    """Stand-in for other kinds of dictionaries."""

    def __init__(self, *_arguments: Pickled) -> None:
        super().__init__()


# Names in what Megatron-LM stores beside the tensors: arguments, optimizer settings, the state that repeats a step, and
# random states. They are those of megatron/core/safe_globals.py, and further ones that arguments contain.
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
    "__builtin__": _BUILT_IN,  # its name in pickle's protocol 2
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
_NONE_SAYS = ("num_experts", "window_size", "window_attn_skip_freq", "rotary_seq_len_interpolation_factor")
"""Arguments for which None is a value; for others None means unknown."""

RENAMED = {"norm_epsilon": "layernorm_epsilon", "apply_layernorm_1p": "layernorm_zero_centered_gamma"}
"""Old names of Megatron-LM's arguments, with the names that they have since they are made of Megatron-Core's
settings."""


class _CommonUnpickler(InertUnpickler):
    def persistent_load(self, pid: Pickled) -> None:
        """Return None in the place of a tensor's data, which is not needed."""


def read_arguments(folder: Path, metadata: Metadata) -> Mapping[str, Pickled] | None:
    """Megatron-LM's arguments by their names; None where another program wrote the checkpoint.

    Raises ValueError for a file that holds anything but what Megatron-LM writes.
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
        said = arguments.state if isinstance(arguments, PickledRecord) else arguments
        return {str(name): value for name, value in said.items()}
    except UnlistedNameError as error:
        raise ValueError(f"{path} names {error}, which Megatron-LM does not put there; it is not read") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (*PICKLE_ERRORS, zipfile.BadZipFile, RuntimeError) as error:
        raise ValueError(f"{path} is not what Megatron-LM writes ({type(error).__name__}: {error})") from error


def _place(folder: Path, metadata: Metadata) -> tuple[Path, int, int]:
    """File, offset and length of the pickle's archive; a length of -1 means up to the file's end."""
    if not (folder / COMMON).is_file():
        for index, found in metadata.storage_data.items():
            if index.fqn == _COMMON_BYTES:
                return folder / found.relative_path, found.offset, found.length
    return folder / COMMON, 0, -1


def _pickle_of(file: BytesIO) -> bytes:
    """The pickle in an archive that torch.save has written."""
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(names) != 1:
            raise ValueError("no archive of torch.save")
        if archive.getinfo(names[0]).file_size > _LARGEST_PICKLE_BYTES:
            raise ValueError("a pickle of more than 1 GiB")
        return archive.read(names[0])


def megatron_arguments(arch: ArchitectureConfig) -> dict[str, JSONValue]:
    """Megatron-LM's arguments for a model of this architecture. Raises ValueError where none describe it."""
    if not arch.is_standard:
        raise ValueError(
            f"a {arch.family} has layers, caps, sinks, scales or norms that are not written to Megatron-LM's format; "
            "use the Hugging Face format"
        )
    built = arch.declaration.megatron(arch)
    rope = arch.hf_config.rope_parameters
    said: dict[str, JSONValue] = {
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
        said["rope_scaling_factor"] = rope["factor"]
    if arch.experts:
        said |= {
            **{name: built.get(name) for name in ("moe_router_topk", "moe_router_pre_softmax")},
            "moe_router_score_function": "softmax",
            "moe_router_topk_scaling_factor": None,
        }
    return said


def require_arguments(said: Mapping[str, Pickled], arch: ArchitectureConfig, stored_tokens: int, role: str) -> None:
    """Raise ValueError where a checkpoint's arguments contradict the architecture. Missing arguments are not checked.

    `stored_tokens`: rows of the embedding, padding included.
    """
    different = [*_differences(_meant(said), arch, role), *_of_vocabulary(said, arch, stored_tokens)]
    if different:
        raise ValueError(
            f"its arguments contradict the {role}'s config.json: {', '.join(different)}; give a model of the same "
            "architecture"
        )


def _meant(said: Mapping[str, Pickled]) -> dict[str, Pickled]:
    """The arguments, completed by what Megatron-LM assumes for missing ones."""
    meant = {old: said[new] for old, new in RENAMED.items() if new in said} | dict(said)
    if said.get("group_query_attention") is False and "num_attention_heads" in said:
        meant["num_query_groups"] = said["num_attention_heads"]
    if said.get("num_experts") is not None and said.get("moe_ffn_hidden_size") is None:
        meant["moe_ffn_hidden_size"] = said.get("ffn_hidden_size")
    return meant


def _differences(meant: Mapping[str, Pickled], arch: ArchitectureConfig, role: str) -> Iterator[str]:
    # Megatron-LM's `ffn_hidden_size` is of dense layers, of which a model with experts has none here.
    unasked = {"group_query_attention", "ffn_hidden_size" if arch.experts else "moe_ffn_hidden_size"}
    if role == "critic":  # which has no output layer to tie
        unasked.add("untie_embeddings_and_output_weights")
    for name, value in megatron_arguments(arch).items():
        if name not in meant or name in unasked or (meant[name] is None and name not in _NONE_SAYS):
            continue
        if not _same(meant[name], value):
            yield f"{name} {_shown(meant[name])} (config.json: {show(value)})"


def _of_vocabulary(said: Mapping[str, Pickled], arch: ArchitectureConfig, stored: int) -> Iterator[str]:
    """Differences of vocabularies: rows beyond the model's that padding does not explain are tokens that it does not
    know."""
    tokens, multiple, tp = (
        said.get(name) for name in ("vocab_size", "make_vocab_size_divisible_by", "tensor_model_parallel_size")
    )
    if type(tokens) is int and tokens > arch.vocab_size:
        yield f"vocab_size {tokens} (config.json: {arch.vocab_size})"
    elif type(multiple) is int and type(tp) is int and stored - arch.vocab_size >= multiple * tp:
        yield f"{stored} tokens, padded in steps of {multiple * tp} (config.json: vocab_size {arch.vocab_size})"


def _same(said: Pickled, value: JSONValue) -> bool:
    if said is None or value is None:
        return said is value
    if _is_number(said) and _is_number(value):
        return math.isclose(said, value, rel_tol=1e-9)
    if isinstance(said, Sequence) and isinstance(value, Sequence) and not isinstance(said, str):
        return list(said) == list(value)
    return type(said) is type(value) and bool(said == value)


def _is_number(value: Pickled | JSONValue) -> TypeGuard[float]:
    return type(value) in (int, float)


def _shown(value: Pickled) -> str:
    return type(value).__name__ if isinstance(value, PickledRecord) else show(value)
