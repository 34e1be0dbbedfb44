"""Each Triton kernel compiles for each GPU generation without spills and within the shared memory."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from megappo_kernels.aot import SHARED_BYTES
from megappo_kernels.gpu.head import Tile, tile_for
from tests.support.places import ROOT

KERNELS = {
    "statistics_kernel", "gradient_kernel", "fused_kernel", "objective_kernel", "gae_kernel", "whiten_kernel",
    "swiglu_kernel", "swiglu_gradient_kernel", "rotation_kernel", "checksum_kernel",
}  # fmt: skip


def compiled(
    cache: Path, *arguments: str, triton: Path | None = None, fits: bool = True, **environment: str
) -> list[tuple[str, str, str]]:
    """Return (chip, bytes spilled, kernel) of each variant. Assembler settings of other packages are ignored.

    The import of flashinfer sets the assembler of PATH in the environment of the process. `triton` is a folder with
    another version of Triton. With `fits` no kernel may spill.
    """
    folders = [str(ROOT / "kernels"), *([] if triton is None else [str(triton)])]
    environment |= {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-m", "megappo_kernels.aot", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not fits, re.findall(".*DOES NOT FIT", done.stdout) or done.stderr[-3000:]
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    return re.findall(r"sm_(\d+) .* (\d+) bytes spilled .* bytes shared  (\w+)", done.stdout)


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.parametrize(
    "chips", [("90",), pytest.param(("80", "100", "120"), marks=pytest.mark.exhaustive)], ids="-".join
)
def test_kernels_compile_for_all_chips(tmp_path: Path, chips: tuple[str, ...]) -> None:
    """The variants of each kernel have all switches, all but one switch, or no switch."""
    lines = compiled(tmp_path, "--few", *chips)
    assert {spilled for _, spilled, _ in lines} == {"0"}
    of_chip = Counter((chip, name) for chip, _, name in lines)
    assert of_chip.keys() == {(chip, name) for chip in chips for name in KERNELS}
    assert {of_chip[chip, "fused_kernel"] for chip in chips} == {5}


@pytest.mark.waits
@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("ptxas") is None, reason="no CUDA toolkit on PATH")
def test_toolkit_assembler_compiles_all_kernels(tmp_path: Path) -> None:
    """The assembler of the CUDA toolkit allocates registers differently from the assembler of Triton. After an
    import of flashinfer, Triton uses the toolkit for Blackwell. The test compiles all combinations of switches."""
    own = str(shutil.which("ptxas"))
    lines = compiled(tmp_path, "100", TRITON_PTXAS_BLACKWELL_PATH=own)
    assert {(spilled, name) for _, spilled, name in lines} == {("0", name) for name in KERNELS}
    assert sum(name == "fused_kernel" for _, _, name in lines) == 8


@pytest.mark.waits
@pytest.mark.exhaustive
def test_oldest_supported_triton_compiles_all_kernels(tmp_path: Path) -> None:
    """Torch 2.11 has the oldest supported Triton, 3.6. Functions cannot return None in Triton 3.6, and the assembler
    spills one number of one kernel."""
    assert "torch>=2.11," in (ROOT / "megappo/requirements.txt").read_text(), "torch 2.11 has Triton 3.6"
    folder = tmp_path / "site"
    program = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*program, "--only-binary=:all:", "--target", str(folder), "triton==3.6.0"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"Triton 3.6 cannot be installed here: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    lines = compiled(tmp_path / "cache", "--few", "90", triton=folder, fits=False)
    assert {(chip, name) for chip, _, name in lines} == {("90", name) for name in KERNELS}
    assert {int(spilled) for _, spilled, _ in lines} <= {0, 8}


def test_tiles_fit_all_gpu_generations() -> None:
    """The compiler stores one part of both operands per stage in shared memory. Capabilities 8.6, 8.9 and 12 have
    the least shared memory. Unknown chips use the tile of the newest chip."""

    def needed_bytes(tile: Tile) -> int:
        return tile.stages * (tile.m + tile.n) * tile.k * 2

    for capability, most in SHARED_BYTES.items():
        assert needed_bytes(tile_for(capability)) < most, capability
    assert tile_for(89) == tile_for(80) and tile_for(103) == tile_for(100) and tile_for(130) == tile_for(120)


@pytest.mark.waits
def test_packs_of_different_sizes_share_binaries() -> None:
    """Each kernel has one binary per dtype and switch of a model, independent of the numbers of tokens and samples."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT / "kernels"), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.kernels.kernel_keys"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    keys = json.loads(done.stdout.splitlines()[-1])
    assert {name: len(of_kernel) for name, of_kernel in keys.items()} == {
        "statistics_kernel": 2,  # float32 and bfloat16 logits
        "gradient_kernel": 5,  # float32 to float32 and bfloat16, with and without entropy, and bfloat16
        "fused_kernel": 1,
        "objective_kernel": 1,
        "gae_kernel": 2,  # padded and packed
        "whiten_kernel": 1,
        "swiglu_kernel": 4,  # float32 and bfloat16, with and without weights
        "swiglu_gradient_kernel": 4,
        "rotation_kernel": 4,  # float32 and bfloat16, forward and backward
    }, json.dumps(keys, indent=1)


def test_all_kernels_are_listed() -> None:
    """These tests must also compile new `@triton.jit` kernels."""
    defined = set()
    for path in (ROOT / "kernels" / "megappo_kernels" / "gpu").glob("*.py"):
        defined |= set(re.findall(r"^def (\w+_kernel)\(", path.read_text(), flags=re.M))
    assert defined == KERNELS
