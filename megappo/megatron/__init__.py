"""Models, layouts, schedules and roles with Megatron-Core.

Megatron-Core reads CUDA attributes during its import. A machine without CUDA is therefore prepared here, before other
modules of this package import Megatron-Core. Transformer Engine and Apex are hidden from Megatron-Core unless the run
has selected them.
"""

import torch

from megappo.megatron.patches.all_devices import silence_megatron
from megappo.megatron.patches.cpu import install
from megappo.runtime.accelerations import decide_accelerations

silence_megatron()
decide_accelerations()
if not torch.cuda.is_available():
    install()
