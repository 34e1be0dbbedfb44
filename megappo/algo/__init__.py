"""The mathematics of a step over batches and time. Per-token mathematics is in `megappo_kernels`.

Names are imported from their modules. Tensor arguments are keyword-only. (B, T) is samples by response tokens. Masks
are bool. Log-probabilities and divergences are in nats. Masked positions may have any value, including NaN, without
any effect.
"""
