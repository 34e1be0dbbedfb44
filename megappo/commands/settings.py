"""`megappo settings`: explanation of a setting, a section, a metric, or a name from other trainers."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megappo.config.fields import find_field
from megappo.config.foreign.answers import Counterpart
from megappo.config.reading.misspelt import SHORTEST, misspelt_word
from megappo.config.reading.other_names import counterpart
from megappo.config.reference import SettingFacts, sections
from megappo.config.schema import Config
from megappo.errors import ConfigError, first_of, nearest_choices

if TYPE_CHECKING:
    from megappo.observe.metric_docs import MetricDoc

_WIDTH = 100
_MOST_NAMED = 4
"""Maximum number of settings in a sentence."""
_ALIKE = 0.8
"""Minimum similarity (difflib's ratio) of a suggested metric to an unknown name."""
_SHORTEST_PART = 3
"""Minimum length of a text that is searched in names; shorter texts match too many names."""
_NAME_HELP = (
    "a section, a setting, a part of a name, a metric such as actor/clipfrac, or the name of a setting in verl, slime, "
    "miles, OpenRLHF, NeMo-RL or TRL"
)
_USAGE = (
    "megappo settings SECTION lists the settings of a section. megappo settings NAME explains a setting.\n"
    "NAME can also be a metric, such as actor/clipfrac, or a name from verl, slime, miles, OpenRLHF, NeMo-RL or TRL."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megappo settings`."""
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help=_NAME_HELP)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--schema", action="store_true", help="print the JSON schema for editors of YAML files")
    form.add_argument("--markdown", action="store_true", help="print tables of all settings and metrics in Markdown")


def run(arguments: argparse.Namespace) -> None:
    """Print the schema, the Markdown reference, or the explanation of a name."""
    if arguments.schema:
        print(json.dumps(json_schema(), indent=1))
    elif arguments.markdown:
        from megappo.commands.markdown import reference  # a slow import that names do not need

        print(reference())
    else:
        print(explanation(arguments.name))


def json_schema() -> dict[str, object]:
    """Return the JSON schema of a configuration (JSON Schema 2020-12)."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}


def explanation(name: str) -> str:
    """Return the text for a name. If the name is empty, the text lists all sections.

    A name is a section, a setting, a part of a name, a metric, or the name of a setting in other trainers. Raises
    ConfigError for an unknown name.
    """
    known = sections()
    name = name.removeprefix("--")
    if not name:
        rows = [", ".join(section.places) + (f": {section.about}" if section.about else "") for section in known]
        return "\n".join([*rows, "", _USAGE])
    if "/" in name:
        return _metric(name)
    name = name.lstrip("+").replace("-", "_").partition("=")[0]
    settings = {f"{place}.{setting.name}": setting for s in known for place in s.places for setting in s.settings}
    own = [key for key in settings if key.rpartition(".")[0] == name] or [
        key for key in settings if key == name or key.endswith(f".{name}")
    ]
    *section, last = name.split(".")
    other = counterpart(section, last) if name not in settings and find_field(tuple(name.split("."))) is None else None
    if own and (other is None or {*other.keys} <= {*own}):
        return _texts(own, settings)
    if other is not None and other.keys:
        keys = dict.fromkeys((*own, *other.keys)) if "." not in name else other.keys
        return _texts([*keys], settings, _heading(name, other))
    if other is not None:
        return f"there is no setting '{name}': {other.note}"
    return _similar(name, settings)


def _heading(name: str, other: Counterpart) -> str:
    whose = " and ".join(other.trainers) or "other trainers"
    return f"'{name}' is a setting of {whose}" + (f" ({other.note})" if other.note else "") + "; here:"


def _similar(name: str, settings: Mapping[str, SettingFacts]) -> str:
    """Return the text for a part of a name, for a value, or for the last part of an unknown name.

    Raises ConfigError for an unknown name.
    """
    last = name.rpartition(".")[2]
    begins = re.compile(rf"(^|[._]){re.escape(name)}")
    if len(name) >= _SHORTEST_PART and (keys := [key for key in settings if begins.search(key)]):
        return _texts(keys, settings)
    if "." not in name:
        if keys := [key for key, setting in settings.items() if f"`{name}`" in setting.value + setting.meaning]:
            return _texts(keys, settings, f"'{name}' is a value of {first_of(keys, _MOST_NAMED)}")
        if metrics := [metric for metric in _metrics() if metric.rpartition("/")[2] == name]:
            return "\n".join(_metric(metric) for metric in metrics)
    keys = [key for key in settings if key.rpartition(".")[2] == last]
    shared = {key: len({*key.split(".")[:-1]} & {*name.split(".")[:-1]}) for key in keys}
    if keys := [key for key in keys if shared[key] == max(shared.values()) > 0]:
        return _texts(keys, settings, f"there is no setting '{name}', but")
    near = misspelt_word(last, sorted({key.rpartition(".")[2] for key in settings}), SHORTEST)
    hint = f"the nearest is '{near}'" if near else "`megappo settings` lists all sections"
    raise ConfigError(f"no setting has '{name}' in its name; {hint}")


def _metrics() -> Mapping[str, MetricDoc]:
    from megappo.observe.metric_docs import METRICS  # a slow import that other names do not need

    return METRICS


def _metric(name: str) -> str:
    """Return the text for a metric: the unit, the meaning and the healthy values.

    Raises ConfigError for an unknown metric.
    """
    from megappo.observe.metric_docs import documented

    metrics = _metrics()
    key = documented(name)
    if key is None:
        group = name.partition("/")[0]
        near = nearest_choices(name, metrics, _MOST_NAMED, cutoff=_ALIKE)
        near = near or [metric for metric in metrics if metric.startswith(f"{group}/")]
        hint = f"there are {', '.join(near)}" if near else "megappo/observe/README.md lists all metrics"
        raise ConfigError(f"there is no metric '{name}'; {hint}")
    about = metrics[key]
    meaning = f"{about.meaning} Healthy: {about.healthy}."
    wrapped = textwrap.fill(meaning, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return f"{name} (metric; {about.unit})\n{wrapped}"


def _texts(keys: Sequence[str], settings: Mapping[str, SettingFacts], *before: str) -> str:
    return "\n".join([*before, *(_text(key, settings.get(key)) for key in keys)])


def _text(key: str, setting: SettingFacts | None) -> str:
    """Format a setting with its meaning. None stands for a top-level section or for a setting of a user-defined
    entry."""
    if setting is None:
        field = find_field(tuple(key.split(".")))
        facts, meaning = "", " ".join((field.description or "").split()) if field is not None else ""
    else:
        default = "required" if setting.default == "required" else f"default {setting.default}"
        facts, meaning = f" ({setting.value.replace('`', '')}; {default})", setting.meaning
    return f"{key}{facts}\n" + textwrap.fill(meaning, _WIDTH, initial_indent="    ", subsequent_indent="    ")
