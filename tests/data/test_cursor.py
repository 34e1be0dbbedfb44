"""The order of prompts over epochs and restarts."""

from __future__ import annotations

import pytest

from megappo.data import Cursor

ORDER = {"seed": 1, "shuffle": True}
LARGE_SEEDS = {
    4097: [5, 3, 0, 2, 1, 4, 7, 6, 7, 0, 1, 5, 2, 3, 4, 6],
    2**32 + 5: [3, 5, 7, 2, 6, 4, 1, 0, 5, 6, 3, 2, 4, 7, 0, 1],
    2**62 + 1: [4, 0, 2, 1, 5, 7, 3, 6, 0, 2, 6, 1, 7, 4, 5, 3],
}
"""Seeds with the expected order of two epochs over eight prompts."""


def cursor(size: int = 5, seed: int = 1, shuffle: bool = True, fingerprint: str = "f" * 64) -> Cursor:
    return Cursor(size, seed, shuffle, fingerprint=fingerprint)


def test_each_epoch_has_all_prompts_in_new_order() -> None:
    walk = cursor(size=20)
    epochs = [walk.take(20) for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    assert (walk.epoch, walk.position) == (3, 0)


def test_takes_cross_epochs() -> None:
    one_by_one, at_once = cursor(), cursor()
    assert [one_by_one.take(1)[0] for _ in range(13)] == at_once.take(13)
    assert (at_once.epoch, at_once.position) == (2, 3) == (one_by_one.epoch, one_by_one.position)


def test_file_order() -> None:
    assert cursor(size=3, shuffle=False).take(7) == [0, 1, 2, 0, 1, 2, 0]


def test_different_and_large_seeds() -> None:
    assert cursor(size=50, seed=1).take(50) != cursor(size=50, seed=2).take(50)
    assert sorted(cursor(seed=2**62 + 1).take(5)) == list(range(5))


def test_order_depends_on_all_bits_of_a_seed() -> None:
    """The CPU generator of torch reads 32 bits, and the epoch uses some of the bits."""
    seeds = [*range(1, 9), *(1 + 4096 * k for k in range(1, 9)), 2**32 + 1, 2**44 + 1]
    orders = [tuple(cursor(size=50, seed=seed).take(50)) for seed in seeds]
    assert len(set(orders)) == len(seeds)


def test_order_is_stable_across_versions() -> None:
    """Later versions must resume existing runs."""
    assert cursor(size=8, seed=1).take(16) == [6, 1, 3, 2, 4, 5, 0, 7, 3, 5, 6, 7, 4, 2, 0, 1]
    for seed, order in LARGE_SEEDS.items():
        assert cursor(size=8, seed=seed).take(16) == order


@pytest.mark.parametrize("taken", [0, 3, 5, 17])
def test_cursor_resumes_at_its_position(taken: int) -> None:
    before = cursor()
    before.take(taken)
    after = cursor()
    after.load_state_dict(before.state_dict())
    assert after.take(9) == before.take(9)
    assert after.state_dict() == before.state_dict()


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (
            {**ORDER, "epoch": 0, "position": 0, "fingerprint": "e" * 64},
            "of the source differ from the start of the run: the data, the tokenizer",
        ),
        ({**ORDER, "epoch": 0, "position": 5, "fingerprint": "f" * 64}, "outside of 5 prompts"),
        ({**ORDER, "epoch": 0}, "lacks fingerprint, position"),
        ({**ORDER, "epoch": 0, "position": 0, "fingerprint": "f" * 64, "seed": 2}, "cursor has run.seed 2"),
        (
            {**ORDER, "epoch": 0, "position": 0, "fingerprint": "f" * 64, "shuffle": False},
            "data.shuffle false, but",
        ),
    ],
)
def test_states_of_other_data_are_rejected(state: dict[str, object], sentence: str) -> None:
    walk = cursor()
    with pytest.raises(ValueError, match=sentence):
        walk.load_state_dict(state)
    assert (walk.epoch, walk.position) == (0, 0)


def test_empty_data_is_rejected() -> None:
    with pytest.raises(ValueError, match="dataset_size is 0"):
        cursor(size=0)
