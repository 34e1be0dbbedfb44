"""A trajectory: the sequence of observed and generated tokens. One trajectory of an episode is its training sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megappo.engines.protocol import Completion
from megappo.engines.stretches import stretches_of
from megappo.observe.ends import End
from megappo.types import RoutingShape, Turn


class Trajectory:
    """Append-only sequence of tokens: a prompt, turns of the model, and observations between the turns."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.prompt_ids = tuple(prompt_ids)
        self.tokens: list[int] = []
        """All tokens after the prompt."""
        self.logprobs: list[float] = []
        """Log-probabilities of `tokens`. 0 for observed tokens."""
        self.turns: list[Turn] = []
        self.stretches: list[tuple[int, int]] = []
        """Weight version and number of tokens of each stretch, in order. Observed tokens belong to the following
        turn."""
        self.last_end = End.COMPLETE
        """Reason why the last turn ended."""
        self._routing: torch.Tensor | None = None

    @property
    def seen(self) -> tuple[int, ...]:
        """All tokens, including the prompt."""
        return (*self.prompt_ids, *self.tokens)

    @property
    def own_tokens(self) -> int:
        """Number of tokens that the model generated."""
        return sum(turn.stop - turn.start for turn in self.turns)

    def add_observation(self, token_ids: Sequence[int]) -> None:
        """Append observed tokens before the next turn of the model."""
        self.tokens += token_ids
        self.logprobs += [0.0] * len(token_ids)

    def add_turn(self, completion: Completion, limit: End) -> None:
        """Append a turn of the model from the engine. `limit`: the end of a turn that used all its tokens."""
        start = len(self.tokens)
        observed = start - sum(tokens for _, tokens in self.stretches)
        for version, tokens in stretches_of(completion):
            self._add_stretch(version, tokens + observed)
            observed = 0
        self.tokens += completion.token_ids
        self.logprobs += completion.logprobs
        self.turns.append(Turn(start, len(self.tokens)))
        self.last_end = limit if completion.truncated else End.COMPLETE
        if completion.routing is not None:  # earlier turns keep the routing of their sampling
            known = completion.routing[:0] if self._routing is None else self._routing
            self._routing = torch.cat([known, completion.routing[len(known) :]])

    def drop_unanswered(self) -> None:
        """Drop the observed tokens after the last turn, because the next turn was cancelled."""
        if self.turns:
            del self.tokens[self.turns[-1].stop :], self.logprobs[self.turns[-1].stop :]

    def _add_stretch(self, version: int, tokens: int) -> None:
        if self.stretches and self.stretches[-1][0] == version:
            tokens += self.stretches.pop()[1]
        self.stretches.append((version, tokens))

    def reward(self, value: float) -> None:
        """Add a value to the reward of the last turn."""
        last = self.turns[-1]
        self.turns[-1] = replace(last, reward=last.reward + value)

    def routing(self, shape: RoutingShape | None) -> torch.Tensor | None:
        """Return the experts of each token, (T - 1, L, K), or None without `shape`.

        Tokens that no engine has processed are marked as unknown.
        """
        if shape is None:
            return None
        computed = len(self.prompt_ids) + len(self.tokens) - 1
        known = [] if self._routing is None else [self._routing[:computed]]
        return torch.cat([*known, shape.unknown(computed - sum(len(routing) for routing in known))])
