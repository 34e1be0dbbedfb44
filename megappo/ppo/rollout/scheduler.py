"""Schedules generation: draws prompts, submits their samples, and hands out finished groups to the steps.

With `rollout.ahead` of 0 or 1, a step takes the prompts that were drawn for the step, and no sample is unfinished while
weights change. With `rollout.ahead` of 2 or more, a step takes the oldest finished prompts, and new prompts are
submitted as replacements. Weights change during generation. Unfinished responses then continue from their tokens under
the new weights.

Every rank stores the samples of its own prompts by ticket. All ranks share the groups and their states.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megappo.config.rules.in_flight import longest_lag
from megappo.engines.protocol import Completion
from megappo.engines.requests import LONG_WAIT_SECONDS
from megappo.ppo.assembly.components import RunComponents
from megappo.ppo.records.saved import LoadedSteps
from megappo.ppo.rollout.arrivals import ArrivalsRecord, ReplayedArrivals, positions_of, rollouts_of
from megappo.ppo.rollout.in_flight_state import KEY, State, read_state, written_state
from megappo.ppo.rollout.rank_samples import RankSamples
from megappo.ppo.rollout.sampling import sample_seed, share_of_rank
from megappo.ppo.rollout.step_samples import Kept, StepSamples
from megappo.ppo.rollout.tickets import Group, choose
from megappo.runtime.ranks.objects import all_gather_objects
from megappo.types import Rollouts

_STEP_OF_SEEDS = -3
"""Step number in seeds with `rollout.ahead` of 2 or more. Sample numbers count over the whole run."""
_WAIT_SECONDS = 0.1
"""Interval in seconds at which ranks exchange the finished samples with `rollout.ahead` of 2 or more."""


class RolloutScheduler(StepSamples):
    """Keeps the prompts of the next `rollout.ahead` steps submitted. See the module."""

    saves_cursor = True

    def __init__(self, parts: RunComponents) -> None:
        super().__init__(parts)
        self._settings, self._engine = parts.config.rollout, parts.engine
        self._continuous = self._settings.in_flight
        self._max_lag = longest_lag(parts.config) if self._continuous else 0
        self._params = parts.sampling(self._settings.max_response_tokens, trained_on=True)
        self._groups: dict[int, Group] = {}
        """All untrained groups by ticket, in ticket order."""
        self._taken: dict[int, list[list[int]]] = {}
        """Tickets of each round, by step. Without dynamic sampling, each step has one round."""
        self._returned: list[int] = []
        """Prompts to submit before the next prompts of the cursor."""
        self._next_ticket, self._loaded_ticket = 0, 0
        self._samples = RankSamples(parts, self._params)
        self._begun: set[int] = set()
        """Untrained steps whose samples were submitted. With `rollout.ahead` of 0 or 1, a restored step is submitted
        when it begins."""
        self._last_step = 0
        """Last step that has received samples."""
        self._saved: set[int] = set()
        """Samples in the last state for a checkpoint. Later states contain them too, until they are trained."""
        self._dropped, self._cut, self._restarted = 0, 0, 0
        self._record = ArrivalsRecord(parts) if self._settings.record_arrivals else None

    # Samples for the trainer

    def of_step(self, step: int, *, weights_changed: bool) -> Rollouts:
        """See `StepSamples.of_step`."""
        if self._continuous:
            assert not weights_changed, "weights are synced after every step"
            self._let_solved_prompts_rest(step)
            if step not in self._taken:
                self._fill(step - 1)
        else:
            self.begin(step)
        return self._round(step, 0, self._settings.prompts_per_step, weights_changed)

    def more(self, step: int, number: int, prompts: int) -> Rollouts:
        """See `StepSamples.more`. A run that is stopped during this call continues with its existing rounds."""
        if number == len(self._taken[step]):
            if self._continuous:
                self._fill(step, at_least=prompts)
            else:
                self._draw(step, prompts)
                self._send(step)
        return self._round(step, number, prompts)

    def begin(self, step: int) -> None:
        """See `StepSamples.begin`."""
        if step not in self._taken:
            self._let_solved_prompts_rest(step)
            self._draw(step, self._settings.prompts_per_step)
        self._begun.add(step)
        self._send(step)

    def settle(self, *, weights_changed: bool) -> None:
        """See `StepSamples.settle`. With `rollout.ahead` of 2 or more, samples stay unfinished between steps."""
        if not self._continuous:
            self._wait_for([ticket for step in self._begun for ticket in self._tickets(step)], weights_changed)

    def _round(self, step: int, number: int, prompts: int, weights_changed: bool = False) -> Rollouts:
        if number == len(self._taken.get(step, [])):
            while (chosen := self._choose(prompts)) is None:
                self._advance()
                self._send()  # replace dropped prompts
            self._taken.setdefault(step, []).append([group.ticket for group in chosen])
        if self._continuous:
            self._fill(step)
        tickets = self._taken[step][number]
        self._wait_for(tickets, weights_changed)
        self._last_step = step
        groups = [self._groups[ticket] for ticket in tickets]
        answers = self._samples.answers(tickets)
        if self._parts.episodes is not None:
            self._parts.episodes.check_failures(list(answers.values()))
        return rollouts_of(self._parts, groups, self._positions(tickets), answers, with_versions=self._continuous)

    def _wait_for(self, tickets: Sequence[int], weights_changed: bool = False) -> None:
        """Wait until these groups are finished. A collective of the world."""
        version = self._engine.version
        while not all(self._groups[ticket].finished for ticket in tickets):
            self._advance(weights_changed=weights_changed and self._engine.version == version)

    def _advance(self, *, weights_changed: bool = False) -> None:
        """Advance generation, and exchange the finished groups. A collective of the world.

        Raises Interrupted and RunError like `Engine.poll` and `check_answers`.
        """
        wait_seconds = _WAIT_SECONDS if self._continuous else LONG_WAIT_SECONDS
        if self._parts.episodes is not None:
            self._parts.episodes.advance(wait_seconds, weights_changed=weights_changed)
        elif self._parts.generation is None:
            self._engine.poll(wait_seconds, weights_changed=weights_changed)
        self._samples.check()
        self._exchange_finished()

    def pause(self, *, stops: bool = False) -> None:
        """See `StepSamples.pause`. An engine that keeps unfinished requests keeps them through a weight sync."""
        if self._continuous and self._engine.capabilities.keeps_requests and not stops:
            self._parts.requests.pause("keep")
        elif self._parts.episodes is not None or any(not group.finished for group in self._groups.values()):
            self._parts.requests.pause("abort")  # also the abandoned turns of finished episodes
            self._samples.check()
            self._exchange_finished()
        self._cut = self._samples.interrupted

    def go_on(self) -> None:
        """Continue under the new weights of the engine, and drop groups that would be too old for a step."""
        for group in self._waiting() if self._continuous else ():
            if self._engine.version - group.version > self._max_lag:
                self._dropped += 1
                self._returned.append(group.prompt)
                self._forget(group.ticket)
        self._parts.requests.resume()
        if self._continuous:
            self._send()

    def metrics(self) -> dict[str, float]:
        """Return counts of unused prompts over all ranks. A collective of the world with `rollout.ahead` of 2 or more.

        Called once per step, after the step has its prompts.
        """
        if not self._continuous:
            return {}
        waiting = self._waiting()
        counts = all_gather_objects((self._cut, self._restarted))
        partial, restarted = (sum(of_rank) for of_rank in zip(*counts, strict=True))
        dropped, self._dropped, self._restarted = self._dropped, 0, 0
        metrics = {
            **({} if self._parts.episodes is None else {"episode/begun_anew": float(restarted)}),
            "rollout/in_flight": float(sum(not group.finished for group in waiting)),
            "rollout/waiting": float(sum(group.finished for group in waiting)),
            "rollout/dropped": float(dropped),
            "rollout/partial": float(partial),
        }
        if self._record is not None:
            step = max(self._taken)
            groups = [
                (self._groups[ticket], step, n) for n, tickets in enumerate(self._taken[step]) for ticket in tickets
            ]
            left = [*(group.prompt for group in waiting), *self._returned]
            answers = self._samples.answers(group.ticket for group, *_ in groups)
            state = State(groups, left, self._next_ticket, 0, answers, self._params.distribution)
            self._record.write(step, state, self.cursor_state(), metrics)
        return metrics

    def forget(self, step: int) -> None:
        """See `StepSamples.forget`."""
        for ticket in self._tickets(step):
            self._forget(ticket)
        self._taken.pop(step, None)
        self._begun.discard(step)

    def needs_old_weights(self, step: int) -> bool:
        """Return whether responses are missing, or whether the rewards may require another round."""
        tickets = self._tickets(step)
        has_rounds = self._settings.dynamic_sampling is not None
        return bool(tickets) and (has_rounds or not all(self._groups[ticket].finished for ticket in tickets))

    # State for a checkpoint

    def state_dict(self, step: int) -> Kept:
        """Return this rank's samples, finished or unfinished, and the groups of all ranks, starting at `step`.

        With `rollout.ahead` of 2 or more, an unfinished response contains its tokens at the last interruption. With 0
        or 1, only finished responses are contained. Those of a step in training are contained if the state before the
        step contained them, or if `rollout.when_stopped` keeps them.
        """
        if not self._continuous and not (self._groups or self._returned or self._loaded_ticket):
            return {}
        taken_by = {ticket: (taker, number) for ticket, taker, number, _ in self._places()}
        groups = [(group, *taken_by.get(ticket, (0, 0))) for ticket, group in self._groups.items()]
        answered = self._samples.answers()
        if not self._continuous:
            keeps, samples = self._settings.when_stopped == "keep", self._settings.samples_per_prompt
            kept_steps = {ticket for ticket, (taker, _) in taken_by.items() if keeps or taker > self._last_step}
            kept = {n for n in answered if n // samples in kept_steps} | self._saved
            answered = {n: a for n, a in answered.items() if not a.broken_off and n in kept}
            self._saved = {*answered}
        distribution = self._params.distribution
        state = State(groups, self._returned, self._next_ticket, self._dropped, answered, distribution)
        return {KEY: written_state(state, self._settings.sizes)}

    def load_state_dict(self, kept: Sequence[Kept]) -> None:
        """Restore the results of `state_dict` from every rank, and continue. The number of ranks may have changed.

        If the number of samples per prompt, the temperature or the minimum length has changed, the run draws all
        prompts again, before the next prompts of the cursor. Unfinished episodes restart, because the states of their
        environments are not saved. If the number of prompts has changed, or if the response limit is below the length
        of a stored response, the prompts of a begun step are selected or drawn again. With `rollout.ahead` of 2 or
        more, longer responses without episodes are truncated instead.
        """
        states = [read_state(of_rank[KEY]) for of_rank in kept if KEY in of_rank]
        if not states:
            return
        state, sizes_before = states[0]
        self._next_ticket = self._loaded_ticket = state.next_ticket
        self._returned, self._dropped = list(state.returned), state.dropped
        answers = {n: answer for of_rank, _ in states for n, answer in of_rank.answers.items()}
        if not self._fits(state, sizes_before, answers.values()):
            self._returned = [*(group.prompt for group, *_ in state.groups), *self._returned]
            return
        for group, step, number in state.groups:
            self._groups[group.ticket] = replace(group, finished=False)
            if step and sizes_before == self._settings.sizes:
                rounds = self._taken.setdefault(step, [])
                rounds += [[] for _ in range(len(rounds), number + 1)]
                rounds[number].append(group.ticket)
        self._add_samples(self._groups, answers)
        self._exchange_finished()
        self._cut = self._samples.interrupted
        self._restarted = self._samples.unfinished
        if self._continuous:
            self.go_on()

    def _fits(self, state: State, sizes_before: tuple[int, int], answers: Collection[Completion]) -> bool:
        """Return whether the settings allow the groups and responses of a checkpoint."""
        plays = self._parts.episodes is not None
        if not state.is_of(self._params) or any((answer.episode is not None) != plays for answer in answers):
            return False
        is_too_long = any(len(answer.token_ids) > self._params.max_new_tokens for answer in answers)
        if self._continuous:
            return sizes_before[1] == self._settings.samples_per_prompt and not (plays and is_too_long)
        is_routed = self._params.routing is not None
        return (
            sizes_before == self._settings.sizes
            and all(step for _, step, _ in state.groups)
            and not is_too_long
            and all((answer.routing is not None) == is_routed for answer in answers)
        )

    # Groups, identical on every rank

    def _waiting(self) -> list[Group]:
        """Return the groups that no step has taken, in ticket order."""
        taken = {ticket for ticket, *_ in self._places()}
        return [group for ticket, group in self._groups.items() if ticket not in taken]

    def _places(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield ticket, step, round and position in the round of each group that a step has taken."""
        for step, rounds in self._taken.items():
            for number, tickets in enumerate(rounds):
                for position, ticket in enumerate(tickets):
                    yield ticket, step, number, position

    def _tickets(self, step: int) -> list[int]:
        """Return the tickets of a step in the order of its rounds."""
        return [ticket for tickets in self._taken.get(step, ()) for ticket in tickets]

    def _choose(self, size: int) -> list[Group] | None:
        newest, of_step = self._engine.version, self._settings.prompts_per_step
        return choose(self._waiting(), size=size, newest=newest, max_lag=self._max_lag, of_step=of_step)

    def _let_solved_prompts_rest(self, step: int) -> None:
        if self._parts.curriculum is not None:
            self._parts.curriculum.before_drawing(step)

    def _fill(self, step: int, at_least: int = 0) -> None:
        """Submit prompts until the next `rollout.ahead` steps have enough prompts in flight.

        The number of prompts is limited to the remaining steps, and is at least `at_least` for this step.
        """
        ahead = min(self._settings.ahead, self._parts.derived.steps - step)
        missing = max(ahead * self._settings.prompts_per_step, at_least) - len(self._waiting())
        self._add_samples(self._new_groups(max(0, missing)))
        self._send()

    def _draw(self, step: int, prompts: int) -> None:
        """Draw prompts for the next round of a step."""
        tickets = self._new_groups(prompts)
        self._taken.setdefault(step, []).append(tickets)
        self._add_samples(tickets)

    def _new_groups(self, prompts: int) -> list[int]:
        again, self._returned = self._returned[:prompts], self._returned[prompts:]
        first = self._next_ticket
        for index in (*again, *self._parts.cursor.take(prompts - len(again))):
            self._groups[self._next_ticket] = Group(self._next_ticket, index, self._engine.version)
            self._next_ticket += 1
        return list(range(first, self._next_ticket))

    def _forget(self, ticket: int) -> None:
        self._samples.forget(ticket)
        del self._groups[ticket]

    def _exchange_finished(self) -> None:
        """Exchange the finished groups of all ranks."""
        unfinished = [ticket for ticket, group in self._groups.items() if not group.finished]
        mine = [ticket for ticket in unfinished if self._samples.are_finished(ticket)]
        for of_rank in all_gather_objects(mine):
            for ticket in of_rank:
                self._groups[ticket].finished = True

    # This rank's samples

    def _positions(self, tickets: Sequence[int]) -> range | list[int]:
        """Return the positions of this rank's groups in a round."""
        runtime = self._parts.runtime
        if self._continuous:
            return positions_of(tickets, runtime)
        return range(*share_of_rank(len(tickets), runtime))

    def _add_samples(self, tickets: Iterable[int], answers: Mapping[int, Completion] | None = None) -> None:
        """Add this rank's samples of new groups, with their responses so far.

        The seeds of a step with `rollout.ahead` of 0 or 1 depend on the step and on the position in the step.
        """
        config, samples, new = self._parts.config, self._settings.samples_per_prompt, set(tickets)
        if self._continuous:
            for ticket in (ticket for ticket in tickets if positions_of([ticket], self._parts.runtime)):
                for sample in range(samples):
                    seed = sample_seed(config.run.seed, _STEP_OF_SEEDS, ticket * samples + sample)
                    self._add(ticket, sample, seed, ticket, answers or {})
            return
        for step, rounds in self._taken.items():
            for n, of_round in enumerate(rounds):
                for position in self._positions(of_round) if new.issuperset(of_round) else ():
                    for sample in range(samples):
                        place = n * self._settings.batch_sequences + position * samples + sample
                        seed = sample_seed(config.run.seed, step, place)
                        self._add(of_round[position], sample, seed, position, answers or {})

    def _add(self, ticket: int, sample: int, seed: int, prompt_id: int, answers: Mapping[int, Completion]) -> None:
        number = ticket * self._settings.samples_per_prompt + sample
        prompt = self._parts.train_prompts[self._groups[ticket].prompt]
        self._samples.add(number, prompt, seed, prompt_id, answers.get(number))

    def _send(self, step: int | None = None) -> None:
        """Submit the samples of a step, by default of all groups, that are unfinished and not submitted."""
        tickets = list(self._groups) if step is None else self._tickets(step)
        if any(not self._groups[ticket].finished for ticket in tickets):
            self._samples.submit(tickets, counts=not self._continuous)


def step_samples_of(parts: RunComponents) -> StepSamples:
    """Return the source of samples that the settings select."""
    settings = parts.config.rollout
    if settings.load_from is not None:
        return LoadedSteps(parts, Path(settings.load_from))
    if settings.replays_arrivals:
        assert settings.replay_arrivals is not None
        return ReplayedArrivals(parts, Path(settings.replay_arrivals))
    return RolloutScheduler(parts)
