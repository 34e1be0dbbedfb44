"""Environment variables for code that a model wrote, and for code that handles what a model wrote.

Standard library only: workers import it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

MARK = "MEGAPPO_REWARD_WORKER"
"""Variable by which the processes of a worker are found."""
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
    """Variables that any program needs, without any that holds a secret."""
    return {n: value for n, value in environment.items() if n in _PLAIN or n.startswith(_PLAIN_PREFIXES)}


def without_secrets(environment: Mapping[str, str], but: Collection[str] = ()) -> dict[str, str]:
    """All variables but those whose names look like secrets; `but` names exceptions."""
    return {n: value for n, value in environment.items() if n in but or not _SECRET.search(n)}
