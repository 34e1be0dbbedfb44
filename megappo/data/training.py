"""Training prompts of one or several sources, and their order."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from megappo.config.sections.data import DataSettings
from megappo.data.cursor import Cursor
from megappo.data.mixture import MixedCursor, MixedPrompts
from megappo.data.prompts import PromptDataset
from megappo.files.json_values import JSONValue
from megappo.models.tokens import TokenRows

TrainingPrompts = PromptDataset | MixedPrompts
TrainingCursor = Cursor | MixedCursor


def read_prompts(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    tool_schemas: Sequence[JSONValue] = (),
    rows: TokenRows | None = None,
) -> TrainingPrompts:
    """Return the prompts of `data.train` or `data.mixture`. Raises ValueError if the prompts cannot be read, or contain
    tokens outside of `rows`."""
    datasets = {n: PromptDataset(s, settings, tokenizer, tool_schemas, n, rows) for n, s in settings.sources.items()}
    if settings.mixture is None:
        return datasets[""]
    return MixedPrompts({name: (settings.mixture[name].weight, prompts) for name, prompts in datasets.items()})


def training_cursor(prompts: TrainingPrompts, settings: DataSettings, seed: int) -> TrainingCursor:
    """Return a cursor at the first prompt."""
    most_resting = settings.curriculum.most_resting if settings.curriculum is not None else 0.0
    if isinstance(prompts, MixedPrompts):
        return MixedCursor(prompts, seed, settings.shuffle, most_resting=most_resting)
    return Cursor(
        len(prompts),
        seed,
        settings.shuffle,
        fingerprint=prompts.fingerprint,
        most_resting=most_resting,
        source=f"data.train, '{prompts.source}',",
    )
