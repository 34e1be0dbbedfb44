"""Seeds, saves and restores all random generators of a process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from megappo.runtime.seeds import derived_seed


def seed_generators(seed: int, rank: int) -> None:
    """Seed every generator with a different seed per rank. Two runs with the same seed draw the same numbers.

    Training does not use these generators. Custom reward models or data functions may use them.
    """
    word = derived_seed(seed, rank, bits=32)  # the limit of numpy's legacy generator and of torch's CPU generator
    random.seed(word)
    np.random.seed(word)
    torch.manual_seed(word)


def random_states() -> dict[str, Any]:
    """Return the states of the generators of Python, numpy, torch, the device and Megatron, as tensors and plain
    values."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    version, python_state, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, torch.tensor(python_state, dtype=torch.int64), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": {name: state.detach().cpu().clone() for name, state in get_cuda_rng_tracker().get_states().items()},
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Restore the states of `random_states` in all generators."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    version, python_state, gauss = states["python"]
    random.setstate((version, tuple(python_state.tolist()), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["megatron"])
