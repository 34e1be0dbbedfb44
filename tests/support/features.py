"""The features of a PPO step, and a small set of steps that covers each pair of features.

    python -m tests.support.features [--strength 3]

The command lists the steps of `test_conformance.py`, which are a covering array. With strength t, each compatible
combination of t features is part of a step. If the strength is the number of factors, the steps are all combinations.
The array of strength 2 is stored in features.json, because a search for few processes takes minutes. `--search 200`
searches for 200 seconds and writes the file. A greedy algorithm with a fixed seed computes the other arrays.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import operator
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROLES = ("actor", "critic")
ADAPTIVE_LAM, NLL_COEF = 0.2, 0.3
_DRAWN, _SEED = 2000, 1
_FEW_RANKS = 4
_WRITTEN = Path(__file__).with_suffix(".json")
"""Steps with up to `_FEW_RANKS` ranks that cover each pair of features. Each entry lists the levels other than the
plain ones."""
_COST_OF_STEP, _COST_OF_RANK = 1.0, 1.2
"""Costs in CPU seconds."""
_SMALLEST_MINIBATCH = 6
"""Samples of the smallest minibatch. Each replica needs at least one sample."""


@dataclass(frozen=True)
class Level:
    """A feature, which is one of the values of a factor."""

    name: str
    description: str
    """Description in the table of supported features."""
    both: tuple[str, ...] = ()
    """Settings of actor and critic, without the role as a prefix."""
    settings: tuple[str, ...] = ()
    ranks: int = 1
    """Factor by which the feature multiplies the required ranks of a step."""


def _off(description: str) -> Level:
    return Level("", description)


FACTORS: dict[str, tuple[Level, ...]] = {
    "model": (
        _off("dense"),
        Level("tied", "tied embeddings"),
        Level(
            "experts", "experts, split across two ranks if a stage has two, with a load-balancing loss",
            ("router_aux_loss_coef=0.05",),
        ),
        Level("experts-replayed", "experts with replay of the routing of the engine"),
    ),
    "tensor": (
        _off("TP 1"),
        Level(
            "tp2", "TP 2 with a padded vocabulary",
            ("layout.tensor_parallel=2", "layout.sequence_parallel=false"), ranks=2,
        ),
        Level("sp2", "TP 2 with SP", ("layout.tensor_parallel=2",), ranks=2),
    ),
    "pipeline": (
        _off("PP 1"),
        Level("pp2", "PP 2", ("layout.pipeline_parallel=2",), ranks=2),
        Level(
            "vpp2", "PP 2, interleaved",
            ("layout.pipeline_parallel=2", "layout.virtual_pipeline_chunks=2"), ranks=2,
        ),
        Level(
            "uneven2", "PP 2 with uneven stages",
            ("layout.pipeline_parallel=2", "layout.pipeline_layers=[3, 1]"), ranks=2,
        ),
    ),
    "context": (_off("CP 1"), Level("cp2", "CP 2", ("layout.context_parallel=2",), ranks=2)),
    "data": (_off("DP 1"), Level("dp2", "DP 2", ranks=2)),
    "optimizer": (
        Level("", "one optimizer per replica", ("optimizer.distributed=false",)),
        Level("distributed", "distributed optimizer", ("optimizer.distributed=true",)),
        Level(
            "overlap", "distributed optimizer with gradient reduction during backward",
            ("optimizer.distributed=true", "optimizer.overlap_grad_reduce=true"),
        ),
    ),
    "weights": (_off("all weights trained"),
        Level("lora", "adapters on every matrix", ("lora={rank: 4, alpha: 6, targets: all}",))),
    "recompute": (_off("activations kept"), Level("parts", "attention and MLP recomputed", ("recompute=selective",)),
        Level("full", "layers recomputed", ("recompute=full",))),
    "memory": (_off("everything on the device"),
        Level("offload", "offload of inactive roles", ("offload=true",), ("reference.offload=true",)),
        Level("on-host", "half of the optimizer on the host", ("optimizer.on_host=0.5",))),
    "critic": (_off("same layout for actor and critic"), Level("other-critic", "different layout for the critic")),
    "loss": (_off("PPO-clip, mean over tokens"),
        Level("seq-mean", "PPO-clip, mean over samples", settings=("algorithm.loss_aggregation=seq-mean-token-mean",)),
        Level("cispo", "a custom policy loss per token"), Level("gspo", "a custom policy loss per sample")),
    "estimates": (
        _off("one lambda"),
        Level(
            "vapo",
            "length-adaptive lambda for the actor, lambda 1 for the critic, imitation of good samples",
            settings=(f"algorithm.lam={{actor: {{length_adaptive: {ADAPTIVE_LAM}}}, critic: 1.0}}",
                f"algorithm.positive_nll_coef={NLL_COEF}"),
        ),
    ),
    "samples": (
        _off("samples of any lengths"),
        Level("giant", "one long sample among short ones"),
        Level("single", "a microbatch with a single trained token"),
        Level("edges", "responses that begin and end at the borders of context ranks"),
        Level("turns", "episodes of several turns, with a reward per turn and text of the environment between turns"),
        Level(
            "rejected", "replicas and minibatches with only rejected samples",
            settings=(
                "algorithm.old_logprob=corrected", "algorithm.correction={level: sequence, cap: 2, reject_above: 1e8}",
            ),
        ),
    ),
}  # fmt: skip
"""The first level of each factor is the plain one."""
_PLACES = {name: place for place, name in enumerate(FACTORS)}


@dataclass(frozen=True)
class Case:
    """A step with a level of every factor."""

    levels: tuple[Level, ...]

    def __getitem__(self, factor: str) -> Level:
        return self.levels[_PLACES[factor]]

    @property
    def name(self) -> str:
        """Name of the case, without the plain levels."""
        return "-".join(level.name for level in self.levels if level.name) or "plain"

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return math.prod(level.ranks for level in self.levels)

    def overrides(self) -> Iterator[str]:
        """Return all settings except the policy loss."""
        has_experts, stage = self["model"].name.startswith("experts"), self.ranks // self["pipeline"].ranks
        apart = self["critic"].name == "other-critic"
        for role in ROLES:
            plain = apart and role == "critic"
            for level in self.levels:
                layout = (setting for setting in level.both if not (plain and setting.startswith("layout.")))
                yield from (f"{role}.{setting}" for setting in layout)
            if plain and self.ranks > _SMALLEST_MINIBATCH:
                yield f"{role}.layout.pipeline_parallel=2"
            if self["recompute"].name == "parts":
                yield f"{role}.recompute_modules=[core_attn, {'moe' if has_experts else 'mlp'}]"
            if has_experts and (self.ranks if plain else stage) > 1:
                yield f"{role}.layout.expert_parallel=2"
        for level in self.levels:
            yield from level.settings


def goes_together(case: Case, most_ranks: int) -> bool:
    """Return whether the case is a valid step. Other cases are refused by the settings or equal another case."""
    if case["model"].name.startswith("experts") and case["tensor"].name == "tp2":
        return False  # experts with TP require SP
    if case["critic"].name and case.ranks == case["data"].ranks:
        return False  # the other layout is data parallel
    return case.ranks <= most_ranks


def features_met(strength: int, most_ranks: int) -> Iterator[tuple[Case, int]]:
    """Yield every case with a bit for each combination of `strength` features in the case."""
    factors, bits = tuple(FACTORS.values()), itertools.count()
    begun: list[tuple[tuple[int, ...], int, int]] = [((), 0, 1)]  # places of levels, bits, ranks
    for i, factor in enumerate(factors):
        # For each level, the bits of its combinations with levels of earlier factors, by the indices of these levels.
        tables = [
            [
                (at, {chosen: 1 << next(bits) for chosen in _choices(factors, at)})
                for at in itertools.combinations(range(i), strength - 1)
            ]
            for _ in factor
        ]
        begun = [
            ((*chosen, place), _with_bits(met, chosen, tables[place]), ranks * level.ranks)
            for chosen, met, ranks in begun
            for place, level in enumerate(factor)
            if ranks * level.ranks <= most_ranks
        ]
    for chosen, met, _ in begun:
        case = Case(tuple(factor[place] for factor, place in zip(factors, chosen, strict=True)))
        if goes_together(case, most_ranks):
            yield case, met


def _with_bits(
    met: int, chosen: tuple[int, ...], tables: Sequence[tuple[tuple[int, ...], Mapping[tuple[int, ...], int]]]
) -> int:
    for at, table in tables:
        met |= table[tuple([chosen[place] for place in at])]
    return met


def _choices(factors: Sequence[Sequence[Level]], places: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(len(factors[place])) for place in places))


@functools.cache
def covering(strength: int, most_ranks: int) -> list[Case]:
    """Return cases of at most `most_ranks` ranks that cover all compatible combinations of `strength` features."""
    if (strength, most_ranks) == (2, _FEW_RANKS):
        return [_case(levels) for levels in json.loads(_WRITTEN.read_text())]
    draw = random.Random(_SEED)
    everything, met = map(list, zip(*features_met(min(strength, len(FACTORS)), most_ranks), strict=True))
    if strength >= len(FACTORS):
        return everything
    left, chosen_cases = functools.reduce(operator.or_, met), list[Case]()
    while left:
        drawn = [n for n in draw.sample(range(len(everything)), min(len(everything), _DRAWN)) if met[n] & left]
        candidates = drawn or [n for n in range(len(everything)) if met[n] & left]
        best = max(candidates, key=lambda n: ((met[n] & left).bit_count(), -everything[n].ranks))
        chosen_cases.append(everything[best])
        left &= ~met[best]
    return chosen_cases


def _case(named: Mapping[str, str]) -> Case:
    """Return the case with the given levels. Missing factors have their plain levels."""
    return Case(tuple(next(x for x in levels if x.name == named.get(factor, "")) for factor, levels in FACTORS.items()))


def search(seconds: float) -> list[Case]:
    """Search for steps that cover each pair of features with the least CPU time. The search repeatedly removes some
    steps of the best array and adds others until all pairs are covered again."""
    draw, chance = random.Random(_SEED), np.random.default_rng(_SEED)
    everything, met = map(list, zip(*features_met(2, _FEW_RANKS), strict=True))
    columns = range(math.ceil(max(x.bit_length() for x in met) / 64))
    bits = np.array([[(x >> 64 * word) & (2**64 - 1) for word in columns] for x in met], dtype=np.uint64)
    every, ranks = np.bitwise_or.reduce(bits), np.array([case.ranks for case in everything])

    def left_by(chosen: Sequence[int]) -> np.ndarray:
        return every & ~np.bitwise_or.reduce(bits[list(chosen)], initial=np.uint64(0))

    def cost(chosen: Sequence[int]) -> float:
        return float((_COST_OF_STEP + _COST_OF_RANK * ranks[list(chosen)]).sum())

    best, until = list[int](), time.monotonic() + seconds
    while not best or time.monotonic() < until:
        chosen = draw.sample(best, max(0, len(best) - draw.randint(2, 8)))
        while (left := left_by(chosen)).any():
            gained = np.bitwise_count(bits & left).sum(axis=1) / (draw.choice((1, 2, 4, 8)) + ranks)
            chosen.append(int((gained * chance.uniform(1, 1.05, len(gained))).argmax()))
        for case in sorted(chosen, key=lambda n: -ranks[n]):
            if not left_by(rest := [n for n in chosen if n != case]).any():
                chosen = rest
        if not best or cost(chosen) <= cost(best):
            best = chosen
    return [everything[n] for n in sorted(best)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strength", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=_FEW_RANKS, help="of the largest step")
    parser.add_argument("--search", type=float, metavar="SECONDS", help="search and write features.json")
    arguments = parser.parse_args()
    if arguments.search:
        steps = [
            {factor: case[factor].name for factor in FACTORS if case[factor].name} for case in search(arguments.search)
        ]
        lines = ",\n".join(f" {json.dumps(step)}" for step in steps)
        _WRITTEN.write_text(f"[\n{lines}\n]\n")
    listed = covering(arguments.strength, arguments.ranks)
    print("\n".join(f"{case.ranks} {case.name}" for case in listed))
    print(len(listed), "steps")


if __name__ == "__main__":
    main()
