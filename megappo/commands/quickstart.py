"""`megappo quickstart`: the run of launch/quickstart.sh in the current folder and with the current Python."""

from __future__ import annotations

import argparse
import os
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megappo quickstart`."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override such as run.steps=10")


def run(arguments: argparse.Namespace) -> None:
    """Replace this process by the launcher. Installed packages contain it, and clones have it next to the package."""
    from megappo.config.shipped import shipped_file  # imports all settings, which `--help` does not need

    launcher = shipped_file("launch", "quickstart.sh")
    environment = {**os.environ, "MEGAPPO_PYTHON": sys.executable}
    os.execvpe("bash", ["bash", str(launcher), *arguments.overrides], environment)
