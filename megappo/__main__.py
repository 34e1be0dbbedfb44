"""`python -m megappo`: the command line."""

from __future__ import annotations

import sys

from megappo.runtime.heap import put_off_collections
from megappo.runtime.packages import quicken_packages_scan, read_texts_only

if __name__ == "__main__":
    put_off_collections()  # until ranks have met
    quicken_packages_scan()
    read_texts_only()
    from megappo.cli import main

    sys.exit(main())
