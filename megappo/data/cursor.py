"""Order of prompts, equal on all ranks without communication."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Any

import torch

from megappo.files.json_values import JSONValue

_GENERATOR_BITS = 32
# Seeds below 2^12 and epochs below 2^20 fit the 32 bits of the generator without collisions. Higher bits of a seed are
# hashed.
_SEED_BITS, _EPOCH_BITS = 12, 20


class Cursor:
    """Iterates over a data set epoch by epoch. The order of an epoch depends on (seed, epoch). Resting prompts are
    skipped."""

    def __init__(
        self,
        dataset_size: int,
        seed: int,
        shuffle: bool,
        *,
        fingerprint: str,
        most_resting: float = 0.0,
        source: str = "the source",
    ) -> None:
        """Create a cursor at the start of the first epoch.

        Args:
            dataset_size: number of prompts; at least 1.
            seed: seed of the order.
            shuffle: whether epochs have a random order.
            fingerprint: identifies the data. A saved cursor with another fingerprint is refused.
            most_resting: maximum fraction of the prompts that an epoch skips. At least one prompt remains.
            source: name of the data in errors.
        """
        if dataset_size < 1:
            raise ValueError(f"dataset_size is {dataset_size}, must be at least 1; use a data set with prompts")
        self._size, self._seed, self._shuffle, self._fingerprint = dataset_size, seed, shuffle, fingerprint
        self._source = source
        self._most_resting = min(dataset_size - 1, int(dataset_size * most_resting))
        self.epoch = 0
        """Number of complete passes over the data."""
        self.position = 0
        """Number of prompts taken in this epoch, less than the prompts of the epoch."""
        self._last_rests: dict[int, int] = {}
        """Last epoch without the prompt, for each prompt that rests now or later."""
        self._resting: tuple[int, ...] = ()
        """Prompts that this epoch skips."""
        self._order = self._draw_order()

    @property
    def resting(self) -> int:
        """Number of prompts that this epoch skips."""
        return len(self._resting)

    def rest(self, indices: Iterable[int], epochs: int) -> None:
        """Skip prompts for a number of epochs, starting with the next epoch."""
        is_new = self.position == 0
        self._last_rests |= dict.fromkeys(indices, self.epoch + epochs - is_new)
        if is_new:
            self._begin_epoch()

    def _draw_order(self) -> list[int]:
        if not self._shuffle:
            order = list(range(self._size))
        else:
            generator = torch.Generator().manual_seed(_generator_seed(self._seed, self.epoch))
            order = torch.randperm(self._size, generator=generator).tolist()
        resting = frozenset(self._resting)
        return [i for i in order if i not in resting] if resting else order

    def _begin_epoch(self) -> None:
        self._last_rests = {i: last for i, last in self._last_rests.items() if last >= self.epoch}
        longest = sorted(self._last_rests, key=lambda i: (-self._last_rests[i], i))
        self._resting = tuple(sorted(longest[: self._most_resting]))
        self._order = self._draw_order()

    def take(self, n: int) -> list[int]:
        """Return the next `n` indices, across epochs."""
        taken: list[int] = []
        while len(taken) < n:
            part = self._order[self.position : self.position + n - len(taken)]
            taken += part
            self.position += len(part)
            if self.position == len(self._order):
                self.epoch, self.position = self.epoch + 1, 0
                self._begin_epoch()
        return taken

    def state_dict(self) -> dict[str, JSONValue]:
        """Return the state for a checkpoint."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "fingerprint": self._fingerprint,
            "seed": self._seed,
            "shuffle": self._shuffle,
            **({"resting": list(self._resting)} if self._resting else {}),
            **({"last_rests": [list(rest) for rest in self._last_rests.items()]} if self._last_rests else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved cursor. Raises ValueError if the state does not fit the data, the seed or the shuffling."""
        missing = {"epoch", "position", "fingerprint", "seed", "shuffle"} - state.keys()
        if missing:
            raise ValueError(f"the saved cursor lacks {', '.join(sorted(missing))}; use an undamaged checkpoint")
        if state["fingerprint"] != self._fingerprint:
            raise ValueError(other_data(self._source))
        if (state["seed"], state["shuffle"]) != (self._seed, self._shuffle):
            raise ValueError(
                f"the saved cursor has run.seed {state['seed']} and data.shuffle {str(state['shuffle']).lower()}, but "
                f"the run has {self._seed} and {str(self._shuffle).lower()}; restore both settings, or start a new run"
            )
        epoch, position, resting = int(state["epoch"]), int(state["position"]), state.get("resting", ())
        taking_part = self._size - len(resting)
        if epoch < 0 or not 0 <= position < taking_part:
            raise ValueError(
                f"the saved cursor is at position {position} of epoch {epoch}, outside of {taking_part} prompts; "
                "use an undamaged checkpoint"
            )
        self.epoch, self.position, self._resting = epoch, position, tuple(resting)
        self._last_rests = dict(state.get("last_rests", ()))
        self._order = self._draw_order()


def other_data(sources: str) -> str:
    """Return the error message for sources with prompts that differ from the start of the run."""
    return (
        f"the prompts or answers of {sources} differ from the start of the run: the data, the tokenizer or a setting "
        "of data has changed; restore them, start a new run, or set run.force_resume: true to start with the new data"
    )


def _generator_seed(seed: int, epoch: int) -> int:
    """Return a seed of 32 bits, because torch's CPU generator ignores higher bits. Seeds 1 and 4097 must differ."""
    word = (seed << _EPOCH_BITS) + epoch
    high = seed >> _SEED_BITS
    if high:
        word ^= int.from_bytes(sha256(str(high).encode()).digest()[:4], "little")
    return word % 2**_GENERATOR_BITS
