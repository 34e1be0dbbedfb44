"""Checks that all ranks were started with the same settings, data and devices.

Otherwise collectives could hang or compute wrong results.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence

from megappo.checkpoint.versions import software_versions
from megappo.config import Config
from megappo.config.load import flat_settings
from megappo.data import PromptDataset, TrainingPrompts
from megappo.errors import ConfigError, first_of, show
from megappo.files.json_values import JSONValue
from megappo.plugins import own_files
from megappo.runtime.process import Runtime
from megappo.runtime.ranks.objects import all_gather_objects

_OF_A_MACHINE = ("runtime.", "run.files", "data.template_time")
"""Settings that name file locations, or that depend on the machine or the clock by default."""
_MOST = 3


def check_ranks(config: Config, runtime: Runtime) -> None:
    """Raise ConfigError on every rank if settings, device types or versions differ between ranks.

    The error names the differing ranks and the differences. A collective of the world.
    """
    settings = config.model_dump(mode="json")
    checksums = {f"the checksum of {file}": digest for file, digest in own_files(settings).items()}
    facts = {**dict(flat_settings(settings)), **checksums}
    facts = {name: value for name, value in facts.items() if not name.startswith(_OF_A_MACHINE)}
    versions = {f"the version of {name}": version for name, version in software_versions().items()}
    check_alike({**facts, "the device": runtime.device.type, **versions})


def check_data(training: TrainingPrompts, validation: Mapping[str, PromptDataset]) -> None:
    """Raise ConfigError on every rank if the data differ between ranks. A collective of the world."""
    sets = {f"the checksum of validation data{name and f' {name}'}": v.fingerprint for name, v in validation.items()}
    check_alike({"the checksum of the training data": training.fingerprint, **sets})


def check_alike(facts: Mapping[str, JSONValue]) -> None:
    """Raise ConfigError on every rank if the facts differ between ranks. A collective of the world.

    The error shows the names of the facts.
    """
    text = json.dumps(facts, sort_keys=True, default=str)
    if len(set(all_gather_objects(hashlib.sha256(text.encode()).hexdigest()))) == 1:
        return
    of_ranks = all_gather_objects(json.loads(text))
    names = dict.fromkeys(name for of_rank in of_ranks for name in of_rank)
    differences = [
        difference for name in names if (difference := _difference(name, [of_rank.get(name) for of_rank in of_ranks]))
    ]
    raise ConfigError(
        f"settings, files or software differ between ranks: {first_of(differences, _MOST, '; ')}; start all ranks with "
        "the same settings, files and software"
    )


def _difference(name: str, values: Sequence[JSONValue]) -> str:
    """Return for example `run.seed is 1 on most ranks and 2 on rank 3`, or "" if all values are equal."""
    texts = [show(value) for value in map(_shown, values)]
    counts = Counter(json.dumps(value, sort_keys=True) for value in values)
    if len(counts) == 1:
        return ""
    usual = counts.most_common(1)[0][0]
    others = [rank for rank, value in enumerate(values) if json.dumps(value, sort_keys=True) != usual]
    first = next(rank for rank in range(len(values)) if rank not in others)
    where = f"rank {first}" if len(values) == 2 else "most ranks"
    whose = f"rank {others[0]}" if len(others) == 1 else f"ranks {first_of(others, 8)}"
    return f"{name} is {texts[first]} on {where} and {texts[others[0]]} on {whose}"


def _shown(value: JSONValue) -> JSONValue:
    """Return the first 12 digits of a checksum, and any other value unchanged."""
    return value[:12] if isinstance(value, str) and len(value) == 64 and value.isalnum() else value
