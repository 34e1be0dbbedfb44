"""One side of a switch in a separate process; see switches.py.

Usage: python -m tests.gpu.acceptance.switch_side GIVEN.json FOUND.pt
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from megappo.config import load_config
from megappo.runtime.accelerations import find_accelerations
from megappo.runtime.memory.allocator import collections_put_off
from tests.gpu.acceptance.registry import Place


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    path, overrides = Path(request["path"]), request["overrides"]
    find_accelerations(load_config(path, overrides).model.accelerations)  # before any import of Megatron-Core
    import torch

    from tests.gpu.acceptance.switches import updated
    from tests.gpu.acceptance.workload import Size

    side = updated(Place(**request["place"]), Size(**request["size"]), Path(request["folder"]), path, overrides)
    torch.save({**vars(side), "speed": asdict(side.speed)}, sys.argv[2])


if __name__ == "__main__":
    with collections_put_off():
        main()
