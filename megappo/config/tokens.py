"""Token ids, whoever made them: which of them a model has a row of its embedding for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megappo.config.schema import Config
    from megappo.families.architecture import ModelShape


@dataclass(frozen=True)
class TokenRows:
    """The rows of the smallest embedding among the models that read the same tokens; rows of padding are none."""

    count: int
    """`vocab_size` of its config.json: ids below it have a row."""
    model: str
    """Its folder or hub name."""

    def problem(self, token_ids: Sequence[int]) -> str:
        """Which of these ids has no row, in words; "" where each has one."""
        missing = without_row(token_ids, self.count)
        if missing is None:
            return ""
        return f"token {missing}, for which the model '{self.model}' has no row (its vocab_size is {self.count})"


def without_row(token_ids: Sequence[int], rows: int) -> int | None:
    """The first id that an embedding of so many rows has none for."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < rows):
        return None
    return next(token for token in token_ids if not 0 <= token < rows)


def stop_token_rules(config: Config, shapes: Mapping[str, ModelShape]) -> Iterator[str]:
    """Stop tokens that are configured can be sampled, and read by every role; `shapes` is keyed by the model's name in
    sentences."""
    name, rows = min(((n, shape.vocab_size) for n, shape in shapes.items()), key=lambda found: found[1])
    missing = without_row(config.rollout.stop_token_ids, rows)
    if missing is not None:
        yield (
            f"rollout.stop_token_ids has {missing}, for which the {name} model has no row (its vocab_size is {rows}); "
            f"set ids of at most {rows - 1}, or remove it"
        )
