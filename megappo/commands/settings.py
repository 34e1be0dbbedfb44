"""`megappo settings`: what can be set, by name, by section, or by what another trainer calls it."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping, Sequence

from megappo.config.explain import find_field
from megappo.config.other_names import counterpart
from megappo.config.reference import SettingFacts, sections
from megappo.config.schema import Config
from megappo.errors import ConfigError, first_of, nearest_word

_WIDTH = 100
_MOST_NAMED = 4
"""Settings that are named in a sentence."""
_ALIKE = 0.6
"""Similarity (difflib's ratio) from which a name is worth naming."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What follows `megappo settings`."""
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help="a section, a setting, or a part of a name")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema that editors check YAML files by")


def run(arguments: argparse.Namespace) -> None:
    """Print the schema, or the explanation of a name."""
    print(json.dumps(json_schema(), indent=1) if arguments.schema else explanation(arguments.name))


def json_schema() -> dict[str, object]:
    """The JSON schema of a configuration (JSON Schema 2020-12)."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}


def explanation(name: str) -> str:
    """The text on a name: all sections without a name; otherwise the settings of a section, or those of a name, of
    another trainer's name, or of a part of a name.

    Raises ConfigError where there are none.
    """
    known = sections()
    name = name.removeprefix("--").replace("-", "_")
    if not name:
        rows = [", ".join(section.places) + (f": {section.about}" if section.about else "") for section in known]
        return "\n".join([*rows, "", "megappo settings SECTION lists those of a section, NAME those of such a name"])
    settings = {f"{place}.{setting.name}": setting for s in known for place in s.places for setting in s.settings}
    found = [key for key in settings if key.rpartition(".")[0] == name] or [
        key for key in settings if key == name or key.endswith(f".{name}")
    ]
    if found:
        return _all_told(found, settings)
    section, _, last = name.rpartition(".")
    other = counterpart(tuple(section.split(".")), last)
    if other is not None:
        note = f": {other.note}" if other.note else ""
        if not other.keys:
            return f"there is no setting '{name}'{note}"
        return _all_told(other.keys, settings, f"'{name}' is what others call it{note}")
    if found := [key for key in settings if name in key]:
        return _all_told(found, settings)
    if found := [key for key, setting in settings.items() if f"`{last}`" in setting.value + setting.meaning]:
        return _all_told(found, settings, f"'{last}' is a value of {first_of(found, _MOST_NAMED)}")
    if found := [key for key in settings if key.rpartition(".")[2] == last]:
        return _all_told(found, settings, f"there is no setting '{name}', but")
    near = nearest_word(last, sorted({key.rpartition(".")[2] for key in settings}), cutoff=_ALIKE)
    hint = f"the nearest is '{near}'" if near else "`megappo settings` lists all sections"
    raise ConfigError(f"no setting has '{name}' in its name; {hint}")


def _all_told(keys: Sequence[str], settings: Mapping[str, SettingFacts], *before: str) -> str:
    return "\n".join([*before, *(_told(key, settings.get(key)) for key in keys)])


def _told(key: str, setting: SettingFacts | None) -> str:
    """A setting with its meaning. None: a section of the top level, or a setting of an entry that the user names."""
    if setting is None:
        field = find_field(tuple(key.split(".")))
        facts, meaning = "", " ".join((field.description or "").split()) if field is not None else ""
    else:
        default = "required" if setting.default == "required" else f"default {setting.default}"
        facts, meaning = f" ({setting.value.replace('`', '')}; {default})", setting.meaning
    return f"{key}{facts}\n" + textwrap.fill(meaning, _WIDTH, initial_indent="    ", subsequent_indent="    ")
