"""`megappo settings`: what can be set, by name, by section, or by what another trainer calls it."""

from __future__ import annotations

import argparse
import json
import textwrap

from megappo.config.other_names import Counterpart, counterpart
from megappo.config.reference import SettingFacts, sections
from megappo.config.schema import Config
from megappo.errors import ConfigError, nearest_word

_WIDTH = 100


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
    if not name:
        rows = [", ".join(section.places) + (f": {section.about}" if section.about else "") for section in known]
        return "\n".join([*rows, "", "megappo settings SECTION lists those of a section, NAME those of such a name"])
    settings = {f"{place}.{setting.name}": setting for s in known for place in s.places for setting in s.settings}
    other = counterpart(tuple(name.split(".")[:-1]), name.rpartition(".")[2]) or Counterpart(())
    wanted = (
        [key for key in settings if key.rpartition(".")[0] == name]
        or [key for key in settings if key == name or key.endswith(f".{name}")]
        or [key for key in settings if key in other.keys]
    )
    note = [f"'{name}' is what others call it" + (f": {other.note}" if other.note else "")] if other.keys else []
    if not wanted and other.note:
        return f"there is no setting '{name}': {other.note}"
    if not wanted:
        wanted, note = [key for key in settings if name in key], []
    if not wanted:
        near = nearest_word(name, sorted({key.rpartition(".")[2] for key in settings}))
        raise ConfigError(f"no setting has '{name}' in its name; the nearest is '{near}'")
    return "\n".join([*note, *(_told(key, settings[key]) for key in wanted)])


def _told(key: str, setting: SettingFacts) -> str:
    default = "required" if setting.default == "required" else f"default {setting.default}"
    meaning = textwrap.fill(setting.meaning, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return f"{key} ({setting.value.replace('`', '')}; {default})\n{meaning}"
