"""Built-in reward functions.

A reward function is called as `function(prompt=, response=, answer=, metadata=, **options)` and returns a finite
number. The arguments are the text of the prompt, the decoded response, the reference answer (or None) and the metadata
of the record. A function with a parameter `raw_response` also receives the response with special tokens, including the
token that ended the response.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from decimal import Decimal
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from megappo.errors import how_to_install, one_line, shortened
from megappo.files.json_values import JSONValue
from megappo.rewards.unexecuted import make_safe, nothing_executed

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

# A minus is a sign unless a preceding term makes it a subtraction. The text 10-3 contains 10 and 3.
_NUMBER = re.compile(
    r"(?:(?<![\w).])-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)(?:[eE][-+]?\d{1,4}\b)?"
)
# Characters next to a number that change its value, with optional spaces: 1/2, 2^10, 5!, 10\u00b3, \u221a2, -$5, x-3.
_BEFORE = re.compile(r"[-/*^<>~|\u00b1\u00d7\u00f7\u00b7\u03c0\u2200-\u22ff]\s*[$\u00a3\u00a5\u20ac]?\s*\Z")
_AFTER = re.compile(r"\s*[+/*^!|\u00d7\u00f7\u00b7\u03c0\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u209f\u2200-\u22ff]")
_DOLLAR, _ESCAPED = re.compile(r"(?<!\\)\$"), re.compile(r"\\+\$")
_MONEY = re.compile(r"(?:\b[A-Z]{1,2})?\\*\$(?=\s*[\d.])|\\*\$")
_TEXT = re.compile(r"\\(?:text|mbox|mathrm)\s*\{[^}]*\}")
_PROSE = re.compile(r"(?:^|\s)[A-Za-z]{2,}(?:\s|$)")
_WORD = re.compile(r"(?<!\\)\b[^\W\d_]{2,}")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def _need(answer: str | None, rule: str) -> str:
    if answer is None:
        raise ValueError(f"the reward '{rule}' needs an answer with every prompt; set data.train.answer_key")
    return answer


def _numbers(text: str) -> list[Decimal]:
    """Return all numbers of a text exactly. 3.50 equals 3.5, and long integers keep every digit."""
    return [Decimal(literal.replace(",", "")) for literal in _NUMBER.findall(text.replace("\u2212", "-"))]


def number_gold(answer: str | None) -> Decimal:
    """Return the number of an answer with an optional unit or currency. Raises ValueError for any other answer."""
    text = _need(answer, "number")
    return _single(text, "use another reward than 'number', such as math_verify or exact")


def gsm8k_gold(answer: str | None) -> Decimal:
    """Return the number after `####`, or the last number of a text of words. Raises ValueError for any other answer."""
    text = _need(answer, "gsm8k")
    _, mark, behind = text.rpartition("####")
    several = not mark and bool(_WORD.search(text))
    return _single(behind, "the reward 'gsm8k' needs '#### 12' or '12'", several=several)


def _single(answer: str, remedy: str, *, several: bool = False) -> Decimal:
    """Return the only number of an answer, or the last number if `several` is true."""
    text, shown = answer.replace("\u2212", "-"), shortened(one_line(answer))
    matches = list(_NUMBER.finditer(text))
    if not matches:
        raise ValueError(f"the answer '{shown}' contains no number; {remedy}")
    last = matches[-1]
    if (len(matches) > 1 and not several) or _BEFORE.search(text[: last.start()]) or _AFTER.match(text, last.end()):
        raise ValueError(f"the answer '{shown}' is not exactly one number; {remedy}")
    return Decimal(last[0].replace(",", ""))


def exact(*, prompt: str, response: str, answer: str | None, metadata: dict[str, JSONValue]) -> float:
    """Return 1 if the response equals the answer without surrounding spaces, otherwise 0."""
    return float(response.strip() == _need(answer, "exact").strip())


def number(
    *,
    prompt: str,
    response: str,
    answer: str | None,
    metadata: dict[str, JSONValue],
    which: Literal["last", "first"] = "last",
) -> float:
    """Return 1 if the last (`which: first`: the first) number of the response equals the answer, otherwise 0.

    Numbers such as 1,234 and 3.50 are supported.
    """
    gold, numbers = number_gold(answer), _numbers(response)
    return float(bool(numbers) and numbers[0 if which == "first" else -1] == gold)


def gsm8k(
    *, prompt: str, response: str, answer: str | None, metadata: dict[str, JSONValue], strict: bool = False
) -> float:
    """Return 1 if the number after `####` equals the answer, otherwise 0.

    A response without `####` is compared by its last number, unless `strict` is true.
    """
    gold = gsm8k_gold(answer)
    _, mark, behind = response.rpartition("####")
    numbers = _numbers(behind)[:1] if mark else ([] if strict else _numbers(response)[-1:])
    return float(numbers == [gold])


def math_verify(*, prompt: str, response: str, answer: str | None, metadata: dict[str, JSONValue]) -> float:
    """Return 1 if the last mathematical expression of the response equals the answer by math-verify, otherwise 0."""
    library = _library("math_verify")
    # The library's time limit would turn a hang into a wrong answer. The worker's time limit counts it as a failure.
    gold_parsed = library.parse(_delimited(_need(answer, "math_verify")), parsing_timeout=None)
    if not gold_parsed:
        raise ValueError(
            f"the answer '{answer}' is not a mathematical expression; use another reward than 'math_verify'"
        )
    with nothing_executed():
        parsed = library.parse(response, parsing_timeout=None)
        if not parsed and _MONEY.search(response):
            parsed = library.parse(_MONEY.sub("$", response), parsing_timeout=None)
        return float(library.verify(gold_parsed, parsed, timeout_seconds=None))


def _delimited(gold: str) -> str:
    r"""Return an answer of the data in the form that math-verify parses.

    Pairs of dollars delimit mathematics. Any other dollar, and every `\$`, is a currency.
    """
    pairs, odd = divmod(len(_DOLLAR.findall(gold)), 2)
    if (pairs and not odd) or any(mark in gold for mark in ("\\boxed", "\\(", "\\[")):
        return _ESCAPED.sub("", gold)
    if "$" in gold and _PROSE.search(_TEXT.sub("", gold)):
        return _ESCAPED.sub("$", gold)
    return f"${_MONEY.sub('', gold)}$"


def reasoning_gym(
    *, prompt: str, response: str, answer: str | None, metadata: dict[str, JSONValue], tagged: bool = False
) -> float:
    """Return the score of the prompt's dataset. If `tagged`, only the text between the last <answer> tags counts."""
    if not {"task", "options", "entry"} <= metadata.keys():
        raise ValueError(
            "the reward 'reasoning_gym' needs prompts of a source 'reasoning_gym:TASK'; change the reward or the source"
        )
    if tagged:
        answers = _TAGGED.findall(response)
        response = answers[-1].strip() if answers else ""
    dataset = _dataset(str(metadata["task"]), json.dumps(metadata["options"], sort_keys=True))
    with nothing_executed():
        return float(dataset.score_answer(response, metadata["entry"]))


@cache
def _dataset(task: str, options: str) -> ProceduralDataset:
    """Return the dataset with the scorer. The scorers of some datasets depend on the dataset's options."""
    return _library("reasoning_gym").create_dataset(task, **json.loads(options))


def _library(name: str) -> ModuleType:
    """Import a library and replace scorers that would execute text of a response."""
    try:
        library = import_module(name)
    except ImportError as error:
        raise ValueError(f"the reward '{name}' needs a library; {how_to_install('tasks')}") from error
    make_safe(name)
    return library


def warm_up(rule: str) -> None:
    """Import the libraries of a rule, so that imports do not count in a sample's time limit.

    Raises ValueError if a library is missing.
    """
    if rule in ("math_verify", "reasoning_gym"):
        _library(rule)
    if rule == "math_verify":
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # hides the warning about disabled time limits
        math_verify(prompt="", response="$\\frac{1}{2}$", answer="1/2", metadata={})


RULES: dict[str, Callable[..., float]] = {
    "exact": exact,
    "number": number,
    "gsm8k": gsm8k,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
}
"""Built-in rules by their names in `reward.function`."""

GOLDS: dict[str, Callable[[str | None], Decimal]] = {"number": number_gold, "gsm8k": gsm8k_gold}
"""Readers of answers, for rules that accept only some answers. A reader raises ValueError for an unsuitable answer."""
