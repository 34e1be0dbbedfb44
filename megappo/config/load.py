"""Reads a configuration from a YAML file and `key=value` overrides, validates it, and writes it.

Relative paths in the file (`model.path`, `run.directory`, ...) are relative to the working directory of the process,
not to the file. They are stored unchanged. Python files of `path/to/file.py:name` are searched in the folder of the
configuration first. Their absolute paths are stored.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megappo import __version__
from megappo.config.base import SettingValue
from megappo.config.fields import Key, dotted, find_field, names_in, section_of, takes
from megappo.config.reading.explain import explain, likely_keys, unknown_keys
from megappo.config.reading.yaml_core import (
    DEEPEST_NESTING,
    LONGEST_TEXT_CHARACTERS,
    dump_yaml,
    parse_value,
    parse_yaml,
)
from megappo.config.renamed import replace_old_names, replace_old_override, replace_old_section
from megappo.config.schema import Config
from megappo.config.templates import read_template
from megappo.errors import ConfigError, expanded, link_to_nothing, secret_settings, shortened, show, writing
from megappo.files.json_values import JSONValue
from megappo.plugins import own_file

_ALTERNATIVES: tuple[tuple[Key, Key], ...] = (
    (("run", "steps"), ("run", "epochs")),
    *(((role, "minibatch_sequences"), (role, "minibatches")) for role in ("actor", "critic")),
    *(((role, "optimizer", "warmup_updates"), (role, "optimizer", "warmup_ratio")) for role in ("actor", "critic")),
    (("rollout", "engine"), ("rollout", "servers")),
)
"""Pairs of settings that exclude each other."""
_PLANNED_LIMITS = {"collective_timeout_seconds", "phase_timeout_seconds"}
"""Settings of `runtime` that a run takes from its plan if the user does not set them."""
_UNDECODED = re.compile("[\ud800-\udfff]")
"""Bytes of a command line that Python could not decode."""
_URLS, _COUNT = ("rollout", "servers", "urls"), ("rollout", "servers", "count")
_REPLACED = {**dict(_ALTERNATIVES), **{other: key for key, other in _ALTERNATIVES}, _URLS: _COUNT}
"""Pairs of settings. An override of the first setting, or of a setting in this section, removes the second one from the
file: an alternative setting, or the number of servers if external servers are named."""


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """Read, override and validate the settings of a run.

    An override is `a.b.c=value`. The value is YAML, such as `critic=null`, `reference={}` or
    `rollout.stop_token_ids=[1, 2]`. If a setting must be text, a number, true or false is the text as typed. Later
    overrides have precedence. Sections that are missing in the file are created. An override that ends in .yaml or
    .yml and has no `=` is another file. Each of its settings replaces the earlier value.

    Raises ConfigError with one sentence per problem. Secrets are reported alone, because other sentences may show
    values.
    """
    path = expanded(path, "the configuration")
    old_names: list[str] = []
    data = _read_sections(path, old_names)
    override_settings: list[tuple[Key, JSONValue]] = []
    files = _files_of(data, path)
    problems: dict[str, list[Key]] = {}
    for override in overrides:
        try:
            override_settings += _override(data, override, Path(path).parent, files, old_names)
        except ConfigError as error:
            problems |= dict.fromkeys(error.problems, _meant(override))
    _remove_replaced(data, dict(override_settings))
    if secrets := list(dict.fromkeys(secret_settings(data))):
        raise ConfigError([_no_secret(key) for key in secrets])
    _name_after(data, Path(path), files)
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        refused = [key for keys in problems.values() for key in keys]
        raise ConfigError([*problems, *explain(error, refused)]) from None
    if problems:
        raise ConfigError(problems)
    return config.with_old_names(old_names)


def _override(
    data: dict[str, JSONValue], override: str, folder: Path, files: list[JSONValue], old_names: list[str]
) -> list[tuple[Key, JSONValue]]:
    """Apply an override to `data` and return its settings. The path of a file override is added to `files`, and names
    of older versions to `old_names`.

    Raises ConfigError if the override is invalid.
    """
    if "=" not in override and override.endswith((".yaml", ".yml")):
        path = expanded(override, "the configuration")
        layer = _read_sections(path, old_names)
        files += _files_of(layer, path)
        return _laid_over(data, layer)
    key, value = _parse_override(override, old_names)
    _set(data, key, _with_own_files(value, folder))
    read_template(data, folder)
    return [(key, value)]


def _meant(override: str) -> list[Key]:
    """Return the settings that the user may have meant by an invalid override."""
    name, _, text = override.partition("=")
    key, _ = replace_old_override(tuple(name.strip("+~ ").split(".")), text)
    if find_field(key) is not None:
        return [key]
    try:
        return likely_keys(key[:-1], key[-1], parse_value(text, "the value"))
    except ConfigError:
        return []


def _files_of(data: dict[str, JSONValue], path: str | os.PathLike[str]) -> list[JSONValue]:
    """Return the files that the settings come from: the file itself, or `run.files` of settings that a run wrote."""
    run = data.get("run")
    written = run.pop("files", None) if isinstance(run, dict) else None
    return written if written and isinstance(written, list) else [str(path)]


def _name_after(data: dict[str, JSONValue], path: Path, files: list[JSONValue]) -> None:
    """Set the default name of a run from its first file, and store all files in `run.files`."""
    run = data.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", path.stem)
        run["files"] = files


def _read_sections(path: str | os.PathLike[str], old_names: list[str]) -> dict[str, JSONValue]:
    """Return the settings in a file, with absolute paths of Python files and the text of a chat template. Names of
    older versions are replaced, and added to `old_names`."""
    data: JSONValue = parse_yaml(read_text(Path(path)), str(path))
    if data is None:
        needed = ", ".join(name for name, field in Config.model_fields.items() if field.is_required())
        raise ConfigError(f"{path} is empty; it needs the sections {needed}")
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds {show(data)}, must be sections of `key: value` lines")
    data, renamed = replace_old_names(data)
    old_names += renamed
    with_files = _with_own_files(data, Path(path).parent)
    assert isinstance(with_files, dict)
    read_template(with_files, Path(path).parent)
    return with_files


def _laid_over(
    data: dict[str, JSONValue], layer: Mapping[str, JSONValue], prefix: Key = ()
) -> list[tuple[Key, JSONValue]]:
    """Merge the settings of another file into `data`, and return them.

    A mapping that is no section of the schema, such as a mapping with user-defined names, is replaced as a whole.
    """
    merged: list[tuple[Key, JSONValue]] = []
    for name, value in layer.items():
        key, present = (*prefix, str(name)), data.get(name)
        field = find_field(key)
        if isinstance(value, dict) and field is not None and section_of(field) is not None:
            inner = data[name] = present if isinstance(present, dict) else {}
            merged += _laid_over(inner, value, key)
        else:
            data[name] = value
            merged.append((key, value))
    return merged


def save_config(config: Config, path: str | os.PathLike[str]) -> None:
    """Write every setting, including defaults, so that `load_config(path)` returns an equal configuration.

    Limits that a run takes from its plan are omitted if the user did not set them. Otherwise their defaults would count
    as user settings.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    settings = config.model_dump()
    for name in _PLANNED_LIMITS - config.runtime.model_fields_set:
        del settings["runtime"][name]
    if config.run.directory is not None:
        settings["run"]["directory"] = str(config.run.directory)
    head = f"# Every setting of this run, defaults included; written by megappo {__version__}.\n"
    with writing(target):
        target.write_text(head + dump_yaml(settings), encoding="utf-8")


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of settings in plain types. An empty section is a value."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat_settings(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def read_text(path: Path) -> str:
    """Return the text of a YAML file. Raises ConfigError if the file cannot be read."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(LONGEST_TEXT_CHARACTERS + 1)  # one character above the limit of the parser
    except FileNotFoundError:
        if link := link_to_nothing(path):
            raise ConfigError(link) from None
        raise ConfigError(f"there is no file {path} (from {Path.cwd()}); give the path of a YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give the path of a YAML file") from None


def _parse_override(override: str, old_names: list[str]) -> tuple[Key, JSONValue]:
    """Parse `a.b=1` into (("a", "b"), 1). A name of an older version is replaced, and added to `old_names`. Raises
    ConfigError if the key does not exist."""
    name, equals, text = override.partition("=")
    key, shown = tuple(name.strip().split(".")), f"override '{shortened(override)}'"
    if _UNDECODED.search(override):
        encoding = f"is not text in the encoding of this locale, {sys.getfilesystemencoding()}"
        raise ConfigError(f"{shown} {encoding}; write UTF-8, and set LC_ALL=C.UTF-8")
    if name.startswith(("+", "~")):
        setting = name.strip("+~ ")
        written = f"{setting}=null" if name.startswith("~") else f"{setting}={text.strip() or 'VALUE'}"
        raise ConfigError(f"{shown} begins with an operator of Hydra; write {shortened(written)}")
    if not equals or not all(key):
        raise ConfigError(f"{shown} must have the form section.key=value, such as run.steps=10")
    if len(key) > DEEPEST_NESTING:
        raise ConfigError(f"{shown} has {len(key)} nested keys, must have at most {DEEPEST_NESTING}")
    key, renamed = replace_old_override(key, text)
    for depth in range(1, len(key) + 1):
        field = find_field(key[:depth])
        if field is None:
            value = parse_value(text, shown)
            for part in reversed(key[depth:]):
                value = {part: value}
            raise ConfigError([f"{shown}: {sentence}" for sentence in unknown_keys(key[:depth], value)])
        if section_of(field) is None:
            if depth < len(key) and "dict" not in str(field.annotation):
                raise ConfigError(f"{shown}: {dotted(key[:depth])} is a value, not a section; remove the keys after it")
            break
    value = parse_value(text, shown)
    if renamed is not None:
        old_names.append(renamed)
        value = replace_old_section(key, value)
    return key, text.strip() if isinstance(value, (bool, int, float)) and _is_text_only(key, depth, value) else value


def _is_text_only(key: Key, depth: int, value: JSONValue) -> bool:
    """Return whether `key` accepts text but not `value`. `key[:depth]` is a setting, which can be a mapping."""
    setting = key if find_field(key) is not None else key[:depth]
    text: JSONValue = "text"
    for part in reversed(key[len(setting) :]):
        text, value = {part: text}, {part: value}
    return takes(setting, text) and not takes(setting, value)


def _with_own_files(value: JSONValue, folder: Path) -> JSONValue:
    """Return settings with absolute paths in each `file.py:name`, including keys. The file is searched in `folder`,
    then in the working directory."""
    if isinstance(value, dict):
        return {_with_own_file(key, folder): _with_own_files(inner, folder) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_own_files(inner, folder) for inner in value]
    return _with_own_file(value, folder)


def _with_own_file(value: SettingValue, folder: Path) -> SettingValue | str:
    if not isinstance(value, str) or (file := own_file(value)) is None:
        return value
    path = next((place for place in (folder / file, file) if place.is_file()), None)
    return value if path is None else f"{path.resolve()}:{value.rpartition(':')[2]}"


def _no_secret(key: str) -> str:
    remedy = "export it as a variable and set its name (key: VARIABLE, or headers_from_environment: {NAME: VARIABLE})"
    if ".environment." in f".{key}":
        remedy = "export it before the run starts, because servers inherit the environment"
    return f"{key} looks like a secret, which a run would write into its files; {remedy}"


def _remove_replaced(data: dict[str, JSONValue], overrides: Mapping[Key, JSONValue]) -> None:
    """Remove settings of the file that an override replaces by another setting."""
    for key, other in _REPLACED.items():
        is_set = any(value not in (None, []) for name, value in overrides.items() if _is_in(name, key))
        if is_set and not any(_is_in(name, other) for name in overrides):
            _remove(data, other)


def _is_in(key: Key, section: Key) -> bool:
    """Return whether a key is a setting or a setting inside a section."""
    return key[: len(section)] == section


def _remove(data: dict[str, JSONValue], key: Key) -> None:
    """Remove a setting if it exists."""
    section: JSONValue = data
    for name in key[:-1]:
        section = section.get(name) if isinstance(section, dict) else None
    if isinstance(section, dict):
        section.pop(key[-1], None)


def _set(data: dict[str, JSONValue], key: Key, value: JSONValue) -> None:
    """Store an override's value, and create missing sections."""
    for depth, name in enumerate(key[:-1], start=1):
        if data.get(name) is None:
            data[name] = {}
        inner = data[name]
        if not isinstance(inner, dict):
            inside = f"a section with {', '.join(names_in(key[:depth]))}" if names_in(key[:depth]) else "a section"
            raise ConfigError(
                f"{dotted(key[:depth])} is {show(inner)}, must be {inside}; override {dotted(key[:depth])}"
            )
        data = inner
    data[key[-1]] = value
