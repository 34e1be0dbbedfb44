"""Keys and tokens that a run reads from outside of its configuration."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from megappo.errors import ConfigError, remember

_MOST_CHARACTERS = 65_536


def key_of(variable: str) -> str:
    """The key in an environment variable, or in the file that `<variable>_FILE` names, as containers mount secrets.

    "" where there is neither. Messages mask the key from then on.

    Raises ConfigError where the file cannot be read, has no text or several lines, or belongs to this user and is open
    to others, as ssh refuses such a key. For a file of another owner, that owner decides who reads it.
    """
    key, named = os.environ.get(variable, ""), os.environ.get(f"{variable}_FILE", "")
    if not key and named:
        key = _read(Path(named), f"{variable}_FILE")
    remember(key)
    return key


def _read(path: Path, variable: str) -> str:
    named = f"{variable} names {path}, which"
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{named} is no plain file; name a file with a key in it")
            if found.st_uid == os.getuid() and found.st_mode & 0o077:
                raise ConfigError(
                    f"{named} others can read or write (mode {stat.S_IMODE(found.st_mode):04o}); chmod 600 it, or "
                    "where a container mounts it, give it the mode 0400 there (defaultMode of Kubernetes)"
                )
            key = file.read(_MOST_CHARACTERS).strip()
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror or type(error).__name__ if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"{named} cannot be read ({said}); name a file with a key in it") from error
    if not key or len(key.splitlines()) > 1:
        raise ConfigError(f"{named} must hold a key in one line; write it there")
    return key
