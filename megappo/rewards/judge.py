"""A language model as a reward: a server is asked to judge an answer, and its text is turned into a score.

This is the part that runs in a worker; the settings are those of `megappo.config.judge`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megappo.errors import remember
from megappo.observe.json_values import JSONValue
from megappo.rewards.http import ServerPlace, each, key_in, post

if TYPE_CHECKING:
    from megappo.config.judge import JudgeSettings, Template

_SHOWN_CHARACTERS = 120
_MATCH_SECONDS = 1.0
"""Time limit of the pattern on one answer of the judge: a pattern with nested repetitions may take for ever."""


class Noted(float):
    """A score with a note for the log."""

    note: str

    def __new__(cls, score: float, note: str) -> Noted:
        made = super().__new__(cls, score)
        made.note = note
        return made


@dataclass(frozen=True)
class Asking:
    """How a judge's server is asked."""

    place: ServerPlace
    chat: bool
    temperature: float
    max_tokens: int
    timeout_seconds: float
    most_tries: int

    def say(self, prompt: str) -> str:
        """The judge's text. Raises as `post`, and ValueError for an answer that is not one of OpenAI's protocol."""
        content: dict[str, JSONValue] = (
            {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        )
        content |= {"model": self.place.model, "temperature": self.temperature, "max_tokens": self.max_tokens}
        url = f"{self.place.url.rstrip('/')}/{'chat/completions' if self.chat else 'completions'}"
        answer: Any = post(
            url,
            content,
            headers={"Authorization": f"Bearer {self.place.key}"} if self.place.key else {},
            deadline_seconds=self.timeout_seconds,
            most_tries=self.most_tries,
            absent_seconds=self.place.starting_seconds or 0.0,
        )
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"] if self.chat else choice["text"]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"{url} answered {str(answer)[:_SHOWN_CHARACTERS]}, which is no completion") from None
        return "" if text is None else str(text)  # a model that thought until its tokens were used up has said nothing


@dataclass(frozen=True)
class Reading:
    """How a judge's text becomes a score."""

    pattern: str | None
    scale: tuple[float, float] | None
    choices: Mapping[str, float]
    unreadable: float

    def score(self, said: str) -> float:
        """The score of the last number or choice in the judge's text; `unreadable`, with a note, where there is
        none."""
        found = self._last(said)
        if found is None:
            return Noted(self.unreadable, f"no verdict in ...{said[-_SHOWN_CHARACTERS:]}")
        if self.pattern is None:
            return self.choices[found]
        low, high = self.scale or (-math.inf, math.inf)
        try:
            number = float(found)
        except ValueError:
            return Noted(self.unreadable, f"'{found[:_SHOWN_CHARACTERS]}' is no number")
        if not (math.isfinite(number) and low <= number <= high):
            return Noted(self.unreadable, f"{number} is not from {low} to {high}")
        return number if self.scale is None else (number - low) / (high - low)

    def _last(self, said: str) -> str | None:
        """The last number or choice, as it is written. Raises ValueError where the pattern is not done in time."""
        import regex  # reward workers that judge nothing start without it

        pattern = self.pattern
        if pattern is None:  # whole words, and the longer of two that begin alike
            words = "|".join(map(re.escape, sorted(self.choices, key=len, reverse=True)))
            pattern = rf"(?<!\w)({words})(?!\w)"
        try:  # `concurrent` releases the GIL, so that other verdicts of the batch go on
            matches = regex.finditer(pattern, said, timeout=_MATCH_SECONDS, concurrent=True)
            found = [match[1] for match in matches if match[1] is not None]
        except TimeoutError:
            raise ValueError(
                f"the judge's pattern is not done within {_MATCH_SECONDS:g} s with what it said; write one without "
                "repetitions in repetitions"
            ) from None
        return found[-1] if found else None


def judge_key(settings: JudgeSettings) -> str:
    """The key of the judge's server, "" where it wants none. Raises ValueError where its variable is empty."""
    return key_in(settings.key, "a judge's")


def judge_place(settings: JudgeSettings) -> ServerPlace:
    """The place of a judge whose server runs already. Raises as `judge_key`."""
    assert settings.url is not None, "an own server has its place when it is started"
    return ServerPlace(settings.url, settings.model, judge_key(settings))


def judge_options(settings: JudgeSettings, place: ServerPlace, messages_key: str) -> dict[str, Any]:
    """The options of `scores`. Raises ValueError where the prompt cannot be read."""
    asking = Asking(
        place=place,
        chat=settings.chat,
        temperature=settings.temperature,
        max_tokens=settings.max_tokens,
        timeout_seconds=settings.timeout_seconds,
        most_tries=settings.retries + 1,
    )
    return {
        "asking": asking,
        "reading": Reading(settings.pattern, settings.scale, settings.choices, settings.unreadable),
        "template": settings.template,
        "messages_key": messages_key,
        "concurrent": settings.concurrency,
    }


def scores(
    *,
    prompts: Sequence[str],
    responses: Sequence[str],
    answers: Sequence[str | None],
    metadata: Sequence[Mapping[str, Any]],
    asking: Asking,
    reading: Reading,
    template: Template,
    messages_key: str,
    concurrent: int,
) -> list[float | str]:
    """The judge's score of each sample, or in its place what went wrong. `messages_key`: where the metadata hold the
    messages of a prompt that is a chat."""
    remember(asking.place.key)
    wants_reference = any(field == "reference" for _, field in template)

    def score(sample: tuple[str, str, str | None]) -> float:
        question, response, reference = sample
        if wants_reference and reference is None:
            raise ValueError("the judge's prompt has a {reference}, and this prompt of the data has no answer")
        fields = {"question": question, "answer": response, "reference": reference or "", "": ""}
        return reading.score(asking.say("".join(text + fields[field] for text, field in template)))

    questions = [_question(prompt, known.get(messages_key)) for prompt, known in zip(prompts, metadata, strict=True)]
    return each(score, zip(questions, responses, answers, strict=True), concurrent)


def _question(prompt: str, messages: Sequence[Mapping[str, JSONValue]] | None) -> str:
    """The question to the model: of a chat the user's message, or where more was said, each message with its role."""
    said = [message for message in messages or () if message["role"] != "system"]
    if len(said) < 2:
        return str(said[0]["content"]) if said else prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in said)
