"""What flows through a PPO step: Prompts -> Rollouts -> Scored -> Experience.

Shape legend: B samples on this rank (its share of the step), T tokens of one sample (prompt and response),
R longest response on this rank (responses are padded on the right), P prompts.
Token ids are int64, masks bool, everything else float32 unless said. Logprobs are natural logarithms of the
distribution that was sampled from, temperature included. Padded positions may hold anything; masks decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from megappo.families.architecture import ArchitectureConfig, expert_number_bytes
from megappo.observe.ends import End, end_of_older_version

CHAT_MESSAGES = "chat_messages"
"""Metadata key of the messages a prompt was rendered from, for reward models with a template of their own."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a data source, tokenised.

    `metadata` is what the source knows besides (for example `data_source`, or reasoning-gym's entry); the reward
    function receives it, and it must be picklable.
    """

    index: int
    """Position in the data source."""
    token_ids: tuple[int, ...]
    text: str
    """The prompt as the model sees it."""
    answer: str | None
    metadata: dict[str, Any]
    source: str = ""
    """Name of the data source in a mixture (`data.mixture`)."""


@dataclass(frozen=True)
class Prompts:
    """This rank's prompts of one step, each to be sampled `samples_per_prompt` times."""

    prompts: tuple[Prompt, ...]
    first_position: int
    """Position of this rank's first prompt among all prompts of the step."""


@dataclass(frozen=True)
class RoutingShape:
    """Sizes of the routing of a sample of T tokens, (T - 1, L, K): the numbers of each token's experts in each layer.
    The last token has no routing, as no engine computes it."""

    layers: int
    experts_per_token: int
    experts: int

    @classmethod
    def of(cls, arch: ArchitectureConfig) -> RoutingShape | None:
        """The sizes of a model's routing; None for a model without experts."""
        return cls(arch.layers, arch.experts_per_token, arch.experts) if arch.experts else None

    @property
    def dtype(self) -> torch.dtype:
        """The smallest integer dtype with a value left that is no expert's number."""
        return {1: torch.uint8, 2: torch.int16}[expert_number_bytes(self.experts)]

    def unknown(self, tokens: int, layers: int | None = None) -> Tensor:
        """Routing of tokens for which the trainer's routers choose; all its numbers are no expert's."""
        shape = (tokens, self.layers if layers is None else layers, self.experts_per_token)
        return torch.full(shape, torch.iinfo(self.dtype).max, dtype=self.dtype)


@dataclass(frozen=True)
class Turn:
    """What the model said without interruption: tokens `start` to `stop` after the prompt, counted from 0."""

    start: int
    stop: int
    reward: float = 0.0
    """Reward of the environment, given on the turn's last token."""


@dataclass(frozen=True)
class ToolUse:
    """The calls of one tool in an episode."""

    calls: int = 0
    failures: int = 0
    """Calls that raised, ran out of time, or took more resources than they may."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Episode:
    """How an environment's sample was made. Tokens outside of turns are the environment's; no loss counts them."""

    turns: tuple[Turn, ...]
    """The model's turns; empty where the episode failed: no token of the sample counts."""
    failure: Literal["", "raised", "hung", "nonsense"] = ""
    reason: str = ""
    """Reason of the failure, for people."""
    end: End = End.COMPLETE
    """Why the episode ended; what was rewarded until then counts."""
    seconds: float = 0.0
    """Seconds spent in the environment, engine and tools aside."""
    tools: Mapping[str, ToolUse] = field(default_factory=dict)
    prompt_ids: tuple[int, ...] | None = None
    """Token ids with which an agent prompted the model instead of the prompt of the data; None: the prompt of the
    data."""
    trajectories: int = 1
    """Number of conversations that do not continue one another. The sample is the one in which the model spoke last."""
    left_out_tokens: int = 0
    """Tokens of the model in the other conversations."""

    @classmethod
    def read(cls, told: Mapping[str, Any], *, truncated: bool) -> Episode:
        """The episode that `dataclasses.asdict` gave and JSON carried.

        Args:
            told: the fields; those of older versions have `limit` in place of `end`.
            truncated: whether the file counts the sample as truncated; read only for files of older versions.
        """
        fields = dict(told)
        limit, ids = fields.pop("limit", ""), fields.get("prompt_ids")
        given = {
            "turns": tuple(Turn(**turn) for turn in fields["turns"]),
            "tools": {name: ToolUse(**use) for name, use in fields["tools"].items()},
            "prompt_ids": None if ids is None else tuple(ids),
            "end": End(fields["end"]) if "end" in fields else end_of_older_version(limit, truncated=truncated),
        }
        return cls(**{**fields, **given})


@dataclass(frozen=True)
class Episodes:
    """The episodes of this rank's samples."""

    of_samples: tuple[Episode, ...]
    turn_rewards_BR: Tensor
    """The environment's rewards, on the last token of each turn."""
    conversations: tuple[tuple[dict[str, Any], ...], ...]
    """B conversations: who said what after the prompt, special tokens shown, and the rewards of turns."""

    @property
    def failed_B(self) -> Tensor:
        """bool: no token of the sample counts."""
        return torch.tensor([bool(episode.failure) for episode in self.of_samples], dtype=torch.bool)


@dataclass(frozen=True)
class Samples:
    """This rank's samples as a model reads them; a rank may have none."""

    sample_ids_B: Tensor
    """int64: position of each sample in the step's global batch; unique over all ranks."""
    sequences: tuple[Tensor, ...]
    """B tensors (T,) of token ids: the prompt, then the response as sampled, never re-tokenised."""
    response_lengths_B: Tensor
    """int64, >= 1: tokens after the prompt, the stop token and what an environment said included."""
    routing: tuple[Tensor, ...] | None = field(default=None, kw_only=True)
    """B tensors (T - 1, L, K), see `RoutingShape`: the experts that the engine sent tokens to; None on all ranks: the
    trainer's routers choose."""
    below_minimum: tuple[Tensor, ...] | None = field(default=None, kw_only=True)
    """B bool tensors (R,): response tokens that the engine sampled without the stop tokens, because of
    `rollout.min_response_tokens`; None on all ranks: there is no minimum."""


@dataclass(frozen=True)
class Rollouts(Samples):
    """Responses that the engine generated for this rank's prompts; samples of one prompt stand together."""

    prompts: tuple[Prompt, ...]
    """B prompts: that of each sample."""
    group_ids_B: Tensor
    """int64: position of each sample's prompt in the step; equal for samples of one prompt. Negative for a failed
    episode, which is a group of its own."""
    engine_logprob_BR: Tensor
    response_mask_BR: Tensor
    """bool: True on the tokens that the model made. The mask has holes where an environment spoke."""
    ends: tuple[End, ...]
    """B reasons why a response or its episode ended."""
    weight_versions_B: Tensor
    """int64: version of the weights that generated each sample."""
    responses: tuple[str, ...]
    """B decoded responses without special tokens, for the reward and the log."""
    raw_responses: tuple[str, ...]
    """B decoded responses with special tokens shown, the stop token included."""
    special_tokens_B: Tensor
    """int64: special tokens inside each response, the stop token that ended it aside."""
    episodes: Episodes | None = field(default=None, kw_only=True)
    """Not None: samples of an environment; then `responses`, and what is said of them, are those of the last turn."""
    token_versions_BR: Tensor | None = field(default=None, kw_only=True)
    """int64: version of the weights that generated each response token, where a sample may be of several versions;
    `weight_versions_B` then has the oldest. None: all tokens have the sample's version."""

    reward_failures: tuple[str, ...] | None = field(default=None, kw_only=True)
    """For each of B samples, the reason that the reward failed, "" if the reward did not fail; None: not scored yet."""

    def reward_parts_BN(self, scores_B: Tensor) -> Tensor:
        """(B, N) float32: the scores of the reward function, and the rewards of all turns if there is an environment.
        The sum over N is the total reward of a sample."""
        if self.episodes is None:
            return scores_B[:, None]
        turn_rewards_BR = self.episodes.turn_rewards_BR.masked_fill(~self.response_mask_BR, 0.0)
        return torch.cat([scores_B[:, None], turn_rewards_BR], dim=1)

    def total_rewards_B(self, scores_B: Tensor) -> Tensor:
        """Scores of the reward function with the environment's rewards of all turns, summed in float64."""
        return self.reward_parts_BN(scores_B).double().sum(-1).to(scores_B.dtype)

    def with_minimum(self, least_tokens: int) -> Rollouts:
        """These samples with the first tokens of each response, and of each turn of an episode, marked `below_minimum`;
        unchanged for a minimum of 0."""
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
        """bool: a limit of the whole response ended it, see `End.is_truncated`."""
        return torch.tensor([end.is_truncated for end in self.ends], dtype=torch.bool)

    @property
    def scored_B(self) -> Tensor:
        """bool: samples that are scored and trained on, which those of failed episodes are not."""
        if self.episodes is None:
            return torch.ones(len(self.sequences), dtype=torch.bool)
        return ~self.episodes.failed_B

    @property
    def lengths_B(self) -> Tensor:
        """int64: tokens of each sample, prompt and response."""
        return torch.tensor([len(s) for s in self.sequences], dtype=torch.int64)


@dataclass(frozen=True)
class Scored:
    """Rollouts with their scores, log-probabilities and values."""

    rollouts: Rollouts
    scores_B: Tensor
    """Scores of the reward function, given on the last token of each sample."""
    old_logprob_BR: Tensor
    """The denominator of the ratio: recomputed by the trainer, or the engine's in bypass mode."""
    ref_logprob_BR: Tensor | None
    values_BR: Tensor | None
    """Value of the state before each response token."""


@dataclass(frozen=True)
class Experience:
    """Everything the updates need."""

    scored: Scored
    advantages_BR: Tensor
    returns_BR: Tensor
    importance_weights_BR: Tensor | None
    """Truncated weights for the gap between engine and trainer; None: all 1."""
    loss_mask_BR: Tensor
    """Response tokens the policy loss counts: the response mask without rejected samples."""
    rewards_BR: Tensor | None = None
    """Token rewards from which advantages and returns were computed: scores, with the weighted KL subtracted; None: not
    known."""
    kl_BR: Tensor | None = None
    """KL to the reference, as `kl_in_reward.kind` estimates it, in nats; 0 where nothing is generated. None without a
    reference."""
