"""Errors with a message for the user, all exit codes, and functions for the text of messages.

A message contains the value, the rule and the remedy, and no secrets. Secrets are the keys that this process has read,
and texts with the form or the name of a secret. Examples of forms are bearer tokens, keys of known services, and
passwords in URLs. This module imports only the standard library, because reward workers import it at their start.
"""

from __future__ import annotations

import difflib
import errno
import math
import os
import re
import signal
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any, NamedTuple

RUN_ERROR = 1
USER_ERROR = 2
REQUEUE = 85
"""The run stopped with a checkpoint after SIGTERM, SIGUSR1 or SIGHUP. The same command continues the run (EX_TEMPFAIL
of sysexits.h)."""
FAULT = 71
"""A device or the communication of ranks failed (an Xid, an ECC error, an NCCL abort). The settings and the code of the
user are not the reason (EX_OSERR of sysexits.h)."""
HANG = 79
"""The watchdog ended a run without progress. A restart may succeed."""
STOPPED_BY_USER = 130
"""The user stopped the run with Ctrl-C."""
_FAULTS = {"AcceleratorError", "DistBackendError"}
"""Names of torch's exception types, because this module does not import torch."""
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
_ROOM_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_FREE = " free"
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_SHOWN_CHARACTERS = 60
_REASON_CHARACTERS = 300
# Numbers of 64 bits have at most 19 digits.
_MOST_DIGITS = 19
_HIDDEN = "(hidden)"
# `redacted` replaces every occurrence of a secret. A shorter secret would also be removed from ordinary words.
_SHORTEST_KNOWN = 6
_KNOWN: set[str] = set()
"""Secrets that this process has read."""
_FORMS = re.compile(
    r"(?P<before>(?i:\bbearer)\s+(?=[^\s'\"]*\d)|https?://(?=[^\s/@'\"]+@)|"
    r"[?&](?i:api[-_]?key|access[-_]?token|auth[-_]?token|token|secret|signature|sig|password)=(?=[^\s&]))"
    r"(?P<secret>[^\s'\"&@/]{6,}|[^\s'\"&@/]+(?=@))|"
    r"(?P<key>\bsk-(?=[\w-]*\d)[\w-]{16,}|\bhf_[A-Za-z0-9]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|"
    r"\bglpat-[\w-]{16,}|\bxox[abprs]-[\w-]{10,}|\bAKIA[0-9A-Z]{16}\b|\bAIza[\w-]{30,}|"
    r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}(?:\.[\w-]*)?|-----BEGIN [A-Z ]*PRIVATE KEY-----)"
)
_NAME = (
    r"(?:authorization|cookie|password|passwd|passphrase|secret|credentials?|jwt|"
    r"(?:api|access|secret|private|auth|account|subscription)[-_]?key|"
    r"(?:auth|access|api|hf|bearer|session|refresh|secret|github|wandb|hub)[-_]?token)"
)
_SECRET_NAME = re.compile(rf"(?i)(?:.*[-_ .])?{_NAME}|token")
_NAMED = re.compile(rf"(?i)(?P<name>\b(?:[\w.]*[-_.])?{_NAME}['\"]?\s*[=:]\s*['\"]?)(?P<secret>[^\s'\",}}]+)")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_HEADERS = "headers"


class RunError(RuntimeError):
    """The run cannot continue. The message contains the reason and the remedy. The command line exits with code 1."""


class ConfigError(ValueError):
    """The settings are invalid. `problems` has one sentence per problem. The command line exits with code 2."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        sentences = (problems,) if isinstance(problems, str) else tuple(problems)
        self.problems: tuple[str, ...] = tuple(one_line(problem) for problem in sentences)
        super().__init__("\n".join(self.problems))


class Interrupted(Exception):
    """The run received a stop signal. Every rank raises this exception at the same point, between two updates."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number

    @property
    def exit_code(self) -> int:
        """Exit code for the launcher."""
        return STOPPED_BY_USER if self.signal == signal.SIGINT else REQUEUE


class Verdict(NamedTuple):
    """Exit code and sentences of a process that an error ends."""

    code: int
    sentences: tuple[str, ...] = ()
    """Sentences for the user; empty after a signal."""
    is_unforeseen: bool = False
    """Whether the error is a bug, for which the traceback is shown."""


def verdict_of(error: BaseException) -> Verdict:
    """Return the exit code and the sentences for an error that ends a process."""
    match error:
        case Interrupted():
            return Verdict(error.exit_code)
        case KeyboardInterrupt():
            return Verdict(STOPPED_BY_USER)
        case RunError():
            return Verdict(RUN_ERROR, (one_line(str(error)),))
        case OSError() if error.errno in _DISK_ERRORS:
            where = f"{error.filename}: " if error.filename else ""
            remedy = "free some space or repair the disk and start again, a run continues from its newest checkpoint"
            return Verdict(RUN_ERROR, (f"writing failed, {where}{error.strerror}; {remedy}",))
        case ConfigError():
            return Verdict(USER_ERROR, error.problems)
        case ValueError() if raised_by_megappo(error):
            return Verdict(USER_ERROR, (one_line(str(error)),))
    code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else RUN_ERROR
    if _is_fault(error):
        code = FAULT
    return Verdict(code, (f"{type(error).__name__}: {reason(error)}{_place(error)}",), is_unforeseen=True)


def _is_fault(error: BaseException) -> bool:
    """Return whether torch reports a failure of a device or of NCCL.

    A failed assertion in a kernel is an error of the program instead of a fault, for example an index out of range.
    OutOfMemoryError is not a fault.
    """
    types = {kind.__name__ for kind in type(error).__mro__ if kind.__module__.partition(".")[0] == "torch"}
    return bool(types & _FAULTS) and "device-side assert" not in str(error)


def _place(error: BaseException) -> str:
    """Return ` (file:line)` of the line that raised an error, or "" without a traceback."""
    place = _innermost(error)
    return "" if place is None else f" ({place[0].f_code.co_filename}:{place[1]})"


def _innermost(error: BaseException) -> tuple[FrameType, int] | None:
    """Return the frame and the line that raised an error, or None without a traceback."""
    return next(reversed([*walk_tb(error.__traceback__)]), None)


@contextmanager
def writing(path: str | PathLike[str]) -> Iterator[None]:
    """Convert errors of a block that writes the file or folder `path` to OSError with the name of the file.

    The message for a full disk contains the free space. Libraries in Rust, such as safetensors, raise different types
    of exceptions for errors of the operating system, with `(os error 28)` in the message.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _ROOM_ERRORS and _FREE not in str(error.strerror):
            file = error.filename or str(path)
            message = f"{os.strerror(error.errno)} ({_free_space(Path(file))})"
            raise OSError(error.errno, message, file) from error
        # Without an errno, a file name would replace the message.
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise
    except Exception as error:
        number = _OS_ERROR.search(str(error))
        if number is None:
            raise
        with writing(path):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def _free_space(file: Path) -> str:
    """Return a text with the free space on the disk of a file."""
    folder = next((place for place in (file, *file.parents) if place.is_dir()), Path())
    try:
        disk = os.statvfs(folder)
    except OSError:
        return f"unknown{_FREE}"
    if disk.f_files and not disk.f_favail:
        return f"no file{_FREE} of {disk.f_files}"
    return f"{disk.f_bavail * disk.f_frsize} bytes{_FREE} of {disk.f_blocks * disk.f_frsize}"


def how_to_install(extra: str) -> str:
    """Return the remedy for missing libraries of an extra of pyproject.toml. megappo is not on a package index, so the
    text refers to the repository."""
    return f"pip install '.[{extra}]' in megappo's repository"


def raised_by_megappo(error: ValueError) -> bool:
    """Return whether megappo's own code raised the error. A ValueError of a library is a bug, so its traceback is
    shown."""
    place = _innermost(error)
    return place is not None and str(place[0].f_globals.get("__name__")).split(".")[0] == "megappo"


def remember(secret: str) -> None:
    """Hide a secret in all later texts of this process."""
    if len(secret) >= _SHORTEST_KNOWN:
        _KNOWN.add(secret)


def redacted(text: str) -> str:
    """Return the text with secrets replaced by `(hidden)`."""
    for secret in _KNOWN:
        text = text.replace(secret, _HIDDEN)
    text = _FORMS.sub(lambda match: (match["before"] or "") + _HIDDEN, text)
    return _NAMED.sub(lambda f: f[0] if _VARIABLE.fullmatch(f["secret"]) else f["name"] + _HIDDEN, text)


def secret_settings(settings: object, key: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the dotted keys of settings (plain types) with the form or the name of a secret.

    The name of an environment variable with a secret, such as `API_KEY`, is not a secret, except in HTTP headers.
    """
    if isinstance(settings, Mapping):
        for name, value in settings.items():
            yield from secret_settings(value, (*key, str(name)))
    elif isinstance(settings, Sequence) and not isinstance(settings, str | bytes):
        for value in settings:
            yield from secret_settings(value, key)
    elif isinstance(settings, str) and settings and (_FORMS.search(settings) or _is_named_secret(key, settings)):
        yield ".".join(key)


def _is_named_secret(key: tuple[str, ...], value: str) -> bool:
    if not key or not _SECRET_NAME.fullmatch(key[-1]):
        return False
    return not _VARIABLE.fullmatch(value) or key[-2:-1] == (_HEADERS,)


def one_line(text: str) -> str:
    """Return a text on one line, without secrets and with escaped control characters."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(redacted(text).split()))


def shortened(text: str, characters: int = _SHOWN_CHARACTERS) -> str:
    """Return at most `characters` characters of a text."""
    return text if len(text) <= characters else text[: characters - 3] + "..."


def reason(error: BaseException, characters: int = _REASON_CHARACTERS) -> str:
    """Return the message of an error for use inside a sentence, or the type of an error without a message."""
    try:
        message = one_line(str(error))
    except Exception:  # noqa: BLE001 - `__str__` of a foreign class may raise any exception
        message = ""
    return shortened(message or type(error).__name__, characters)


def show(value: object) -> str:
    """Return a value as in YAML, shortened and without secrets."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return shortened(redacted(repr(value)))


def either(choices: Iterable[object]) -> str:
    """Return the choices as `a`, `a or b`, or `a, b or c`."""
    texts = [str(choice) for choice in choices]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def first_of(items: Collection[object], most: int, separator: str = ", ") -> str:
    """Return the first `most` items and the number of the others, for example `a, b, c and 4 more`."""
    shown = separator.join(str(item) for item, _ in zip(items, range(most), strict=False))
    return f"{shown} and {len(items) - most} more" if len(items) > most else shown


ALIKE = 0.5
"""Smallest similarity (difflib's ratio) of a word that an error message suggests."""


def nearest_word(word: str, choices: Iterable[str], cutoff: float = 0.0) -> str | None:
    """Return the choice most similar to `word`, or None if no similarity reaches `cutoff` (0 to 1)."""
    return next(iter(nearest_choices(word, choices, 1, cutoff)), None)


def nearest_choices(word: str, choices: Iterable[str], most: int, cutoff: float = 0.0) -> list[str]:
    """Return the `most` choices that are most similar to `word`, in descending order. See `nearest_word`."""
    by_lower = {choice.lower(): choice for choice in choices}
    matches = difflib.get_close_matches(word[:_SHOWN_CHARACTERS].lower(), by_lower, n=most, cutoff=cutoff)
    return [by_lower[choice] for choice in matches]


def nearest_numbers(value: int, choices: Iterable[int]) -> str:
    """Return a text with the nearest choices below and above `value`. `choices` must not be empty."""
    ordered = sorted(set(choices))
    below = [choice for choice in ordered if choice <= value]
    above = [choice for choice in ordered if choice > value]
    return either(below[-1:] + above[:1])


def whole_number(text: str) -> int | None:
    """Return the number in a text of at most 19 ASCII digits, or None for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number in ascending order. Takes O(sqrt(number)) steps."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


# -- Paths as users write them --
# A shell expands variables and a leading `~` in its arguments. It does not expand `~` after the `=` of an override.
# Paths in files are not expanded by a shell.

_SHELL_VARIABLE = re.compile(r"\$(?:\w+|\{[^}]*\}?|\([^)]*\)?)")
_PATH_IN_TEXT = re.compile(rf"(?:^|(?<=[/:])){_SHELL_VARIABLE.pattern}")


def expanded(path: str | os.PathLike[str], setting: str = "") -> str:
    """Return the path with a leading `~` or `~user` replaced by the home folder.

    `setting` begins the error message. Raises ConfigError if the user does not exist on this machine, or if the path
    contains a variable such as `$HOME`. A dollar sign in the name of an existing file or folder is not a variable.
    """
    text, place = os.fspath(path), f"{setting}: " if setting else ""
    for variable in _SHELL_VARIABLE.finditer(text):
        rest = text.find("/", variable.end())
        if not os.path.lexists(text if rest < 0 else text[:rest]):
            raise ConfigError(place + _variable_refused(text, variable[0]))
    home = os.path.expanduser(text)
    if text.startswith("~") and home == text:
        user = text.partition("/")[0]
        raise ConfigError(
            f"{place}{show(text)} begins with {user}, but this machine has no such user; write the whole path, or "
            f"./{text} for a name that begins with ~"
        )
    return home


def expanded_values(value: Any) -> Any:
    """Return options of an external program, with `~/` expanded at the start of each text, at any depth.

    A text is not always a path. A variable is therefore refused only at the start of a text, and after `/` or `:`.
    Raises ConfigError for a refused variable.
    """
    if isinstance(value, Mapping):
        return {key: expanded_values(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [expanded_values(inner) for inner in value]
    if not isinstance(value, str):
        return value
    if variable := _PATH_IN_TEXT.search(value):
        raise ConfigError(_variable_refused(value, variable[0]))
    return home_expanded(value)


def home_expanded(word: str) -> str:
    """Return an argument of an external program, with a leading `~/` replaced by the home folder."""
    return os.path.expanduser(word) if word.startswith("~/") else word


def link_to_nothing(path: Path) -> str:
    """Return an error text if the path or one of its parent folders is a broken link, otherwise ""."""
    for place in (path, *path.parents):
        if place.is_symlink() and not place.exists():
            return f"{place} is a link to {os.readlink(place)}, which does not exist; restore it, or replace the link"
    return ""


def _variable_refused(text: str, variable: str) -> str:
    return (
        f"{show(text)} has the variable {variable}, but variables in paths are not expanded; write the whole path, or "
        "let the shell expand the variable on the command line, outside of single quotes"
    )
