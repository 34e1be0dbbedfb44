"""Data of a PPO step, in the order of its stages: Prompts -> Rollouts -> Scored -> Experience.

Shape legend: B samples on this rank (its share of the step), T tokens of one sample (prompt and response),
R longest response on this rank (responses are padded on the right), P prompts.
Token ids are int64, masks are bool, and all other tensors are float32 unless the docstring of the field gives a
different dtype. Logprobs are natural logarithms under the sampling distribution, including its temperature. Padded
positions have arbitrary values, and masks exclude them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from megappo.families.architecture import expert_number_bytes
from megappo.families.declaration import ArchitectureConfig
from megappo.observe.ends import End, end_of_older_version

CHAT_MESSAGES = "chat_messages"
"""Metadata key of the chat messages of a prompt, for reward models with a different chat template."""


@dataclass(frozen=True)
class Prompt:
    """One tokenised prompt of a data source.

    `metadata` contains further values of the source, for example `data_source` or the entry of reasoning-gym. The
    reward function receives the metadata, which must be picklable.
    """

    index: int
    """Position in the data source."""
    token_ids: tuple[int, ...]
    text: str
    """Text of the prompt in the form that the model receives."""
    answer: str | None
    metadata: dict[str, Any]
    source: str = ""
    """Name of the data source in a mixture (`data.mixture`)."""


@dataclass(frozen=True)
class Prompts:
    """Prompts of this rank in one step. The engine samples `samples_per_prompt` responses of each prompt."""

    prompts: tuple[Prompt, ...]
    first_position: int
    """Position of the first prompt of this rank among all prompts of the step."""


@dataclass(frozen=True)
class RoutingShape:
    """Sizes of the routing of a sample of T tokens, (T - 1, L, K): the expert numbers of each token in each layer.

    The last token has no routing, because engines do not compute its hidden states.
    """

    layers: int
    experts_per_token: int
    experts: int

    @classmethod
    def of(cls, arch: ArchitectureConfig) -> RoutingShape | None:
        """Return the sizes of the routing of a model, or None for a model without experts."""
        return cls(arch.layers, arch.experts_per_token, arch.experts) if arch.experts else None

    @property
    def dtype(self) -> torch.dtype:
        """Smallest integer dtype with at least one value that is not an expert number."""
        return {1: torch.uint8, 2: torch.int16}[expert_number_bytes(self.experts)]

    def unknown(self, tokens: int, layers: int | None = None) -> Tensor:
        """Return the routing of tokens for which the routers of the trainer select experts. Its values are not expert
        numbers."""
        shape = (tokens, self.layers if layers is None else layers, self.experts_per_token)
        return torch.full(shape, torch.iinfo(self.dtype).max, dtype=self.dtype)


@dataclass(frozen=True)
class Turn:
    """Uninterrupted output of the model: tokens `start` to `stop` after the prompt, counted from 0."""

    start: int
    stop: int
    reward: float = 0.0
    """Reward of the environment, assigned to the last token of the turn."""


@dataclass(frozen=True)
class ToolUse:
    """The calls of one tool in an episode."""

    calls: int = 0
    failures: int = 0
    """Calls that raised an error, exceeded the time limit, or exceeded a limit of resources."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Episode:
    """Record of the episode of a sample. Tokens outside of turns are from the environment and have no loss."""

    turns: tuple[Turn, ...]
    """Turns of the model. Empty for a failed episode, whose sample has no tokens in the loss."""
    failure: Literal["", "raised", "hung", "nonsense"] = ""
    reason: str = ""
    """Reason of the failure, for logs."""
    end: End = End.COMPLETE
    """Reason of the end of the episode. Rewards before the end count."""
    seconds: float = 0.0
    """Seconds in the environment, without the engine and the tools."""
    tools: Mapping[str, ToolUse] = field(default_factory=dict)
    prompt_ids: tuple[int, ...] | None = None
    """Token ids of an agent's own prompt of the model, which replaces the prompt of the data; None: the prompt of the
    data."""
    trajectories: int = 1
    """Number of separate conversations of the episode. The sample is the conversation with the last turn of the
    model."""
    left_out_tokens: int = 0
    """Number of tokens of the model in all other conversations."""

    @classmethod
    def read(cls, record: Mapping[str, Any], *, truncated: bool) -> Episode:
        """Return the episode of a JSON object that `dataclasses.asdict` created.

        Args:
            record: the fields. Files of older versions have `limit` instead of `end`.
            truncated: whether the file marks the sample as truncated; used only for files of older versions.
        """
        fields = dict(record)
        limit, ids = fields.pop("limit", ""), fields.get("prompt_ids")
        decoded = {
            "turns": tuple(Turn(**turn) for turn in fields["turns"]),
            "tools": {name: ToolUse(**use) for name, use in fields["tools"].items()},
            "prompt_ids": None if ids is None else tuple(ids),
            "end": End(fields["end"]) if "end" in fields else end_of_older_version(limit, truncated=truncated),
        }
        return cls(**{**fields, **decoded})


@dataclass(frozen=True)
class Episodes:
    """Episodes of the samples of this rank."""

    of_samples: tuple[Episode, ...]
    turn_rewards_BR: Tensor
    """Rewards of the environment, on the last token of each turn."""
    conversations: tuple[tuple[dict[str, Any], ...], ...]
    """B conversations: the messages after the prompt with their roles, special tokens included, and the rewards of
    turns."""

    @property
    def failed_B(self) -> Tensor:
        """bool: whether the episode failed, so that the sample has no tokens in the loss."""
        return torch.tensor([bool(episode.failure) for episode in self.of_samples], dtype=torch.bool)


@dataclass(frozen=True)
class Samples:
    """Samples of this rank in the form of model inputs. A rank may have no samples."""

    sample_ids_B: Tensor
    """int64: position of each sample in the global batch of the step; unique over all ranks."""
    sequences: tuple[Tensor, ...]
    """B tensors (T,) of token ids: the prompt, then the sampled tokens of the response, which are never
    re-tokenised."""
    response_lengths_B: Tensor
    """int64, >= 1: number of tokens after the prompt, including the stop token and tokens of an environment."""
    routing: tuple[Tensor, ...] | None = field(default=None, kw_only=True)
    """B tensors (T - 1, L, K), see `RoutingShape`: the experts that the engine selected. None on all ranks: the routers
    of the trainer select experts."""
    below_minimum: tuple[Tensor, ...] | None = field(default=None, kw_only=True)
    """B bool tensors (R,): response tokens for which the engine excluded the stop tokens, because of
    `rollout.min_response_tokens`. None on all ranks: there is no minimum."""


@dataclass(frozen=True)
class Rollouts(Samples):
    """Responses of the engine to the prompts of this rank. Samples of one prompt are adjacent."""

    prompts: tuple[Prompt, ...]
    """B prompts: the prompt of each sample."""
    group_ids_B: Tensor
    """int64: position of the prompt of each sample in the step, equal for samples of one prompt. Negative for a failed
    episode, which is a separate group."""
    engine_logprob_BR: Tensor
    response_mask_BR: Tensor
    """bool: True on tokens of the model, False on tokens of an environment."""
    ends: tuple[End, ...]
    """B reasons of the end of a response or its episode."""
    weight_versions_B: Tensor
    """int64: version of the weights that generated each sample."""
    responses: tuple[str, ...]
    """B decoded responses without special tokens, for the reward and the log."""
    raw_responses: tuple[str, ...]
    """B decoded responses with special tokens, including the stop token."""
    special_tokens_B: Tensor
    """int64: number of special tokens inside each response, without the final stop token."""
    episodes: Episodes | None = field(default=None, kw_only=True)
    """Episodes of samples of an environment; None without an environment. With episodes, `responses` and the other
    fields of responses belong to the last turn."""
    token_versions_BR: Tensor | None = field(default=None, kw_only=True)
    """int64: version of the weights that generated each response token, if a sample may have several versions. Then
    `weight_versions_B` has the oldest version. None: all tokens have the version of the sample."""

    reward_failures: tuple[str, ...] | None = field(default=None, kw_only=True)
    """B reasons of failed rewards, "" for rewards without a failure; None: the samples are not scored yet."""

    def reward_parts_BN(self, scores_B: Tensor) -> Tensor:
        """Return the parts of the reward, (B, N) float32: the scores of the reward function, and with an environment
        the rewards of all turns. The sum over N is the total reward of a sample."""
        if self.episodes is None:
            return scores_B[:, None]
        turn_rewards_BR = self.episodes.turn_rewards_BR.masked_fill(~self.response_mask_BR, 0.0)
        return torch.cat([scores_B[:, None], turn_rewards_BR], dim=1)

    def total_rewards_B(self, scores_B: Tensor) -> Tensor:
        """Return the scores of the reward function plus the rewards of all turns, summed in float64."""
        return self.reward_parts_BN(scores_B).double().sum(-1).to(scores_B.dtype)

    def with_minimum(self, least_tokens: int) -> Rollouts:
        """Return these samples with `below_minimum` set. It marks the first `least_tokens` tokens of each response, or
        of each turn of an episode. A minimum of 0 returns the samples unchanged."""
        if least_tokens == 0:
            return self
        marks = []
        for b, length in enumerate(self.response_lengths_B.tolist()):
            starts = [0] if self.episodes is None else [turn.start for turn in self.episodes.of_samples[b].turns]
            marked_R = torch.zeros(length, dtype=torch.bool)
            for start in starts:
                marked_R[start : start + least_tokens] = True
            marks.append(marked_R & self.response_mask_BR[b, :length])
        return replace(self, below_minimum=tuple(marks))

    @property
    def truncated_B(self) -> Tensor:
        """bool: whether a limit of the whole response ended the response, see `End.is_truncated`."""
        return torch.tensor([end.is_truncated for end in self.ends], dtype=torch.bool)

    @property
    def scored_B(self) -> Tensor:
        """bool: samples that are scored and trained on. Samples of failed episodes are excluded."""
        if self.episodes is None:
            return torch.ones(len(self.sequences), dtype=torch.bool)
        return ~self.episodes.failed_B

    @property
    def lengths_B(self) -> Tensor:
        """int64: number of tokens of each sample, prompt and response."""
        return torch.tensor([len(s) for s in self.sequences], dtype=torch.int64)


@dataclass(frozen=True)
class Scored:
    """Rollouts with their scores, log-probabilities and values."""

    rollouts: Rollouts
    scores_B: Tensor
    """Scores of the reward function, assigned to the last token of each sample."""
    old_logprob_BR: Tensor
    """Log-probabilities in the denominator of the ratio: recomputed by the trainer, or from the engine in bypass
    mode."""
    ref_logprob_BR: Tensor | None
    values_BR: Tensor | None
    """Value of the state before each response token."""


@dataclass(frozen=True)
class Experience:
    """Inputs of the updates."""

    scored: Scored
    advantages_BR: Tensor
    returns_BR: Tensor
    importance_weights_BR: Tensor | None
    """Truncated importance weights between engine and trainer; None: all weights are 1."""
    loss_mask_BR: Tensor
    """Response tokens in the policy loss: the response mask without rejected samples."""
    rewards_BR: Tensor | None = None
    """Token rewards of advantages and returns: scores minus the weighted KL; None: unknown."""
    kl_BR: Tensor | None = None
    """KL to the reference in nats, by the estimator `kl_in_reward.kind`; 0 on tokens that the model did not generate.
    None without a reference."""
