"""Every Triton kernel compiles for every GPU generation, without spills and within its shared memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = {
    "statistics_kernel",
    "gradient_kernel",
    "fused_kernel",
    "objective_kernel",
    "gae_kernel",
    "whiten_kernel",
}


def compiled(cache: Path, *chips: str, **environment: str) -> list[tuple[str, str, str]]:
    """(chip, bytes spilled, kernel) of every variant; other packages' choices of an assembler do not count.

    flashinfer, once imported, names the assembler of PATH in the environment of the process.
    """
    environment |= {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT / "kernels")}
    command = [sys.executable, "-m", "megappo_kernels.aot", *chips]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, re.findall(".*DOES NOT FIT", done.stdout) or done.stderr[-3000:]
    return re.findall(r"sm_(\d+) .* (\d+) bytes spilled .* bytes shared  (\w+)", done.stdout)


def test_all_kernels_compile_for_all_chips(tmp_path: Path) -> None:
    lines = compiled(tmp_path)
    assert {name for _, _, name in lines} == KERNELS
    assert set(Counter(name for _, _, name in lines if name == "fused_kernel").values()) == {3 * 8}
    for chip in ("80", "90", "100"):
        assert {name for c, spilled, name in lines if c == chip and spilled == "0"} == KERNELS


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="no CUDA toolkit on PATH")
def test_the_toolkits_assembler_compiles_them_too(tmp_path: Path) -> None:
    """It allots registers otherwise than Triton's own, and is taken for Blackwell where flashinfer is imported."""
    own = str(shutil.which("ptxas"))
    lines = compiled(tmp_path, "100", TRITON_PTXAS_BLACKWELL_PATH=own)
    assert {(spilled, name) for _, spilled, name in lines} == {("0", name) for name in KERNELS}


def test_every_kernel_is_in_the_list() -> None:
    """A new `@triton.jit` function that is launched must be compiled here too."""
    found = set()
    for path in (ROOT / "kernels" / "megappo_kernels" / "gpu").glob("*.py"):
        found |= set(re.findall(r"^@triton\.jit\ndef (\w+_kernel)\(", path.read_text(), flags=re.M))
    assert found == KERNELS
