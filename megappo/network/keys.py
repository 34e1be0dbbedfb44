"""Keys and tokens from environment variables and files outside of the configuration."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from megappo.errors import ConfigError, remember

_MOST_CHARACTERS = 65_536


def key_of(variable: str) -> str:
    """Return the key in an environment variable, or in the file that `<variable>_FILE` names.

    For example, a container may mount a secret as a file. Returns "" if neither variable is set. Later messages mask
    the key.

    Raises ConfigError if the file cannot be read, is empty or has several lines. Like ssh, the function also refuses a
    file of this user that other users can access. The permissions of a file of another user are not checked.
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
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{named} is not a regular file; name a file that contains a key")
            if status.st_uid == os.getuid() and status.st_mode & 0o077:
                raise ConfigError(
                    f"{named} other users can read or write (mode {stat.S_IMODE(status.st_mode):04o}); chmod 600 it, "
                    "or for a file that a container mounts, set its mode to 0400 (defaultMode of Kubernetes)"
                )
            key = file.read(_MOST_CHARACTERS).strip()
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror or type(error).__name__ if isinstance(error, OSError) else "the content is not text"
        raise ConfigError(f"{named} cannot be read ({problem}); name a file that contains a key") from error
    if not key or len(key.splitlines()) > 1:
        raise ConfigError(f"{named} must contain a key on one line; write the key into the file")
    return key
