"""Tests of the assignment of prompts to engines. All ranks of a large run are simulated."""

from __future__ import annotations

import importlib.util
import pickle
import random
from collections import Counter
from collections.abc import Iterable, Mapping

import pytest

from megappo.config import load_config
from megappo.engines.protocol import GenerateRequest
from tests.support.places import ROOT

if importlib.util.find_spec("aiohttp") is None:
    pytest.skip("needs the full environment", allow_module_level=True)

from megappo.engines.sglang.requests.assignment import RequestAssignment

Shares = dict[int, dict[int, int]]
"""The prompt of each sample, per rank."""


def assigned(
    engines: Iterable[int],
    prompt_ids: Mapping[int, int],
    prompt_tokens: Mapping[int, int] | None = None,
    most_response_tokens: int = 1,
) -> RequestAssignment:
    """Return an assignment of one request per sample. The default prompt length is 0."""
    assignment, tokens = RequestAssignment(engines), prompt_tokens or {}
    requests = {sample: request(prompt, tokens.get(sample, 0)) for sample, prompt in prompt_ids.items()}
    assignment.add(requests, most_response_tokens)
    return assignment


def request(prompt: int, tokens: int, conversation: int | None = None) -> GenerateRequest:
    return GenerateRequest((prompt,) * tokens, seed=0, prompt_id=prompt, conversation=conversation)


def shares(ranks: int, prompts: int, samples: int = 1) -> Shares:
    """Return the samples of each rank, numbered like `prompts_of_rank` and `request_samples`."""
    return {
        rank: {
            prompt * samples + sample: prompt
            for prompt in range(-(-prompts * rank // ranks), -(-prompts * (rank + 1) // ranks))
            for sample in range(samples)
        }
        for rank in range(ranks)
    }


def played(of_ranks: Shares, engines: int, failing: dict[int, int], limit: int = 512) -> dict[int, int]:
    """Return the engine that answered each sample. An engine in `failing` answers the given number of samples of each
    rank and then fails. Each rank detects the failures in another order."""
    answered: dict[int, int] = {}
    for rank, prompt_ids in of_ranks.items():
        assignment, alive, outstanding = (
            assigned(range(engines), prompt_ids),
            set(range(engines)),
            dict[int, list[int]](),
        )
        for engine in alive:
            outstanding[engine] = assignment.take(engine, limit)
        for engine in random.Random(rank).sample(sorted(failing), len(failing)):
            n_answered = failing[engine]
            answered |= dict.fromkeys(outstanding[engine][:n_answered], engine)
            alive.remove(engine)
            assignment.lose(engine, outstanding.pop(engine)[n_answered:])
        while assignment.waiting or any(outstanding.values()):
            for engine in alive:
                answered |= dict.fromkeys(outstanding[engine], engine)
                outstanding[engine] = assignment.take(engine, limit)
    return answered


def prompts_per_engine(of_ranks: Shares, answered: dict[int, int], engines: int) -> list[int]:
    prompt_of = {sample: prompt for prompts in of_ranks.values() for sample, prompt in prompts.items()}
    pairs = {(engine, prompt_of[sample]) for sample, engine in answered.items()}
    counts = Counter(engine for engine, _ in pairs)
    return [counts[engine] for engine in range(engines)]


@pytest.mark.parametrize(
    ("ranks", "prompts", "engines"), [(16, 64, 8), (8, 9, 4), (64, 64, 7), (3, 100, 5), (512, 512, 96)]
)
def test_few_prompts_on_many_ranks_balance_engines(ranks: int, prompts: int, engines: int) -> None:
    of_ranks = shares(ranks, prompts, samples=3)
    answered = played(of_ranks, engines, {})
    assert len(answered) == prompts * 3
    counts = prompts_per_engine(of_ranks, answered, engines)
    assert sum(counts) == prompts, "all samples of a prompt must go to one engine"
    assert max(counts) - min(counts) <= 1


def test_disaggregated_configuration_uses_all_engines() -> None:
    config = load_config(ROOT / "configs/qwen3_32b_64node_disaggregated_dapo_math.yaml")
    rollout, engines = config.rollout, config.rollout.server_settings.count
    assert engines == 96
    of_ranks = shares(40 * 8, rollout.prompts_per_step, rollout.samples_per_prompt)
    counts = prompts_per_engine(of_ranks, played(of_ranks, engines, {}), engines)
    assert sum(counts) == rollout.prompts_per_step == 2560
    assert (min(counts), max(counts)) == (26, 27)


@pytest.mark.parametrize("failing", [(3,), (3, 5), (0, 1, 2, 3), (0, 2, 4, 6)])
def test_requests_of_failed_engines_are_spread_evenly(failing: tuple[int, ...]) -> None:
    """Ranks detect several failed engines in different orders and still balance the other engines."""
    of_ranks = shares(64, 512, samples=4)
    answered = played(of_ranks, 8, dict.fromkeys(failing, 0))
    assert len(answered) == 512 * 4
    counts = prompts_per_engine(of_ranks, answered, 8)
    alive = [count for engine, count in enumerate(counts) if engine not in failing]
    assert sum(counts) == sum(alive) == 512
    assert max(alive) - min(alive) <= 0.15 * max(alive)


def test_answers_of_failed_engines_count() -> None:
    of_ranks = shares(16, 64, samples=2)
    answered = played(of_ranks, 8, {3: 1})
    assert len(answered) == 128
    assert Counter(answered.values())[3] == 8  # one sample of each rank that sent a prompt to engine 3
    assert set(answered.values()) == set(range(8))


def test_free_engine_takes_whole_prompts_from_full_engine() -> None:
    prompt_ids = {i: i // 4 for i in range(32)}  # eight prompts of four samples for two engines
    assignment = assigned([0, 1], prompt_ids)
    first = assignment.take(0, 6)
    assert {prompt_ids[i] for i in first} == {0} and len(first) == 4
    mine = [i for _ in range(2) for i in assignment.take(1, 8)]
    assert sorted({prompt_ids[i] for i in mine}) == [1, 3, 5, 7] and len(mine) == 16
    assert assignment.relieve(1)
    taken = assignment.take(1, 8)
    assert {prompt_ids[i] for i in taken} == {6} and len(taken) == 4
    cut = assignment.take(0, 2)
    assert {prompt_ids[i] for i in cut} == {2} and len(cut) == 2
    assert assignment.relieve(1) and {prompt_ids[i] for i in assignment.take(1, 8)} == {4}
    assert assignment.waiting and not assignment.relieve(1), (
        "the remaining samples of a started prompt must stay with the engine"
    )
    assert {prompt_ids[i] for i in assignment.take(0, 8)} == {2} and not assignment.waiting


def test_requests_without_engines_wait_for_the_next_engine() -> None:
    assignment = assigned([4], {0: 0, 1: 1})
    requests = assignment.take(4, 8)
    assignment.lose(4, requests)
    assert not assignment.waiting
    assignment.add_servers([5])
    assert sorted(assignment.take(5, 8)) == [0, 1]


def test_servers_have_equal_outstanding_tokens() -> None:
    """Prompts have different lengths. Each server gets the same number of prompts, and the spread of tokens is a tenth
    of the spread without balancing."""
    lengths = random.Random(5)
    prompt_ids = {i: i // 4 for i in range(4 * 64)}
    of_prompts = [int(2 ** lengths.uniform(4, 12)) for _ in range(64)]
    tokens = {i: of_prompts[prompt] for i, prompt in prompt_ids.items()}
    assignment = assigned(range(8), prompt_ids, tokens, most_response_tokens=100)
    by_number = [sum(4 * (n + 100) for n in of_prompts[server::8]) for server in range(8)]
    outstanding = [assignment.owed.of(server) for server in range(8)]
    assert sum(outstanding) == sum(by_number)
    assert max(outstanding) - min(outstanding) < 0.1 * (max(by_number) - min(by_number))
    taken = {server: assignment.take(server, 4 * 64) for server in range(8)}
    assert [len(requests) for requests in taken.values()] == [4 * 8] * 8
    assert [len({prompt_ids[i] for i in requests}) for requests in taken.values()] == [8] * 8
    assignment.lose(3, taken[3])
    outstanding = [assignment.owed.of(server) for server in range(8) if server != 3]
    assert sum(outstanding) == sum(by_number)


def test_outstanding_tokens_follow_mean_response_length() -> None:
    assignment = assigned([0, 1], {0: 0, 1: 1, 2: 2, 3: 3}, {0: 50, 1: 10, 2: 10, 3: 30}, most_response_tokens=1000)
    assert [assignment.owed.of(server) for server in (0, 1)] == [2060, 2040]  # 50 and 10, 30 and 10
    assert sorted(assignment.take(0, 2)) == [0, 2]
    assignment.answered(0, {0: 4, 2: 8})
    assert [assignment.owed.of(server) for server in (0, 1)] == [0, 40 + 2 * 6]


def test_free_server_takes_from_the_most_loaded() -> None:
    """The server with the most tokens does not have the most requests."""
    assignment = assigned([0, 1, 2], {0: 0, 1: 1, 2: 2, 3: 4, 4: 7}, {0: 900, 1: 10, 2: 10, 3: 10, 4: 10}, 10)
    assert [assignment.owed.of(server) for server in (0, 1, 2)] == [910, 60, 20]
    assert assignment.take(2, 8) == [2]
    assert assignment.relieve(2) and assignment.take(2, 8) == [0]


def test_turns_stay_with_the_last_server() -> None:
    """The rule also applies after failures of other servers. Moved episodes stay with their new server."""
    assignment = RequestAssignment(range(4))
    last_servers = dict[int, int]()
    for episode in range(24):
        assignment.add({episode: request(episode // 2, 10, episode)})
    for server in range(4):
        while taken := assignment.take(server, 100):
            last_servers |= dict.fromkeys(taken, server)
            assignment.answered(server, dict.fromkeys(taken, 5))
    assert all(last_servers[episode] == episode // 2 % 4 for episode in range(24))
    assignment.lose(1, [])
    for _ in range(2):
        for episode in range(24):
            assignment.add({episode: request(episode // 2, 20, episode)})
        for server in (0, 2, 3):
            while taken := assignment.take(server, 100):
                assert all(last_servers[episode] in (server, 1) for episode in taken)
                last_servers |= dict.fromkeys(taken, server)
                assignment.answered(server, dict.fromkeys(taken, 5))
    moved = [last_servers[episode] for episode in range(24) if episode // 2 % 4 == 1]
    assert set(moved) <= {0, 2, 3} and moved[::2] == moved[1::2], "all samples of a prompt must go to one server"


@pytest.mark.parametrize(("other_requests", "moves"), [(4, False), (1, True)])
def test_turn_moves_to_a_much_less_loaded_server(other_requests: int, moves: bool) -> None:
    """Server 0 has one running turn and six waiting turns. Server 1 takes a waiting turn only if server 0 has more
    than twice the outstanding tokens of server 1."""
    assignment = RequestAssignment([0, 1])
    for episode in range(0, 14, 2):  # even prompts go to server 0
        assignment.add({episode: request(episode, 10, episode)})
    while taken := assignment.take(0, 100):
        assignment.answered(0, dict.fromkeys(taken, 10))
    for number in range(other_requests):
        assignment.add({101 + 2 * number: request(101 + 2 * number, 10)})
    while assignment.take(1, 100):
        pass
    for episode in range(0, 14, 2):
        assignment.add({episode: request(episode, 10, episode)})
    assert len(assignment.take(0, 1)) == 1
    assert assignment.relieve(1) is moves
    if moves:
        (moved,) = assignment.take(1, 8)
        assignment.answered(1, {moved: 10})
        assignment.add({moved: request(moved, 20, moved)})
        assert assignment.take(1, 8) == [moved], "the next turn must stay with the new server"


def test_assignment_has_bounded_size() -> None:
    """Answered requests are removed. Only the servers of the latest requests are remembered for later turns."""
    assignment, sizes = RequestAssignment([0, 1]), list[int]()
    for last in (170_000, 240_000):  # the pickle encodes small integers in fewer bytes
        for number in range(last - 70_000, last):
            assignment.add({number: request(number, 5, number)})
            (server,) = [s for s in (0, 1) if assignment.take(s, 1)]
            assignment.answered(server, {number: 3})
        sizes.append(len(pickle.dumps(assignment)))
    assert sizes[1] < 1.01 * sizes[0]
    assignment.add({last: request(last - 1, 9, last - 1)})
    assert assignment.take(server, 1) == [last]
