"""Every Triton kernel compiles for every GPU generation, without spills and within its shared memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = {
    "statistics_kernel",
    "gradient_kernel",
    "fused_kernel",
    "objective_kernel",
    "gae_kernel",
    "whiten_kernel",
}


def test_all_kernels_compile_for_all_chips(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT / "kernels")}
    done = subprocess.run(
        [sys.executable, "-m", "megappo_kernels.aot"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    lines = re.findall(r"sm_(\d+) .* (\d+) bytes spilled .* bytes shared  (\w+)", done.stdout)
    assert {name for _, _, name in lines} == KERNELS
    assert set(Counter(name for _, _, name in lines if name == "fused_kernel").values()) == {3 * 8}
    for chip in ("80", "90", "100"):
        assert {name for c, spilled, name in lines if c == chip and spilled == "0"} == KERNELS


def test_every_kernel_is_in_the_list() -> None:
    """A new `@triton.jit` function that is launched must be compiled here too."""
    found = set()
    for path in (ROOT / "kernels" / "megappo_kernels" / "gpu").glob("*.py"):
        found |= set(re.findall(r"^@triton\.jit\ndef (\w+_kernel)\(", path.read_text(), flags=re.M))
    assert found == KERNELS
