"""Prompts of several sources in proportion to their weights.

The order of the sources depends only on the weights. Let p be the share of a source. The j-th prompt of the source
(from 0) is available after n prompts if j < (n + 1) p. The deadline of the prompt is position ceil((j + 1) / p). The
cursor always takes the available prompt with the earliest deadline. A schedule that meets all deadlines exists
(Tijdeman 1980, "The chairman assignment problem"), and the rule of the earliest deadline finds such a schedule (Horn
1974). Therefore the first n prompts contain more than n p - 1 and less than n p + 1 prompts of the source, for every n.
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
from megappo.files.json_values import JSONValue
from megappo.types import Prompt


class MixedPrompts:
    """Prompts of all sources, ordered by the names of the sources."""

    def __init__(self, sources: Mapping[str, tuple[float, PromptDataset]]) -> None:
        """Join sources. `sources`: weight and prompts of each source, by name."""
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
        """Return the number of the source of a prompt, and the position of the prompt in the source."""
        source = bisect_right(self._starts, position) - 1
        return source, position - self._starts[source]

    def position(self, source: int, own: int) -> int:
        """Return the position of a prompt of a source among all prompts."""
        return self._starts[source] + own

    def position_of(self, prompt: Prompt) -> int:
        """Return the position of a prompt among all prompts."""
        source = self.names.index(prompt.source)
        return self.position(source, self.sources[source].position_of(prompt))


class MixedCursor:
    """Order of the sources, and the position in each source. Equal on all ranks without communication."""

    def __init__(self, prompts: MixedPrompts, seed: int, shuffle: bool, *, most_resting: float = 0.0) -> None:
        """Create a cursor for each source. See `Cursor` for the arguments."""
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
        """Number of prompts taken from each source."""

    @property
    def resting(self) -> int:
        """Number of prompts that the current passes skip."""
        return sum(cursor.resting for cursor in self._cursors)

    def rest(self, positions: list[int], epochs: int) -> None:
        """Skip prompts in the next passes over their sources."""
        places = [self._prompts.place(position) for position in positions]
        for source, cursor in enumerate(self._cursors):
            if indices := [own for of, own in places if of == source]:
                cursor.rest(indices, epochs)

    def take(self, n: int) -> list[int]:
        """Return the positions of the next `n` prompts."""
        positions = []
        for _ in range(n):
            source = self._next_source()
            self.taken[source] += 1
            positions.append(self._prompts.position(source, self._cursors[source].take(1)[0]))
        return positions

    def _next_source(self) -> int:
        """Return the source of the next prompt, computed with integers only. A number from the seed orders sources with
        equal deadlines."""
        total, now = sum(self._shares), sum(self.taken) + 1
        sources = [*zip(self._shares, self.taken, self._ties, range(len(self._shares)), strict=True)]
        return min(
            (-(-(taken + 1) * total // share), tie, source)
            for share, taken, tie, source in sources
            if taken * total < now * share
        )[-1]

    def state_dict(self) -> dict[str, JSONValue]:
        """Return the state for a checkpoint."""
        each = zip(self._prompts.names, self.taken, self._cursors, strict=True)
        return {
            "fingerprint": self._prompts.fingerprint,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "sources": {name: {"taken": taken, **cursor.state_dict()} for name, taken, cursor in each},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved cursor. Raises ValueError if the data or the weights differ."""
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
                "the sources of data.mixture or their weights differ from the start of the run; restore them, start a "
                "new run, or set run.force_resume: true to start with the new sources"
            )
        for source, name in enumerate(self._prompts.names):
            self._cursors[source].load_state_dict(saved[name])
            self.taken[source] = int(saved[name]["taken"])


def _seed_of(seed: int, name: str) -> int:
    """Return a seed of 63 bits for a source, so that sources of equal size have different orders."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little") >> 1
