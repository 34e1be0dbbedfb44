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
from typing import Any, Literal

# A minus is a sign unless it stands behind what could be subtracted from: 10-3 holds 10 and 3.
_NUMBER = re.compile(
    r"(?:(?<![\w).])-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)(?:[eE][-+]?\d{1,4}\b)?"
)
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def _need(answer: str | None, rule: str) -> str:
    if answer is None:
        raise ValueError(f"the reward '{rule}' needs an answer with every prompt; set data.train.answer_key")
    return answer


def _numbers(text: str) -> list[Decimal]:
    """All numbers of a text, exactly: 3.50 equals 3.5, and long integers keep every digit."""
    return [Decimal(found.replace(",", "")) for found in _NUMBER.findall(text.replace("\u2212", "-"))]


def exact(*, prompt: str, response: str, answer: str | None, metadata: dict[str, Any]) -> float:
    """1 where the response is the answer, spaces at the ends aside."""
    return float(response.strip() == _need(answer, "exact").strip())


def number(
    *,
    prompt: str,
    response: str,
    answer: str | None,
    metadata: dict[str, Any],
    which: Literal["last", "first"] = "last",
) -> float:
    """1 where the last (or `which: first`) number of the response equals the answer's; 1,234 and 3.50 are numbers."""
    wanted = _numbers(_need(answer, "number"))
    if not wanted:
        raise ValueError(f"the answer '{answer}' holds no number; use another reward than 'number'")
    found = _numbers(response)
    return float(bool(found) and found[0 if which == "first" else -1] == wanted[-1])


def gsm8k(*, prompt: str, response: str, answer: str | None, metadata: dict[str, Any], strict: bool = False) -> float:
    """1 where the number behind `####` (unless `strict`, else the last number) equals the answer's."""
    wanted = _numbers(_need(answer, "gsm8k").split("####")[-1])
    if not wanted:
        raise ValueError(f"the answer '{answer}' holds no number; the reward 'gsm8k' needs '#### 12' or '12'")
    _, mark, behind = response.rpartition("####")
    found = _numbers(behind)[:1] if mark else ([] if strict else _numbers(response)[-1:])
    return float(found == wanted[-1:])


def math_verify(*, prompt: str, response: str, answer: str | None, metadata: dict[str, Any]) -> float:
    """1 where the response's last mathematical expression equals the answer, by the library math-verify."""
    library = _library("math_verify")
    gold = _need(answer, "math_verify")
    # Its own time limit would turn a hang into a wrong answer; ours counts it as a failure.
    gold_parsed = library.parse(gold if "$" in gold or "\\boxed" in gold else f"${gold}$", parsing_timeout=None)
    if not gold_parsed:
        raise ValueError(f"the answer '{answer}' is no mathematical expression; use another reward than 'math_verify'")
    return float(library.verify(gold_parsed, library.parse(response, parsing_timeout=None), timeout_seconds=None))


def reasoning_gym(
    *, prompt: str, response: str, answer: str | None, metadata: dict[str, Any], tagged: bool = False
) -> float:
    """The score of the dataset the prompt came from; with `tagged`, of the text between the last <answer> tags."""
    if not {"task", "options", "entry"} <= metadata.keys():
        raise ValueError(
            "the reward 'reasoning_gym' needs prompts of a source 'reasoning_gym:TASK'; change one of them"
        )
    if tagged:
        found = _TAGGED.findall(response)
        response = found[-1].strip() if found else ""
    dataset = _dataset(metadata["task"], json.dumps(metadata["options"], sort_keys=True))
    return float(dataset.score_answer(response, metadata["entry"]))


@cache
def _dataset(task: str, options: str) -> Any:
    """The dataset whose scorer is used; some score by their own options."""
    return _library("reasoning_gym").create_dataset(task, **json.loads(options))


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise ValueError(f"the reward '{name}' needs a library; pip install 'megappo[tasks]'") from error


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
