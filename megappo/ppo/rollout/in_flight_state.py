"""Prompts in flight as tensors for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.engines.protocol import Completion, SamplingParams
from megappo.ppo.rollout.episodes import keep_episodes, kept_episodes
from megappo.ppo.rollout.tickets import Group

KEY = -1
"""Key of the prompts in flight among the responses of a checkpoint, instead of a step number."""


@dataclass(frozen=True)
class State:
    """State of the prompts in flight on one rank."""

    groups: Sequence[tuple[Group, int, int]]
    """Groups of all ranks in ticket order. Each group has the number of its step (0: none) and the round of the
    step."""
    returned: Sequence[int]
    """Indices of prompts to send again."""
    next_ticket: int
    dropped: int
    """Number of prompts dropped since the last logged step."""
    answers: Mapping[int, Completion]
    """Responses of this rank's samples by number, finished or unfinished. Each has at least one token. Episodes are
    complete."""
    distribution: tuple[float, ...] | None = None
    """`SamplingParams.distribution` of all responses. Checkpoints of older versions have only the temperature, or
    None."""

    def is_of(self, params: SamplingParams) -> bool:
        """Return whether the responses were sampled from the distribution of `params`, as far as recorded."""
        return is_of(self.distribution, params)


def is_of(distribution: tuple[float, ...] | None, params: SamplingParams) -> bool:
    """Return whether recorded responses were sampled from the distribution of `params`."""
    return distribution in (None, params.distribution, params.distribution[:1])


def read_distribution(kept: Mapping[str, Tensor]) -> tuple[float, ...] | None:
    """Return the distribution in the tensors of a checkpoint. Older versions store `temperature` or nothing."""
    recorded = kept.get("distribution", kept.get("temperature"))
    return None if recorded is None else tuple(recorded.reshape(-1).tolist())


def written_state(state: State, batch_2: tuple[int, int]) -> dict[str, Tensor]:
    """Return the state as tensors for G groups, B responses and S stretches of tokens from one weight version.

    `batch_2`: prompts per step and samples per prompt.
    """
    answers, distribution = list(state.answers.values()), state.distribution
    stretches = [a.stretches or ((a.weight_version, len(a.token_ids)),) for a in answers]
    return {
        "batch_2": torch.tensor(batch_2),
        "groups_G6": torch.tensor(
            [(g.ticket, g.prompt, g.version, g.finished, *taken_by) for g, *taken_by in state.groups], dtype=torch.int64
        ).view(-1, 6),
        "returned": torch.tensor(list(state.returned), dtype=torch.int64),
        "counts_2": torch.tensor((state.next_ticket, state.dropped)),
        "numbers_B": torch.tensor(list(state.answers), dtype=torch.int64),
        "lengths_B": torch.tensor([len(a.token_ids) for a in answers], dtype=torch.int64),
        "token_ids": torch.tensor([token for a in answers for token in a.token_ids], dtype=torch.int64),
        # float64, as returned by the engine, so that resumed responses are bitwise identical
        "logprobs": torch.tensor([logprob for a in answers for logprob in a.logprobs], dtype=torch.float64),
        "truncated_B": torch.tensor([a.truncated for a in answers], dtype=torch.bool),
        "broken_off_B": torch.tensor([a.broken_off for a in answers], dtype=torch.bool),
        "stretches_B": torch.tensor([len(of_one) for of_one in stretches], dtype=torch.int64),
        "stretches_S2": torch.tensor([s for of_one in stretches for s in of_one], dtype=torch.int64).view(-1, 2),
        **_written_routing(answers),
        **keep_episodes(answers),
        **({} if distribution is None else {"distribution": torch.tensor(distribution, dtype=torch.float64)}),
    }


def _written_routing(answers: Sequence[Completion]) -> dict[str, Tensor]:
    routings = [answer.routing for answer in answers if answer.routing is not None]
    if not routings:
        return {}
    return {"routing": torch.cat(routings), "routed_B": torch.tensor([len(routing) for routing in routings])}


def read_state(kept: Mapping[str, Tensor]) -> tuple[State, tuple[int, int]]:
    """Return the state and `batch_2` from the tensors of `written_state`."""
    groups = [
        (Group(ticket, prompt, version, bool(finished)), step, of_round)
        for ticket, prompt, version, finished, step, of_round in kept["groups_G6"].tolist()
    ]
    lengths = kept["lengths_B"].tolist()
    routings = kept["routing"].split(kept["routed_B"].tolist()) if "routing" in kept else [None] * len(lengths)
    columns = zip(
        kept["numbers_B"].tolist(),
        kept["token_ids"].split(lengths),
        kept["logprobs"].split(lengths),
        kept["truncated_B"].tolist(),
        kept["broken_off_B"].tolist(),
        kept["stretches_S2"].split(kept["stretches_B"].tolist()),
        kept_episodes(kept, kept["truncated_B"].tolist()),
        routings,
        strict=True,
    )
    answers = {}
    for number, tokens, logprobs, truncated, broken_off, stretches_S2, episode, routing in columns:
        stretches = tuple((version, length) for version, length in stretches_S2.tolist())
        answers[number] = Completion(
            tuple(tokens.tolist()),
            tuple(logprobs.tolist()),
            truncated,
            min(version for version, _ in stretches),
            routing,
            episode=episode,
            broken_off=broken_off,
            stretches=stretches if len(stretches) > 1 else (),
        )
    prompts, samples = kept["batch_2"].tolist()
    next_ticket, dropped = kept["counts_2"].tolist()
    state = State(groups, kept["returned"].tolist(), next_ticket, dropped, answers, read_distribution(kept))
    return state, (prompts, samples)
