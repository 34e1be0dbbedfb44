"""Formats validation errors as sentences with the dotted key, the value, the rule and the nearest valid name."""

from __future__ import annotations

import itertools
import json
import typing
from collections.abc import Collection, Iterator, Mapping

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megappo.config.fields import (
    BOUNDS,
    ENTRY,
    Key,
    all_keys,
    dotted,
    entries_of,
    field_and_section,
    find_field,
    is_nullable,
    is_section,
    keys_of_entries,
    names_in,
    takes,
    without_places,
)
from megappo.config.foreign.answers import Counterpart
from megappo.config.reading.misspelt import SHORTEST, misspelt_word
from megappo.config.reading.other_names import counterpart, is_dotted_name
from megappo.config.reading.section_examples import Example, as_overrides, in_yaml, section_example
from megappo.errors import ALIKE, either, nearest_word, shortened, show
from megappo.files.json_values import JSONValue

_OF_EVALUATIONS = ("data", "validation_sets", ENTRY)
_AKIN = {("evaluation",): _OF_EVALUATIONS, ("data", "validation"): _OF_EVALUATIONS}
"""Alternative section (value) for a setting that the user wrote into a section (key). It is searched first."""
_NAMES_AKIN = {"samples_per_prompt": "samples"}

_OTHER_CHOICES = {"gpu": "cuda", "bf16": "bfloat16", "fp32": "float32", "float": "float32", "ppo": "clip"}
"""Values of other trainers (keys) and megappo's values for the same choice."""

_TYPE_RULES = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "bool_type": "must be true or false",
    "dict_type": "must be a section of `key: value` lines",
    "tuple_type": "must be a list",
    "path_type": "must be a path",
}

_BOUND_REMEDIES = {
    "rollout.temperature": "; training needs random samples, such as with 1.0 (data.validation is always greedy)"
}
_OFF = ("none", "null", "off", "no", "false", "disabled", "disable")
"""Words that users write to disable a section."""
_MISSPELT = 0.85
"""Minimum similarity (difflib's ratio) of a misspelt name. The similarity of `beta` and `beta1` is 0.89, that of
`kl_penalty` and `penalty` only 0.82."""
_MOST_SENTENCES = 20
_SHORT_CHARACTERS = 40
"""Maximum length of a value in an example."""
_LARGEST_EXACT_FLOAT = 2**53


def likely_keys(section: Key, name: str, value: JSONValue) -> list[Key]:
    """Return the best candidates for an unknown `name` in `section`, or an empty list if no key is similar.

    A key of another section and a less similar key are candidates only if they accept the value.
    """
    siblings = names_in(section)
    other = _counterpart(section, name)
    if other is not None:
        keys = [_parted(key) for key in other.keys]
        is_taken = any(takes(key, value) for key in keys)
        return [key for key in keys if is_taken and (takes(key, value) or is_section(key))]
    close = misspelt_word(name, siblings)
    if close is not None and nearest_word(name, [close], cutoff=0.8):
        return [(*section, close)]
    akin = (*_AKIN.get(section, ()), _NAMES_AKIN.get(name, name))
    if akin in keys_of_entries() and takes(akin, value):
        return [akin]
    same_name = [key for key in all_keys() if key[-1] == name and takes(key, value)] or [
        key for key in keys_of_entries() if key[-1] == name and takes(key, value)
    ]
    same_name = [key for key in same_name if not section or _is_plausible(key, section)]
    if same_name:
        nearness = {key: (_shared_prefix(key, section), -len(key)) for key in same_name}
        return [key for key in same_name if nearness[key] == max(nearness.values())][:3]
    if close is not None and takes((*section, close), value):
        return [(*section, close)]
    elsewhere = misspelt_word(name, sorted({key[-1] for key in all_keys()}), SHORTEST)
    matches = [key for key in all_keys() if key[-1] == elsewhere and takes(key, value)]
    return [key for key in matches if not section or _is_near(key, section)][:3]


def _is_plausible(key: Key, section: Key) -> bool:
    """Return whether the user may have meant `key`, which has the same name, in `section`.

    A nested setting with a one-word name, such as `reward.judge.prompt`, must be near `section`.
    """
    return "_" in key[-1] or _is_near(key, section)


def _is_near(key: Key, section: Key) -> bool:
    """Return whether a setting is not nested, or shares a section with `section`."""
    return len(key) <= 2 or bool({*key[:-1]} & {*section})


def unknown_key(section: Key, name: str, value: JSONValue) -> str:
    """Return the sentence for an unknown key with `value`."""
    other = _counterpart(section, name) or Counterpart(())
    if other.note and not other.keys:
        return f"{dotted((*section, name))} is not a setting: {other.note}"
    likely = likely_keys(section, name, value)
    place = f"the section {dotted(section)}" if section else "the top level"
    if other.keys and not likely:
        remedy = f"see {either(other.keys)}"
    elif likely:
        remedy = f"did you mean {either(dotted(key) for key in likely)}?"
    elif names := names_in(section):
        remedy = f"{place} has {', '.join(names)}"
    else:
        remedy = "`megappo settings` lists all settings"
    return f"{dotted((*section, name))} is not a setting; {remedy}" + (f" ({other.note})" if other.note else "")


def _counterpart(section: Key, name: str) -> Counterpart | None:
    """Return the answer for a name from another trainer.

    Return None if the name is more likely a misspelt setting of this section.
    """
    other = counterpart(section, name)
    if other is None or is_dotted_name((*section, name)):
        return other
    section_keys = tuple(key for key in other.keys if _parted(key)[:-1] == section)
    if section_keys:
        return other if section_keys == other.keys else Counterpart(section_keys)
    slip = nearest_word(name, names_in(section), cutoff=_MISSPELT)
    return None if slip is not None and abs(len(slip) - len(name)) <= 1 else other


def _parted(key: str) -> Key:
    return tuple(key.split("."))


def explain(error: ValidationError, refused: Collection[Key] = ()) -> tuple[str, ...]:
    """Return one sentence per problem, up to a limit. Unknown keys are last.

    If a misspelt key probably stands for a missing key, the missing key is left out. `refused` contains keys whose
    values are already rejected. The problems of these keys and of their sections are left out.
    """
    details = [d for d in error.errors(include_url=False) if not _is_of(_key(d["loc"]), refused)]
    details.sort(key=lambda detail: detail["type"] == "extra_forbidden")
    strange = [(_key(d["loc"]), d["input"]) for d in details if d["type"] == "extra_forbidden"][:_MOST_SENTENCES]
    unknown = [setting for key, value in strange for setting in _others_settings(key, value)][:_MOST_SENTENCES]
    misspelt = {key for name, value in unknown for key in likely_keys(name[:-1], name[-1], value)}
    reported = [d for d in details if not (d["type"] == "missing" and _key(d["loc"]) in misspelt)]
    sentences = [_sentence(d) for d in reported[:_MOST_SENTENCES] if d["type"] != "extra_forbidden"]
    sentences += [unknown_key(key[:-1], key[-1], value) for key, value in unknown[: _MOST_SENTENCES - len(sentences)]]
    if len(reported) > _MOST_SENTENCES:
        sentences.append(f"{len(reported) - _MOST_SENTENCES} more settings are wrong; correct these first")
    return tuple(sentences)


def _is_of(key: Key, refused: Collection[Key]) -> bool:
    return any(other[: len(key)] == key for other in refused)


def unknown_keys(key: Key, value: JSONValue) -> list[str]:
    """Return one sentence for an unknown key, or one per setting in a section of another trainer."""
    return [unknown_key(inner[:-1], inner[-1], of_inner) for inner, of_inner in _others_settings(key, value)]


def _others_settings(key: Key, value: JSONValue) -> Iterator[tuple[Key, JSONValue]]:
    """Yield an unknown key with its value, or the settings in a section of another trainer."""
    leaves = list(itertools.islice(_leaves(key, value), _MOST_SENTENCES)) if isinstance(value, Mapping) else []
    if any(is_dotted_name(leaf) for leaf, _ in leaves):
        yield from leaves
        return
    other = _counterpart(key[:-1], key[-1])
    is_one_of_ours = len(other.keys) == 1 if other is not None else bool(likely_keys(key[:-1], key[-1], value))
    has_answers = not is_one_of_ours and any(counterpart(leaf[:-1], leaf[-1]) for leaf, _ in leaves)
    yield from leaves if has_answers else [(key, value)]


def _leaves(key: Key, value: JSONValue) -> Iterator[tuple[Key, JSONValue]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves((*key, str(name)), inner)
    else:
        yield key, value


def _key(loc: tuple[int | str, ...]) -> Key:
    return tuple(str(part) for part in loc)


def _shared_prefix(a: Key, b: Key) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _sentence(detail: ErrorDetails) -> str:
    key, kind, value = _key(detail["loc"]), detail["type"], detail["input"]
    name = dotted(key) or "the configuration"
    if kind == "invalid_key":
        return f"{name} is a key that is not text; {unknown_key(key[:-1], key[-1], value)}"
    if kind == "missing":
        return f"{name} is missing; add it{_description(key)}"
    if kind == "literal_error":
        choices = _choices(key)
        word = _OTHER_CHOICES.get(str(value).lower(), str(value))
        nearest = word if word in choices else nearest_word(word, choices, cutoff=ALIKE)
        return f"{name} is {show(value)}, must be {either(choices)}" + (
            f"; the nearest is '{nearest}'" if nearest else ""
        )
    if kind == "value_error":
        return f"{name}: {detail['ctx']['error']}"
    if kind in BOUNDS:
        remedy = _BOUND_REMEDIES.get(name) or _as_fraction(value, detail["ctx"])
        return f"{name} is {show(value)}, {_bound(key, kind, detail['ctx'])}{remedy}"
    if kind == "string_too_long":
        return f"{name} is {show(value)}, must have at most {detail['ctx']['max_length']} characters"
    if kind == "model_type":
        return f"{name} is {show(value)}, {_section_rule(key, value)}"
    if kind in _TYPE_RULES:
        return (
            f"{name} is {show(value)}, {_TYPE_RULES[kind]}{_type_remedy(kind, value, key) or _example_of(key, value)}"
        )
    return f"{name} is {show(value)}: {detail['msg']}"


def _description(key: Key) -> str:
    field = find_field(key)
    text = (field.description or "").split("\n\n")[0] if field is not None else ""
    return f" ({text.rstrip('.')})" if text else ""


def _choices(key: Key) -> list[str]:
    """Return the choices of a Literal field, or of a list of Literals."""
    field = find_field(without_places(key))
    assert field is not None
    literals = [
        a for a in (field.annotation, *typing.get_args(field.annotation)) if typing.get_origin(a) is typing.Literal
    ]
    return [str(choice) for literal in literals for choice in typing.get_args(literal)]


def _bound(key: Key, kind: str, context: Mapping[str, float]) -> str:
    """Format a bound as `must be above 0; the nearest is 1`. An open bound has a nearest value only for integers."""
    name, relation = BOUNDS[kind]
    bound = context[name]
    field = find_field(without_places(key))
    whole = field is not None and "int" in str(field.annotation)
    step = {"gt": 1, "lt": -1}.get(name, 0)
    if step and not whole:
        return f"must be {relation} {bound}"
    return f"must be {relation} {bound}; the nearest is {bound + step}"


def _as_fraction(value: JSONValue, context: Mapping[str, float]) -> str:
    """Convert a percentage for a setting that must be a fraction, such as `; 5% is 0.05`; otherwise return ""."""
    is_part = 1.0 in (context.get("lt"), context.get("le"))
    return f"; {value:g}% is {value / 100:g}" if is_part and isinstance(value, int | float) and 1 < value < 100 else ""


def _example_of(key: Key, value: JSONValue) -> str:
    """Return an example if the setting must be a list or a mapping; otherwise return ""."""
    field = find_field(without_places(key))
    if field is not None and "tuple[" in str(field.annotation):
        is_one = isinstance(value, (str, int)) and len(str(value)) < _SHORT_CHARACTERS
        return f", such as {json.dumps([value]) if is_one and '...' in str(field.annotation) else '[1, 2]'}"
    entry = entries_of(field) if field is not None else None
    if entry is None and key == ("logging", "loggers"):
        wandb = "; for Weights & Biases set logging.wandb_project" if "wandb" in str(value) else ""
        return ", such as {package.module:Logger: {option: value}}" + wandb
    return _example(key, {ENTRY: section_example(entry, value)}) if entry is not None else ""


def _section_rule(key: Key, value: JSONValue) -> str:
    """Return the rule for a section whose value is not a section."""
    field, section = field_and_section(without_places(key))
    rule = "must be a section of `key: value` lines"
    if section is None:
        return rule
    if section.plain_forms:
        return f"must be {section.plain_forms}, or a section of `key: value` lines"
    assert field is not None, "a section has a field"
    if is_nullable(field) and (value is False or str(value).lower() in _OFF):
        return f"{rule}; write null to disable the section"
    if value is True and not any(inner.is_required() for inner in section.model_fields.values()):
        return f"{rule}; write {{}} for its defaults"
    return rule + _example(key, section_example(section, value))


def _example(key: Key, example: Example) -> str:
    """Return an example of a section as YAML and as an override."""
    return f", such as {in_yaml(example)}; as an override write {as_overrides(dotted(key), example)}"


def _type_remedy(kind: str, value: JSONValue, key: Key) -> str:
    """Return the replacement that follows from the value, or "" if there is none."""
    if kind == "string_type" and isinstance(value, (bool, int, float)):
        # An override of a plain setting needs no quotes, but inside a list or a mapping the shell would remove them.
        is_inside = find_field(key) is None
        in_shell = "; in a shell, put double quotes around the whole override" if is_inside else ""
        return f"; put it in quotes: '{show(value)}'{in_shell}"
    if kind == "string_type" and value is None:
        return "; write a text, or leave the setting out"
    if kind == "int_from_float" or (kind == "int_type" and isinstance(value, float)):
        close = typing.cast(float, value)
        return f"; the nearest is {round(close)}" if abs(close) < _LARGEST_EXACT_FLOAT else ""
    if kind in ("int_type", "float_type") and isinstance(value, str):
        number = _number_in(value)
        return f"; write {shortened(number)}" if number else "; give a number without quotes or units"
    if kind == "bool_type":
        meant = {"yes": "true", "on": "true", "1": "true", "no": "false", "off": "false", "0": "false"}
        word = show(value).strip("'").lower()
        answer = meant.get(word, word)
        return f"; write {answer}" if answer in ("true", "false") else ""
    return ""


def _number_in(text: str) -> str | None:
    """Return the number in a quoted text or in a text with underscores, or None."""
    plain = text.strip().replace("_", "")
    try:
        float(plain)
    except ValueError:
        return None
    return plain
