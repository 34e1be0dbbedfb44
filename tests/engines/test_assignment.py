"""Prompts are dealt out to engines evenly over all ranks; every rank of large runs is played here."""

from __future__ import annotations

import importlib.util
import pickle
import random
from collections import Counter

import pytest

from megappo.config import load_config
from tests.support.places import ROOT

if importlib.util.find_spec("aiohttp") is None:
    pytest.skip("needs the full environment", allow_module_level=True)

from megappo.engines.sglang.assignment import RequestAssignment

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
        assignment, alive, owed = (
            RequestAssignment(range(engines), prompt_ids),
            set(range(engines)),
            dict[int, list[int]](),
        )
        for engine in alive:
            owed[engine] = assignment.take(engine, limit)
        for engine in random.Random(rank).sample(sorted(failing), len(failing)):
            done = failing[engine]
            answered |= dict.fromkeys(owed[engine][:done], engine)
            alive.remove(engine)
            assignment.lose(engine, owed.pop(engine)[done:])
        while assignment.waiting or any(owed.values()):
            for engine in alive:
                answered |= dict.fromkeys(owed[engine], engine)
                owed[engine] = assignment.take(engine, limit)
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
    assignment = RequestAssignment([0, 1], prompt_ids)
    first = assignment.take(0, 6)
    assert {prompt_ids[i] for i in first} == {0} and len(first) == 4
    mine = [i for _ in range(9) for i in assignment.take(1, 8)]
    assert sorted({prompt_ids[i] for i in mine}) == [1, 3, 5, 7] and len(mine) == 16
    assert assignment.relieve(1)
    given = assignment.take(1, 8)
    assert {prompt_ids[i] for i in given} == {6} and len(given) == 4
    cut = assignment.take(0, 2)
    assert {prompt_ids[i] for i in cut} == {2} and len(cut) == 2
    assert assignment.relieve(1) and {prompt_ids[i] for i in assignment.take(1, 8)} == {4}
    assert assignment.waiting and not assignment.relieve(1), "the rest of a prompt that was begun stays with its engine"
    assert {prompt_ids[i] for i in assignment.take(0, 8)} == {2} and not assignment.waiting


def test_without_engines_nothing_is_handed_out() -> None:
    assignment = RequestAssignment([4], {0: 0, 1: 1})
    owed = assignment.take(4, 8)
    assignment.lose(4, owed)
    assert not assignment.waiting


def test_of_a_ranks_prompts_each_server_owes_equally_many_tokens() -> None:
    """Long and short ones: as many prompts for each server as without their lengths, and a tenth of the spread."""
    lengths = random.Random(5)
    prompt_ids = {i: i // 4 for i in range(4 * 64)}
    of_prompts = [int(2 ** lengths.uniform(4, 12)) for _ in range(64)]
    tokens = {i: of_prompts[prompt] for i, prompt in prompt_ids.items()}
    assignment = RequestAssignment(range(8), prompt_ids, tokens, most_response_tokens=100)
    by_number = [sum(4 * (n + 100) for n in of_prompts[server::8]) for server in range(8)]
    owed = [assignment.owed.of(server) for server in range(8)]
    assert sum(owed) == sum(by_number)
    assert max(owed) - min(owed) < 0.1 * (max(by_number) - min(by_number))
    taken = {server: assignment.take(server, 4 * 64) + assignment.take(server, 4 * 64) for server in range(8)}
    while assignment.waiting:
        taken = {server: requests + assignment.take(server, 4 * 64) for server, requests in taken.items()}
    assert [len(requests) for requests in taken.values()] == [4 * 8] * 8
    assert [len({prompt_ids[i] for i in requests}) for requests in taken.values()] == [8] * 8
    assignment.lose(3, taken[3])
    owed = [assignment.owed.of(server) for server in range(8) if server != 3]
    assert sum(owed) == sum(by_number)


def test_what_is_owed_follows_the_responses_so_far() -> None:
    assignment = RequestAssignment(
        [0, 1], {0: 0, 1: 1, 2: 2, 3: 3}, {0: 50, 1: 10, 2: 10, 3: 30}, most_response_tokens=1000
    )
    assert [assignment.owed.of(server) for server in (0, 1)] == [2060, 2040]  # 50 and 10, 30 and 10
    assert sorted(assignment.take(0, 1) + assignment.take(0, 1)) == [0, 2]
    assignment.answered(0, {0: 4, 2: 8})
    assert [assignment.owed.of(server) for server in (0, 1)] == [0, 40 + 2 * 6]


def test_a_free_server_takes_from_the_one_that_owes_most_tokens() -> None:
    """Which has fewer requests than another."""
    assignment = RequestAssignment([0, 1, 2], {0: 0, 1: 1, 2: 2, 3: 4, 4: 7}, {0: 10, 1: 900, 2: 10, 3: 10, 4: 10}, 10)
    waiting = {server: assignment.owed.of(server) for server in (0, 1, 2)}
    long = max(waiting, key=lambda server: waiting[server])
    (idle,) = [server for server in waiting if server != long][:1]
    while assignment.take(idle, 8):
        pass
    assert assignment.relieve(idle) and assignment.take(idle, 8) == [1]


def test_turns_stay_with_the_server_that_answered_the_last() -> None:
    """Whoever else fails, and also where it was not the one that the prompt's number names."""
    assignment = RequestAssignment(range(4), {})
    homes = dict[int, int]()
    for episode in range(24):
        assignment.add(episode, episode // 2, prompt_tokens=10)
    for server in range(4):
        while taken := assignment.take(server, 100):
            homes |= dict.fromkeys(taken, server)
            assignment.answered(server, dict.fromkeys(taken, 5))
    assert all(homes[episode] == episode // 2 % 4 for episode in range(24))
    assignment.lose(1, [])
    for _ in range(2):
        for episode in range(24):
            assignment.add(episode, episode // 2, prompt_tokens=20)
        for server in (0, 2, 3):
            while taken := assignment.take(server, 100):
                assert all(homes[episode] in (server, 1) for episode in taken)
                homes |= dict.fromkeys(taken, server)
                assignment.answered(server, dict.fromkeys(taken, 5))
    moved = [homes[episode] for episode in range(24) if episode // 2 % 4 == 1]
    assert set(moved) <= {0, 2, 3} and moved[::2] == moved[1::2], "samples of a prompt went to several servers"


@pytest.mark.parametrize(("elsewhere", "leaves"), [(4, False), (1, True)])
def test_a_turn_behind_a_full_server_leaves_for_one_that_owes_far_less(elsewhere: int, leaves: bool) -> None:
    """Of 8 it may have what 6 others wait for; one that owes more than half as much does not get any of it."""
    assignment = RequestAssignment([0, 1], {})
    for episode in range(0, 14, 2):  # even prompts are dealt to the first
        assignment.add(episode, episode, prompt_tokens=10)
    while taken := assignment.take(0, 100):
        assignment.answered(0, dict.fromkeys(taken, 10))
    for number in range(elsewhere):
        assignment.add(101 + 2 * number, 101 + 2 * number, prompt_tokens=10)
    while assignment.take(1, 100):
        pass
    for episode in range(0, 14, 2):
        assignment.add(episode, episode, prompt_tokens=10)
    assert len(assignment.take(0, 1)) == 1
    assert assignment.relieve(1) is leaves
    if leaves:
        (moved,) = assignment.take(1, 8)
        assignment.answered(1, {moved: 10})
        assignment.add(moved, moved, prompt_tokens=20)
        assert assignment.take(1, 8) == [moved], "it stays where it went"


def test_an_assignment_of_a_whole_run_does_not_grow() -> None:
    """What was answered is forgotten, but for the server of the latest requests, to which later turns go."""
    assignment, sizes = RequestAssignment([0, 1], {}), list[int]()
    for last in (170_000, 240_000):  # a pickle's smaller numbers take fewer bytes
        for request in range(last - 70_000, last):
            assignment.add(request, request, 5)
            (server,) = [s for s in (0, 1) if assignment.take(s, 1)]
            assignment.answered(server, {request: 3})
        sizes.append(len(pickle.dumps(assignment)))
    assert sizes[1] < 1.01 * sizes[0]
    assignment.add(last - 1, last - 1, 9)
    assert assignment.take(server, 1) == [last - 1]
