"""Samples as a run saves them, whose numbers are drawn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megappo.ppo.experience_files import SavedSamples
from megappo.types import Episode, Episodes, Experience, Prompt, Rollouts, Scored, ToolUse, Turn

EPISODES = (
    Episode((Turn(0, 2, 0.1), Turn(3, 4, 1 / 3)), tools={"find": ToolUse(2, 1, 0.25)}, prompt_ids=(5, 6)),
    Episode((), failure="raised", reason="no \ud83d"),
)


def samples(lengths: Sequence[int], first: int = 0, *, whole: bool = True) -> SavedSamples:
    """Samples of so many response tokens whose numbers are drawn; padding is NaN where there may be any. `whole`: of a
    run with a reference, a critic, an environment and routing."""
    generator, B, R = torch.Generator().manual_seed(first), len(lengths), max(lengths, default=1)
    lengths_B = torch.tensor(lengths, dtype=torch.int64)
    here_BR = torch.arange(R)[None] < lengths_B[:, None]

    def numbers(_name: str) -> Tensor:
        return torch.randn(B, R, generator=generator).masked_fill(~here_BR, torch.nan)

    ids_B, mask_BR = torch.arange(first, first + B), here_BR & (torch.arange(R) != 1)
    routing = tuple(torch.randint(0, 9, (n + 1, 2, 3), generator=generator, dtype=torch.int16) for n in lengths)
    episodes = Episodes(
        tuple(EPISODES[i % 2] for i in range(B)),
        numbers("turn_rewards"),
        tuple(({"by": "model", "text": "é", "reward": 0.5},) for _ in range(B)),
    )
    rollouts = Rollouts(
        prompts=tuple(
            Prompt(9 * i, (1, 2), f"p{i}", None if i else "a", {"data_source": "math"}, "s") for i in range(B)
        ),
        sample_ids_B=ids_B,
        group_ids_B=torch.where(ids_B % 2 == 1, -1 - ids_B, ids_B // 2),
        sequences=tuple(torch.tensor([1, 2, *range(10, 10 + n)]) for n in lengths),
        response_lengths_B=lengths_B,
        engine_logprob_BR=numbers("engine"),
        response_mask_BR=mask_BR,
        truncated_B=ids_B % 3 == 0,
        weight_versions_B=ids_B + 7,
        responses=tuple(f"r{i}" for i in range(B)),
        raw_responses=tuple(f"r{i}<eos>" for i in range(B)),
        special_tokens_B=ids_B % 2,
        episodes=episodes if whole else None,
        token_versions_BR=here_BR * (ids_B[:, None] + 3) if whole else None,
        reward_failures=tuple("late" if i == 1 else "" for i in range(B)),
        routing=routing if whole else None,
    )
    scored = Scored(
        rollouts,
        torch.randn(B, generator=generator),
        numbers("old"),
        numbers("ref") if whole else None,
        numbers("values") if whole else None,
    )
    weights = numbers("weights") if whole else None
    kl = numbers("kl") if whole else None
    experience = Experience(scored, numbers("a"), numbers("r"), weights, mask_BR, numbers("rewards"), kl)
    return SavedSamples(experience, torch.randn(B, generator=generator))
