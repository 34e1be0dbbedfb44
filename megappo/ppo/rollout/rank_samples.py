"""The samples of this rank: their requests or episodes, and their responses so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megappo.engines.protocol import Completion, GenerateRequest, SamplingParams
from megappo.engines.requests import TrackedRequest
from megappo.engines.rows import check_answers
from megappo.engines.stretches import cut
from megappo.environments.episodes import RunningEpisode
from megappo.observe.terminal.progress import EPISODES, PROGRESS, SAMPLES
from megappo.ppo.assembly.components import RunComponents
from megappo.ppo.rollout.sampling import room_behind
from megappo.types import Prompt


@dataclass
class Sample:
    """A sample of one of this rank's prompts."""

    prompt: Prompt
    request: GenerateRequest
    stored: Completion | None = None
    """Response so far from before the submission, or the response of a user function."""
    running: TrackedRequest | RunningEpisode | None = None
    """The submitted request or episode."""
    checked: bool = False

    @property
    def answer(self) -> Completion | None:
        """The response so far, marked `broken_off` while unfinished."""
        return self.stored if self.running is None else self.running.answer

    @property
    def finished(self) -> bool:
        """Whether the response is complete."""
        return (answer := self.answer) is not None and not answer.broken_off


class RankSamples:
    """Samples by number: ticket x samples per prompt + sample."""

    def __init__(self, parts: RunComponents, params: SamplingParams) -> None:
        self._parts, self._params = parts, params
        self._per_prompt = parts.config.rollout.samples_per_prompt
        self._samples: dict[int, Sample] = {}

    def add(self, number: int, prompt: Prompt, seed: int, prompt_id: int, answer: Completion | None) -> None:
        """Add a sample. `answer` is the response so far. A response above the limit is truncated, except an episode."""
        room = room_behind(prompt, self._parts.config.rollout.max_total_tokens)
        request = GenerateRequest(prompt.token_ids, seed, prompt_id, room)
        most = request.most_tokens(self._params)
        if answer is not None and answer.episode is None and len(answer.token_ids) + answer.broken_off > most:
            answer = cut(answer, most, truncated=True)
        self._samples[number] = Sample(prompt, request, answer)

    def numbers(self, ticket: int) -> list[int]:
        """Return the numbers of the samples of a prompt. Empty if the prompt belongs to another rank."""
        return [n for n in range(ticket * self._per_prompt, (ticket + 1) * self._per_prompt) if n in self._samples]

    def answers(self, tickets: Iterable[int] | None = None) -> dict[int, Completion]:
        """Return the responses so far of these prompts, by number. Default: all prompts."""
        numbers = self._samples if tickets is None else [n for ticket in tickets for n in self.numbers(ticket)]
        return {n: answer for n in numbers if (answer := self._samples[n].answer) is not None}

    def are_finished(self, ticket: int) -> bool:
        """Return whether all samples of a prompt of this rank are finished. False for a prompt of another rank."""
        numbers = self.numbers(ticket)
        return bool(numbers) and all(self._samples[number].finished for number in numbers)

    @property
    def unfinished(self) -> int:
        """Number of unfinished samples."""
        return sum(not sample.finished for sample in self._samples.values())

    @property
    def interrupted(self) -> int:
        """Number of unfinished responses or episodes with tokens of the model."""
        if self._parts.episodes is not None:
            return self._parts.episodes.begun
        return sum(answer.broken_off for answer in self.answers().values())

    def check(self) -> None:
        """Check new responses. Raises RunError like `check_answers`."""
        new = {n: sample for n, sample in self._samples.items() if sample.finished and not sample.checked}
        answers = {n: answer for n, sample in new.items() if (answer := sample.answer) is not None}
        check_answers(answers.values(), self._parts.vocabulary, self._parts.answerer, answers)
        for sample in new.values():
            sample.checked = True

    def forget(self, ticket: int) -> None:
        """Drop the samples of a prompt, finished or unfinished."""
        for number in self.numbers(ticket):
            running = self._samples.pop(number).running
            if isinstance(running, RunningEpisode):
                assert self._parts.episodes is not None
                self._parts.episodes.cancel([running])
            elif running is not None:
                running.future.cancel()

    def submit(self, tickets: Iterable[int], *, counts: bool) -> None:
        """Submit the samples of these prompts that are unfinished and not submitted. A collective of the world with a
        user function.

        `counts`: whether the console shows the progress of these samples.
        """
        samples = [self._samples[number] for ticket in tickets for number in self.numbers(ticket)]
        new = [sample for sample in samples if sample.running is None and not sample.finished]
        prompts, requests = [sample.prompt for sample in new], [sample.request for sample in new]
        if counts and new:
            PROGRESS.expect(SAMPLES if self._parts.episodes is None else EPISODES, len(new))
        if self._parts.generation is not None:
            answers = self._parts.answer(prompts, requests, self._params)
            for sample, answer in zip(new, answers, strict=True):
                sample.stored = answer
        elif self._parts.episodes is not None:
            episodes = self._parts.episodes.submit(prompts, requests, self._params)
            for sample, episode in zip(new, episodes, strict=True):
                sample.running = episode
        else:
            tracked = [TrackedRequest(sample.request, self._params, answer=sample.stored) for sample in new]
            for sample, request in zip(new, tracked, strict=True):
                sample.running = request
            self._parts.requests.submit(tracked)
