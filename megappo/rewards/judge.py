"""Language model as a reward. A server generates a judgement of an answer, and the judgement becomes a score.

This module runs in a worker. `megappo.config.sections.judge` defines the settings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megappo.errors import one_line
from megappo.files.json_values import JSONValue
from megappo.rewards.http import ScoreServer, raise_reported_error

if TYPE_CHECKING:
    from megappo.config.sections.judge import JudgeSettings, Template

_SHOWN_CHARACTERS = 120
_MATCH_SECONDS = 1.0
"""Time limit of the pattern for one text of the judge. A pattern with nested repetitions can take forever."""


_FINISHED = frozenset(("stop", "eos", "eos_token", "stop_sequence", "end_turn"))
"""Values of `finish_reason` for a text that the model ended. All other values mean that the text is not finished."""
_CUT = frozenset(("length", "max_tokens", "max_length", "max_output_tokens", "model_length"))
_FAILED = ("abort", "error")
"""Values of `finish_reason` for a request that the server aborted. The request is retried."""
_TEXT_PARTS = ("text", "output_text")
_TAGS = "(?:seed:)?(?:think|thinking|thought|thoughts|reasoning|scratchpad)"
_THOUGHTS_BEGIN = re.compile(
    rf"<{_TAGS}\b[^>]*>|<\|begin_of_thought\|>|\[THINK\]|\u25c1think\u25b7|<\|START_THINKING\|>|"
    r"<\|channel\|>(?:analysis|commentary)",
    re.IGNORECASE,
)
_THOUGHTS_END = re.compile(
    rf"</{_TAGS}>|<\|end_of_thought\|>|\[/THINK\]|\u25c1/think\u25b7|<\|END_THINKING\|>|"
    r"<\|channel\|>final<\|message\|>",
    re.IGNORECASE,
)
"""Tags around the thoughts of a model: Qwen3, DeepSeek-R1, GLM, Seed-OSS, Magistral, Kimi, Command A and similar
models, and gpt-oss without a reasoning parser."""


class Noted(float):
    """A score with a note for the log."""

    note: str

    def __new__(cls, score: float, note: str) -> Noted:
        made = super().__new__(cls, score)
        made.note = note
        return made


@dataclass(frozen=True)
class JudgeText:
    """The text of a judge."""

    text: str
    problem: str = ""
    """Reason why the judge did not finish the text, or "" for a finished text."""


@dataclass(frozen=True)
class Asking:
    """The requests to a judge's server."""

    server: ScoreServer
    chat: bool
    fields: Mapping[str, JSONValue]
    """Fields of a request in addition to the prompt."""

    def request(self, prompt: str) -> JudgeText:
        """Return the judge's text. Raises the errors of `ScoreServer.post`, and ValueError for answers outside OpenAI's
        protocol."""
        if self.chat:
            content = {**self.fields, "messages": [{"role": "user", "content": prompt}]}
            return self.server.post("/chat/completions", content, self._read)
        return self.server.post("/completions", {**self.fields, "prompt": prompt}, self._read)

    def _read(self, answer: Any) -> JudgeText:
        """Return the text in an answer of the server. Raises the errors of `read` in `post`."""
        raise_reported_error(answer)
        try:
            choice = answer["choices"][0]
            reason = choice.get("finish_reason")
            finish = str((reason.get("type") if isinstance(reason, dict) else reason) or "").lower()
            raise_reported_error(choice)
            if finish in _FAILED:
                raise ConnectionError(f"an answer with finish_reason '{finish}'")
            text = _plain_text(choice["message"]["content"] if self.chat else choice["text"])
        except (KeyError, IndexError, TypeError, AttributeError):
            shown = one_line(str(answer))[:_SHOWN_CHARACTERS]
            raise ValueError(f"answered {shown}, which is not a completion") from None
        if not finish or finish in _FINISHED:
            return JudgeText(text)
        remedy = "; raise max_tokens" if finish in _CUT else ""
        return JudgeText(text, f"the judge did not finish its text (finish_reason '{finish}'){remedy}")


def _plain_text(content: Any) -> str:
    """Return the text of a message's content.

    The content is a text, a list of parts, or null if a model used all tokens for its thoughts. Parts without a text,
    such as thoughts, are skipped. Raises TypeError for other content.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise TypeError("content")
    parts = [part if isinstance(part, str) else _part_text(part) for part in content]
    return "".join(parts)


def _part_text(part: Any) -> str:
    text = part.get("text") if part.get("type", "text") in _TEXT_PARTS else ""
    if not isinstance(text, str):
        raise TypeError("a part of the content")
    return text


@dataclass(frozen=True)
class Reading:
    """Conversion of the text of a judge to a score."""

    pattern: str | None
    scale: tuple[float, float] | None
    choices: Mapping[str, float]
    unreadable: float

    def score(self, answer: JudgeText) -> float:
        """Return the score of the last number or choice after the judge's thoughts.

        The score is `unreadable`, with a note, if the text contains no verdict or the judge did not finish the text.
        """
        problem, verdict = answer.problem, _after_thoughts(answer.text)
        if not problem and verdict is None:
            problem = "the judge did not end its thoughts; raise max_tokens"
        if problem or verdict is None:
            return Noted(self.unreadable, f"{problem}: ...{answer.text[-_SHOWN_CHARACTERS:]}")
        match = self._last(verdict)
        if match is None:
            return Noted(self.unreadable, f"no verdict in ...{verdict[-_SHOWN_CHARACTERS:]}")
        if self.pattern is None:
            return self.choices[match]
        low, high = self.scale or (-math.inf, math.inf)
        try:
            number = float(match)
        except ValueError:
            return Noted(self.unreadable, f"'{match[:_SHOWN_CHARACTERS]}' is not a number")
        if not (math.isfinite(number) and low <= number <= high):
            return Noted(self.unreadable, f"{number} is not from {low} to {high}")
        return number if self.scale is None else (number - low) / (high - low)

    def _last(self, text: str) -> str | None:
        """Return the text of the last number or choice. Raises ValueError if the pattern exceeds its time limit."""
        import regex  # only workers of judges import this library

        pattern = self.pattern
        if pattern is None:  # whole words, and the longer of two words with the same beginning
            alternatives = "|".join(map(re.escape, sorted(self.choices, key=len, reverse=True)))
            pattern = rf"(?<!\w)({alternatives})(?!\w)"
        try:  # `concurrent` releases the GIL for the other verdicts of the batch
            matches = regex.finditer(pattern, text, timeout=_MATCH_SECONDS, concurrent=True)
            verdicts = [match[1] for match in matches if match[1] is not None]
        except TimeoutError:
            raise ValueError(
                f"the judge's pattern takes more than {_MATCH_SECONDS:g} s on the judge's text; remove nested "
                "repetitions from the pattern"
            ) from None
        return verdicts[-1] if verdicts else None


def _after_thoughts(text: str) -> str | None:
    """Return the text after the last tag that ends thoughts, or None if unfinished thoughts begin in this text."""
    rest = _THOUGHTS_END.split(text)[-1]
    return None if _THOUGHTS_BEGIN.search(rest) else rest


def judge_client(settings: JudgeSettings) -> ScoreServer:
    """Return the client of a judge's running server. Raises ValueError if the variable of the key is empty."""
    return ScoreServer.of(settings, "a judge's")


def judge_options(settings: JudgeSettings, server: ScoreServer, messages_key: str) -> dict[str, Any]:
    """Return the options of `scores`. Raises ValueError if the prompt cannot be read."""
    name = settings.model if settings.server is None else "judge"  # SGLang searches the path of a folder for an adapter
    return {
        "asking": Asking(server, settings.chat, {"model": name, **settings.sampling}),
        "reading": Reading(settings.pattern, settings.scale, settings.choices, settings.unreadable),
        "template": settings.template,
        "messages_key": messages_key,
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
) -> list[float | str]:
    """Return the judge's score of each sample, or the reason of a failure in its place.

    `messages_key` is the key in the metadata for the messages of a prompt that is a chat.
    """
    wants_reference = any(field == "reference" for _, field in template)

    def score(sample: tuple[str, str, str | None]) -> float:
        question, response, reference = sample
        if wants_reference and reference is None:
            raise ValueError("the judge's prompt has a {reference}, but this prompt of the data has no answer")
        fields = {"question": question, "answer": response, "reference": reference or "", "": ""}
        return reading.score(asking.request("".join(text + fields[field] for text, field in template)))

    questions = [_question(prompt, known.get(messages_key)) for prompt, known in zip(prompts, metadata, strict=True)]
    return asking.server.each(score, zip(questions, responses, answers, strict=True))


def _question(prompt: str, messages: Sequence[Mapping[str, JSONValue]] | None) -> str:
    """Return the question to the model: the user's message, or each message with its role in a longer chat."""
    turns = [message for message in messages or () if message["role"] != "system"]
    if len(turns) < 2:
        return str(turns[0]["content"]) if turns else prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in turns)
