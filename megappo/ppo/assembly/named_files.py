"""Check for settings with the name of a missing file or folder."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.config import Config
from megappo.config.load import flat_settings
from megappo.config.role_models import tokenizer_folder
from megappo.data.sources import source_files
from megappo.plugins import check_own_file, own_file
from megappo.ppo.assembly.origins import check_origin


def missing_files(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (setting, message) for each missing file of data or functions, tokenizer and origin of weights."""
    for key, value in flat_settings(config.model_dump(mode="json")):
        if not isinstance(value, str):
            continue
        try:
            _check(config, key, value)
        except ValueError as error:
            yield key, str(error)


def _check(config: Config, key: str, value: str) -> None:
    file = own_file(value)
    if file is not None:
        check_own_file(value, file, key)
    elif key.startswith("data.") and key.endswith(".source") and value.endswith((".jsonl", ".parquet")):
        source_files(value)
    elif key == "model.tokenizer":
        tokenizer_folder(config.model)
    elif key.endswith(".start_from"):
        check_origin(value)
