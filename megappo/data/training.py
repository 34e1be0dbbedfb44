"""Training prompts of one source or several, and the order in which they are taken."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from megappo.config.data import DataSettings
from megappo.config.tokens import TokenRows
from megappo.data.cursor import Cursor
from megappo.data.mixture import MixedCursor, MixedPrompts
from megappo.data.prompts import PromptDataset
from megappo.observe.json_values import JSONValue

TrainingPrompts = PromptDataset | MixedPrompts
TrainingCursor = Cursor | MixedCursor


def read_prompts(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    tool_schemas: Sequence[JSONValue] = (),
    rows: TokenRows | None = None,
) -> TrainingPrompts:
    """The prompts of `data.train` or `data.mixture`, of tokens that are among `rows`. Raises ValueError where they
    cannot be read."""
    found = {n: PromptDataset(s, settings, tokenizer, tool_schemas, n, rows) for n, s in settings.sources.items()}
    if settings.mixture is None:
        return found[""]
    return MixedPrompts({name: (settings.mixture[name].weight, prompts) for name, prompts in found.items()})


def training_cursor(prompts: TrainingPrompts, settings: DataSettings, seed: int) -> TrainingCursor:
    """A cursor over these prompts, at its beginning."""
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
