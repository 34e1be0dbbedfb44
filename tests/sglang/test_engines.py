"""Real SGLang servers have the exact weights of real Megatron actors, also after failures."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from megappo.engines.sglang.servers.guard import session_pids
from megappo.runtime.ranks.nccl import SETTINGS
from tests.support.harness import launch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs the full environment"),
]

RankResults = list[dict[str, Any]]
EXACT = 1e-5  # nats, float32 on both sides


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RankResults]:
    """Return a function that runs a scenario once and returns the results of each rank."""
    done: dict[str, RankResults] = {}

    def run(name: str) -> RankResults:
        if name not in done:
            done[name] = []  # a failed scenario is not run again
            out = tmp_path_factory.mktemp(name) / "found.json"
            launch("engine_worker.py", 2, name, out, timeout_seconds=570)
            done[name] = json.loads(out.read_text())
        assert done[name], "the scenario failed"
        return done[name]

    return run


exhaustive = pytest.mark.exhaustive
TWO = "two_engines"  # Llama, own output layer, engine TP1
SHARDED = "sharded_engine"  # Qwen3, tied, engine TP2
BROADCAST = "broadcast_engine"  # Llama, tied, engine TP1, broadcast group
EXPERTS = "experts_engine"  # Qwen3 with experts, engine of two machines
LAYOUTS = [
    ("two_engines", "TP2"),
    ("two_engines", "PP2"),
    (SHARDED, "TP2"),
    (SHARDED, "PP2"),
    (SHARDED, "PP2-messages"),
    (SHARDED, "apart-messages"),
    ("experts_engine", "EP2"),  # Qwen3 with experts, engine TP2 on two machines
    pytest.param("attending_engine", "TP2xEP2", marks=exhaustive),  # TP2xEP2, attending apart
    pytest.param("mixtral_engine", "EP2", marks=exhaustive),
    pytest.param("glm_engine", "PP2", marks=exhaustive),
    pytest.param("plain_engine", "TP2", marks=exhaustive),
    ("broadcast_engine", "TP2"),
    ("broadcast_engine", "DP2"),
    ("broadcast_engine", "PP2"),
    ("broadcast_engine", "apart"),
    ("broadcast_engine", "external"),
]


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_engine_logprobs_match_the_updated_actor(
    scenario: Callable[[str], RankResults], name: str, layout: str
) -> None:
    """Log-probabilities differ by the update before the sync, and by rounding after the sync. Each sync compares all
    fingerprints."""
    assert max(result[layout]["buckets"] for result in scenario(name)) > 3
    for result in scenario(name):
        case = result[layout]
        assert case["without_sync"] > 1e-2
        assert case["after_sync"] < EXACT
        assert case["probe"] < EXACT
        assert 0 < case["phases"] <= 1
    starts = [case["wake"] for result in scenario(name) for case in result.values() if "wake" in case]
    assert max(starts) > 1, "the first sync must count the start of the servers"


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_rank_receives_only_missing_weights(scenario: Callable[[str], RankResults], name: str, layout: str) -> None:
    """The transport counts received bytes over two syncs. Ranks receive no weights over shared memory. With a colocated
    server of two ranks, each rank receives the missing slices of one server rank. If each server rank has whole
    experts, each rank receives all missing weights. For a remote server, one rank of each stage receives the missing
    weights of the stage."""
    cases = [result[layout] for result in scenario(name)]
    assert [case["received"] for case in cases] == [case["planned"] for case in cases]
    shares = [case["received"] / (2 * case["model"]) for case in cases]
    if layout == "apart-messages":
        assert shares == pytest.approx([0.5, 0.0], abs=0.05)  # only the second rank has the actor
    elif name == "broadcast_engine":
        expected = [0.5, 0.0] if layout in ("TP2", "external") else [0.0, 0.0]
        assert shares == pytest.approx(expected, abs=0.05)
    elif layout == "TP2xEP2":
        assert shares == pytest.approx([0.5, 0.5], abs=0.05)
    elif layout.endswith("messages") or name == "experts_engine":
        assert all(0.1 < share < 0.35 for share in shares)
    else:
        assert shares == [0, 0]


@pytest.mark.parametrize(
    ("name", "layout"),
    [("experts_engine", "EP2"), pytest.param("attending_engine", "TP2xEP2", marks=exhaustive)],
)
def test_engine_reports_the_experts_of_a_token(scenario: Callable[[str], RankResults], name: str, layout: str) -> None:
    """The engine reports experts of all tokens except the last token of each sample. In float32 the trainer selects the
    same experts."""
    for result in scenario(name):
        assert 0.8 < result[layout]["replayed"] < 1
        assert result[layout]["changed"] < 0.01


def test_stop_text_ends_an_answer_at_first_occurrence(scenario: Callable[[str], RankResults]) -> None:
    """Stop texts work with more tokens than SGLang inspects. The tokens before a stop text do not change."""
    for result in scenario(TWO):
        case = result["texts"]
        assert case["lengths"] == [end or whole for end, whole in zip(case["ends"], case["whole"], strict=True)]
        assert case["lengths"] != case["whole"]
        assert not any(case["truncated"])
        assert case["same_tokens"]
        assert case["gap"] < EXACT


def test_answers_reach_the_minimum_length(scenario: Callable[[str], RankResults]) -> None:
    """The two allowed first tokens have a total probability of one."""
    for result in scenario(TWO):
        case = result["least"]
        assert case["first"] == [3, 4]
        assert case["sum"] == pytest.approx(1, abs=EXACT)
        assert case["later"] > 5
        assert case["unbound"] > 5


@pytest.mark.parametrize(
    ("name", "accident"),
    [("two_engines", "kill"), pytest.param("struck_engines", "stop", marks=exhaustive), ("broadcast_engine", "kill")],
)
def test_lost_engine_loses_no_sample(scenario: Callable[[str], RankResults], name: str, accident: str) -> None:
    """The engine is killed or stopped during a rollout, and restarted during the rollout. Each prompt still has exactly
    one answer."""
    for result in scenario(name):
        case = result[accident]
        assert case["answers"] == 24
        assert case["same_tokens"]
        assert case["logprob_gap"] < EXACT
        assert case["restarts"] == 1
        assert case["versions"] == [case["version"]]
        assert case["current"] == ([0] if name == "broadcast_engine" else [0, 1])


@pytest.mark.parametrize(
    ("name", "servers"), [("two_engines", [0, 1]), ("experts_engine", [0]), ("broadcast_engine", [0])]
)
def test_interrupted_sync_is_repeated(scenario: Callable[[str], RankResults], name: str, servers: list[int]) -> None:
    """The server can receive slices from two ranks or stages from two ranks. If only one part of a server on two
    machines dies, the whole server is restarted once."""
    for result in scenario(name):
        assert result["cut"]["restarts"] == 1
        assert result["cut"]["current"] == servers
        gathering, moving = result["cut"]["moving"]  # all attempts; the last attempt
        assert moving > 0 and gathering > 0
        assert result["cut"]["speed"] == pytest.approx(result["cut"]["model"])
        assert result["cut"]["probe"] < EXACT
        assert result["cut"]["mismatch"] < EXACT


def test_corrupted_tensor_is_sent_again(scenario: Callable[[str], RankResults]) -> None:
    for result in scenario("two_engines"):
        assert result["once"]["error"] == ""
        assert result["once"]["current"] == [0, 1]


def test_persistently_wrong_tensor_stops_the_run(scenario: Callable[[str], RankResults]) -> None:
    for result in scenario("two_engines"):
        assert "failed 3 times" in result["always"]["error"]
        assert (
            "has weights that differ from the sent weights: model.layers.2.mlp.gate_up_proj.weight;"
            in result["always"]["error"] + ";"
        )
        assert result["always"]["current"] == []  # no server may generate with mixed weights


@pytest.mark.parametrize(("name", "expected"), [(SHARDED, True), pytest.param("plain_engine", False, marks=exhaustive)])
def test_inference_is_deterministic_if_configured(
    scenario: Callable[[str], RankResults], name: str, expected: bool
) -> None:
    assert {fact for result in scenario(name) for fact in result["deterministic"]} == {expected}


def test_colocated_server_wakes_in_memory_order(
    scenario: Callable[[str], RankResults],
) -> None:
    """The server restores weights, receives the sync, and then restores the key-value cache. Each rank releases the
    cache of torch before each of the two allocations. A rank waits if one server rank has answered for both."""
    sleep = ["/flush_cache", "/release_memory_occupation cuda_graph kv_cache weights", "freed"]
    sync = ["/end_weight_update", "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]
    sync += ["/weights_checker", "/flush_cache", "/update_weight_version"]
    wake = ["cache", "/resume_memory_occupation weights", *sync, "cache"]
    wake += ["/resume_memory_occupation cuda_graph kv_cache"]
    starter, other = scenario(SHARDED)
    assert starter["asleep"]["events"] == sleep + wake
    assert other["asleep"]["events"] == ["freed", "cache", "cache"]
    for result in (starter, other):
        assert result["asleep"]["mismatch"] < EXACT
        assert result["asleep"]["restarts"] == 0


def test_remote_server_with_another_torch_is_rejected(scenario: Callable[[str], RankResults]) -> None:
    """The error names both versions before a process group is created, because the group would hang or fail."""
    version = torch.__version__.partition("+")[0]
    for result in scenario("broadcast_engine"):
        assert re.search(
            rf"server 0 \(http://.*\) has torch {version} and .*NCCL.*, the trainers have torch 1.2.3 and .*NCCL.*; "
            "install the same versions",
            result["external"]["refusal"],
        )


@pytest.mark.parametrize("name", [TWO, SHARDED, BROADCAST])
def test_trainers_and_servers_share_nccl_settings(scenario: Callable[[str], RankResults], name: str) -> None:
    chosen = sorted(f"{name}={value}" for name, value in SETTINGS.items())
    for result in scenario(name):
        assert result["trainer_nccl"] == chosen
        assert all(variables == chosen for variables in result["nccl"])


@pytest.mark.parametrize("name", [TWO, SHARDED, BROADCAST])
def test_idle_cpu_servers_sleep(scenario: Callable[[str], RankResults], name: str) -> None:
    """Without this setting the schedulers of SGLang poll for requests without a pause."""
    assert {fact for result in scenario(name) for fact in result["sleeps"]} == {True}


@pytest.mark.parametrize("name", [TWO, SHARDED, BROADCAST])
def test_servers_have_the_configured_token_capacity(scenario: Callable[[str], RankResults], name: str) -> None:
    """Restarted servers have the same capacity. A server with a smaller capacity is rejected."""
    for result in scenario(name):
        assert set(result["tokens"]) == {16384}
        assert (
            "room for the keys and values of 16384 tokens, but the longest prompt and response have 16385 tokens;"
            in (result["too_long"])
        )


@pytest.mark.parametrize("name", [TWO, EXPERTS])
def test_servers_import_only_their_own_model(scenario: Callable[[str], RankResults], name: str) -> None:
    """Other models import libraries of the NVIDIA compiler."""
    assert {fact for result in scenario(name) for fact in result["compiler"]} == {False}


def test_server_processes_are_forked(scenario: Callable[[str], RankResults]) -> None:
    """The processes are the server, a detokenizer and a scheduler for each of the two ranks."""
    assert [count for result in scenario(SHARDED) for count in result["forked"]] == [4]


@pytest.mark.parametrize(
    ("name", "forked"),
    [("experts_engine", [3, 2]), pytest.param("attending_engine", [4, 3], marks=exhaustive)],
)
def test_two_machine_server_has_one_part_per_machine(
    scenario: Callable[[str], RankResults], name: str, forked: list[int]
) -> None:
    """Each part has a guard and a rank. The first part also has a detokenizer. With data-parallel attention, both
    machines have a process that distributes requests. No process remains after the run."""
    results = scenario(name)
    assert [f["forked"] for f in results] == [[count] for count in forked]
    sessions = {session for f in results for session in f["sessions"]}
    assert len(sessions) == 2 and not any(session_pids(session) for session in sessions)


@pytest.mark.parametrize("name", [TWO, SHARDED, BROADCAST, EXPERTS])
def test_servers_listen_only_on_their_interface(scenario: Callable[[str], RankResults], name: str) -> None:
    """The rule includes the ranks of SGLang and the broadcast group, because their stores do not authenticate
    clients."""
    assert {address for result in scenario(name) for address in result["addresses"]} == {"127.0.0.1"}
    assert {address for result in scenario(name) for address in result["trainer_addresses"]} <= {"127.0.0.1"}


@pytest.mark.parametrize("name", [TWO, SHARDED, BROADCAST, EXPERTS])
def test_no_process_or_file_remains(scenario: Callable[[str], RankResults], name: str) -> None:
    for result in scenario(name):
        for session in result["sessions"]:
            assert session_pids(session) == []
        assert not [path for path in result["files"] + result["folders"] if os.path.exists(path)]
        for url in result["urls"]:
            with socket.socket() as probe:
                assert probe.connect_ex((urlsplit(url).hostname, urlsplit(url).port)) != 0
    assert [s for result in scenario(name) for s in result["sessions"]]


@pytest.mark.parametrize("name", [TWO, SHARDED, BROADCAST])
def test_server_logs_do_not_end_with_a_crash(scenario: Callable[[str], RankResults], name: str) -> None:
    """The servers are on one machine and end with the run. A server on two machines can log the end of its other
    part."""
    logs = [log for result in scenario(name) for log in result["logs"]]
    assert logs and not any(word in log for log in logs for word in ("crashed", "SIGQUIT", "leaked")), logs


def test_answers_continue_under_new_weights(scenario: Callable[[str], RankResults]) -> None:
    """The tokens from before the sync are not lost. Each token has the log-probability of its recorded weight
    version."""
    for result in scenario("two_engines"):
        case = result["in_flight"]
        assert case["answers"] == 24 and case["late"] == 0 and case["most_tokens"] <= 100
        assert case["versions"] == case["expected"] and 0 < case["several"] <= case["partial"] <= case["cut"]
        assert case["gap_of_the_actors"] < EXACT < 1e-3 < case["gap_of_others"]


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_servers_keep_answers_during_a_weight_change(scenario: Callable[[str], RankResults], pause: str) -> None:
    """Answers end under the new weights. With `retract`, each token has the log-probability of its recorded weight
    version. With `in_place`, tokens use old keys and values, and their log-probabilities match neither version."""
    for result in scenario("two_engines"):
        case = result[pause]
        assert case["answers"] == 24 and case["broken_off"] == case["restarts"] == 0 < case["several"]
        assert case["versions"] == case["expected"]
        assert case["gap_of_others"] > 1e-3
        assert (case["gap_of_the_actors"] < EXACT) == (pause == "retract")


@exhaustive
def test_answers_in_flight_survive_a_killed_server(scenario: Callable[[str], RankResults]) -> None:
    for result in scenario("struck_engines"):
        case = result["in_flight_killed"]
        assert case["answers"] == 24 and case["restarts"] == 1
        assert case["versions"] == [case["version"]] and case["gap"] < EXACT
