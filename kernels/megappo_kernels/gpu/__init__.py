"""Triton kernels and their launchers. The modules are imported only on devices that run Triton.

Triton recompiles a kernel if an integer becomes 1 or a multiple of 16, or if a pointer becomes aligned to 16 bytes.
A compilation takes seconds. Arguments that change between packs (rows, tokens, lengths, and pointers into their
buffers) are therefore excluded from specialisation. Arguments that depend only on the model (columns, features,
strides of logits) are specialised, which allows loads of logits up to 16 bytes wide.
"""
