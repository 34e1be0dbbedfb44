"""Prompts of several sources, taken in the proportion of their weights.

The order of the sources follows from the weights alone. With a share p of all prompts, a source's j-th prompt (from 0)
may be taken after n prompts where j < (n + 1) p, and is due among the first ceil((j + 1) / p). Of the prompts that may
be taken, the one that is due first is taken. Meeting all deadlines is possible (Tijdeman 1980, "The chairman assignment
problem"), and taking the earliest deadline first meets them whenever that is possible (Horn 1974). So of any first n
prompts, more than n p - 1 and less than n p + 1 are the source's.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping
from fractions import Fraction
from itertools import accumulate
from math import lcm
from typing import Any

from megappo.data.cursor import Cursor, other_data
from megappo.data.prompts import PromptDataset
from megappo.observe.json_values import JSONValue
from megappo.types import Prompt


class MixedPrompts:
    """The prompts of all sources, source by source in the order of their names."""

    def __init__(self, sources: Mapping[str, tuple[float, PromptDataset]]) -> None:
        """`sources`: weight and prompts of each source, by its name."""
        self.names = tuple(sorted(sources))
        self.weights = tuple(Fraction(str(sources[name][0])) for name in self.names)
        self.sources = tuple(sources[name][1] for name in self.names)
        self._starts = (0, *accumulate(len(prompts) for prompts in self.sources))
        self.dropped = sum(prompts.dropped for prompts in self.sources)
        self.reads_clock = any(prompts.reads_clock for prompts in self.sources)
        self.truncated = sum(prompts.truncated for prompts in self.sources)
        of_each = [(n, str(w), s.fingerprint) for n, w, s in zip(self.names, self.weights, self.sources, strict=True)]
        self.fingerprint = hashlib.sha256(json.dumps(of_each).encode()).hexdigest()
        """sha256 over the names, weights and fingerprints of the sources."""

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, position: int) -> Prompt:
        source, own = self.place(position)
        return self.sources[source][own]

    def place(self, position: int) -> tuple[int, int]:
        """The number of a prompt's source, and its position in that."""
        source = bisect_right(self._starts, position) - 1
        return source, position - self._starts[source]

    def position(self, source: int, own: int) -> int:
        """The position of a source's prompt among all."""
        return self._starts[source] + own

    def position_of(self, prompt: Prompt) -> int:
        """Position of a prompt among all."""
        source = self.names.index(prompt.source)
        return self.position(source, self.sources[source].position_of(prompt))


class MixedCursor:
    """The order in which sources are taken, and the position in each; the same on every rank without communication."""

    def __init__(self, prompts: MixedPrompts, seed: int, shuffle: bool, *, most_resting: float = 0.0) -> None:
        """Make a cursor for each source; see `Cursor` for the arguments."""
        self._prompts, self._seed, self._shuffle = prompts, seed, shuffle
        seeds = {name: _seed_of(seed, name) for name in prompts.names}
        self._cursors = tuple(
            Cursor(len(p), seeds[name], shuffle, fingerprint=p.fingerprint, most_resting=most_resting, source=name)
            for name, p in zip(prompts.names, prompts.sources, strict=True)
        )
        unit = lcm(*(weight.denominator for weight in prompts.weights))
        self._shares = tuple(int(weight * unit) for weight in prompts.weights)
        self._ties = tuple(seeds[name] for name in prompts.names)
        self.taken = [0] * len(self._cursors)
        """Prompts that each source has given."""

    @property
    def resting(self) -> int:
        """Number of prompts that the current passes leave out."""
        return sum(cursor.resting for cursor in self._cursors)

    def rest(self, positions: list[int], epochs: int) -> None:
        """Leave prompts out of the next passes over their sources."""
        places = [self._prompts.place(position) for position in positions]
        for source, cursor in enumerate(self._cursors):
            if found := [own for of, own in places if of == source]:
                cursor.rest(found, epochs)

    def take(self, n: int) -> list[int]:
        """The positions of the next `n` prompts."""
        positions = []
        for _ in range(n):
            source = self._next_source()
            self.taken[source] += 1
            positions.append(self._prompts.position(source, self._cursors[source].take(1)[0]))
        return positions

    def _next_source(self) -> int:
        """The source of the next prompt, by integer arithmetic alone. Sources with equal deadlines are ordered by a
        number drawn from the seed."""
        total, now = sum(self._shares), sum(self.taken) + 1
        given = [*zip(self._shares, self.taken, self._ties, range(len(self._shares)), strict=True)]
        return min(
            (-(-(taken + 1) * total // share), tie, source)
            for share, taken, tie, source in given
            if taken * total < now * share
        )[-1]

    def state_dict(self) -> dict[str, JSONValue]:
        """State for a checkpoint."""
        each = zip(self._prompts.names, self.taken, self._cursors, strict=True)
        return {
            "fingerprint": self._prompts.fingerprint,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "sources": {name: {"taken": taken, **cursor.state_dict()} for name, taken, cursor in each},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a saved cursor stood. Raises ValueError where the data are others."""
        saved = state.get("sources", {})
        if state.get("fingerprint") != self._prompts.fingerprint or saved.keys() != set(self._prompts.names):
            named = zip(self._prompts.names, self._prompts.sources, strict=True)
            others = [
                f"data.mixture.{name}, '{prompts.source}',"
                for name, prompts in named
                if saved.get(name, {}).get("fingerprint") not in (None, prompts.fingerprint)
            ]
            if others:
                raise ValueError(other_data(" and ".join(others)))
            raise ValueError(
                "the sources of data.mixture, or their weights, are not those the run began with; set them back, start "
                "a new run, or set run.force_resume: true to begin with these"
            )
        for source, name in enumerate(self._prompts.names):
            self._cursors[source].load_state_dict(saved[name])
            self.taken[source] = int(saved[name]["taken"])


def _seed_of(seed: int, name: str) -> int:
    """A seed of 63 bits for a source, so that sources of equal sizes have different orders."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1
