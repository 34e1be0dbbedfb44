"""Environment variables for code of a model, and for code that processes text of a model.

Imports only the standard library, for workers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

MARK = "MEGAPPO_REWARD_WORKER"
"""Variable that identifies the processes of a worker."""
_PLAIN = frozenset(
    (
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR", "TMP", "TEMP",
        "HOSTNAME", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME",
        "PYTHONHASHSEED", "PYTHONWARNINGS", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS",
        "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS",
    )
)  # fmt: skip
_PLAIN_PREFIXES = ("LC_", MARK)
_SECRET = re.compile(r"TOKEN(?!IZERS)|SECRET|PASS|CREDENTIAL|AUTH|JWT|COOKIE|_PAT$|KEY|_URI$|_DSN$", re.IGNORECASE)


def plain_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return general variables of programs, without variables that contain secrets."""
    return {n: value for n, value in environment.items() if n in _PLAIN or n.startswith(_PLAIN_PREFIXES)}


def without_secrets(environment: Mapping[str, str], but: Collection[str] = ()) -> dict[str, str]:
    """Return all variables except variables with names that look like secrets. `but` contains exceptions."""
    return {n: value for n, value in environment.items() if n in but or not _SECRET.search(n)}
