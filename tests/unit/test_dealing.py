"""Prompts are dealt out to engines evenly over all ranks; every rank of large runs is played here."""

from __future__ import annotations

import importlib.util
import random
from collections import Counter
from pathlib import Path

import pytest

from megappo.config import load_config

if importlib.util.find_spec("aiohttp") is None:
    pytest.skip("needs launch/requirements-sglang.txt", allow_module_level=True)

from megappo.engines.sglang.dealing import Deal

ROOT = Path(__file__).resolve().parents[2]
Shares = dict[int, dict[int, int]]
"""The prompt of each sample, by rank."""


def shares(ranks: int, prompts: int, samples: int = 1) -> Shares:
    """As `prompts_of_rank` and `request_samples` number them."""
    return {
        rank: {
            prompt * samples + sample: prompt
            for prompt in range(-(-prompts * rank // ranks), -(-prompts * (rank + 1) // ranks))
            for sample in range(samples)
        }
        for rank in range(ranks)
    }


def played(of_ranks: Shares, engines: int, failing: dict[int, int], limit: int = 512) -> dict[int, int]:
    """Which engine answered each sample. An engine in `failing` answers so many samples of a rank and is then found
    dead by it, in an order of the rank's own."""
    answered: dict[int, int] = {}
    for rank, prompt_ids in of_ranks.items():
        deal, alive, owed = Deal(range(engines), prompt_ids), set(range(engines)), dict[int, list[int]]()
        for engine in alive:
            owed[engine] = deal.take(engine, limit)
        for engine in random.Random(rank).sample(sorted(failing), len(failing)):
            done = failing[engine]
            answered |= dict.fromkeys(owed[engine][:done], engine)
            alive.remove(engine)
            deal.lose(engine, owed.pop(engine)[done:])
        while deal.waiting or any(owed.values()):
            for engine in alive:
                answered |= dict.fromkeys(owed[engine], engine)
                owed[engine] = deal.take(engine, limit)
    return answered


def prompts_per_engine(of_ranks: Shares, answered: dict[int, int], engines: int) -> list[int]:
    prompt_of = {sample: prompt for prompts in of_ranks.values() for sample, prompt in prompts.items()}
    pairs = {(engine, prompt_of[sample]) for sample, engine in answered.items()}
    counts = Counter(engine for engine, _ in pairs)
    return [counts[engine] for engine in range(engines)]


@pytest.mark.parametrize(
    ("ranks", "prompts", "engines"), [(16, 64, 8), (8, 9, 4), (64, 64, 7), (3, 100, 5), (512, 512, 96)]
)
def test_few_prompts_on_many_ranks_keep_every_engine_equally_busy(ranks: int, prompts: int, engines: int) -> None:
    of_ranks = shares(ranks, prompts, samples=3)
    answered = played(of_ranks, engines, {})
    assert len(answered) == prompts * 3
    found = prompts_per_engine(of_ranks, answered, engines)
    assert sum(found) == prompts, "the samples of a prompt went to several engines"
    assert max(found) - min(found) <= 1


def test_the_shipped_disaggregated_configuration_uses_all_its_engines() -> None:
    config = load_config(ROOT / "configs/qwen3_32b_64node_disaggregated_dapo_math.yaml")
    rollout, engines = config.rollout, config.rollout.servers.engines
    assert engines == 96
    of_ranks = shares(40 * 8, rollout.prompts_per_step, rollout.samples_per_prompt)
    found = prompts_per_engine(of_ranks, played(of_ranks, engines, {}), engines)
    assert sum(found) == rollout.prompts_per_step == 2560
    assert (min(found), max(found)) == (26, 27)


@pytest.mark.parametrize("failing", [(3,), (3, 5), (0, 1, 2, 3), (0, 2, 4, 6)])
def test_what_failed_engines_owe_is_spread_evenly(failing: tuple[int, ...]) -> None:
    """Ranks find several dead engines in different orders, and still load the others alike."""
    of_ranks = shares(64, 512, samples=4)
    answered = played(of_ranks, 8, dict.fromkeys(failing, 0))
    assert len(answered) == 512 * 4
    found = prompts_per_engine(of_ranks, answered, 8)
    alive = [count for engine, count in enumerate(found) if engine not in failing]
    assert sum(found) == sum(alive) == 512
    assert max(alive) - min(alive) <= 0.15 * max(alive)


def test_a_failed_engine_leaves_what_it_answered() -> None:
    of_ranks = shares(16, 64, samples=2)
    answered = played(of_ranks, 8, {3: 1})
    assert len(answered) == 128
    assert Counter(answered.values())[3] == 8  # one sample of each rank that had dealt it a prompt
    assert set(answered.values()) == set(range(8))


def test_what_waits_behind_a_full_engine_goes_to_a_free_one_by_whole_prompts() -> None:
    prompt_ids = {i: i // 4 for i in range(32)}  # eight prompts of four samples for two engines
    deal = Deal([0, 1], prompt_ids)
    first = deal.take(0, 6)
    assert {prompt_ids[i] for i in first} == {0} and len(first) == 4
    mine = [i for _ in range(9) for i in deal.take(1, 8)]
    assert sorted({prompt_ids[i] for i in mine}) == [1, 3, 5, 7] and len(mine) == 16
    assert deal.relieve(1)
    given = deal.take(1, 8)
    assert {prompt_ids[i] for i in given} == {6} and len(given) == 4
    cut = deal.take(0, 2)
    assert {prompt_ids[i] for i in cut} == {2} and len(cut) == 2
    assert deal.relieve(1) and {prompt_ids[i] for i in deal.take(1, 8)} == {4}
    assert deal.waiting and not deal.relieve(1), "the rest of a prompt that was begun stays with its engine"
    assert {prompt_ids[i] for i in deal.take(0, 8)} == {2} and not deal.waiting


def test_without_engines_nothing_is_handed_out() -> None:
    deal = Deal([4], {0: 0, 1: 1})
    owed = deal.take(4, 8)
    deal.lose(4, owed)
    assert not deal.waiting
