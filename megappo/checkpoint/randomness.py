"""Seeds, saves and restores all random generators of a process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from megappo.runtime.seeds import derived_seed


def seed_generators(seed: int, rank: int) -> None:
    """Seed every generator, differently on each rank, so that two runs of a seed draw the same numbers.

    Nothing that is learned draws from them; a user's reward model or data function may.
    """
    word = derived_seed(seed, rank, bits=32)  # numpy's legacy generator takes no more, torch's on a CPU reads no more
    random.seed(word)
    np.random.seed(word)
    torch.manual_seed(word)


def random_states() -> dict[str, Any]:
    """States of Python's, numpy's, torch's, the device's and Megatron's generators, as tensors and plain values."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": {name: state.detach().cpu().clone() for name, state in get_cuda_rng_tracker().get_states().items()},
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Put every generator back where `random_states` saw it."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["megatron"])
