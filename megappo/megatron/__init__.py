"""The Megatron-Core side: layouts, models, schedules and roles.

Megatron-Core reads CUDA's attributes while it is imported, so a machine without CUDA is prepared here, before any
module of this room imports it. Transformer Engine and Apex, which it uses where it finds them, are hidden unless the
run has selected them.
"""

import torch

from megappo.runtime.accelerations import decide_accelerations
from megappo.runtime.megatron_cpu import install
from megappo.runtime.megatron_patches import silence_megatron

silence_megatron()
decide_accelerations()
if not torch.cuda.is_available():
    install()
