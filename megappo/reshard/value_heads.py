"""Scalar heads in model folders, under the names of other programs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

EXPORTED = ("score.weight", "score.bias")
"""Names in transformers' token classifiers. Exports of a critic use these names."""
EXTRA_FILE = "value_head.safetensors"
"""File in which some programs store the head separately from the files of the model."""
_STEMS = ("score", "v_head.summary", "v_head", "value_head")
"""Names of the layer of the head: transformers' classifiers and verl; TRL; older TRL and trlx; OpenRLHF."""


@dataclass(frozen=True)
class ValueHeadNames:
    """Tensor names of a head."""

    weight: str
    bias: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all existing tensors of the head."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


def find_value_head(names: Collection[str], prefix: str | None = None) -> ValueHeadNames | None:
    """Return the head among the tensors of a folder, or None if there is no head.

    `prefix` is the name of the head in config.json (`value_head_prefix`). Raises ValueError unless the head is one
    linear layer.
    """
    first_parts = {stem.split(".")[0] for stem in _stems(prefix)}
    head_names = {name for name in names if name.split(".")[0] in first_parts}
    if not head_names:
        return None
    heads = [
        ValueHeadNames(f"{stem}.weight", f"{stem}.bias" if f"{stem}.bias" in head_names else None)
        for stem in _stems(prefix)
        if f"{stem}.weight" in head_names
    ]
    if len(heads) != 1 or head_names - {heads[0].weight, heads[0].bias}:
        raise ValueError(
            f"it holds {', '.join(sorted(head_names))}; the head of a critic is one linear layer with a weight and an "
            f"optional bias, named {', '.join(_stems(prefix))}"
        )
    return heads[0]


def _stems(prefix: str | None) -> Iterator[str]:
    yield from dict.fromkeys((*_STEMS, *((prefix,) if prefix else ())))
