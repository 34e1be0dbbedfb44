"""Makes the packages of the repository importable where nothing is installed."""

import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]
warnings.filterwarnings("ignore", module="megatron")
