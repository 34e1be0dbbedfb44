"""Count the reads on the host during a pass through a model; see test_host_reads.py.

Usage (under torchrun): reads_worker.py CASE.json FOUND.json
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megappo.config.grid import Grid
from megappo.config.role_models import load_architecture
from megappo.config.schema import ModelSettings
from megappo.families.architecture import padded_vocab_size
from megappo.megatron.build import BuildOptions, RoleModel, build_model
from megappo.megatron.layout import Cut, Layout, make_layouts
from megappo.megatron.schedule import PlacedSample, pack_samples, run_schedule
from megappo.reshard.sources import SafetensorsSource
from megappo.runtime.process import Runtime
from tests.support.workers import answer
from tests.support.workers.model_worker import outputs, sequences

# Operations whose result or output size is a number that the host would read from a device.
READING = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique_dim", "_unique2"}
COPYING = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}
MAKING = {torch.tensor, torch.as_tensor, torch.asarray}


class Reads(TorchDispatchMode):
    """Counter of reads below Python, including indices by masks and repetitions by a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        # An assignment of one number at a mask is `masked_fill` on a device, which needs no indices.
        puts_one = name.startswith("index_put") and args[2].numel() == 1
        masks = name in ("index", "index_put", "index_put_") and any(map(is_mask, args[1])) and not puts_one
        repeats = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        self.count += name in READING or masks or repeats
        return func(*args, **(kwargs or {}))


def is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype == torch.bool


class Copies(TorchFunctionMode):
    """Counter of complete tensors that Python reads, and of copies to a device that wait: copies of numbers, and
    copies of tensors without `non_blocking`. A CPU executes no operation for such copies."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        moves = func in (torch.Tensor.to, torch.Tensor.cuda) and not options.get("non_blocking")
        moves = moves and (func is torch.Tensor.cuda or any(map(names_a_device, (*args[1:], options.get("device")))))
        makes = func in MAKING and names_a_device(options.get("device"))
        self.count += func in COPYING or moves or makes
        return func(*args, **options)


def names_a_device(argument: Any) -> bool:
    return isinstance(argument, torch.device | str | torch.Tensor)


def reads(model: RoleModel, layout: Layout, samples: Iterable[PlacedSample]) -> int:
    """Return the reads in forward and backward. Each sample has its own microbatch, except the second sample, which
    shares the microbatch of the first."""
    first, second, *others = samples
    groups = [[first, second], *([sample] for sample in others)]
    with Reads() as scalars, Copies() as tensors:
        device, multiple = torch.device("cpu"), layout.token_multiple
        batches = [pack_samples(group, device, shard=layout.shard, multiple_of=multiple) for group in groups]
        run_schedule(model.chunks, layout, batches, outputs, train=True)
    return scalars.count + tensors.count


def check(case: dict[str, Any], folder: Path, runtime: Runtime) -> int:
    """Return the reads of one case on this rank."""
    arch = load_architecture(folder, ModelSettings(path=str(folder)))
    tp = case["tp"]
    layout = make_layouts({"actor": Cut(Grid((0, 1), tp, case["pp"], cp=case.get("cp", 1)), 1, tp > 1)}, "cpu", 120)[
        "actor"
    ]
    assert isinstance(layout, Layout)
    vocab = padded_vocab_size(arch.vocab_size, tp, 8 * tp)
    options = BuildOptions(torch.float32, runtime.device, vocab, recompute=case["recompute"])
    samples = [PlacedSample(i, s, len(s) - 1) for i, s in enumerate(sequences(arch.vocab_size))]
    return reads(build_model(arch, layout, options, SafetensorsSource(folder, arch)), layout, samples)


def counts(request: dict[str, Any], runtime: Runtime) -> dict[str, list[int]]:
    cases, folders = request["cases"], request["folders"]
    return {name: [check(case, Path(folder), runtime) for folder in folders] for name, case in cases.items()}


if __name__ == "__main__":
    answer(counts)
