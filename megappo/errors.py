"""Errors that end a run for a reason its user should read, the exit codes of all ends, and how sentences are worded.

A sentence names the value, the rule and the remedy, and shows no secret: what this process read as one, or what looks
like one by its form (a bearer's token, keys of known services, a password in an address) or its name. Standard library
only: reward workers start with it.
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
"""Stopped by SIGTERM, SIGUSR1 or SIGHUP with a checkpoint: start the same command again (EX_TEMPFAIL of sysexits.h)."""
FAULT = 71
"""A device or the communication of ranks failed (an Xid, an ECC error, an NCCL abort), not the settings or code of the
user (EX_OSERR of sysexits.h)."""
HANG = 79
"""The watchdog ended a run in which nothing went on; starting it again is worth a try."""
STOPPED_BY_USER = 130
"""Ctrl-C."""
_FAULTS = {"AcceleratorError", "DistBackendError"}
"""Types of torch, which this module does not import."""
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
_ROOM_ERRORS = (errno.ENOSPC, errno.EDQUOT)
_FREE = " free"
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_SHOWN_CHARACTERS = 60
_REASON_CHARACTERS = 300
# Numbers of 64 bits have at most 19 digits.
_MOST_DIGITS = 19
_HIDDEN = "(hidden)"
# `redacted` replaces a secret wherever it occurs: a shorter one would be cut out of ordinary words.
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
    """The run cannot go on; the message says why and what to do. The command line exits with code 1."""


class ConfigError(ValueError):
    """Settings that cannot be run; `problems` holds one sentence each. The command line exits with code 2."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        found = (problems,) if isinstance(problems, str) else tuple(problems)
        self.problems: tuple[str, ...] = tuple(one_line(problem) for problem in found)
        super().__init__("\n".join(self.problems))


class Interrupted(Exception):
    """The run was asked to stop; every rank raises it at the same point, between two updates."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number

    @property
    def exit_code(self) -> int:
        """The exit code that the launcher should see."""
        return STOPPED_BY_USER if self.signal == signal.SIGINT else REQUEUE


class Verdict(NamedTuple):
    """The exit code and the sentences with which an error ends a process."""

    code: int
    sentences: tuple[str, ...] = ()
    """Sentences for the user; none where a signal ended the process, which needs no reason."""
    is_unforeseen: bool = False
    """Whether the error is a bug, whose traceback says more than a sentence."""


def verdict_of(error: BaseException) -> Verdict:
    """The exit code of an error that ends a process, and the sentences for the user."""
    match error:
        case Interrupted():
            return Verdict(error.exit_code)
        case KeyboardInterrupt():
            return Verdict(STOPPED_BY_USER)
        case RunError():
            return Verdict(RUN_ERROR, (one_line(str(error)),))
        case OSError() if error.errno in _DISK_ERRORS:
            where = f"{error.filename}: " if error.filename else ""
            remedy = "make room or fix the disk and start again, a run continues from its newest checkpoint"
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
    """Whether torch reports a failure of a device or of NCCL. A failed assertion in a kernel is not a fault, but an
    error of the program, for example an index that is out of range. OutOfMemoryError is not a fault."""
    types = {kind.__name__ for kind in type(error).__mro__ if kind.__module__.partition(".")[0] == "torch"}
    return bool(types & _FAULTS) and "device-side assert" not in str(error)


def _place(error: BaseException) -> str:
    """` (file:line)` where an error was raised; "" where it has no traceback."""
    place = _innermost(error)
    return "" if place is None else f" ({place[0].f_code.co_filename}:{place[1]})"


def _innermost(error: BaseException) -> tuple[FrameType, int] | None:
    """Frame and line in which an error was raised; None where it has no traceback."""
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
            words = f"{os.strerror(error.errno)} ({_free_words(Path(file))})"
            raise OSError(error.errno, words, file) from error
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


def _free_words(file: Path) -> str:
    """The free space on the disk of a file."""
    folder = next((place for place in (file, *file.parents) if place.is_dir()), Path())
    try:
        disk = os.statvfs(folder)
    except OSError:
        return f"unknown{_FREE}"
    if disk.f_files and not disk.f_favail:
        return f"no file{_FREE} of {disk.f_files}"
    return f"{disk.f_bavail * disk.f_frsize} bytes{_FREE} of {disk.f_blocks * disk.f_frsize}"


def how_to_install(extra: str) -> str:
    """The remedy where the libraries of an extra of pyproject.toml are missing. It names the repository, as megappo is
    on no package index."""
    return f"pip install '.[{extra}]' in megappo's repository"


def raised_by_megappo(error: ValueError) -> bool:
    """Whether our own code refused a value; a ValueError from a library is a bug and keeps its traceback."""
    place = _innermost(error)
    return place is not None and str(place[0].f_globals.get("__name__")).split(".")[0] == "megappo"


def remember(secret: str) -> None:
    """Hide a secret that this process has read in all later texts of it."""
    if len(secret) >= _SHORTEST_KNOWN:
        _KNOWN.add(secret)


def redacted(text: str) -> str:
    """The text with `(hidden)` where secrets stood in it."""
    for secret in _KNOWN:
        text = text.replace(secret, _HIDDEN)
    text = _FORMS.sub(lambda found: (found["before"] or "") + _HIDDEN, text)
    return _NAMED.sub(lambda f: f[0] if _VARIABLE.fullmatch(f["secret"]) else f["name"] + _HIDDEN, text)


def secret_settings(settings: object, key: tuple[str, ...] = ()) -> Iterator[str]:
    """Dotted keys of settings, in plain types, whose value is a secret by its form or by its name.

    The name of an environment variable that holds one, such as `API_KEY`, is none, but for HTTP's headers.
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
    """A text on one line, without secrets, with escapes in place of what a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(redacted(text).split()))


def shortened(text: str, characters: int = _SHOWN_CHARACTERS) -> str:
    """At most so many characters of a text."""
    return text if len(text) <= characters else text[: characters - 3] + "..."


def reason(error: BaseException, characters: int = _REASON_CHARACTERS) -> str:
    """The message of another program's error, fit for the middle of a sentence; its type where it has no message."""
    try:
        said = one_line(str(error))
    except Exception:  # noqa: BLE001 - of a class that somebody else wrote
        said = ""
    return shortened(said or type(error).__name__, characters)


def show(value: object) -> str:
    """A value as the user would write it in YAML, shortened and without secrets."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return shortened(redacted(repr(value)))


def either(choices: Iterable[object]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    texts = [str(choice) for choice in choices]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def first_of(items: Collection[object], most: int, separator: str = ", ") -> str:
    """`a, b, c and 4 more`."""
    shown = separator.join(str(item) for item, _ in zip(items, range(most), strict=False))
    return f"{shown} and {len(items) - most} more" if len(items) > most else shown


ALIKE = 0.5
"""Similarity (difflib's ratio) from which a word is worth naming in place of another one."""


def nearest_word(word: str, choices: Iterable[str], cutoff: float = 0.0) -> str | None:
    """Returns the choice most similar to `word`, or None if no similarity reaches `cutoff` (0 to 1)."""
    return next(iter(nearest_words(word, choices, 1, cutoff)), None)


def nearest_words(word: str, choices: Iterable[str], most: int, cutoff: float = 0.0) -> list[str]:
    """Returns the `most` choices that are most similar to `word`, in descending order. See `nearest_word`."""
    by_lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(word[:_SHOWN_CHARACTERS].lower(), by_lower, n=most, cutoff=cutoff)
    return [by_lower[choice] for choice in found]


def nearest_numbers(value: int, choices: Iterable[int]) -> str:
    """The nearest of `choices` below and above `value`, as words; `choices` must not be empty."""
    ordered = sorted(set(choices))
    below = [choice for choice in ordered if choice <= value]
    above = [choice for choice in ordered if choice > value]
    return either(below[-1:] + above[:1])


def whole_number(text: str) -> int | None:
    """The number of plain digits that a program or user wrote; None for anything else, and for absurdly many digits."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending, in as many steps as its square root."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


# -- Paths as users write them --
# A shell expands variables and a leading `~` in its arguments. It does not expand `~` after the `=` of an override.
# Paths in files are not expanded by a shell.

_SHELL_VARIABLE = re.compile(r"\$(?:\w+|\{[^}]*\}?|\([^)]*\)?)")
_PATH_IN_TEXT = re.compile(rf"(?:^|(?<=[/:])){_SHELL_VARIABLE.pattern}")


def expanded(path: str | os.PathLike[str], setting: str = "") -> str:
    """The path with the home folder in place of a leading `~` or `~user`.

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
            f"{place}{show(text)} begins with {user}, and this machine has no such user; write the whole path, or "
            f"./{text} for a name that begins with ~"
        )
    return home


def expanded_values(value: Any) -> Any:
    """Returns options of an external program, with `~/` expanded at the start of each text, at any depth.

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
    """Returns an argument of an external program, with a leading `~/` replaced by the home folder."""
    return os.path.expanduser(word) if word.startswith("~/") else word


def link_to_nothing(path: Path) -> str:
    """Returns an error text if the path or one of its parent folders is a broken link; otherwise ""."""
    for place in (path, *path.parents):
        if place.is_symlink() and not place.exists():
            return f"{place} is a link to {os.readlink(place)}, which does not exist; bring it back, or renew the link"
    return ""


def _variable_refused(text: str, variable: str) -> str:
    return (
        f"{show(text)} has the variable {variable}, and paths are taken as they are written; write the whole path, or "
        "let the shell replace the variable on the command line, outside of single quotes"
    )
