"""How much of the logits exists at once, by device; without torch, as whoever plans a run's memory reads it."""

from __future__ import annotations

BLOCK = {"cpu": (512, 896), "cuda": (8192, 8192)}
"""(rows, columns) of logits that exist at once in `lm_head`'s forward pass. On a CPU they stay in its caches."""
CHUNK_BYTES = {"cpu": 256 * 2**20, "cuda": 2 * 2**30}
"""Most bytes of a chunk's logits and gradients in `ppo_head`."""
