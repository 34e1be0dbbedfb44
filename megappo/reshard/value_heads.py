"""Scalar heads in model folders, by the names that other programs give them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

EXPORTED = ("score.weight", "score.bias")
"""Names in transformers' token classifiers, which exports of a critic have."""
EXTRA_FILE = "value_head.safetensors"
"""File in which some programs keep the head beside the model's own files."""
_STEMS = ("score", "v_head.summary", "v_head", "value_head")
"""Names of the head's layer: transformers' classifiers and verl; TRL; older TRL and trlx; OpenRLHF."""


@dataclass(frozen=True)
class ValueHeadNames:
    """Tensors that make up a head."""

    weight: str
    bias: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors of the head that are there."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


def find_value_head(names: Collection[str], prefix: str | None = None) -> ValueHeadNames | None:
    """The head among the tensors of a folder, None where there is none.

    `prefix`: the name that config.json gives it (`value_head_prefix`). Raises ValueError for anything but one linear
    layer.
    """
    first_parts = {stem.split(".")[0] for stem in _stems(prefix)}
    found = {name for name in names if name.split(".")[0] in first_parts}
    if not found:
        return None
    heads = [
        ValueHeadNames(f"{stem}.weight", f"{stem}.bias" if f"{stem}.bias" in found else None)
        for stem in _stems(prefix)
        if f"{stem}.weight" in found
    ]
    if len(heads) != 1 or found - {heads[0].weight, heads[0].bias}:
        raise ValueError(
            f"it holds {', '.join(sorted(found))}; a critic's head is one linear layer: a weight and perhaps a bias, "
            f"named {', '.join(_stems(prefix))}"
        )
    return heads[0]


def _stems(prefix: str | None) -> Iterator[str]:
    yield from dict.fromkeys((*_STEMS, *((prefix,) if prefix else ())))
