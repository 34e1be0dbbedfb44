"""Count the weights of a model that is only on the hub: `python -m megappo.plan.bytes.declared FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from megappo.runtime.memory.allocator import collections_put_off


def declared_parameters(folder: Path) -> int:
    """Return the number of weights of the model that transformers would build from the configuration in `folder`. The
    model is built on the meta device and takes no memory."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(folder))
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    with collections_put_off():
        print(declared_parameters(Path(sys.argv[1])))
