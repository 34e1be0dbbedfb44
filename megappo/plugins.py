"""Plug-ins of users. Settings name them as `package.module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
import typing
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import megappo_kernels
from megappo.errors import ALIKE, either, expanded, first_of, link_to_nothing, nearest_word, reason, shortened

_MEGAPPO = os.path.dirname(os.path.abspath(__file__)) + os.sep
_KERNELS = os.path.dirname(os.path.abspath(megappo_kernels.__file__)) + os.sep
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_MOST_NAMED = 5


@contextmanager
def users_code(
    problem: str, remedy: str, but: tuple[type[Exception], ...] = (), *, keeps_ours: bool = False
) -> Iterator[None]:
    """Convert any exception of the block except `but` to ValueError with one sentence: problem, error, remedy.

    For blocks that run functions, objects or templates of a user, which may raise any exception. With `keeps_ours`, a
    ValueError that megappo raises is not converted, because its sentence is already complete.
    """
    try:
        yield
    except but:
        raise
    except (Exception, SystemExit) as error:
        if keeps_ours and isinstance(error, ValueError) and _is_ours(error):
            raise
        line = raised_at(error)
        place = f" ({line})" if line and keeps_ours else ""
        raise ValueError(f"{problem} ({type(error).__name__}: {reason(error)}{place}); {remedy}") from error


def _is_ours(error: BaseException) -> bool:
    """Return whether code of megappo raised an error."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return files[-1].startswith((_MEGAPPO, _KERNELS))


def failure_text(error: BaseException, characters: int = 300) -> str:
    """Return an error of a user's code on one line: the type, the message, and `file:line` if known."""
    text, line = f"{type(error).__name__}: {reason(error, characters)}", raised_at(error)
    return f"{shortened(text, max(characters - len(line) - 3, 60))} ({line})" if line else shortened(text, characters)


def raised_at(error: BaseException) -> str:
    """Return `file:line` of the innermost line of the user's own code in a traceback, otherwise of an installed
    library. Returns "" if the traceback contains only code of megappo."""
    lines = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    others = [(file, number) for file, number in lines if not file.startswith((_MEGAPPO, _KERNELS, "<"))]
    installed = {file for file, _ in others if "site-packages" in file or "dist-packages" in file}
    libraries = installed | {file for file, _ in others if file.startswith(_STANDARD_LIBRARY)}
    own = [line for line in others if line[0] not in libraries] or [line for line in others if line[0] in installed]
    return f"{own[-1][0]}:{own[-1][1]}" if own else ""


def is_import_path(name: str) -> bool:
    """Return whether a setting names a plug-in instead of a built-in choice."""
    return ":" in name


def check_choice(
    name: str, choices: Iterable[str], setting: str = "", others: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raise ValueError for a name that is neither a built-in choice nor an import path. `setting` begins the message.
    `others`: choices by their names in other trainers."""
    known = list(choices)
    if name in known or is_import_path(name):
        return
    all_forms = either([*known, "path/to/file.py:name", "package.module:name"])
    near = others.get(name) or nearest_word(name, known, cutoff=ALIKE)
    hint = f"did you mean '{near}'?" if near else "choose one of them"
    if name.endswith(".py"):
        hint = f"write {name}:NAME, with a name that the file defines"
    raise ValueError(f"{setting} '{name}' is none of {all_forms}; {hint}".strip())


def own_file(path: str) -> Path | None:
    """Return the file of `path/to/file.py:name` with `~` expanded, or None if `path` has a different form."""
    place, _, name = path.rpartition(":")
    return Path(os.path.expanduser(place)) if place.endswith(".py") and name.isidentifier() else None


def own_files(settings: object) -> dict[str, str]:
    """Return the sha256 by path of all existing Python files that settings name, at any depth."""
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
    """Import `package.module:function` or `path/to/file.py:function`. Errors begin with `setting`."""
    return load(path, setting, callable, "function")


def load(path: str, setting: str, is_one: Callable[[Any], bool], word: str) -> Any:
    """Import `package.module:name` or `path/to/file.py:name`. Errors begin with `setting`, and use `word` for the kind
    of object.

    Raises ValueError if the import fails, or if `is_one` returns False for the object.
    """
    module_name, _, name = path.rpartition(":")
    file = own_file(path)
    if file is None and (not name or not all(part.isidentifier() for part in module_name.split("."))):
        raise ValueError(
            f"{setting} '{path}' is not the path of a {word}; write package.module:{word} or path/to/file.py:{word}"
        )
    if file is not None:
        check_own_file(path, file, setting)
    try:
        with users_code(f"{setting} '{path}': module '{module_name}' failed", "fix it", but=(ImportError,)):
            module = importlib.import_module(module_name) if file is None else _module_of(file)
    except ImportError as error:
        what, remedy = f": module '{module_name}'", "install it or set PYTHONPATH"
        if file is not None:
            what, remedy = "", "install the modules that it imports, or put them next to the file"
        raise ValueError(f"{setting} '{path}'{what} cannot be imported ({reason(error)}); {remedy}") from error
    loaded = getattr(module, name, None)
    if not is_one(loaded):
        names = [n for n, v in vars(module).items() if is_one(v) and not _is_strange(n, v, module)]
        near = nearest_word(name, names, cutoff=ALIKE)
        hint = f"it has {first_of(names, _MOST_NAMED)}" if names else "define it in the module"
        hint = f"did you mean '{module_name}:{near}'?" if near else hint
        raise ValueError(f"{setting} '{path}': module '{module_name}' has no {word} '{name}'; {hint}")
    return loaded


def _module_of(file: Path) -> ModuleType:
    """Return the module of a file, which is executed once per process. It may import modules of the same folder."""
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
    """Return whether a name should not be suggested, because the name is private, imported or a type."""
    if value.__class__.__module__ == "typing" or typing.get_origin(value) is not None:
        return True
    imported = (inspect.isroutine(value) or inspect.isclass(value)) and value.__module__ != module.__name__
    return imported or name.startswith("_")


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a function, or None for some functions in C."""
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
    """Raise ValueError if a function does not accept the keyword arguments `names` and `options`.

    `offered`: all optional parameter names, if `names` contains only the names that the function has.
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
