"""Checks of a machine, its links and a run, for `doctor` and `train --dry-run`. A check is fine, slow or broken, and
has a remedy."""
