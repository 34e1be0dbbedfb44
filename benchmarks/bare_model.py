"""Forward and backward of a stock transformers model without optimizer, as the reference for an update.

All forms are exact, and compute the head only on the rows that predict response tokens. The fastest form depends on
the lengths and the machine, so all forms are timed.

Shape legend: S samples, L longest sample, t tokens of all samples, N response tokens of all samples, H hidden size,
V vocabulary.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LAYOUTS = ("padded", "packed", "by length")
ATTENTIONS = ("sdpa", "eager")


@dataclass(frozen=True)
class Inputs:
    """Samples of one call of the model."""

    tokens: Tensor
    """(S, L), or (1, t)."""
    positions: Tensor
    """Position of each token, in the same shape. If positions restart within a row, transformers masks the tokens
    before the restart."""
    rows_N: Tensor
    """Indices of the tokens whose outputs predict response tokens."""
    labels_N: Tensor
    targets_N: Tensor
    """Target of each response token in the loss: an advantage or a return."""


def _call(samples: Sequence[tuple[Tensor, int]], targets: Sequence[Tensor], *, packed: bool) -> Inputs:
    longest = 0 if packed else max(len(tokens) for tokens, _ in samples)
    starts = itertools.accumulate((longest or len(tokens) for tokens, _ in samples), initial=0)
    rows = [torch.arange(s + len(t) - r - 1, s + len(t) - 1) for (t, r), s in zip(samples, starts, strict=False)]
    padded = [nn.functional.pad(tokens, (0, max(0, longest - len(tokens)))) for tokens, _ in samples]
    shape = (1, -1) if packed else (len(samples), longest)
    return Inputs(
        tokens=torch.cat(padded).view(shape),
        positions=torch.cat([torch.arange(len(p)) for p in padded]).view(shape),
        rows_N=torch.cat(rows),
        labels_N=torch.cat([tokens[-response:] for tokens, response in samples]),
        targets_N=torch.cat(list(targets)),
    )


def calls_of(layout: str, samples: Sequence[tuple[Tensor, int]], targets: Sequence[Tensor]) -> list[Inputs]:
    """Return the calls of the model for samples (tokens, response tokens): one call, or one call for each length."""
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for number, (tokens, _) in enumerate(samples):
        groups[len(tokens) if layout == "by length" else 0].append(number)
    return [
        _call([samples[i] for i in group], [targets[i] for i in group], packed=layout == "packed")
        for group in groups.values()
    ]


class BareModel:
    """transformers model with random weights. The head is a language model head, or a scalar head for a critic."""

    def __init__(self, folder: Path, dtype: torch.dtype, *, is_critic: bool) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = AutoConfig.from_pretrained(folder)
            self.model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
            self.value_head = nn.Linear(config.hidden_size, 1) if is_critic else None
        self.model.train()

    def forget_gradients(self) -> None:
        """Drop all gradients."""
        self.model.zero_grad(set_to_none=True)

    def run(self, calls: Sequence[Inputs], attention: str) -> float:
        """Run forward and backward of all calls. Returns the loss."""
        self.model.set_attn_implementation(attention)
        total, count = 0.0, sum(len(call.rows_N) for call in calls)
        for call in calls:
            loss = self._loss(call) / count
            loss.backward()
            total += float(loss.detach())
        return total

    def _loss(self, call: Inputs) -> Tensor:
        positions = {"position_ids": call.positions} if len(call.tokens) == 1 else {}  # the default otherwise
        hidden = self.model.model(input_ids=call.tokens, use_cache=False, **positions).last_hidden_state
        rows_NH = hidden.flatten(0, 1).index_select(0, call.rows_N)
        if self.value_head is not None:
            errors_N: Tensor = self.value_head(rows_NH.float()).squeeze(1) - call.targets_N
            return errors_N.square().sum()
        logits_NV = self.model.lm_head(rows_NH).float()
        return (nn.functional.cross_entropy(logits_NV, call.labels_N, reduction="none") * call.targets_N).sum()


def forms(samples: Sequence[tuple[Tensor, int]], targets: Sequence[Tensor]) -> Iterator[tuple[str, str, list[Inputs]]]:
    """Yield every exact way to compute the samples: name, attention and calls."""
    equal = len({len(tokens) for tokens, _ in samples}) == 1
    for layout, attention in itertools.product(LAYOUTS, ATTENTIONS):
        if not (equal and layout == "by length"):  # samples of equal length have no padding
            name = "one batch" if equal and layout == "padded" else layout
            yield f"{name}, {attention}", attention, calls_of(layout, samples, targets)
