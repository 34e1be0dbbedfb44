"""Per-token mathematics of PPO on large vocabularies, and of layers between their matrices.

Needs torch and Triton, and nothing of megappo.

Names are imported from their modules, so that settings can be built from `objectives` without importing torch:
`objectives` (what is optimised), `losses`, `lm_head`, `logits`, `ppo_head`, `gae`, `whiten`, `metrics`, `layers`,
`backend`.
"""
