"""Compiles every Triton kernel for GPU generations without having one: `python -m megappo_kernels.aot`.

Each kernel is compiled in every combination of its switches that changes the code, with the tile sizes that are used,
and must neither spill registers nor ask for more shared memory than the chip has. Prints a line per kernel and chip;
exits with 1 where a kernel fails.
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
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megappo_kernels.gpu import gae, head, losses, rows, whiten

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Most shared memory a block may have, by compute capability: CUDA C++ Programming Guide, table of technical limits."""


@dataclass(frozen=True)
class Variant:
    """One compilation: argument types and the values of compile-time arguments."""

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int
    stages: int
    capability: int | None = None
    """The generation this is for; None: all of them."""


@dataclass(frozen=True)
class Report:
    """What came out for one chip."""

    name: str
    capability: int
    registers: int
    spill_bytes: int
    shared_bytes: int

    @property
    def fits(self) -> bool:
        """No spills, and no more shared memory than there is."""
        return self.spill_bytes == 0 and self.shared_bytes <= SHARED_BYTES[self.capability]


def _switches(**choices: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


_PTR_NAMES = {"labels": "*i64", "starts": "*i64", "mask": "*u8"}
_FLOATS = "inverse_temperature cap gamma lam clip clip_low clip_high dual_clip penalty_coef entropy_coef kl_coef limit"
_INTEGERS = "row_stride stats_stride out_stride columns rows features units splits row_tiles n length"


def _signature(kernel: Any, constants: Mapping[str, Any], special: Mapping[str, str]) -> dict[str, str]:
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in special:
            signature[name] = special[name]
        elif name in _FLOATS.split() or name == "k3_limit":
            signature[name] = "fp32"
        elif name in _INTEGERS.split():
            signature[name] = "i32"
        else:
            signature[name] = _PTR_NAMES.get(name, "*fp32")
    return signature


def _variant(
    kernel: Any, switches: dict[str, Any], sizes: dict[str, Any], warps: int, stages: int = 3, **special: str
) -> Variant:
    constants = switches | sizes
    shown = [f"{k}={v}" if not isinstance(v, bool) else k for k, v in switches.items() if v is not False]
    shown += sorted(set(special.values()))
    name = " ".join([kernel.__name__, *shown])
    return Variant(name, kernel, _signature(kernel, constants, special), constants, warps, stages)


def _fused_variant(switches: dict[str, Any], capability: int, tile: head.Tile) -> Variant:
    sizes = {"DESCRIPTORS": tile.descriptors, "WIDEN": False, "GROUP": head.GROUP_M}
    sizes |= {"TILES": head.SPLIT_COLUMNS // tile.n, "BM": tile.m, "BN": tile.n, "BK": tile.k}
    operands = {"hidden": "*bf16", "weight": "*bf16"}
    if tile.descriptors:
        operands = {
            "hidden": f"tensordesc<bf16[{tile.m}, {tile.k}]>",
            "weight": f"tensordesc<bf16[{tile.n}, {tile.k}]>",
        }
    variant = _variant(head.fused_kernel, switches, sizes, tile.warps, tile.stages, **operands)
    return replace(variant, capability=capability)


def variants() -> Iterator[Variant]:
    """All that is compiled."""
    yes_no = (False, True)
    for switches in _switches(PER_ROW=yes_no, CAPPED=yes_no, ENTROPY=yes_no):
        for logits in ("*fp32", "*bf16"):
            sizes = {"BLOCK": rows.STATISTICS_BLOCK}
            yield _variant(rows.statistics_kernel, switches, sizes, rows.WARPS, logits=logits)
        for logits, out in (("*fp32", "*bf16"), ("*fp32", "*fp32"), ("*bf16", "*bf16")):
            sizes = {"BLOCK": rows.GRADIENT_BLOCK}
            yield _variant(rows.gradient_kernel, switches, sizes, rows.WARPS, logits=logits, out=out)
        for capability, tile in head.TILES.items():
            yield _fused_variant(switches, capability, tile)
    for switches in _switches(
        PENALTY=yes_no, DUAL=yes_no, REFERENCE=yes_no, IMPORTANCE=yes_no, KL_KIND=tuple(range(1, 5))
    ):
        if switches["REFERENCE"] or switches["KL_KIND"] == 1:
            yield _variant(losses.policy_kernel, switches, {"BLOCK": losses.BLOCK}, losses.WARPS)
    for switches in _switches(CLIPPED=yes_no):
        yield _variant(losses.value_kernel, switches, {"BLOCK": losses.BLOCK}, losses.WARPS)
    for switches, mask in itertools.product(_switches(PACKED=yes_no), ("*u8", "*fp32")):
        yield _variant(gae.gae_kernel, switches, {"BLOCK": gae.BLOCK}, gae.WARPS, mask=mask)
    yield _variant(whiten.whiten_kernel, {}, {"BLOCK": whiten.BLOCK}, whiten.WARPS)


def compile_variant(variant: Variant, capability: int) -> Report:
    """Compile for one chip and read what the assembler says."""
    index = {name: i for i, name in enumerate(variant.kernel.arg_names)}
    constants = {(index[name],): value for name, value in variant.constants.items()}
    # Pointers are 16-byte aligned, as torch's are, and so are rows of hidden states; other sizes may be anything.
    aligned = {
        (index[name],): [["tt.divisibility", 16]]
        for name, kind in variant.signature.items()
        if kind.startswith("*") or name == "features"
    }
    source = ASTSource(fn=variant.kernel, signature=dict(variant.signature), constexprs=constants, attrs=aligned)
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spill_bytes = resource_usage(compiled.asm["cubin"])
    return Report(variant.name, capability, registers, spill_bytes, compiled.metadata.shared)


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """(registers per thread, bytes of local memory per thread, where spills go) of a cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    program = str(tool) if tool.exists() else shutil.which("cuobjdump")
    if program is None:
        raise FileNotFoundError("cuobjdump is neither in Triton's package nor on PATH; install the CUDA toolkit")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout + done.stderr)
    if found is None:
        raise ValueError(f"cuobjdump said nothing of registers: {done.stdout + done.stderr}")
    return int(found[1]), int(found[2])


def compile_all(capabilities: Sequence[int], jobs: int) -> Iterator[Report]:
    """Every variant for every chip, in processes of their own."""
    indices = [(i, c) for i, v in enumerate(variants()) for c in capabilities if v.capability in (None, c)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_compile_index, indices, chunksize=8)


def _compile_index(what: tuple[int, int]) -> Report:
    """Kernels cannot be pickled, so a process finds them by their place in `variants`."""
    index, capability = what
    return compile_variant(next(itertools.islice(variants(), index, None)), capability)


def main(arguments: list[str]) -> int:
    """Compile for the capabilities given, by default for 80, 90 and 100."""
    capabilities = [int(a) for a in arguments] or list(SHARED_BYTES)
    failed = 0
    for report in compile_all(capabilities, os.cpu_count() or 1):
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
