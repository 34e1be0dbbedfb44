"""Keys and tokens that a run is given outside of its configuration."""

from __future__ import annotations

import os
from pathlib import Path

from megappo.errors import ConfigError, reason, remember

_MOST_CHARACTERS = 65_536


def key_of(variable: str) -> str:
    """The key in an environment variable, or in the file that `<variable>_FILE` names, as containers mount secrets.

    "" where there is neither. No message shows the key from then on.

    Raises ConfigError where the file cannot be read, or holds no text or several lines.
    """
    key, named = os.environ.get(variable, ""), os.environ.get(f"{variable}_FILE", "")
    if not key and named:
        path = Path(named)
        try:
            with path.open(encoding="utf-8") as file:
                key = file.read(_MOST_CHARACTERS).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{variable}_FILE names {path}, which cannot be read ({reason(error)}); name a file with a key in it"
            ) from error
        if not key or len(key.splitlines()) > 1:
            raise ConfigError(f"{variable}_FILE names {path}, which must hold a key in one line; write it there")
    remember(key)
    return key
