"""Generates the responses of each step: on request of the step, or during the previous step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megappo.engines.protocol import Completion, GenerateRequest, PendingCompletions
from megappo.observe.json_values import JSONValue
from megappo.ppo.components import RunComponents
from megappo.ppo.episodes import keep_episodes, kept_episodes
from megappo.ppo.in_flight_state import KEY, State, is_of, read_distribution, read_state, written_state
from megappo.ppo.sampling import SampleRequests, finish_rollout, prompts_of_rank, request_samples, sample_seed
from megappo.types import Prompt, Rollouts

Kept = dict[int, dict[str, Tensor]]
"""Responses by step, as tensors for a checkpoint."""


@dataclass
class _Drawn:
    """The prompts of a step and the responses that have arrived."""

    wanted: SampleRequests
    cursor: dict[str, JSONValue]
    """State of the cursor before these prompts were drawn."""
    answers: dict[int, Completion] = field(default_factory=dict)
    """Completed responses by the number of their request in `wanted`."""
    asked: tuple[int, ...] = ()
    """Numbers of the requests without a response at the last call of `ask_for_the_rest`."""
    pending: PendingCompletions | None = None
    """Pending responses to the `asked` requests."""
    is_whole: bool = False
    """True if every rank has all its responses."""

    def ask_for_the_rest(self) -> list[GenerateRequest]:
        """Return the requests without a response."""
        self.asked = tuple(i for i in range(len(self.wanted.requests)) if i not in self.answers)
        return [self.wanted.requests[i] for i in self.asked]

    @property
    def asked_prompts(self) -> list[Prompt]:
        """Prompts of the `asked` requests."""
        return [self.wanted.prompts[i] for i in self.asked]

    def take(self, done: Mapping[int, Completion]) -> None:
        """Store responses by their number among the `asked` requests."""
        self.answers |= {self.asked[i]: completion for i, completion in done.items()}


class StepSamples:
    """Source of the samples of each step. Every call is a collective of the world.

    By default, no generation runs between steps and there is no state to save.
    """

    draws_on = False
    """True if prompts can be drawn at any time. The cursor must then be saved together with `state_dict`."""

    def __init__(self, parts: RunComponents) -> None:
        self._parts = parts

    def of_step(self, step: int, *, weights_changed: bool) -> Rollouts:
        """Return this rank's responses of a step. Training uses exactly the sampled tokens.

        `weights_changed`: whether the actor is newer than the engine weights, which matters if an engine is
        restarted. Raises Interrupted on every rank if the run is interrupted.
        """
        raise NotImplementedError

    def more(self, step: int, number: int, prompts: int) -> Rollouts:
        """Return this rank's responses to more prompts of a step, in round `number` (the first is 0).

        Raises like `of_step`. A run that is stopped during this call generates the responses again.
        """
        raise NotImplementedError

    def begin(self, step: int) -> None:
        """Start generating the responses of a later step."""

    def settle(self, *, weights_changed: bool) -> None:
        """Wait for all started generation. Raises Interrupted like `of_step`."""

    def pause(self, *, stops: bool = False) -> None:
        """Interrupt generation because weights change or the run stops."""

    def go_on(self) -> None:
        """Continue after a change of weights."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of responses that no step has used yet."""
        return {}

    def needs_old_weights(self, step: int) -> bool:
        """Return whether a step must continue with the weights of its first responses. The same on every rank."""
        return False

    def cursor_state(self) -> dict[str, JSONValue]:
        """Return the state of the cursor for a checkpoint."""
        return self._parts.cursor.state_dict()

    def forget(self, step: int) -> None:
        """Drop the responses of a step after its updates."""

    def state_dict(self, step: int) -> Kept:
        """Return this rank's responses of untrained steps, starting at `step`."""
        return {}

    def load_state_dict(self, kept: Sequence[Kept]) -> None:
        """Restore the results of `state_dict` from every rank. The number of ranks may have changed."""


class Responses(StepSamples):
    """Draws prompts from the cursor step by step, and generates responses with the engine.

    Pending responses keep the weights at their start.
    """

    def __init__(self, parts: RunComponents) -> None:
        super().__init__(parts)
        settings = parts.config.rollout
        self._params = parts.sampling(settings.max_response_tokens, trained_on=True)
        self._keeps = settings.when_stopped == "keep"
        self._drawn: dict[int, _Drawn] = {}
        self._again: list[int] = []
        """Prompts to draw before the next prompts of the cursor: prompts in flight under a `rollout.ahead` of 2 or
        more."""
        self._again_before: dict[int, list[int]] = {}
        """Value of `_again` before a step drew its prompts, by step. Contains only untrained steps."""
        self._next_ticket = 0
        """Number of the next prompt in flight, if the run returns to a `rollout.ahead` of 2 or more."""

    def of_step(self, step: int, *, weights_changed: bool) -> Rollouts:
        """See `StepSamples.of_step`."""
        self.settle(weights_changed=weights_changed)
        drawn = self._drawn[step] if step in self._drawn else self._draw(step)
        if not drawn.is_whole:
            requests, done = drawn.ask_for_the_rest(), dict[int, Completion]()
            try:
                done |= dict(enumerate(self._parts.answer(drawn.asked_prompts, requests, self._params, done)))
            finally:
                drawn.take(done)
            drawn.is_whole = True
        if not self._keeps:
            del self._drawn[step]
        return self._finish(drawn.wanted, [drawn.answers[i] for i in range(len(drawn.wanted.requests))])

    def more(self, step: int, number: int, prompts: int) -> Rollouts:
        """See `StepSamples.more`."""
        first_seed = number * self._parts.config.rollout.batch_sequences
        wanted = self._request(step, self._take(prompts), first_seed)
        return self._finish(wanted, self._parts.answer(wanted.prompts, wanted.requests, self._params))

    def _finish(self, wanted: SampleRequests, completions: Sequence[Completion]) -> Rollouts:
        return finish_rollout(wanted, completions, self._parts.tokenizer, self._parts.vocabulary, self._parts.answerer)

    def begin(self, step: int) -> None:
        """See `StepSamples.begin`."""
        drawn = self._drawn[step] if step in self._drawn else self._draw(step)
        if drawn.is_whole:
            return
        requests = drawn.ask_for_the_rest()
        drawn.pending = self._parts.submit(drawn.asked_prompts, requests, self._params)

    def settle(self, *, weights_changed: bool) -> None:
        """See `StepSamples.settle`."""
        for drawn in self._drawn.values():
            pending = drawn.pending
            if pending is None:
                continue
            try:
                self._parts.collect(pending, weights_changed=weights_changed)
            finally:
                drawn.take(pending.completions)
                drawn.pending = None
            drawn.is_whole = True

    def needs_old_weights(self, step: int) -> bool:
        """Return whether responses are missing, or whether the rewards may require another round."""
        has_rounds = self._parts.config.rollout.dynamic_sampling is not None
        return step in self._drawn and (has_rounds or not self._drawn[step].is_whole)

    def cursor_state(self) -> dict[str, JSONValue]:
        """Return the state of the cursor before the prompts of untrained steps were drawn."""
        return next((drawn.cursor for drawn in self._drawn.values()), None) or self._parts.cursor.state_dict()

    def forget(self, step: int) -> None:
        """See `StepSamples.forget`."""
        self._drawn.pop(step, None)
        self._again_before.pop(step, None)

    def state_dict(self, step: int) -> Kept:
        """Return this rank's responses of an untrained step, and the prompts to draw first.

        An incomplete step contributes its responses only if `rollout.when_stopped` keeps them.
        """
        again, kept = self._again_before.get(step, self._again), Kept()
        if again or self._next_ticket:
            kept[KEY] = written_state(State([], again, self._next_ticket, 0, {}), self._parts.config.rollout.sizes)
        drawn = self._drawn.get(step)
        if drawn is not None and drawn.answers and (drawn.is_whole or self._keeps):
            distribution = torch.tensor(self._params.distribution, dtype=torch.float64)
            kept[step] = {"batch_2": self._batch_2(), "distribution": distribution, **_keep(drawn)}
        return kept

    def load_state_dict(self, kept: Sequence[Kept]) -> None:
        """Restore the results of `state_dict` from every rank. The number of ranks may have changed.

        The prompts are drawn again. The step is generated again if the settings now require different samples,
        shorter responses, another temperature or another minimum length. Prompts that were in flight under a
        `rollout.ahead` of 2 or more are drawn first.
        """
        if in_flight := [read_state(of_rank[KEY])[0] for of_rank in kept if KEY in of_rank]:
            state = in_flight[0]
            self._again = [*(group.prompt for group, *_ in state.groups), *state.returned]
            self._next_ticket = state.next_ticket
        everything = range(self._parts.config.rollout.batch_sequences)
        for step in sorted({step for of_rank in kept for step in of_rank if step > 0}):
            parts = [of_rank[step] for of_rank in kept if step in of_rank]
            found = {i: c for part in parts for i, c in _completions(part).items()}
            batches_2 = [part.get("batch_2", self._batch_2()) for part in parts]
            if not all(torch.equal(batch_2, self._batch_2()) for batch_2 in batches_2) or max(found) not in everything:
                continue
            if not all(is_of(read_distribution(part), self._params) for part in parts):
                continue
            if any(len(c.token_ids) > self._params.max_new_tokens for c in found.values()):
                continue
            if any((c.routing is None) != (self._params.routing is None) for c in found.values()):
                continue
            if any((c.episode is None) != (self._parts.episodes is None) for c in found.values()):
                continue
            drawn = self._draw(step)
            drawn.answers = {n: found[i] for n, i in enumerate(drawn.wanted.sample_ids) if i in found}
            drawn.is_whole = len(found) == len(everything)

    def _batch_2(self) -> Tensor:
        return torch.tensor(self._parts.config.rollout.sizes)

    def _draw(self, step: int) -> _Drawn:
        if self._parts.curriculum is not None:
            self._parts.curriculum.before_drawing(step)
        cursor = self._parts.cursor.state_dict()
        self._again_before[step] = self._again
        indices = self._take(self._parts.config.rollout.prompts_per_step)
        drawn = self._drawn[step] = _Drawn(self._request(step, indices, 0), cursor)
        return drawn

    def _take(self, prompts: int) -> list[int]:
        again, self._again = self._again[:prompts], self._again[prompts:]
        return [*again, *self._parts.cursor.take(prompts - len(again))]

    def _request(self, step: int, indices: Sequence[int], first_seed: int) -> SampleRequests:
        """Return requests for prompts of a step. The seeds use sample numbers starting at `first_seed`."""
        config, parts = self._parts.config, self._parts
        return request_samples(
            prompts_of_rank(parts.train_prompts, indices, parts.runtime),
            samples_per_prompt=config.rollout.samples_per_prompt,
            seed_of=lambda sample_id: sample_seed(config.run.seed, step, first_seed + sample_id),
            max_total_tokens=config.rollout.max_total_tokens,
        )


def _keep(drawn: _Drawn) -> dict[str, Tensor]:
    """Concatenate B >= 1 responses into tensors."""
    numbers = sorted(drawn.answers)
    answers = [drawn.answers[n] for n in numbers]
    return {
        "sample_ids_B": torch.tensor([drawn.wanted.sample_ids[n] for n in numbers]),
        "lengths_B": torch.tensor([len(a.token_ids) for a in answers]),
        "token_ids": torch.tensor([token for a in answers for token in a.token_ids]),
        "logprobs": torch.tensor([logprob for a in answers for logprob in a.logprobs]),
        "truncated_B": torch.tensor([a.truncated for a in answers]),
        "weight_versions_B": torch.tensor([a.weight_version for a in answers]),
        **_keep_routing([a.routing for a in answers if a.routing is not None]),
        **keep_episodes(answers),
    }


def _keep_routing(routings: Sequence[Tensor]) -> dict[str, Tensor]:
    if not routings:
        return {}
    return {"routing": torch.cat(list(routings)), "routed_B": torch.tensor([len(routing) for routing in routings])}


def _completions(kept: Mapping[str, Tensor]) -> dict[int, Completion]:
    lengths = kept["lengths_B"].tolist()
    routings = kept["routing"].split(kept["routed_B"].tolist()) if "routing" in kept else [None] * len(lengths)
    columns = zip(
        kept["sample_ids_B"].tolist(),
        kept["token_ids"].split(lengths),
        kept["logprobs"].split(lengths),
        kept["truncated_B"].tolist(),
        kept["weight_versions_B"].tolist(),
        routings,
        kept_episodes(kept, kept["truncated_B"].tolist()),
        strict=True,
    )
    return {
        sample_id: Completion(tuple(tokens.tolist()), tuple(logprobs.tolist()), truncated, version, routing, episode)
        for sample_id, tokens, logprobs, truncated, version, routing, episode in columns
    }
