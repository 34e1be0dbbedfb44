"""The version of SGLang for which the code in the processes of its servers was written."""

from __future__ import annotations

import torch

from megappo.errors import RunError, how_to_install
from megappo.runtime.packages import installed_version

TRIED_VERSION = "0.5.23"
"""Version of SGLang for which `cpu_platform`, `server_hooks` and `slice_loader` were written."""


def is_tried() -> bool:
    """Return whether the installed SGLang is the tested version. Servers of other versions have no hooks, and receive
    whole tensors instead of slices."""
    return installed_version("sglang") == TRIED_VERSION


def require_sglang() -> None:
    """Raise RunError if SGLang is missing, or if its version does not run on this machine."""
    version = installed_version("sglang")
    if version is None:
        raise RunError(f"SGLang is not installed, but the settings need it; {how_to_install('sglang')}")
    if version != TRIED_VERSION and not torch.cuda.is_available():
        raise RunError(f"SGLang is {version}, must be {TRIED_VERSION} on a CPU; {how_to_install('sglang')}")
