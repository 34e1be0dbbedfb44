"""The Triton kernels and their launchers; imported only where they run.

Triton recompiles a kernel where an integer becomes 1 or a multiple of 16, or a pointer becomes aligned to 16 bytes,
which takes seconds. So arguments that change from pack to pack (rows, tokens, lengths, and pointers into their buffers)
are exempt from specialisation. Those that a model fixes (columns, features, strides of logits) are not: they make loads
of logits up to 16 bytes wide.
"""
