"""Per-token functions of PPO for large vocabularies, and transformer operations between matrix products.

The package requires torch and Triton, and does not import megappo.

Import names from their modules, so that settings can be built from `objectives` without importing torch. The modules
are `objectives` (losses and metrics), `losses`, `lm_head`, `logits`, `ppo_head`, `gae`, `whiten`, `metrics`,
`layers` and `backend`.
"""
