"""The responses of each step: generated when the step asks for them, or during the step before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megappo.assembly import Parts
from megappo.rollout import RolloutPlan, SamplingParams, finish_rollout, plan_rollout, prompts_of_rank, sample_seed
from megappo.rollout.engine import AheadEngine, Completion, PendingCompletions
from megappo.types import Rollouts

Kept = dict[int, dict[str, Tensor]]
"""Responses by step, in tensors that a checkpoint can hold."""


@dataclass(frozen=True)
class _Begun:
    plan: RolloutPlan
    pending: PendingCompletions
    cursor: dict[str, Any]
    """Where the cursor stood before it gave the prompts."""


@dataclass(frozen=True)
class _Finished:
    rollouts: Rollouts
    cursor: dict[str, Any]


class Responses:
    """Takes prompts from the cursor, step by step, and has them answered; a collective of the world."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        settings = parts.config.rollout
        self._params = SamplingParams(
            temperature=settings.temperature,
            max_new_tokens=settings.max_response_tokens,
            stop_token_ids=parts.stop_token_ids,
            greedy=False,
        )
        self._begun: dict[int, _Begun] = {}
        self._finished: dict[int, _Finished] = {}

    def of_step(self, step: int, *, weights_changed: bool) -> Rollouts:
        """This rank's responses of a step; what was sampled is what is trained on, token by token.

        `weights_changed`: the actor is newer than the engine, which matters where an engine has to be started again.
        """
        self.settle(weights_changed=weights_changed)
        if step in self._finished:
            return self._finished.pop(step).rollouts
        plan = self._plan(step)
        completions = self._parts.engine.generate(plan.requests, self._params)
        return finish_rollout(plan, completions, self._parts.tokenizer)

    def begin(self, step: int) -> None:
        """Have a later step's prompts answered from now on."""
        cursor = self._parts.cursor.state_dict()
        engine, plan = self._parts.engine, self._plan(step)
        assert isinstance(engine, AheadEngine), "rules refuse rollout.ahead with other engines"
        self._begun[step] = _Begun(plan, engine.submit(plan.requests, self._params), cursor)

    def settle(self, *, weights_changed: bool) -> None:
        """Wait for everything that was begun."""
        for step in sorted(self._begun):
            begun, engine = self._begun.pop(step), self._parts.engine
            assert isinstance(engine, AheadEngine)
            completions = engine.collect(begun.pending, weights_changed=weights_changed)
            rollouts = finish_rollout(begun.plan, completions, self._parts.tokenizer)
            self._finished[step] = _Finished(rollouts, begun.cursor)

    def cursor_state(self) -> dict[str, Any]:
        """Where the cursor stood before it gave prompts that are not trained on yet."""
        waiting = [f.cursor for f in self._finished.values()] + [b.cursor for b in self._begun.values()]
        return waiting[0] if waiting else self._parts.cursor.state_dict()

    def state_dict(self) -> Kept:
        """This rank's finished responses that are not trained on yet; nothing may be under way."""
        assert not self._begun, "settle was not called"
        return {step: _keep(found.rollouts) for step, found in self._finished.items()}

    def load_state_dict(self, kept: Sequence[Kept]) -> None:
        """Take back what `state_dict` gave on every rank of a run, which may have had other ranks.

        The prompts are drawn again. Where settings have changed so that the step has other samples, it is generated
        anew.
        """
        for step in sorted({step for of_rank in kept for step in of_rank}):
            found = {i: c for of_rank in kept for i, c in _completions(of_rank[step]).items()}
            if found.keys() != set(range(self._parts.derived.batch_sequences)):
                continue
            cursor = self._parts.cursor.state_dict()
            plan = self._plan(step)
            mine = [found[sample_id] for sample_id in plan.sample_ids]
            self._finished[step] = _Finished(finish_rollout(plan, mine, self._parts.tokenizer), cursor)

    def _plan(self, step: int) -> RolloutPlan:
        config, parts = self._parts.config, self._parts
        indices = parts.cursor.take(config.rollout.prompts_per_step)
        return plan_rollout(
            prompts_of_rank(parts.train_prompts, indices, parts.runtime),
            samples_per_prompt=config.rollout.samples_per_prompt,
            seed_of=lambda sample_id: sample_seed(config.run.seed, step, sample_id),
        )


def _keep(rollouts: Rollouts) -> dict[str, Tensor]:
    """B samples one after another, in tensors."""
    lengths = rollouts.response_lengths_B.tolist()
    tails = [sequence[-length:] for sequence, length in zip(rollouts.sequences, lengths, strict=True)]
    return {
        "sample_ids_B": rollouts.sample_ids_B,
        "lengths_B": rollouts.response_lengths_B,
        "token_ids": torch.cat(tails),
        "logprobs": rollouts.engine_logprob_BR[rollouts.response_mask_BR],
        "truncated_B": rollouts.truncated_B,
        "weight_versions_B": rollouts.weight_versions_B,
    }


def _completions(kept: Mapping[str, Tensor]) -> dict[int, Completion]:
    lengths = kept["lengths_B"].tolist()
    columns = zip(
        kept["sample_ids_B"].tolist(),
        kept["token_ids"].split(lengths),
        kept["logprobs"].split(lengths),
        kept["truncated_B"].tolist(),
        kept["weight_versions_B"].tolist(),
        strict=True,
    )
    return {
        sample_id: Completion(tuple(tokens.tolist()), tuple(logprobs.tolist()), truncated, version)
        for sample_id, tokens, logprobs, truncated, version in columns
    }
