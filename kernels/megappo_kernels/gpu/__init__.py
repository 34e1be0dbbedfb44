"""The Triton kernels and what launches them; imported only where they run."""
