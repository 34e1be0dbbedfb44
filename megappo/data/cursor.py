"""The order in which prompts are taken; the same on every rank without communication."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Any

import torch

from megappo.observe.json_values import JSONValue

_GENERATOR_BITS = 32
# Seeds below 2^12 and epochs below 2^20 fill the generator's 32 bits without collisions; higher bits of a seed are
# hashed in.
_SEED_BITS, _EPOCH_BITS = 12, 20


class Cursor:
    """Walks through a data set epoch by epoch, each in an order drawn from (seed, epoch), without those that rest."""

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
        """`fingerprint` identifies the data: a saved cursor is refused on other data, which errors call `source`. An
        epoch leaves out at most the part `most_resting` of the prompts, and never all."""
        if dataset_size < 1:
            raise ValueError(f"dataset_size is {dataset_size}, must be at least 1; give the cursor a data set")
        self._size, self._seed, self._shuffle, self._fingerprint = dataset_size, seed, shuffle, fingerprint
        self._source = source
        self._most_resting = min(dataset_size - 1, int(dataset_size * most_resting))
        self.epoch = 0
        """Complete passes over the data."""
        self.position = 0
        """Prompts taken in this epoch; less than it has."""
        self._last_rests: dict[int, int] = {}
        """For each prompt that rests now or later: the last epoch without it."""
        self._resting: tuple[int, ...] = ()
        """Prompts that this epoch leaves out."""
        self._order = self._draw_order()

    @property
    def resting(self) -> int:
        """Number of prompts that this epoch leaves out."""
        return len(self._resting)

    def rest(self, indices: Iterable[int], epochs: int) -> None:
        """Leave these prompts out of the next epochs, of which the first is the next that begins."""
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
        """The next `n` indices, across ends of epochs."""
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
        """State for a checkpoint."""
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
        """Continue where a saved cursor stood. Raises ValueError where the data are others."""
        missing = {"epoch", "position", "fingerprint", "seed", "shuffle"} - state.keys()
        if missing:
            raise ValueError(f"the saved cursor lacks {', '.join(sorted(missing))}; use a checkpoint that is whole")
        if state["fingerprint"] != self._fingerprint:
            raise ValueError(other_data(self._source))
        if (state["seed"], state["shuffle"]) != (self._seed, self._shuffle):
            raise ValueError(
                f"the saved cursor's order is that of run.seed {state['seed']} with data.shuffle "
                f"{str(state['shuffle']).lower()}, not of {self._seed} with {str(self._shuffle).lower()}; "
                "set them back, or start a new run"
            )
        epoch, position, resting = int(state["epoch"]), int(state["position"]), state.get("resting", ())
        taking_part = self._size - len(resting)
        if epoch < 0 or not 0 <= position < taking_part:
            raise ValueError(
                f"the saved cursor stands at {position} in epoch {epoch}, outside of {taking_part} prompts; "
                "use a checkpoint that is whole"
            )
        self.epoch, self.position, self._resting = epoch, position, tuple(resting)
        self._last_rests = dict(state.get("last_rests", ()))
        self._order = self._draw_order()


def other_data(sources: str) -> str:
    """The sentence on sources that give other prompts than those a run began with."""
    return (
        f"the prompts or answers of {sources} are not those the run began with: the data, the tokenizer or a setting "
        "of data has changed; bring them back as they were, start a new run, or set run.force_resume: true to begin "
        "with these"
    )


def _generator_seed(seed: int, epoch: int) -> int:
    """32 bits, as torch's CPU generator ignores all higher ones: seeds 1 and 4097 must not be the same."""
    word = (seed << _EPOCH_BITS) + epoch
    high = seed >> _SEED_BITS
    if high:
        word ^= int.from_bytes(sha256(str(high).encode()).digest()[:4], "little")
    return word % 2**_GENERATOR_BITS
