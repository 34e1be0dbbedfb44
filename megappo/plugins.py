"""Users' plug-ins, named as `package.module:name` or `path/to/file.py:name`, wherever the settings take one."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from megappo.errors import ALIKE, either, expanded, first_of, link_to_nothing, nearest_word, reason, shortened

_MEGAPPO = os.path.dirname(os.path.abspath(__file__)) + os.sep
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_MOST_NAMED = 5


@contextmanager
def users_code(problem: str, remedy: str, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Raise whatever the block raises, except `but`, as ValueError with one sentence: the problem, the error, the
    remedy.

    For blocks that run a user's functions, or the code of their objects and templates, which may raise anything.
    """
    try:
        yield
    except but:
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(f"{problem} ({type(error).__name__}: {reason(error)}); {remedy}") from error


def failure_words(error: BaseException, characters: int = 300) -> str:
    """An error of a user's code on one line: the type, the message, and `file:line` of the code where it is known."""
    words, line = f"{type(error).__name__}: {reason(error, characters)}", raised_at(error)
    return f"{shortened(words, max(characters - len(line) - 3, 60))} ({line})" if line else shortened(words, characters)


def raised_at(error: BaseException) -> str:
    """`file:line` of the innermost line of the user's own code that an error came through, or else of an installed
    library; "" where it is all megappo's."""
    lines = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    others = [(file, number) for file, number in lines if not file.startswith((_MEGAPPO, "<"))]
    installed = {file for file, _ in others if "site-packages" in file or "dist-packages" in file}
    libraries = installed | {file for file, _ in others if file.startswith(_STANDARD_LIBRARY)}
    own = [line for line in others if line[0] not in libraries] or [line for line in others if line[0] in installed]
    return f"{own[-1][0]}:{own[-1][1]}" if own else ""


def is_import_path(name: str) -> bool:
    """Whether a setting names something of the user's rather than one of our choices."""
    return ":" in name


def check_choice(
    name: str, choices: Iterable[str], setting: str = "", others: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raise ValueError for a name that is neither a built-in choice nor an import path; `setting` begins the sentence.
    `others`: choices by the names that other trainers have for them."""
    known = list(choices)
    if name in known or is_import_path(name):
        return
    all_forms = either([*known, "path/to/file.py:name", "package.module:name"])
    near = others.get(name) or nearest_word(name, known, cutoff=ALIKE)
    hint = f"did you mean '{near}'?" if near else "choose one of them"
    if name.endswith(".py"):
        hint = f"write {name}:NAME, with the name of what the file defines"
    raise ValueError(f"{setting} '{name}' is none of {all_forms}; {hint}".strip())


def own_file(path: str) -> Path | None:
    """Returns the file of `path/to/file.py:name` with `~` expanded, or None if `path` has a different form."""
    place, _, name = path.rpartition(":")
    return Path(os.path.expanduser(place)) if place.endswith(".py") and name.isidentifier() else None


def own_files(settings: object) -> dict[str, str]:
    """sha256 by path of the Python files that settings name, at any depth, and that are there."""
    if isinstance(settings, Mapping):
        return own_files([*settings.keys(), *settings.values()])
    if isinstance(settings, list | tuple):
        return {path: digest for value in settings for path, digest in own_files(value).items()}
    file = own_file(settings) if isinstance(settings, str) else None
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest()} if file is not None and file.is_file() else {}


def check_own_file(path: str, file: Path, setting: str) -> None:
    """Raise ValueError if the file of `path/to/file.py:name` does not exist."""
    if file.is_file():
        return
    expanded(path, setting)
    link = link_to_nothing(file)
    problem = link or f"there is no file {file.resolve()}; create it, or correct the path"
    raise ValueError(f"{setting} '{path}': {problem}")


def load_function(path: str, setting: str) -> Callable[..., Any]:
    """Import `package.module:function` or `path/to/file.py:function`; `setting` names the place in errors."""
    return load(path, setting, callable, "function")


def load(path: str, setting: str, is_one: Callable[[Any], bool], word: str) -> Any:
    """Import `package.module:name` or `path/to/file.py:name`; `setting` and `word` name the place and the kind of thing
    in errors.

    Raises ValueError for what cannot be imported or is none by `is_one`.
    """
    module_name, _, name = path.rpartition(":")
    file = own_file(path)
    if file is None and (not name or not all(part.isidentifier() for part in module_name.split("."))):
        raise ValueError(
            f"{setting} '{path}' is no path of a {word}; write package.module:{word} or path/to/file.py:{word}"
        )
    if file is not None:
        check_own_file(path, file, setting)
    try:
        with users_code(f"{setting} '{path}': module '{module_name}' failed", "fix it", but=(ImportError,)):
            module = importlib.import_module(module_name) if file is None else _module_of(file)
    except ImportError as error:
        what, remedy = f": module '{module_name}'", "install it or set PYTHONPATH"
        if file is not None:
            what, remedy = "", "install what it imports, or put that beside the file"
        raise ValueError(f"{setting} '{path}'{what} cannot be imported ({reason(error)}); {remedy}") from error
    found = getattr(module, name, None)
    if not is_one(found):
        there = [n for n, v in vars(module).items() if is_one(v) and not _is_strange(n, v, module)]
        near = nearest_word(name, there, cutoff=ALIKE)
        hint = f"it has {first_of(there, _MOST_NAMED)}" if there else "define it there"
        hint = f"did you mean '{module_name}:{near}'?" if near else hint
        raise ValueError(f"{setting} '{path}': module '{module_name}' has no {word} '{name}'; {hint}")
    return found


def _module_of(file: Path) -> ModuleType:
    """The module of a file, run once in a process. It may import what stands beside it."""
    file = file.resolve()
    name = f"{file.stem}_{zlib.crc32(str(file).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a name that ends in .py has a loader"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_strange(name: str, value: object, module: ModuleType) -> bool:
    """Whether a module's name should not be suggested: it is private, or imported."""
    imported = (inspect.isroutine(value) or inspect.isclass(value)) and value.__module__ != module.__name__
    return imported or name.startswith("_")


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """The parameters of a function; None for some that are written in C."""
    try:
        return inspect.signature(function)
    except ValueError:
        return None


def check_call(
    function: Callable[..., Any],
    names: Iterable[str],
    options: Mapping[str, Any],
    *,
    what: str,
    remedy: str,
    offered: Sequence[str] = (),
) -> None:
    """Raise ValueError where a function does not take these keyword arguments: `names` and `options`.

    `offered`: the names that it may have parameters for, where `names` are those of them that it has.
    """
    signature, names = signature_of(function), list(names)
    try:
        if signature is not None:
            signature.bind(**dict.fromkeys(names), **options)
    except TypeError as error:
        call = ", ".join(f"{name}=" for name in (*names, *options))
        may_take = f"; it may take {', '.join(offered)}" if offered else ""
        called = f"with ({call})" if call else "without arguments"
        raise ValueError(f"{what} cannot be called {called}: {error}{may_take}; {remedy}") from error
