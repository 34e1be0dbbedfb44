"""Compiler of every Triton kernel for GPU generations, without such a GPU: `python -m megappo_kernels.aot`.

Each kernel is compiled with every combination of its switches that changes the code, and with the tile sizes in use.
A kernel must not spill registers or exceed the shared memory of the chip. With `--few`, only three kinds of
combinations are compiled: the fullest combination, combinations with one difference from the fullest, and the
emptiest combination. The command prints one line for each kernel and chip, and exits with 1 if a kernel fails.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from multiprocessing import get_context
from pathlib import Path
from types import FunctionType
from typing import TypeAlias, get_args, get_type_hints

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, KernelParam

from megappo_kernels.gpu import checksum, gae, head, layers, objectives, rows, whiten
from megappo_kernels.objectives import FUNCTIONS, Objective, PolicyObjective, ValueObjective, inputs_of
from megappo_kernels.surrogates import POLICY_LOSSES

_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
SHARED_BYTES = {capability: kib * 1024 for capability, kib in _KIB.items()}
"""Maximum shared memory per block by compute capability (CUDA C++ Programming Guide, table of technical limits)."""
CHIPS = (80, 90, 100, 120)
"""Default GPU generations. Generations between them run the same code with the same tiles."""


class Kind(str):
    """Type of an argument in Triton's notation. Arguments that are not a Kind are compile-time values."""


Value: TypeAlias = bool | int | str | FunctionType | JITFunction | tuple["Value", ...] | None
"""Compile-time value, or a `Kind`. A string may also be the type of a pointer."""


@dataclass(frozen=True)
class Variant:
    """One compilation of a kernel. `arguments` are listed by name. Triton treats a tuple in `arguments` as one
    argument."""

    name: str
    kernel: JITFunction
    arguments: Mapping[str, Value]
    warps: int
    stages: int
    aligned: bool = True
    """Whether specialised integers are multiples of 16."""


@dataclass(frozen=True)
class Report:
    """Report of the compiler on a kernel for one GPU generation."""

    name: str
    capability: int
    registers: int
    spill_bytes: int
    shared_bytes: int

    @property
    def fits(self) -> bool:
        """Whether no register is spilled and shared memory suffices."""
        return self.spill_bytes == 0 and self.shared_bytes <= SHARED_BYTES[self.capability]


def _switches(few: bool, **choices: tuple[Value, ...]) -> Iterator[dict[str, Value]]:
    """Yield combinations of choices. The fullest combination has the last value of each choice, the emptiest the
    first value."""
    fullest, emptiest = tuple(c[-1] for c in choices.values()), tuple(c[0] for c in choices.values())
    for values in itertools.product(*choices.values()):
        differences = sum(a is not b for a, b in zip(values, fullest, strict=True))
        if not few or differences <= 1 or values == emptiest:
            yield dict(zip(choices, values, strict=True))


_POINTERS = {"labels": "*i64", "starts": "*i64", "mask": "*u8", "borders": "*u8"}
_FLOATS = "inverse_temperature cap gamma"
_INTEGERS = (
    "row_stride stats_stride out_stride columns rows features units splits row_tiles n length heads width token_stride "
    "head_stride"
)


def _kind(name: str) -> Kind:
    if name in _FLOATS.split():
        return Kind("fp32")
    return Kind("i32" if name in _INTEGERS.split() else _POINTERS.get(name, "*fp32"))


def _variant(
    kernel: JITFunction,
    switches: Mapping[str, Value],
    sizes: Mapping[str, Value],
    warps: int,
    *,
    stages: int = 3,
    **special: str,
) -> Variant:
    shown = [f"{k}={v}" if not isinstance(v, bool) else k for k, v in switches.items() if v is not False]
    shown += sorted(set(special.values()))
    name = " ".join([kernel.__name__, *shown])
    values = {**switches, **sizes} | {name: Kind(kind) for name, kind in special.items()}
    return Variant(name, kernel, {n: values[n] if n in values else _kind(n) for n in kernel.arg_names}, warps, stages)


def _fused_variant(switches: Mapping[str, Value], tile: head.Tile) -> Variant:
    sizes = {"DESCRIPTORS": tile.descriptors, "WIDEN": False, "GROUP": head.GROUP_M}
    sizes |= {"TILES": head.SPLIT_COLUMNS // tile.n, "BM": tile.m, "BN": tile.n, "BK": tile.k}
    operands = {"hidden": "*bf16", "weight": "*bf16"}
    if tile.descriptors:
        operands = {
            "hidden": f"tensordesc<bf16[{tile.m}, {tile.k}]>",
            "weight": f"tensordesc<bf16[{tile.n}, {tile.k}]>",
        }
    return _variant(head.fused_kernel, switches, sizes, tile.warps, stages=tile.stages, **operands)


def _row_variants(few: bool) -> Iterator[Variant]:
    """Yield variants of the statistics of rows and their gradient. The vocabulary is a multiple of 16, which allows
    wide loads."""
    for switches in _switches(few, PER_ROW=(False, True), CAPPED=(False, True), ENTROPY=(False, True)):
        for logits in ("*fp32", "*bf16"):
            sizes = {"BLOCK": rows.STATISTICS_BLOCK}
            yield _variant(rows.statistics_kernel, switches, sizes, rows.WARPS, logits=logits)
        for logits, out in (("*fp32", "*bf16"), ("*fp32", "*fp32"), ("*bf16", "*bf16")):
            sizes = {"BLOCK": rows.GRADIENT_BLOCK}
            yield _variant(rows.gradient_kernel, switches, sizes, rows.WARPS, logits=logits, out=out)


def _layer_variants() -> Iterator[Variant]:
    """Yield variants of SwiGLU with and without weights of rows, and of rotations for heads with 128 channels. Both
    passes are included."""
    for kind in ("*bf16", "*fp32"):
        for kernel, weighted in itertools.product((layers.swiglu_kernel, layers.swiglu_gradient_kernel), (False, True)):
            absent = set() if weighted else {"weights", "grad_weights"} & set(kernel.arg_names)
            sizes = {"BLOCK": layers.BLOCK, **dict.fromkeys(absent)}
            wide = {"gate_up", "out", "grad", "grad_gate_up"} & set(kernel.arg_names)
            operands = dict.fromkeys(wide, kind)
            yield _variant(kernel, {"WEIGHTED": weighted}, sizes, layers.WARPS, stages=3, **operands)
        operands = {"x": kind, "out": kind, "cosine": "*fp32", "sine": "*fp32"}
        for inverse in (False, True):
            sizes = {"HEADS": layers.HEADS, "HALF": 64}
            switches = {"INVERSE": inverse}
            yield _variant(layers.rotation_kernel, switches, sizes, layers.ROTATION_WARPS, stages=3, **operands)


def _objective_variants(few: bool, objective: type[Objective]) -> Iterator[Variant]:
    """Yield variants with and without each optional number and setting, and with each function of a setting."""
    pointer, number, hints = Kind("*fp32"), Kind("fp32"), get_type_hints(objective)
    numbers = {name: (pointer,) if must else (None, pointer) for name, must in inputs_of(objective.formula).items()}
    if "sequence_log_ratio" in numbers:
        numbers["sequence_log_ratio"] = (None,)  # type: ignore[assignment]  # only losses of sequences use it
    settings: dict[str, tuple[Value, ...]] = {
        name: (None, number) if type(None) in get_args(hints[name]) else (number,)
        for name in (field.name for field in fields(objective))
    }
    settings |= {n: tuple(dict.fromkeys(FUNCTIONS[n].values())) for n in settings if n in FUNCTIONS}
    of_sequences = [loss.formula for loss in POLICY_LOSSES.values() if loss.sees_sequences]
    for chosen in _switches(few, **numbers, **settings):
        if "kl" in chosen and chosen["ref_logprob"] is None and chosen["kl"] is not settings["kl"][0]:
            continue  # no KL to estimate
        if chosen.get("policy_loss") in of_sequences:
            chosen["sequence_log_ratio"] = pointer
        defaults = objective().settings()._replace(**{name: chosen[name] for name in settings})
        arguments: dict[str, Value] = {name: _kind(name) for name in objectives.objective_kernel.arg_names}
        arguments |= {"numbers": tuple(chosen[n] for n in numbers), "settings": objectives.compiled_settings(defaults)}
        arguments |= {"slopes": (pointer,) * len(objective.trained), **objectives.constants_of(objective)}
        optional = [n for n, choices in {**numbers, **settings}.items() if None in choices and chosen[n] is not None]
        named = [f.__name__ for n in settings if n in FUNCTIONS and isinstance(f := chosen[n], FunctionType)]
        name = " ".join(["objective_kernel", objective.__name__, *named, *optional])
        yield Variant(name, objectives.objective_kernel, arguments, objectives.WARPS, 3)


def variants(capability: int, *, few: bool = False) -> Iterator[Variant]:
    """Yield every kernel with every combination of switches that runs on a GPU generation."""
    for switches in _switches(few, PER_ROW=(False, True), CAPPED=(False, True), ENTROPY=(False, True)):
        yield _fused_variant(switches, head.tile_for(capability))
    for variant in _row_variants(few):
        yield variant
        if not few:
            yield replace(variant, name=f"{variant.name} odd", aligned=False)
    for objective in (PolicyObjective, ValueObjective):
        yield from _objective_variants(few, objective)
    of_gae = _switches(few, PACKED=(False, True), BORDERS=(False, True))
    for switches, mask in itertools.product(of_gae, ("*u8", "*fp32")):
        yield _variant(gae.gae_kernel, switches, {"BLOCK": gae.BLOCK}, gae.WARPS, mask=mask)
    yield from _layer_variants()
    yield _variant(whiten.whiten_kernel, {}, {"BLOCK": whiten.BLOCK}, whiten.WARPS)
    sizes = {"BLOCK": checksum.BLOCK, "TILE": checksum.TILE}
    yield _variant(checksum.checksum_kernel, {}, sizes, checksum.WARPS, integers="*i32", partials="*i64")


def compile_variant(variant: Variant, capability: int) -> Report:
    """Compile a variant for one chip and parse the report of the assembler."""
    signature, constants, aligned = {}, {}, {}
    for i, parameter in enumerate(variant.kernel.params):
        argument = variant.arguments[name := parameter.name]
        parts = argument if isinstance(argument, tuple) and any(isinstance(x, Kind) for x in argument) else None
        kinds = [str(x) if isinstance(x, Kind) else "constexpr" for x in parts or (argument,)]
        signature[name] = kinds[0] if parts is None else getattr(parts, "_make", tuple)(kinds)
        for j, (kind, x) in enumerate(zip(kinds, parts or (argument,), strict=True)):
            path = (i,) if parts is None else (i, j)
            if kind == "constexpr":
                constants[path] = x
            # Same rules as Triton at a launch: torch's memory is aligned, and rows of hidden states are aligned.
            elif _is_aligned(kind, parameter) and (variant.aligned or kind.startswith("*") or name == "features"):
                aligned[path] = [["tt.divisibility", 16]]
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spill_bytes = resource_usage(compiled.asm["cubin"])
    return Report(variant.name, capability, registers, spill_bytes, compiled.metadata.shared)


def _is_aligned(kind: str, parameter: KernelParam) -> bool:
    if kind.startswith("*"):
        return not parameter.do_not_specialize_on_alignment
    return kind == "i32" and not parameter.do_not_specialize


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Return (registers per thread, bytes of local memory per thread) of a cubin. Spills use local memory."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    program = str(tool) if tool.exists() else shutil.which("cuobjdump")
    if program is None:
        raise FileNotFoundError("cuobjdump is missing in Triton's package and on PATH; install the CUDA toolkit")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True)
    match = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout + done.stderr)
    if match is None:
        raise ValueError(f"the output of cuobjdump has no register count: {done.stdout + done.stderr}")
    return int(match[1]), int(match[2])


def compile_all(capabilities: Sequence[int], jobs: int, *, few: bool = False) -> Iterator[Report]:
    """Compile every variant for every chip in worker processes."""
    indices = [(c, few, i) for c in capabilities for i, _ in enumerate(variants(c, few=few))]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_compile_index, indices, chunksize=8)


def _compile_index(what: tuple[int, bool, int]) -> Report:
    """Compile a variant by its index in `variants`. Kernels cannot be pickled."""
    capability, few, index = what
    return compile_variant(next(itertools.islice(variants(capability, few=few), index, None)), capability)


def main(arguments: list[str]) -> int:
    """Compile for the given capabilities, or for `CHIPS`."""
    capabilities = [int(a) for a in arguments if a != "--few"] or list(CHIPS)
    failed = 0
    for report in compile_all(capabilities, os.cpu_count() or 1, few="--few" in arguments):
        failed += not report.fits
        verdict = "" if report.fits else "   DOES NOT FIT"
        print(
            f"sm_{report.capability:<4} {report.registers:4} registers {report.spill_bytes:4} bytes spilled "
            f"{report.shared_bytes:7} bytes shared  {report.name}{verdict}",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
