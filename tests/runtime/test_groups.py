"""Process groups of roles with different layouts, and exchanges of tensors between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import launch, run_worker

pytestmark = [pytest.mark.slow, pytest.mark.waits]


WORLD = 8
# For each role: ranks, TP, PP, EP, CP.
CASES: dict[str, dict[str, tuple[list[int], int, int, int, int]]] = {
    "same ranks": {"actor": (list(range(8)), 2, 2, 2, 1), "critic": (list(range(8)), 1, 4, 1, 1)},
    "other ranks": {"actor": (list(range(4)), 2, 1, 4, 1), "critic": (list(range(4, 8)), 1, 2, 2, 1)},
    "some ranks": {"actor": (list(range(6)), 1, 3, 2, 1), "critic": (list(range(4, 8)), 4, 1, 2, 1)},
    "not all": {"actor": ([1, 2, 3], 3, 1, 3, 1), "critic": ([0, 2, 4, 6], 2, 2, 1, 1)},
    "shared out": {"actor": (list(range(8)), 2, 1, 4, 2), "critic": (list(range(8)), 1, 2, 2, 2)},
}


def expected(ranks: list[int], tp: int, pp: int, ep: int, cp: int) -> dict[str, list[list[int]]]:
    """Return the groups of Megatron by definition: ranks of a group share all coordinates except some."""
    places = {}
    for index, rank in enumerate(ranks):
        context, tensor = index // tp % cp, index % tp
        replica, stage = index // (tp * cp * pp), index // (tp * cp) % pp
        copy, share = divmod((replica * cp + context) * tp + tensor, ep)
        places[rank] = {"d": replica, "p": stage, "x": context, "t": tensor, "c": copy, "e": share, "r": rank}

    def sharing(coordinates: str, among: list[int] = ranks) -> list[list[int]]:
        def key(rank: int) -> list[int]:
            return [places[rank][c] for c in coordinates]

        return [sorted(group) for _, group in groupby(sorted(among, key=key), key)]

    first, ends = [[r for r in ranks if places[r]["p"] in stages] for stages in ({0}, {0, pp - 1})]
    groups = {"tp": sharing("dpx"), "tp_cp": sharing("dp"), "cp": sharing("dpt")}
    groups |= dict.fromkeys(["dp", "dp_cp", "intra_dp_cp"], sharing("pt"))
    groups |= dict.fromkeys(["ep", "tp_ep"], sharing("pc")) | {"tp_ep_pp": sharing("c")}
    groups |= dict.fromkeys(["expt_dp", "intra_expt_dp"], sharing("pe"))
    groups |= {"expt_tp": sharing("r")} | dict.fromkeys(["role", "intra_dist_opt"], sharing(""))
    groups |= {"pp": sharing("dxt"), "mp": sharing("dx"), "tp_dp_cp": sharing("p")}
    return groups | {"embd": sharing("dxt", ends), "pos_embd": sharing("dxt", first)}


@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.quick) for name in CASES])
def test_groups_of_all_roles(case: str) -> None:
    """A sum over each group reaches exactly the ranks of the group. An incomplete group would hang."""
    answers = run_worker("groups_worker.py", WORLD, CASES[case], timeout_seconds=120)
    for role, arguments in CASES[case].items():
        groups = expected(*arguments)
        for rank in range(WORLD):
            assert answers[rank]["groups"].get(role, {}) == dict(own(groups, rank)), (role, rank)


def own(groups: dict[str, list[list[int]]], rank: int) -> Iterator[tuple[str, Any]]:
    """Yield the group of this rank for each kind of group."""
    for name, of_kind in groups.items():
        yield from ((name, ranks) for ranks in of_kind if rank in ranks)


def test_exchange_between_three_ranks() -> None:
    launch("exchange_worker.py", 3)


def test_rank_has_two_connections_to_the_store(tmp_path: Path) -> None:
    """One connection is for the process group and one for all listener threads. All ranks connect to one process."""
    launch("store_worker.py", 2, tmp_path)
