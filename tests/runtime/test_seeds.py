"""Seeds never change, so that resumed and repeated runs draw the same samples."""

from __future__ import annotations

import pytest

from megappo.runtime.seeds import derived_seed


@pytest.mark.parametrize(
    ("parts", "bits", "seed"),
    [((0, 1, 2), 63, 3662037204992188296), ((7, "after", 12), 63, 2742713444620671204), ((3, 1), 32, 2276220904)],
)
def test_seeds_do_not_change(parts: tuple[int | str, ...], bits: int, seed: int) -> None:
    assert derived_seed(*parts, bits=bits) == seed


def test_seeds_use_all_bits_and_differ() -> None:
    for bits in (32, 63):
        seeds = {derived_seed(0, step, sample, bits=bits) for step in range(100) for sample in range(100)}
        assert len(seeds) > 9990 and 2**bits * 0.999 < max(seeds) < 2**bits
