"""The Triton kernels and what launches them; imported only where they run.

Triton compiles a kernel anew where an integer becomes 1 or a multiple of 16, or a pointer aligned to 16 bytes, which
takes seconds. So what changes from pack to pack (rows, tokens, lengths, and pointers into buffers of them) is exempt.
What a model fixes (columns, features, strides of logits) is not: loads of logits get up to 16 bytes wide by it.
"""
