"""Sizes of blocks of logits by device. The module does not import torch, because plans read the sizes."""

from __future__ import annotations

BLOCK = {"cpu": (512, 896), "cuda": (8192, 8192)}
"""(rows, columns) of the logits in memory at a time in the forward pass of `lm_head`. On a CPU the logits stay in
the caches."""
CHUNK_BYTES = {"cpu": 256 * 2**20, "cuda": 2 * 2**30}
"""Limit on the bytes of a chunk's logits and gradients in `ppo_head`."""
