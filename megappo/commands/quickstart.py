"""`megappo quickstart`: the run of launch/quickstart.sh, in the folder and with the Python of whoever calls it."""

from __future__ import annotations

import argparse
import os
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What follows `megappo quickstart`."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override such as run.steps=10")


def run(arguments: argparse.Namespace) -> None:
    """Become the launcher, which stands in the package where pip installed it, and beside it in a clone."""
    from megappo.config.shipped import shipped_file  # with all settings, which `--help` need not wait for

    launcher = shipped_file("launch", "quickstart.sh")
    environment = {**os.environ, "MEGAPPO_PYTHON": sys.executable}
    os.execvpe("bash", ["bash", str(launcher), *arguments.overrides], environment)
