"""The Megatron-Core side: layouts, models, schedules and roles.

Megatron-Core reads CUDA's attributes while it is imported, so a machine without CUDA is prepared here, before any
module of this room imports it. So are Transformer Engine and Apex, which it takes where it finds them.
"""

import logging
import warnings

import torch

from megappo.runtime.accelerations import find_accelerations

# Said at every import: that Transformer Engine and Apex are missing, and of a default of Megatron's own.
warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex|full scope is deprecated).*")

find_accelerations()
if not torch.cuda.is_available():
    # Megatron-Core imports what builds CUDA extensions, which nobody does on such a machine.
    logging.getLogger("torch.utils.cpp_extension").addFilter(lambda r: "No CUDA runtime is found" not in str(r.msg))
    from megappo.runtime.megatron_cpu import install

    install()
