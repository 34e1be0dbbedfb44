"""Episodes of environments in the samples of a step: token masks, positions of rewards, and conversations.

Checkpoints store the part of an episode that is not in its tokens as bytes of JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megappo.engines.protocol import Completion
from megappo.files.json_values import JSONValue
from megappo.models.context import continuation_text
from megappo.models.tokens import decoded
from megappo.types import Episode, Episodes, Prompt


def own_tokens(completion: Completion) -> list[int]:
    """Return the tokens of the model's response. For an episode, return the tokens of its last turn."""
    ids = list(completion.token_ids)
    if completion.episode is None or not completion.episode.turns:
        return ids
    last = completion.episode.turns[-1]
    return ids[last.start : last.stop]


def prompt_ids(prompt: Prompt, completion: Completion) -> tuple[int, ...]:
    """Return the tokens before the first token of the model: the prompt of the data, or the prompt of an agent."""
    told = None if completion.episode is None else completion.episode.prompt_ids
    return prompt.token_ids if told is None else told


def turns_mask(completions: Sequence[Completion], mask_BR: Tensor) -> Tensor:
    """Return a (B, R) bool mask of the tokens of the model. `mask_BR` marks all tokens after the prompt."""
    if all(completion.episode is None for completion in completions):
        return mask_BR
    own_BR = torch.zeros_like(mask_BR)
    for own_R, completion in zip(own_BR, completions, strict=True):
        assert completion.episode is not None, "either all samples of a step are episodes, or no sample is"
        for turn in completion.episode.turns:
            own_R[turn.start : turn.stop] = True
    return own_BR


def episodes_of(
    completions: Sequence[Completion], mask_BR: Tensor, tokenizer: PreTrainedTokenizerBase
) -> Episodes | None:
    """Return the episodes of the completions. None without an environment."""
    episodes = tuple(completion.episode for completion in completions if completion.episode is not None)
    if not episodes:
        return None
    rewards_BR = torch.zeros(mask_BR.shape)
    for rewards_R, episode in zip(rewards_BR, episodes, strict=True):
        for turn in episode.turns:
            rewards_R[turn.stop - 1] += turn.reward
    return Episodes(episodes, rewards_BR, tuple(_conversation(c, tokenizer) for c in completions))


def _conversation(completion: Completion, tokenizer: PreTrainedTokenizerBase) -> tuple[dict[str, JSONValue], ...]:
    """Return the turns of model and environment as text. If an agent wrote the prompt, the prompt comes first."""
    assert completion.episode is not None
    said: list[dict[str, JSONValue]] = []
    if completion.episode.prompt_ids is not None:
        said.append({"by": "agent", "text": decoded(tokenizer, completion.episode.prompt_ids)})
    heard = 0
    for turn in completion.episode.turns:
        if turn.start > heard:
            text = continuation_text(tokenizer, completion.token_ids[heard : turn.start])
            said.append({"by": "environment", "text": text})
        text = continuation_text(tokenizer, completion.token_ids[turn.start : turn.stop])
        said.append({"by": "model", "text": text, "reward": turn.reward})
        heard = turn.stop
    return tuple(said)


def keep_episodes(completions: Sequence[Completion]) -> dict[str, Tensor]:
    """Return the episodes of the completions as tensors for a checkpoint. Empty without episodes."""
    episodes = [asdict(completion.episode) for completion in completions if completion.episode is not None]
    if not episodes:
        return {}
    return {"episodes": torch.frombuffer(bytearray(json.dumps(episodes).encode()), dtype=torch.uint8)}


def kept_episodes(kept: Mapping[str, Tensor], truncated: Sequence[bool]) -> list[Episode | None]:
    """Return the episodes in the tensors of `keep_episodes`. `truncated`: whether each completion was truncated."""
    if "episodes" not in kept:
        return [None] * len(truncated)
    told = json.loads(bytes(kept["episodes"].tolist()))
    return [Episode.read(of_one, truncated=was) for of_one, was in zip(told, truncated, strict=True)]
