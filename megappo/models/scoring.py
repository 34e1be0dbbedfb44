"""What the models say of finished responses. B samples of this rank, R longest response, as in `types`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megappo.models.roles import Role
from megappo.runtime.exchange import Row
from megappo.types import Rollouts


def response_rows(rollouts: Rollouts, samples: Sequence[int], fields_FBR: Tensor) -> list[Row]:
    """The chosen local samples as rows; padding of `fields_FBR` (float32) stays behind."""
    ids, lengths = rollouts.sample_ids_B.tolist(), rollouts.response_lengths_B.tolist()
    return [Row(ids[b], rollouts.sequences[b], fields_FBR[:, b, : lengths[b]].contiguous()) for b in samples]


def score_responses(role: Role, rollouts: Rollouts) -> Tensor:
    """First channel of the role's output at each response token, (B, R) float32 on the CPU, padded with 0.

    Log-probabilities of actor and reference, values of the critic. A collective of the whole world.
    """
    B, R = rollouts.response_mask_BR.shape
    outputs = role.score(response_rows(rollouts, range(B), torch.zeros(1, B, R)))
    scores_BR = torch.zeros(B, R)
    for b, sample_id in enumerate(rollouts.sample_ids_B.tolist()):
        output_RC = outputs[sample_id]
        scores_BR[b, : len(output_RC)] = output_RC[:, 0].cpu()
    return scores_BR
