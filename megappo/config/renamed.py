"""Names of settings in older versions, which are replaced by the current names before validation.

`rollout.engine: sglang` and `rollout.sglang: {...}` are `rollout.servers: {kind: sglang, ...}` now.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megappo.config.sections.engine import SERVERS

Key = tuple[str, ...]

_SERVERS, _OLD_SERVERS, _OLD_ENGINE = ("rollout", "servers"), ("rollout", "sglang"), ("rollout", "engine")
_FIELDS = {"engines": "count"}
"""Current names of settings of servers by their old names."""


def replace_old_names(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the sections of a configuration with current names, and `OLD is now NEW` for each old name."""
    sections, rollout = dict(settings), settings.get("rollout")
    if not isinstance(rollout, Mapping):
        return sections, []
    old, renamed = dict(rollout), list[str]()
    servers, old_section = old.get("servers"), _OLD_SERVERS[-1]
    kind = old.get("engine")
    if isinstance(kind, str) and kind in SERVERS and isinstance(servers, Mapping | None):
        renamed.append(_engine_sentence(kind))
        del old["engine"]
        servers = {"kind": kind, **(servers or {})}
    if old_section in old and "servers" not in old:
        renamed.append(_sentence(_OLD_SERVERS, _SERVERS))
        section = old.pop(old_section)
        servers = servers if section is None else _renamed(section)
    if not renamed:
        return sections, []
    return {**sections, "rollout": {**old, "servers": servers}}, renamed


def replace_old_override(key: Key, value: str) -> tuple[Key, str | None]:
    """Return the current key of an override, and `OLD is now NEW` if the key or the value has an old name."""
    if key == _OLD_ENGINE and value.strip() in SERVERS:
        return (*_SERVERS, "kind"), _engine_sentence(value.strip())
    if key[: len(_OLD_SERVERS)] != _OLD_SERVERS:
        return key, None
    new = (*_SERVERS, *(_FIELDS.get(name, name) for name in key[len(_OLD_SERVERS) :]))
    return new, _sentence(key, new)


def replace_old_section(key: Key, value: Any) -> Any:
    """Return the value of an override whose key `replace_old_override` has replaced."""
    return _renamed(value) if key == _SERVERS else value


def _renamed(section: Any) -> Any:
    """Return a section of servers with current names. A value that is no section is an error of the user."""
    if not isinstance(section, Mapping):
        return section
    return {"kind": _OLD_SERVERS[-1]} | {_FIELDS.get(name, name): value for name, value in section.items()}


def _engine_sentence(kind: str) -> str:
    return f"rollout.engine: {kind} is now rollout.servers.kind: {kind}"


def _sentence(old: Key, new: Key) -> str:
    return f"{'.'.join(old)} is now {'.'.join(new)}"
