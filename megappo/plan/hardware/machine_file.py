"""Machines from a YAML file instead of the table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megappo.config.load import read_text
from megappo.config.reading.yaml_core import parse_yaml
from megappo.errors import ALIKE, ConfigError, either, expanded, nearest_word, show
from megappo.plan.hardware.machines import MACHINES, Machine
from megappo.plan.hardware.measured import LOCAL, measure_cpu

_TEXTS = ("words", "kind")
_KINDS = ("gpu", "cpu")
_UNITS = {
    "bfloat16_teraflops": ("bfloat16_flops", 1e12),
    "float32_teraflops": ("float32_flops", 1e12),
    "memory_gigabytes": ("memory_bytes", 1e9),
    "memory_gigabytes_per_second": ("memory_bandwidth", 1e9),
    "intra_node_gigabytes_per_second": ("intra_node_bandwidth", 1e9),
    "inter_node_gigabytes_per_second": ("inter_node_bandwidth", 1e9),
}
"""Numeric keys of the file, with their fields of `Machine` and units."""
_HOST = "host_gigabytes_per_second"
"""Optional key of the bandwidth between a device and host memory."""
_KEYS = (*_TEXTS, *_UNITS, "devices_per_node")
_MOST = 1e9
"""Largest accepted number in the file. A larger number indicates a wrong unit."""


def find_machine(text: str) -> Machine:
    """Return a machine by its name in the table or by the path of a YAML file. For `here`, return the measured CPU of
    this machine.

    Raises ConfigError for an unknown name or an invalid file.
    """
    if text in MACHINES:
        return MACHINES[text]
    if text == LOCAL:
        return measure_cpu()
    if text.endswith((".yaml", ".yml")) or "/" in text:
        return read_machine(Path(expanded(text, "--machine")))
    known = [*MACHINES, LOCAL]
    alike = nearest_word(text, known, cutoff=ALIKE)
    near = [name for name in known if name.startswith(text.lower())] or ([alike] if alike is not None else [])
    raise ConfigError(
        f"--machine is {show(text)}, must be {either(known)}, or a YAML file that describes one, such as "
        f"configs/machines/rtx4090.yaml" + (f"; the nearest is {either(near)}" if near else "")
    )


def read_machine(path: Path) -> Machine:
    """Return the machine that a file like configs/machines/rtx4090.yaml describes. The name of the machine is the name
    of the file.

    Raises ConfigError with a sentence per mistake.
    """
    content = parse_yaml(read_text(path), str(path))
    if not isinstance(content, dict):
        raise ConfigError(f"{path} contains {show(content)}, must describe a machine by {', '.join(_KEYS)}")
    problems = [f"{path}: {problem}" for problem in _problems(content)]
    if problems:
        raise ConfigError(problems)
    is_gpu = content["kind"] == "gpu"
    host = {"host_bandwidth": content[_HOST] * 1e9} if _HOST in content else {}
    return Machine(
        name=path.stem,
        summary=content["words"],
        **{field: content[key] * unit for key, (field, unit) in _UNITS.items()},
        devices_per_node=content["devices_per_node"],
        is_cuda=is_gpu,
        shared_by_ranks=not is_gpu,
        **host,
    )


def _problems(content: Mapping[Any, Any]) -> Iterator[str]:
    for key in content:
        if key == _HOST:
            if (problem := _wrong(key, content[key])) is not None:
                yield f"{key} is {show(content[key])}, must be {problem}"
        elif key not in _KEYS:
            nearest = nearest_word(str(key), (*_KEYS, _HOST))
            yield f"{show(key)} is not a key of a machine; the nearest is '{nearest}' of {', '.join(_KEYS)}"
    for key in _KEYS:
        if key not in content:
            yield f"{key} is missing; a machine has {', '.join(_KEYS)}"
        elif (problem := _wrong(key, content[key])) is not None:
            yield f"{key} is {show(content[key])}, must be {problem}"


def _wrong(key: str, value: object) -> str | None:
    """Return a description of the accepted values if the value is invalid, otherwise None."""
    if key == "kind":
        return None if value in _KINDS else either(_KINDS)
    if key == "words":
        return None if isinstance(value, str) and value else "text, such as 'RTX 4090, 24 GB'"
    if key == "devices_per_node":
        whole = isinstance(value, int) and not isinstance(value, bool)
        return None if whole and 1 <= value <= _MOST else "a whole number from 1"  # type: ignore[operator]
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return None if number and 0 < value <= _MOST else f"a number above 0, at most {_MOST:g}"  # type: ignore[operator]
