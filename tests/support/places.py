"""Paths in the repository that many tests read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
BASE = ROOT / "tests" / "support" / "config_base.yaml"
"""A base configuration that tests change."""
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
TINY = ROOT / "configs" / "models" / "tiny_arithmetic"
"""Folder of the model of the quickstart."""
