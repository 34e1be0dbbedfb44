"""Samples in the format of saved experience: random samples, and two samples with results computed by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megappo.observe.ends import End
from megappo.observe.saved_samples import MARKER
from megappo.ppo.records.experience_files import SavedSamples, write_samples
from megappo.types import Episode, Episodes, Experience, Prompt, Rollouts, Scored, ToolUse, Turn

EPISODES = (
    Episode(
        (Turn(0, 2, 0.1), Turn(3, 4, 1 / 3)), tools={"find": ToolUse(2, 1, 0.25)}, prompt_ids=(5, 6), end=End.TURN_CUT
    ),
    Episode((), failure="raised", reason="no \ud83d"),
)


def samples(lengths: Sequence[int], first: int = 0, *, whole: bool = True) -> SavedSamples:
    """Return samples with these response lengths and random numbers. Padding is NaN for floats. With `whole`, the run
    has a reference, a critic, an environment and routing."""
    generator, B, R = torch.Generator().manual_seed(first), len(lengths), max(lengths, default=1)
    lengths_B = torch.tensor(lengths, dtype=torch.int64)
    valid_BR = torch.arange(R)[None] < lengths_B[:, None]

    def numbers(_name: str) -> Tensor:
        return torch.randn(B, R, generator=generator).masked_fill(~valid_BR, torch.nan)

    ids_B, mask_BR = torch.arange(first, first + B), valid_BR & (torch.arange(R) != 1)
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
        ends=tuple([*End][i % 6] for i in range(B)),
        weight_versions_B=ids_B + 7,
        responses=tuple(f"r{i}" for i in range(B)),
        raw_responses=tuple(f"r{i}<eos>" for i in range(B)),
        special_tokens_B=ids_B % 2,
        episodes=episodes if whole else None,
        token_versions_BR=valid_BR * (ids_B[:, None] + 3) if whole else None,
        reward_failures=tuple("late" if i == 1 else "" for i in range(B)),
        routing=routing if whole else None,
    )
    scored = Scored(
        rollouts, torch.randn(B, generator=generator), numbers("old"), numbers("ref") if whole else None,
        numbers("values") if whole else None,
    )  # fmt: skip
    weights = numbers("weights") if whole else None
    kl = numbers("kl") if whole else None
    experience = Experience(scored, numbers("a"), numbers("r"), weights, mask_BR, numbers("rewards"), kl)
    return SavedSamples(experience, torch.randn(B, generator=generator))


SPOKEN = "\x1b[2J"
"""A control sequence that clears the terminal."""


def rows(*numbers: Sequence[float], fill: float = 0.0) -> Tensor:
    """Return (B, 3) numbers, padded on the right."""
    return torch.tensor([[*row, *[fill] * (3 - len(row))] for row in numbers])


def two_samples(first: int) -> SavedSamples:
    """Return two samples that are computed by hand, with gamma 1, lambda 0.5 and values 0.5. One is a right answer of
    three tokens, the second of which is from an environment. The other is a wrong, truncated answer of one token."""
    mask_BR = rows([1, 0, 1], [1]).bool()
    texts = (f"4{SPOKEN}!", "9")
    rollouts = Rollouts(
        prompts=tuple(Prompt(b, (1, 2), f"{b}+4=", "4" if b == 0 else None, {}, "") for b in range(2)),
        sample_ids_B=torch.tensor([first, first + 1]), group_ids_B=torch.tensor([0, -1]),
        sequences=(torch.tensor([1, 2, 4, 5, 6]), torch.tensor([1, 2, 9])), response_lengths_B=torch.tensor([3, 1]),
        engine_logprob_BR=rows([-1.0, 0.0, -2.0], [-1.0]), response_mask_BR=mask_BR,
        ends=(End.COMPLETE, End.RESPONSE_LIMIT), weight_versions_B=torch.tensor([7, 8]), responses=texts,
        raw_responses=tuple(f"{text}<eos>" for text in texts), special_tokens_B=torch.zeros(2, dtype=torch.int64),
        reward_failures=("", ""),
    )  # fmt: skip
    old_BR = rows([-0.5, 0.0, -2.0], [-1.0])
    scored = Scored(rollouts, torch.tensor([1.0, -0.5]), old_BR, None, rows([0.5, 9.0, 0.5], [0.5]))
    rewards_BR = rows([0.0, 0.0, 1.0], [-0.5])
    advantages_BR, returns_BR = rows([0.25, 9.0, 0.5], [-1.0]), rows([0.75, 9.0, 1.0], [-0.5])
    experience = Experience(scored, advantages_BR, returns_BR, None, mask_BR & ~rollouts.truncated_B[:, None],
                            rewards_BR, None)  # fmt: skip
    return SavedSamples(experience, torch.tensor([2.0, -0.5]))


def two_episodes(first: int) -> SavedSamples:
    """`two_samples` as episodes. The turns of the first episode have the rewards 0.25 and 0.5, and shaping changes the
    score from 0.125 to 0.25. The second episode failed."""
    saved_samples = two_samples(first)
    episodes = Episodes(
        (Episode((Turn(0, 1, 0.25), Turn(2, 3, 0.5))), Episode((), failure="raised", reason=f"no {SPOKEN}")),
        rows([0.25, torch.nan, 0.5], [0.0]),
        ((), ()),
    )
    scored = saved_samples.experience.scored
    rollouts = replace(scored.rollouts, episodes=episodes)
    scored = replace(scored, rollouts=rollouts, scores_B=torch.tensor([0.25, -0.5]))
    return SavedSamples(replace(saved_samples.experience, scored=scored), torch.tensor([0.125, -0.5]))


def text_of(token: int) -> str:
    """Return the text of a token. Token 4 clears the terminal, and token 5 starts a line."""
    return {4: SPOKEN, 5: "é\n", 6: "ok"}.get(token, str(token))


def save_step(folder: Path, step: int, *of_ranks: SavedSamples, text_of: Callable[[int], str] = text_of) -> None:
    """Write a step as a run does."""
    place = folder / f"step-{step:06d}"
    place.mkdir(parents=True)
    for rank, of_rank in enumerate(of_ranks):
        write_samples(place / f"rank-{rank:05d}.parquet", of_rank, range(2), text_of)
    content = {"step": step, "run": "/runs/a", "ranks": len(of_ranks), "saved": 2 * len(of_ranks)}
    sizes = {"prompts_per_step": 4, "samples_per_prompt": 4, "temperature": 1.0}
    (place / MARKER).write_text(json.dumps(content | sizes))
