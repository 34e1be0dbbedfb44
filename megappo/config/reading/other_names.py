"""Search for the settings that correspond to a name of verl, slime, miles, OpenRLHF, NeMo-RL or TRL.

The names are data in `foreign/`, one file per trainer. Names that are shared by several trainers are in
`foreign/common.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from megappo.config.foreign import common, nemo_rl, openrlhf, slime, trl, verl
from megappo.config.foreign.answers import ROLE, Counterpart

Key = tuple[str, ...]

TRAINERS: Mapping[str, Mapping[str, Counterpart]] = {
    "verl": verl.NAMES,
    "slime": slime.NAMES,
    "miles": slime.NAMES,
    "OpenRLHF": openrlhf.NAMES,
    "NeMo-RL": nemo_rl.NAMES,
    "TRL": trl.NAMES,
}
"""Answers of each trainer by the whole name, with dots between sections, underscores, and no leading dashes."""
_CRITIC, _ACTOR = {"critic", "value"}, {"actor", "policy", "ref", "reference"}
_MOST_KEYS = 6


def counterpart(section: Sequence[str], name: str) -> Counterpart | None:
    """Return the answer for a name in `section`, for the role of this section, or None for an unknown name.

    The whole name has precedence over its last parts. `critic.model.path` is a name of verl, although `path` alone is
    ambiguous.
    """
    parts = tuple(part.lower().lstrip("+-").replace("-", "_") for part in (*section, name) if part)
    if not parts:
        return None
    whole = _whole_names().get(".".join(parts)) if len(parts) > 1 else None
    return whole or _of_end(parts) or _of_common(parts) or _of_flags(parts) or _of_last_part(parts)


def is_dotted_name(key: Sequence[str]) -> bool:
    """Return whether a dotted name, such as `kl_ctrl.type`, is a setting of a trainer or the end of its name."""
    name = ".".join(key).lower()
    return len(key) > 1 and (name in _whole_names() or name in _names_by_end())


@functools.cache
def _whole_names() -> dict[str, Counterpart]:
    """Return the answers of all trainers by the whole name.

    If two trainers share a name, the answer contains the settings and notes of both trainers.
    """
    names: dict[str, Counterpart] = {}
    for trainer, answers in TRAINERS.items():
        for name, answer in answers.items():
            named = answer._replace(trainers=(trainer,))
            names[name] = _both(names[name], named) if name in names else named
    return {name: answer._replace(keys=_for_roles(answer.keys, ())) for name, answer in names.items()}


def _both(first: Counterpart, second: Counterpart) -> Counterpart:
    trainers = first.trainers + second.trainers
    if first.keys == second.keys:
        return Counterpart(first.keys, first.note or second.note, trainers)
    notes = [f"{' and '.join(a.trainers)}: {a.note}" for a in (first, second) if a.note]
    return Counterpart(tuple(dict.fromkeys(first.keys + second.keys)), "; ".join(notes), trainers)


@functools.cache
def _names_by_end() -> dict[str, list[str]]:
    """Return lists of whole names by the end of the name. An end has any number of parts."""
    ends: dict[str, list[str]] = {}
    for name in _whole_names():
        parts = name.split(".")
        for begin in range(len(parts)):
            ends.setdefault(".".join(parts[begin:]), []).append(name)
    return ends


def _of_end(parts: Key) -> Counterpart | None:
    """Return the answer for the last parts of a whole name, such as `kl_ctrl.type`.

    The name may begin with a section that is not in the whole name, such as `actor` in
    `actor.megatron.tensor_model_parallel_size`.
    """
    for begin in range(len(parts) - 1):
        if agreed := _agreed(_names_by_end().get(".".join(parts[begin:]), ()), parts):
            return agreed
    return None


def _of_last_part(parts: Key) -> Counterpart | None:
    """Return the answer that all whole names with this last part share. Single words are too general."""
    return _agreed(_names_by_end().get(parts[-1], ()), parts) if "_" in parts[-1] else None


def _agreed(names: Sequence[str], parts: Key) -> Counterpart | None:
    """Return the common answer of several whole names, or None if the answers differ in more than the role."""
    answers = [_whole_names()[name] for name in names]
    if len({tuple(dict.fromkeys(_without_role(key) for key in a.keys)) for a in answers}) != 1:
        return None
    roles = _roles(parts[:-1])
    keys = dict.fromkeys(key for a in answers for key in a.keys)
    of_role = [key for key in keys if len(roles) == 2 or key.split(".")[0] not in {"actor", "critic"} - {*roles}]
    if len(keys) > _MOST_KEYS:
        return None
    trainers = dict.fromkeys(trainer for a in answers for trainer in a.trainers)
    return Counterpart(tuple(of_role or keys), next((a.note for a in answers if a.note), ""), tuple(trainers))


def _of_flags(parts: Key) -> Counterpart | None:
    """Return the answer for a name without sections, or None if megappo has a setting with the same name."""
    flag_answer = _whole_names().get(parts[-1]) if len(parts) == 1 or _is_section(parts[0]) else None
    is_ours = flag_answer is not None and any(key.endswith(f".{parts[-1]}") for key in flag_answer.keys)
    return None if is_ours else flag_answer


def _of_common(parts: Key) -> Counterpart | None:
    common_answer = common.NAMES.get(".".join(parts[-2:])) if len(parts) > 1 else None
    common_answer = common_answer or (common.NAMES.get(parts[-1]) if len(parts) == 1 or _is_section(parts[0]) else None)
    return common_answer and common_answer._replace(keys=_for_roles(common_answer.keys, parts[:-1]))


@functools.cache
def _is_section(name: str) -> bool:
    """Return whether a name is a top-level section of megappo or of a trainer in `TRAINERS`."""
    from megappo.config.schema import Config  # the schema does not need this module

    return name in Config.model_fields or any(whole.startswith(f"{name}.") for whole in _whole_names())


def _roles(section: Key) -> tuple[str, ...]:
    return ("critic",) if _CRITIC & {*section} else ("actor",) if _ACTOR & {*section} else ("actor", "critic")


def _for_roles(keys: Key, section: Key) -> Key:
    return tuple(key.replace(ROLE, role, 1) for key in keys for role in (_roles(section) if ROLE in key else ("",)))


def _without_role(key: str) -> str:
    role, _, rest = key.partition(".")
    return f"{ROLE}.{rest}" if role in ("actor", "critic") else key
