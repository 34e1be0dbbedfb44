"""The mathematics of a step over batches and time; per-token mathematics is in `megappo_kernels`.

Names are imported from their modules. Conventions: tensor arguments are keyword-only; (B, T) is samples by response
tokens; masks are bool; log-probabilities and divergences are in nats. Masked positions may hold anything, NaN included,
without any effect.
"""
