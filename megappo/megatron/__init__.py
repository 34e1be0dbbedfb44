"""The Megatron-Core side: layouts, models, schedules and roles.

Megatron-Core reads CUDA's attributes while it is imported, so a machine without CUDA is prepared here, before any
module of this room imports it. So are Transformer Engine and Apex, which it takes where it finds them.
"""

import torch

from megappo.runtime.accelerations import find_accelerations
from megappo.runtime.megatron_cpu import install
from megappo.runtime.megatron_patches import silence_megatron

silence_megatron()
find_accelerations("auto")
if not torch.cuda.is_available():
    install()
