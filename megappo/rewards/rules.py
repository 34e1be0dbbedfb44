"""Built-in reward functions.

A reward function is called as `function(prompt=, response=, answer=, metadata=, **options)` with the prompt's text, the
decoded response, the reference answer (or None) and the record's metadata, and returns a finite number. One that has a
parameter `raw_response` also gets the response with its special tokens, the one that ended it included.
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
from megappo.observe.json_values import JSONValue
from megappo.rewards.unexecuted import make_safe, nothing_executed

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

# A minus is a sign unless it stands behind what could be subtracted from: 10-3 holds 10 and 3.
_NUMBER = re.compile(
    r"(?:(?<![\w).])-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)(?:[eE][-+]?\d{1,4}\b)?"
)
# What stands next to a number and makes another one of it, spaces aside: 1/2, 2^10, 5!, 10\u00b3, \u221a2, -$5, x-3.
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
    """All numbers of a text, exactly: 3.50 equals 3.5, and long integers keep every digit."""
    return [Decimal(found.replace(",", "")) for found in _NUMBER.findall(text.replace("\u2212", "-"))]


def number_gold(answer: str | None) -> Decimal:
    """The number that an answer is, with a unit or a currency at most. Raises ValueError for any other answer."""
    text = _need(answer, "number")
    return _single(text, "use another reward than 'number', such as math_verify or exact")


def gsm8k_gold(answer: str | None) -> Decimal:
    """The number behind `####`; without, the last of a text of words. Raises ValueError for any other answer."""
    text = _need(answer, "gsm8k")
    _, mark, behind = text.rpartition("####")
    several = not mark and bool(_WORD.search(text))
    return _single(behind, "the reward 'gsm8k' needs '#### 12' or '12'", several=several)


def _single(answer: str, remedy: str, *, several: bool = False) -> Decimal:
    """The only number of an answer, or with `several` the last."""
    text, shown = answer.replace("\u2212", "-"), shortened(one_line(answer))
    found = list(_NUMBER.finditer(text))
    if not found:
        raise ValueError(f"the answer '{shown}' holds no number; {remedy}")
    last = found[-1]
    if (len(found) > 1 and not several) or _BEFORE.search(text[: last.start()]) or _AFTER.match(text, last.end()):
        raise ValueError(f"the answer '{shown}' is not exactly one number; {remedy}")
    return Decimal(last[0].replace(",", ""))


def exact(*, prompt: str, response: str, answer: str | None, metadata: dict[str, JSONValue]) -> float:
    """1 where the response is the answer, spaces at the ends aside."""
    return float(response.strip() == _need(answer, "exact").strip())


def number(
    *,
    prompt: str,
    response: str,
    answer: str | None,
    metadata: dict[str, JSONValue],
    which: Literal["last", "first"] = "last",
) -> float:
    """1 where the last (or `which: first`) number of the response equals the answer's; 1,234 and 3.50 are numbers."""
    wanted, found = number_gold(answer), _numbers(response)
    return float(bool(found) and found[0 if which == "first" else -1] == wanted)


def gsm8k(
    *, prompt: str, response: str, answer: str | None, metadata: dict[str, JSONValue], strict: bool = False
) -> float:
    """1 where the number behind `####` (unless `strict`, else the last number) equals the answer's."""
    wanted = gsm8k_gold(answer)
    _, mark, behind = response.rpartition("####")
    found = _numbers(behind)[:1] if mark else ([] if strict else _numbers(response)[-1:])
    return float(found == [wanted])


def math_verify(*, prompt: str, response: str, answer: str | None, metadata: dict[str, JSONValue]) -> float:
    """1 where the response's last mathematical expression equals the answer, by the library math-verify."""
    library = _library("math_verify")
    # Its own time limit would turn a hang into a wrong answer; ours counts it as a failure.
    gold_parsed = library.parse(_delimited(_need(answer, "math_verify")), parsing_timeout=None)
    if not gold_parsed:
        raise ValueError(f"the answer '{answer}' is no mathematical expression; use another reward than 'math_verify'")
    with nothing_executed():
        found = library.parse(response, parsing_timeout=None)
        if not found and _MONEY.search(response):
            found = library.parse(_MONEY.sub("$", response), parsing_timeout=None)
        return float(library.verify(gold_parsed, found, timeout_seconds=None))


def _delimited(gold: str) -> str:
    r"""An answer of the data in the form that math-verify parses. Dollars delimit mathematics in pairs; any other
    dollar, and every `\$`, is a currency."""
    pairs, odd = divmod(len(_DOLLAR.findall(gold)), 2)
    if (pairs and not odd) or any(mark in gold for mark in ("\\boxed", "\\(", "\\[")):
        return _ESCAPED.sub("", gold)
    if "$" in gold and _PROSE.search(_TEXT.sub("", gold)):
        return _ESCAPED.sub("$", gold)
    return f"${_MONEY.sub('', gold)}$"


def reasoning_gym(
    *, prompt: str, response: str, answer: str | None, metadata: dict[str, JSONValue], tagged: bool = False
) -> float:
    """The score of the dataset the prompt came from; with `tagged`, of the text between the last <answer> tags."""
    if not {"task", "options", "entry"} <= metadata.keys():
        raise ValueError(
            "the reward 'reasoning_gym' needs prompts of a source 'reasoning_gym:TASK'; change one of them"
        )
    if tagged:
        found = _TAGGED.findall(response)
        response = found[-1].strip() if found else ""
    dataset = _dataset(str(metadata["task"]), json.dumps(metadata["options"], sort_keys=True))
    with nothing_executed():
        return float(dataset.score_answer(response, metadata["entry"]))


@cache
def _dataset(task: str, options: str) -> ProceduralDataset:
    """The dataset whose scorer is used; some score by their own options."""
    return _library("reasoning_gym").create_dataset(task, **json.loads(options))


def _library(name: str) -> ModuleType:
    """Import a library, with scorers that execute nothing of a response."""
    try:
        library = import_module(name)
    except ImportError as error:
        raise ValueError(f"the reward '{name}' needs a library; {how_to_install('tasks')}") from error
    make_safe(name)
    return library


def warm_up(rule: str) -> None:
    """Import what a rule needs, so that no sample's time limit pays for it. Raises ValueError where it is missing."""
    if rule in ("math_verify", "reasoning_gym"):
        _library(rule)
    if rule == "math_verify":
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off
        math_verify(prompt="", response="$\\frac{1}{2}$", answer="1/2", metadata={})


RULES: dict[str, Callable[..., float]] = {
    "exact": exact,
    "number": number,
    "gsm8k": gsm8k,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
}
"""The built-in rules by their names in `reward.function`."""

GOLDS: dict[str, Callable[[str | None], Decimal]] = {"number": number_gold, "gsm8k": gsm8k_gold}
"""For rules that do not take every answer: the function that reads an answer and raises ValueError for a wrong one."""
