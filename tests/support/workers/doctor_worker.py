"""`megappo doctor` on several ranks. The clock of the last rank is 30 seconds ahead."""

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
