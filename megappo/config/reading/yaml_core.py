"""YAML parser for the core schema of YAML 1.2.

PyYAML follows YAML 1.1, in which `1e-5` is text (floats need a dot and a signed exponent), `010` is 8, `1:30` is 90,
`no` is false and `2026-01-02` is a date. Each case causes errors in settings, and the first one affects every learning
rate. This loader supports only the core schema: null, true/false, integers (decimal, 0o, 0x), floats, text, lists and
mappings. It also rejects duplicate keys, of which PyYAML silently keeps the last one. Input that is too large or too
deeply nested for settings is rejected before it costs time or memory.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml

from megappo.errors import ConfigError, shortened
from megappo.files.json_values import JSONValue

LONGEST_TEXT_CHARACTERS = 100_000
DEEPEST_NESTING = 50
"""Maximum depth of nested sections and lists."""
_MOST_VALUES = 5_000
_LONGEST_INT_CHARACTERS = 40
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
"""Characters that text must not contain. File names cannot contain NUL, and UTF-8 cannot encode half of a surrogate
pair."""

_TAG = "tag:yaml.org,2002:"
_CORE_SCALARS = (
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("merge", r"<<", "<"),
)


class _Refused(yaml.MarkedYAMLError):
    """Error for valid YAML that cannot be settings."""

    def __init__(self, problem: str, mark: yaml.Mark) -> None:
        super().__init__(problem=problem, problem_mark=mark)


class _CoreLoader(yaml.SafeLoader):
    """SafeLoader with the core schema's scalars and size limits, without duplicate keys."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}
    yaml_constructors: ClassVar[dict[str | None, Any]] = {
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(_TAG) in ("seq", "map")
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._begun = self._inside = 0
        self._sizes: dict[int, tuple[int, int]] = {}
        """(values, levels) of every finished node by its id. The content of an anchor counts at each use."""

    def compose_node(self, parent: yaml.Node | None, index: yaml.Node | int | None) -> yaml.Node:
        """Compose a node. Raises _Refused if the node is too deep or too large with all anchors expanded."""
        mark, is_alias = self.peek_event().start_mark, self.check_event(yaml.AliasEvent)
        self._inside += 1
        self._begun += 1
        self._check_size(self._begun, self._inside, mark)
        node = super().compose_node(parent, index)
        self._inside -= 1
        if is_alias:
            if id(node) not in self._sizes:
                raise _Refused("an anchor contains itself; write the value out", mark)
            return node
        items = [] if isinstance(node, yaml.ScalarNode) else node.value
        inner = [part for item in items for part in (item if isinstance(item, tuple) else (item,))]
        values = 1 + sum(self._sizes[id(part)][0] for part in inner)
        levels = 1 + max((self._sizes[id(part)][1] for part in inner), default=0)
        self._check_size(values, levels, mark)
        self._sizes[id(node)] = (values, levels)
        return node

    def _check_size(self, values: int, levels: int, mark: yaml.Mark) -> None:
        if values > _MOST_VALUES or levels > DEEPEST_NESTING:
            raise _Refused(
                f"there are more than {_MOST_VALUES} values or {DEEPEST_NESTING} levels with anchors expanded, which "
                "no settings need; remove some, or put data into a separate file",
                mark,
            )

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """Compose a mapping. Raises _Refused for a duplicate key."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise _Refused(
                        f"the key '{shortened(key.value)}' occurs twice in this section; remove one", key.start_mark
                    )
                seen.add((key.tag, key.value))
        return node

    def construct_core_scalar(self, node: yaml.ScalarNode) -> bool | int | float | str | None:
        """Return the value of a scalar. Its tag is explicit or follows from its form."""
        text, kind = str(self.construct_scalar(node)), node.tag.removeprefix(_TAG)
        if kind == "str":
            if _NO_TEXT.search(text):
                raise _Refused("text must not hold a NUL or half a surrogate pair; remove it", node.start_mark)
            return text
        if not _FORMS[kind].fullmatch(text):
            raise _Refused(f"'{shortened(text)}' is no {kind}; remove the tag !!{kind}", node.start_mark)
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if kind == "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        if len(text) > _LONGEST_INT_CHARACTERS:
            problem = f"no setting takes a whole number of {len(text)} characters; write a smaller one"
            raise _Refused(problem, node.start_mark)
        return int(text, 0 if text[:2] in ("0o", "0x") else 10)


class _CoreDumper(yaml.SafeDumper):
    """Dumper that quotes text which either version of YAML would read as another type, and never writes anchors."""

    def ignore_aliases(self, data: JSONValue) -> bool:
        """Write every value in full."""
        return True


_TOKENS_OF_VALUES = (
    yaml.ScalarToken, yaml.TagToken, yaml.AliasToken, yaml.KeyToken, yaml.ValueToken, yaml.BlockEntryToken,
    yaml.FlowEntryToken, yaml.FlowSequenceStartToken, yaml.FlowSequenceEndToken, yaml.FlowMappingStartToken,
    yaml.FlowMappingEndToken,
)  # fmt: skip
"""Tokens of YAML that are part of a value. Other tokens are document markers, anchors and ends of blocks."""
_FORMS = {name: re.compile(f"^(?:{pattern})$") for name, pattern, _ in _CORE_SCALARS}
for _kind in ("null", "bool", "int", "float", "str"):
    _CoreLoader.add_constructor(_TAG + _kind, _CoreLoader.construct_core_scalar)
for _name, _, _first in _CORE_SCALARS:
    for _yaml_class in (_CoreLoader, _CoreDumper):
        _yaml_class.add_implicit_resolver(_TAG + _name, _FORMS[_name], ["" if c == "\0" else c for c in _first])


def parse_yaml(text: str, where: str) -> Any:
    """Return the value of one YAML document. Values of anchors are copied for each use.

    `where` names the text in errors. Raises ConfigError with the line of a syntax error, or if the text is too large
    for settings.
    """
    if len(text) > LONGEST_TEXT_CHARACTERS:
        raise ConfigError(
            f"{where} has more than {LONGEST_TEXT_CHARACTERS} characters, which no settings need; give the YAML file "
            "of a run, and put data into a separate file"
        )
    loader = None
    try:
        loader = _CoreLoader(text)
        return _unshared(loader.get_single_data())
    except _Refused as error:
        raise ConfigError(f"{where}{_place(error.problem_mark)}: {error.problem}") from error
    except yaml.MarkedYAMLError as error:
        context = f" {shortened(error.context)}," if error.context else ""
        place = f"{where}{_place(error.problem_mark or error.context_mark)}"
        raise ConfigError(f"{place}: this is not valid YAML:{context} {shortened(error.problem, 200)}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: this is not valid YAML: {error}") from error
    except (ValueError, OverflowError) as error:  # PyYAML does not check numbers of escapes and directives
        place = f"{where}{_place(loader.get_mark() if loader is not None else None)}"
        raise ConfigError(f"{place}: this is not valid YAML: a number that is too large ({error})") from error


def parse_value(text: str, where: str) -> Any:
    """Return the value of an override. The rules of YAML apply, but a single line cannot contain a comment.

    A line of plain text is one value, even with special characters: `exp #2`, `&a b`. Raises ConfigError like
    `parse_yaml`, and if a comment follows a list, a mapping or a quoted text.
    """
    line = text.strip()
    if not line or len(line) > LONGEST_TEXT_CHARACTERS:
        return parse_yaml(text, where)
    try:
        tokens = [token for token in yaml.scan(line, Loader=yaml.SafeLoader) if isinstance(token, _TOKENS_OF_VALUES)]
    except (yaml.YAMLError, ValueError, OverflowError):
        return parse_yaml(text, where)  # raises an error with the position
    is_text = all(isinstance(token, yaml.ScalarToken) and token.style in (None, "|", ">") for token in tokens)
    if len(line.splitlines()) > 1:  # parsed like a file, unless plain text contains a comment
        is_cut = is_text and len(tokens) == 1 and tokens[0].plain and line.count("#") > tokens[0].value.count("#")
        return line if is_cut else parse_yaml(text, where)
    if is_text and len(tokens) < 2:
        return parse_yaml(text, where) if tokens and tokens[0].value == line else line
    comment = line[tokens[-1].end_mark.index :].strip()
    if comment.startswith("#"):
        raise ConfigError(
            f"{where}: '{shortened(comment)}' would be a comment of YAML and be lost; remove it, or put quotes around "
            "the text that it belongs to"
        )
    return parse_yaml(text, where)


def _place(mark: yaml.Mark | None) -> str:
    return f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""


def dump_yaml(value: JSONValue) -> str:
    """Format mappings, lists and scalars as YAML that `parse_yaml` reads as equal values."""
    return str(yaml.dump(value, Dumper=_CoreDumper, sort_keys=False, allow_unicode=True, width=110))


def _unshared(value: JSONValue) -> JSONValue:
    """Return a copy without shared values, so that an override changes only one use of an anchor."""
    if isinstance(value, list):
        return [_unshared(item) for item in value]
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    return value
