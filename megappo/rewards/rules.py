"""Built-in reward functions.

A reward function is called as `function(prompt=, response=, answer=, metadata=, **options)` with the prompt's text, the
decoded response, the reference answer (or None) and the record's metadata, and returns a finite number.
"""

from __future__ import annotations

import re
from typing import Any

_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def _need(answer: str | None, rule: str) -> str:
    if answer is None:
        raise ValueError(f"the reward '{rule}' needs an answer with every prompt; set data.train.answer_key")
    return answer


def _numbers(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in _NUMBER.findall(text)]


def exact(*, prompt: str, response: str, answer: str | None, metadata: dict[str, Any]) -> float:
    """1 where the response is the answer, spaces at the ends aside."""
    return float(response.strip() == _need(answer, "exact").strip())


def number(*, prompt: str, response: str, answer: str | None, metadata: dict[str, Any], which: str = "last") -> float:
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
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ValueError("the reward 'math_verify' needs a library; pip install 'megappo[tasks]'") from error
    gold = _need(answer, "math_verify")
    return float(verify(parse(gold if "$" in gold else f"${gold}$"), parse(response)))


def reasoning_gym(
    *, prompt: str, response: str, answer: str | None, metadata: dict[str, Any], tagged: bool = False
) -> float:
    """The score of the dataset the prompt came from; with `tagged`, of the text between <answer> tags."""
    try:
        from reasoning_gym import get_score_answer_fn
    except ImportError as error:
        raise ValueError("the reward 'reasoning_gym' needs a library; pip install 'megappo[tasks]'") from error
    if "entry" not in metadata:
        raise ValueError("the reward 'reasoning_gym' needs prompts of a source 'reasoning_gym:TASK'")
    if tagged:
        found = _TAGGED.findall(response)
        response = found[-1].strip() if found else ""
    return float(get_score_answer_fn(metadata["task"])(response, metadata["entry"]))


RULES = {"exact": exact, "number": number, "gsm8k": gsm8k, "math_verify": math_verify, "reasoning_gym": reasoning_gym}
"""By name."""
