"""Real SGLang servers hold exactly what real Megatron actors hold, whatever happens to them in between."""

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

from megappo.engines.sglang.guard import session_pids
from megappo.runtime.nccl import SETTINGS
from tests.support.harness import launch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.waits,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs the full environment"),
]

Found = list[dict[str, Any]]
EXACT = 1e-5  # nats, float32 on both sides


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Found]:
    """Runs a scenario once; what each rank found."""
    done: dict[str, Found] = {}

    def run(name: str) -> Found:
        if name not in done:
            done[name] = []  # not tried again by the next test
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
def test_an_engine_says_what_the_updated_actor_says(scenario: Callable[[str], Found], name: str, layout: str) -> None:
    """Before the sync they differ by the update; after it, by rounding. Every sync compared all fingerprints."""
    assert max(found[layout]["buckets"] for found in scenario(name)) > 3
    for found in scenario(name):
        case = found[layout]
        assert case["without_sync"] > 1e-2
        assert case["after_sync"] < EXACT
        assert case["probe"] < EXACT
        assert 0 < case["phases"] <= 1
    starts = [case["wake"] for found in scenario(name) for case in found.values() if "wake" in case]
    assert max(starts) > 1, "the first sync is told to have waited for servers that start"


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_a_rank_receives_what_it_needs_of_the_weights(scenario: Callable[[str], Found], name: str, layout: str) -> None:
    """As the transport counts it over two syncs. Nobody where memory is shared; beside a server of two ranks each rank
    what it lacks of one's slices, or of all where experts stand whole on the server's ranks; for a server elsewhere a
    rank of each stage what it lacks of its stage."""
    cases = [found[layout] for found in scenario(name)]
    assert [case["received"] for case in cases] == [case["planned"] for case in cases]
    shares = [case["received"] / (2 * case["model"]) for case in cases]
    if layout == "apart-messages":
        assert shares == pytest.approx([0.5, 0.0], abs=0.05)  # the actor is on the second rank alone
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
def test_an_engine_says_which_experts_computed_a_token(
    scenario: Callable[[str], Found], name: str, layout: str
) -> None:
    """All but the last token of each sample, and in float32 those that the trainer would have taken, too."""
    for found in scenario(name):
        assert 0.8 < found[layout]["replayed"] < 1
        assert found[layout]["changed"] < 0.01


def test_a_text_ends_an_answer_where_it_first_stands_in_it(scenario: Callable[[str], Found]) -> None:
    """Also where it takes more tokens than SGLang looks at; what comes before is as it is without."""
    for found in scenario(TWO):
        case = found["texts"]
        assert case["lengths"] == [end or whole for end, whole in zip(case["ends"], case["whole"], strict=True)]
        assert case["lengths"] != case["whole"]
        assert not any(case["truncated"])
        assert case["same_tokens"]
        assert case["gap"] < EXACT


def test_no_answer_ends_before_its_least_tokens(scenario: Callable[[str], Found]) -> None:
    """The two tokens that may come first share out all probability."""
    for found in scenario(TWO):
        case = found["least"]
        assert case["first"] == [3, 4]
        assert case["sum"] == pytest.approx(1, abs=EXACT)
        assert case["later"] > 5
        assert case["unbound"] > 5


@pytest.mark.parametrize(
    ("name", "accident"),
    [("two_engines", "kill"), pytest.param("struck_engines", "stop", marks=exhaustive), ("broadcast_engine", "kill")],
)
def test_a_lost_engine_costs_no_sample(scenario: Callable[[str], Found], name: str, accident: str) -> None:
    """Killed, or stopped so that it hangs, in the middle of a rollout: every prompt has its one answer."""
    for found in scenario(name):
        case = found[accident]
        assert case["answers"] == 24
        assert case["same_tokens"]
        assert case["logprob_gap"] < EXACT
        assert case["restarts"] == 1
        assert case["versions"] == [case["version"]]
        assert case["survivors"] == ([0] if name == "broadcast_engine" else [1])


@pytest.mark.parametrize(
    ("name", "servers"), [("two_engines", [0, 1]), ("experts_engine", [0]), ("broadcast_engine", [0])]
)
def test_a_sync_that_is_cut_in_half_is_made_again(
    scenario: Callable[[str], Found], name: str, servers: list[int]
) -> None:
    """Also where two ranks feed the server that dies, with slices of their own, and each with its stage; and where
    only the part of it dies that stands on another machine than the one that is asked: all of it is started again,
    once."""
    for found in scenario(name):
        assert found["cut"]["restarts"] == 1
        assert found["cut"]["current"] == servers
        gathering, moving = found["cut"]["moving"]  # all attempts; the last attempt
        assert moving > 0 and gathering > 0
        assert found["cut"]["speed"] == pytest.approx(found["cut"]["model"])
        assert found["cut"]["probe"] < EXACT
        assert found["cut"]["mismatch"] < EXACT


def test_a_corrupted_tensor_is_sent_again(scenario: Callable[[str], Found]) -> None:
    for found in scenario("two_engines"):
        assert found["once"]["error"] == ""
        assert found["once"]["current"] == [0, 1]


def test_a_tensor_that_stays_wrong_stops_the_run_by_name(scenario: Callable[[str], Found]) -> None:
    for found in scenario("two_engines"):
        assert "failed 3 times" in found["always"]["error"]
        assert (
            "has weights that differ from the sent weights: model.layers.2.mlp.gate_up_proj.weight;"
            in found["always"]["error"] + ";"
        )
        assert found["always"]["current"] == []  # nothing may generate with mixed weights


@pytest.mark.parametrize(("name", "expected"), [(SHARDED, True), pytest.param("plain_engine", False, marks=exhaustive)])
def test_inference_is_deterministic_where_the_settings_say_so(
    scenario: Callable[[str], Found], name: str, expected: bool
) -> None:
    assert {fact for found in scenario(name) for fact in found["deterministic"]} == {expected}


def test_a_server_on_the_trainers_gpus_wakes_in_the_order_in_which_there_is_room(
    scenario: Callable[[str], Found],
) -> None:
    """Weights, sync, keys and values; every rank gives torch's cache back before each of the two that take memory, and
    waits where one of the server's ranks has answered for both."""
    sleep = ["/flush_cache", "/release_memory_occupation cuda_graph kv_cache weights", "freed"]
    sync = ["/end_weight_update", "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]
    sync += ["/weights_checker", "/flush_cache", "/update_weight_version"]
    wake = ["cache", "/resume_memory_occupation weights", *sync, "cache"]
    wake += ["/resume_memory_occupation cuda_graph kv_cache"]
    starter, other = scenario(SHARDED)
    assert starter["asleep"]["events"] == sleep + wake
    assert other["asleep"]["events"] == ["freed", "cache", "cache"]
    for found in (starter, other):
        assert found["asleep"]["mismatch"] < EXACT
        assert found["asleep"]["restarts"] == 0


def test_a_server_elsewhere_with_another_torch_gets_no_weights(scenario: Callable[[str], Found]) -> None:
    """Both ends are named, before a group is made that would hang or break."""
    version = torch.__version__.partition("+")[0]
    for found in scenario("broadcast_engine"):
        assert re.search(
            rf"server 0 \(http://.*\) has torch {version} and .*NCCL.*, the trainers have torch 1.2.3 and .*NCCL.*; "
            "install the same versions",
            found["external"]["refusal"],
        )


@pytest.mark.parametrize("name", [TWO, SHARDED, BROADCAST])
def test_trainers_and_servers_have_the_same_settings_of_nccl(scenario: Callable[[str], Found], name: str) -> None:
    chosen = sorted(f"{name}={value}" for name, value in SETTINGS.items())
    for found in scenario(name):
        assert found["trainer_nccl"] == chosen
        assert all(variables == chosen for variables in found["nccl"])


@pytest.mark.parametrize("name", [TWO, SHARDED, BROADCAST])
def test_servers_on_a_cpu_leave_it_to_others_while_they_are_idle(scenario: Callable[[str], Found], name: str) -> None:
    """SGLang's schedulers ask for requests without a pause otherwise."""
    assert {fact for found in scenario(name) for fact in found["sleeps"]} == {True}


@pytest.mark.parametrize("name", [TWO, SHARDED, BROADCAST])
def test_servers_hold_the_tokens_that_they_were_told_to(scenario: Callable[[str], Found], name: str) -> None:
    """Those that were started again too; and one that has too few is not used."""
    for found in scenario(name):
        assert set(found["tokens"]) == {16384}
        assert (
            "room for the keys and values of 16384 tokens, but the longest prompt and response have 16385 tokens;"
            in (found["too_long"])
        )


@pytest.mark.parametrize("name", [TWO, EXPERTS])
def test_servers_import_no_models_but_their_own(scenario: Callable[[str], Found], name: str) -> None:
    """Others want libraries of NVIDIA's compiler."""
    assert {fact for found in scenario(name) for fact in found["compiler"]} == {False}


def test_the_processes_of_a_server_are_forked(scenario: Callable[[str], Found]) -> None:
    """The server itself, a detokenizer, and a scheduler for each of its two ranks."""
    assert [count for found in scenario(SHARDED) for count in found["forked"]] == [4]


@pytest.mark.parametrize(
    ("name", "forked"),
    [("experts_engine", [3, 2]), pytest.param("attending_engine", [4, 3], marks=exhaustive)],
)
def test_a_server_on_two_machines_has_a_part_on_each(
    scenario: Callable[[str], Found], name: str, forked: list[int]
) -> None:
    """Guarded there, with a rank of its own; a detokenizer beside the first one, and on both machines of the server
    whose ranks attend apart, what deals requests out to them. Nothing of it is left."""
    found = scenario(name)
    assert [f["forked"] for f in found] == [[count] for count in forked]
    sessions = {session for f in found for session in f["sessions"]}
    assert len(sessions) == 2 and not any(session_pids(session) for session in sessions)


@pytest.mark.parametrize("name", [TWO, SHARDED, BROADCAST, EXPERTS])
def test_servers_listen_on_their_interface_only(scenario: Callable[[str], Found], name: str) -> None:
    """SGLang's own ranks and the broadcast group too, whose stores take anybody at their word."""
    assert {address for found in scenario(name) for address in found["addresses"]} == {"127.0.0.1"}
    assert {address for found in scenario(name) for address in found["trainer_addresses"]} <= {"127.0.0.1"}


@pytest.mark.parametrize("name", [TWO, SHARDED, BROADCAST, EXPERTS])
def test_nothing_is_left_behind(scenario: Callable[[str], Found], name: str) -> None:
    for found in scenario(name):
        for session in found["sessions"]:
            assert session_pids(session) == []
        assert not [path for path in found["files"] + found["folders"] if os.path.exists(path)]
        for url in found["urls"]:
            with socket.socket() as probe:
                assert probe.connect_ex((urlsplit(url).hostname, urlsplit(url).port)) != 0
    assert [s for found in scenario(name) for s in found["sessions"]]


@pytest.mark.parametrize("name", [TWO, SHARDED, BROADCAST])
def test_a_log_does_not_end_with_a_crash(scenario: Callable[[str], Found], name: str) -> None:
    """Of servers on one machine that were ended because the run did; a part on another one sees its other part end."""
    logs = [log for found in scenario(name) for log in found["logs"]]
    assert logs and not any(word in log for log in logs for word in ("crashed", "SIGQUIT", "leaked")), logs


def test_answers_go_on_under_new_weights(scenario: Callable[[str], Found]) -> None:
    """What was generated until then is kept; each token has the log-probability of the weights that it says made it."""
    for found in scenario("two_engines"):
        case = found["in_flight"]
        assert case["answers"] == 24 and case["idle"] == 0 and case["most_tokens"] <= 100
        assert case["versions"] == case["expected"] and 0 < case["several"] <= case["partial"] <= case["cut"]
        assert case["gap_of_the_actors"] < EXACT < 1e-3 < case["gap_of_others"]


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_servers_keep_answers_while_their_weights_change(scenario: Callable[[str], Found], pause: str) -> None:
    """They end under the new weights, and each token has the log-probability of those that it says made it; with the
    keys and values of the older ones, those of neither."""
    for found in scenario("two_engines"):
        case = found[pause]
        assert case["answers"] == 24 and case["broken_off"] == case["restarts"] == 0 < case["several"]
        assert case["versions"] == case["expected"]
        assert case["gap_of_others"] > 1e-3
        assert (case["gap_of_the_actors"] < EXACT) == (pause == "retract")


@exhaustive
def test_answers_in_flight_survive_a_server(scenario: Callable[[str], Found]) -> None:
    for found in scenario("struck_engines"):
        case = found["in_flight_killed"]
        assert case["answers"] == 24 and case["restarts"] == 1
        assert case["versions"] == [case["version"]] and case["gap"] < EXACT
