"""Keeps prompts in flight continuously: a step uses finished prompts, and new prompts are sent as replacements.

This mode is used for `rollout.ahead` of 2 or more. Weights change during generation. Unfinished responses are then
interrupted, and continue from their tokens under the new weights. Every rank stores the samples of its own prompts by
ticket. All ranks share the set of prompts in flight and the set of finished prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megappo.config.rules.in_flight import longest_lag
from megappo.engines.protocol import Completion, GenerateRequest, HoldingEngine, InFlightEngine
from megappo.engines.rows import check_answers
from megappo.engines.stopping import stopped
from megappo.engines.stretches import continued, cut, ended, joined
from megappo.ppo.arrivals import ArrivalsRecord, ReplayedArrivals, numbers_of, rollouts_of
from megappo.ppo.components import RunComponents
from megappo.ppo.generation import Kept, Responses, StepSamples
from megappo.ppo.in_flight_state import KEY, State, read_state, written_state
from megappo.ppo.sampling import room_behind, sample_seed
from megappo.ppo.saved import LoadedSteps
from megappo.ppo.tickets import Group, choose
from megappo.runtime.objects import all_gather_objects
from megappo.types import Prompt, Rollouts

_STEP_OF_SEEDS = -3
"""Step number in seeds. Sample numbers count over the whole run, so the step number is constant."""
_WAIT_SECONDS = 0.1
"""Interval in seconds at which ranks exchange the finished samples."""


@dataclass
class _Sample:
    """A sample of one of this rank's prompts."""

    request: GenerateRequest
    answer: Completion | None = None
    """The response so far, marked `broken_off` while unfinished."""
    under_way: bool = False

    @property
    def finished(self) -> bool:
        return self.answer is not None and not self.answer.broken_off


class InFlight(StepSamples):
    """Keeps responses to the prompts of the cursor in progress continuously."""

    draws_on = True

    def __init__(self, parts: RunComponents) -> None:
        assert isinstance(parts.engine, InFlightEngine), "rules refuse rollout.ahead with other engines"
        super().__init__(parts)
        self._engine = parts.engine
        self._settings = parts.config.rollout
        self._max_lag = longest_lag(parts.config)
        self._params = parts.sampling(self._settings.max_response_tokens, trained_on=True)
        self._groups: dict[int, Group] = {}
        """All untrained groups by ticket, in ticket order."""
        self._taken: dict[int, list[list[int]]] = {}
        """Tickets of each round, by step. Without dynamic sampling, each step has one round."""
        self._returned: list[int] = []
        """Prompts to send again before the next prompts of the cursor."""
        self._next_ticket = 0
        self._samples: dict[int, _Sample] = {}
        """This rank's samples by number: ticket x samples per prompt + sample."""
        self._dropped, self._cut, self._begun_anew = 0, 0, 0
        self._episodes = None if parts.episodes is None else parts.episodes.fly(self._params)
        """Generator of episodes. None without an environment."""
        self._record = ArrivalsRecord(parts) if self._settings.record_arrivals else None

    def of_step(self, step: int, *, weights_changed: bool) -> Rollouts:
        """Return this rank's responses of a step when enough prompts are finished. Raises like `Responses.of_step`."""
        assert not weights_changed, "weights are synced after every step"
        if self._parts.curriculum is not None:
            self._parts.curriculum.before_drawing(step)
        if step not in self._taken:
            self._fill(step - 1)
        return self._round(step, 0, self._settings.prompts_per_step)

    def more(self, step: int, number: int, prompts: int) -> Rollouts:
        """Return this rank's responses of another round: the responses to the next `prompts` finished prompts.

        `number` counts rounds from 0. A run that is stopped during this call continues with its existing rounds.
        """
        if number == len(self._taken[step]):
            self._fill(step, at_least=prompts)
        return self._round(step, number, prompts)

    def _round(self, step: int, number: int, prompts: int) -> Rollouts:
        if number == len(self._taken.get(step, [])):
            while (chosen := self._choose(prompts)) is None:
                self._note((self._episodes or self._engine).finished(_WAIT_SECONDS))
                self._send()  # replace dropped prompts
            self._taken.setdefault(step, []).append([group.ticket for group in chosen])
        self._fill(step)
        groups = [self._groups[ticket] for ticket in self._taken[step][number]]
        answers = self._answers(groups)
        if self._parts.episodes is not None and self._episodes is not None:
            self._parts.episodes.check_failures(list(answers.values()), self._episodes.table.error)
        return rollouts_of(self._parts, groups, answers)

    def pause(self, *, stops: bool = False) -> None:
        """Interrupt generation because weights change or the run stops.

        An engine that keeps unfinished responses through a weight sync holds them instead.
        """
        if isinstance(self._engine, HoldingEngine) and self._engine.keeps_requests and not stops:
            self._engine.hold()
        elif self._groups:
            self._note((self._episodes or self._engine).abort())
            if self._episodes is None:  # the engine may not return a response without tokens
                for sample in self._samples.values():
                    sample.under_way = False
        self._count_cut()

    def go_on(self) -> None:
        """Continue under the new weights of the engine, and drop groups that would be too old for a step."""
        for group in self._waiting():
            if self._parts.engine.version - group.version > self._max_lag:
                self._dropped += 1
                self._returned.append(group.prompt)
                self._forget(group.ticket)
        if self._episodes is not None:
            self._episodes.go_on()
        self._send()

    def metrics(self) -> dict[str, float]:
        """Return counts of unused prompts over all ranks. A collective of the world.

        Called once per step, after the step has its prompts.
        """
        waiting = self._waiting()
        counts = all_gather_objects((self._cut, self._begun_anew))
        partial, begun_anew = (sum(of_rank) for of_rank in zip(*counts, strict=True))
        dropped, self._dropped, self._begun_anew = self._dropped, 0, 0
        metrics = {
            **({} if self._episodes is None else {"episode/begun_anew": float(begun_anew)}),
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
            answers = self._answers([group for group, *_ in groups])
            state = State(groups, left, self._next_ticket, 0, answers, self._params.distribution)
            self._record.write(step, state, self.cursor_state(), metrics)
        return metrics

    def forget(self, step: int) -> None:
        """Drop the samples of a step whose updates are done."""
        for tickets in self._taken.pop(step, []):
            for ticket in tickets:
                self._forget(ticket)

    # State for a checkpoint

    def state_dict(self, step: int) -> Kept:
        """Return this rank's samples, finished or unfinished, and the groups of all ranks, starting at `step`.

        An unfinished response contains its tokens at the last interruption.
        """
        taken_by = {
            ticket: (taker, number)
            for taker, rounds in self._taken.items()
            for number, tickets in enumerate(rounds)
            for ticket in tickets
        }
        answered = {n: sample.answer for n, sample in self._samples.items() if sample.answer is not None}
        groups = [(group, *taken_by.get(ticket, (0, 0))) for ticket, group in self._groups.items()]
        distribution = self._params.distribution
        state = State(groups, self._returned, self._next_ticket, self._dropped, answered, distribution)
        return {KEY: written_state(state, self._settings.sizes)}

    def load_state_dict(self, kept: Sequence[Kept]) -> None:
        """Restore the results of `state_dict` from every rank, and continue. The number of ranks may have changed.

        If the number of samples per prompt, the temperature or the minimum length has changed, the run sends all
        prompts again. If the number of prompts has changed, a step that has begun selects its prompts again.
        Unfinished episodes restart, because the states of their environments are not saved. If the response limit is
        now lower, longer responses are truncated. If one of the longer responses is an episode, the run sends all
        prompts again.
        """
        states = [read_state(of_rank[KEY]) for of_rank in kept if KEY in of_rank]
        if not states:
            return
        state, batches_2 = states[0]
        prompts_before, samples_before = batches_2
        self._next_ticket, self._returned, self._dropped = state.next_ticket, list(state.returned), state.dropped
        answers = {n: answer for of_rank, _ in states for n, answer in of_rank.answers.items()}
        differs = not state.is_of(self._params)  # the log-probabilities belong to another distribution
        others = any((answer.episode is None) != (self._episodes is None) for answer in answers.values())
        too_long = any(
            answer.episode is not None and len(answer.token_ids) > self._params.max_new_tokens
            for answer in answers.values()
        )
        if samples_before != self._settings.samples_per_prompt or others or too_long or differs:
            self._returned = [*(group.prompt for group, *_ in state.groups), *self._returned]
            return
        for group, step, number in state.groups:
            self._add(group, answers)
            if step and prompts_before == self._settings.prompts_per_step:
                rounds = self._taken.setdefault(step, [])
                rounds += [[] for _ in range(len(rounds), number + 1)]
                rounds[number].append(group.ticket)
        self._agree()
        self._count_cut()
        self._begun_anew = sum(not sample.finished for sample in self._samples.values())
        self.go_on()

    # Groups, identical on every rank

    def _waiting(self) -> list[Group]:
        """Return the groups that no step has taken, in ticket order."""
        taken = {ticket for rounds in self._taken.values() for tickets in rounds for ticket in tickets}
        return [group for ticket, group in self._groups.items() if ticket not in taken]

    def _choose(self, wanted: int) -> list[Group] | None:
        newest, of_step = self._parts.engine.version, self._settings.prompts_per_step
        return choose(self._waiting(), size=wanted, newest=newest, max_lag=self._max_lag, of_step=of_step)

    def _fill(self, step: int, at_least: int = 0) -> None:
        """Send prompts until the next `rollout.ahead` steps have enough prompts in flight.

        The number of prompts is limited to the remaining steps, and is at least `at_least` for this step.
        """
        ahead = min(self._settings.ahead, self._parts.derived.steps - step)
        missing = max(ahead * self._settings.prompts_per_step, at_least) - len(self._waiting())
        again, self._returned = self._returned[: max(0, missing)], self._returned[max(0, missing) :]
        for index in (*again, *self._parts.cursor.take(max(0, missing - len(again)))):
            self._add(Group(self._next_ticket, index, self._parts.engine.version), {})
            self._next_ticket += 1
        self._send()

    def _add(self, group: Group, answers: Mapping[int, Completion]) -> None:
        self._groups[group.ticket] = group
        for number in self._numbers(group.ticket):
            request = GenerateRequest(
                self._prompt(group).token_ids,
                sample_seed(self._parts.config.run.seed, _STEP_OF_SEEDS, number),
                group.ticket,
                room_behind(self._prompt(group), self._settings.max_total_tokens),
            )
            answer, most = answers.get(number), request.most_tokens(self._params)
            if answer is not None and answer.episode is None and len(answer.token_ids) + answer.broken_off > most:
                answer = cut(answer, most, truncated=True)
            self._samples[number] = _Sample(request, answer)

    def _forget(self, ticket: int) -> None:
        for number in self._numbers(ticket):
            if self._samples.pop(number).under_way and self._episodes is not None:
                self._episodes.table.give_up([number])
        del self._groups[ticket]

    def _agree(self) -> None:
        """Exchange the finished groups of all ranks."""
        mine = [
            group.ticket
            for group in self._groups.values()
            if not group.finished
            and (numbers := self._numbers(group.ticket))
            and all(self._samples[number].finished for number in numbers)
        ]
        for of_rank in all_gather_objects(mine):
            for ticket in of_rank:
                self._groups[ticket].finished = True

    def _prompt(self, group: Group) -> Prompt:
        return self._parts.train_prompts[group.prompt]

    # This rank's samples

    def _numbers(self, ticket: int) -> range:
        """Return the numbers of the samples of a prompt. Empty if the prompt belongs to another rank."""
        return numbers_of(ticket, self._settings.samples_per_prompt, self._parts.runtime)

    def _answers(self, groups: Sequence[Group]) -> dict[int, Completion]:
        """Return the responses so far of this rank's samples in these groups."""
        found = {n: self._samples[n].answer for group in groups for n in self._numbers(group.ticket)}
        return {n: answer for n, answer in found.items() if answer is not None}

    def _note(self, news: Mapping[int, Completion]) -> None:
        """Store new responses, and exchange the finished groups. Raises RunError like `check_answers`."""
        check_answers(news.values(), self._parts.vocabulary, self._parts.answerer, news)
        for number, answer in news.items():
            sample = self._samples.get(number)
            if sample is None:  # the sample was dropped while the engine continued
                continue
            sample.under_way = False
            if answer.episode is not None:
                sample.answer = answer  # the stop rules were applied to each turn
            elif answer.token_ids:
                whole = stopped(joined(sample.answer, answer), self._params)
                sample.answer = ended(whole, self._params.stop_token_ids, sample.request.most_tokens(self._params))
        self._agree()

    def _count_cut(self) -> None:
        if self._episodes is not None:
            self._cut = self._episodes.table.begun()
            return
        self._cut = sum(sample.answer is not None and sample.answer.broken_off for sample in self._samples.values())

    def _send(self) -> None:
        """Send requests for all samples that are unfinished and not in progress."""
        wanted: dict[int, GenerateRequest] = {}
        for number, sample in self._samples.items():
            if not sample.finished and not sample.under_way:
                most, least = sample.request.most_tokens(self._params), sample.request.least_tokens(self._params)
                wanted[number] = continued(sample.request, sample.answer, most, least)
                sample.under_way = True
        if wanted and self._episodes is not None:
            samples = self._settings.samples_per_prompt
            prompts = {number: self._prompt(self._groups[number // samples]) for number in wanted}
            self._episodes.begin(prompts, wanted)
        elif wanted:
            self._engine.send(wanted, self._params)


def responses_of(parts: RunComponents) -> StepSamples:
    """Return the source of samples that the settings select."""
    settings = parts.config.rollout
    if settings.load_from is not None:
        return LoadedSteps(parts, Path(settings.load_from))
    if settings.replays_arrivals:
        assert settings.replay_arrivals is not None
        return ReplayedArrivals(parts, Path(settings.replay_arrivals))
    return InFlight(parts) if settings.in_flight else Responses(parts)
