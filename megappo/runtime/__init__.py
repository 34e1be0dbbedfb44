"""Everything that differs between CPU with gloo and CUDA with NCCL, and nothing else."""

from megappo.runtime.process import Runtime, start_runtime

__all__ = ["Runtime", "start_runtime"]
