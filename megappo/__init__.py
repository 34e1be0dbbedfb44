"""PPO for large language models on Megatron-Core and SGLang."""

import os

__version__ = "0.1.0"

# OpenMP reads this variable when torch is imported. By default, its threads wait actively and occupy cores that other
# processes need. A value of the user is kept. Child processes inherit the variable.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
