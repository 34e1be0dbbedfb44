"""Makes the packages of the repository importable where nothing is installed, and Triton kernels run on a CPU."""

import os
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]
warnings.filterwarnings("ignore", module="megatron")
# Triton decides at import whether kernels run on a GPU or in its interpreter; tests have the latter.
os.environ.setdefault("TRITON_INTERPRET", "1")
