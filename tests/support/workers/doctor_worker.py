"""`megappo doctor` on ranks of which the last has a clock that is half a minute ahead."""

from __future__ import annotations

import os
import sys
import time

from megappo.cli import main

if __name__ == "__main__":
    if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
        true_time = time.time
        time.time = lambda: true_time() + 30.0
    sys.exit(main(["doctor", *sys.argv[1:]]))
