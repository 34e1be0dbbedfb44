"""Checks of a machine, its links and a run: each is fine, slow or broken, with a remedy (doctor, `train --dry-run`)."""
