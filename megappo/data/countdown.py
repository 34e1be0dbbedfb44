"""Countdown puzzles: combine numbers to reach a target. The puzzles are generated from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator

from megappo.files.json_values import JSONValue

SOURCE = "countdown"
_ASKS = (
    "Using the numbers {numbers}, write an expression that equals {target}. Use each number exactly once, with +, -, "
    "*, / and parentheses. End with the expression between <answer> tags, such as <answer>(1 + 2) / 3</answer>."
)
_COUNTS = (3, 4)
_LARGEST_NUMBER, _LARGEST_TARGET = 99, 999


def puzzles(count: int, seed: int) -> Iterator[dict[str, JSONValue]]:
    """Yield `count` different puzzles in verl's schema. The answer is a solution, and `extra_info` contains `numbers`
    and `target`."""
    draw, seen, made = random.Random(seed), set[tuple[int, ...]](), 0
    while made < count:
        numbers = [draw.randint(1, _LARGEST_NUMBER) for _ in range(draw.choice(_COUNTS))]
        solution, target = _combined(numbers, draw)
        key = (target, *sorted(numbers))
        if not 1 <= target <= _LARGEST_TARGET or target in numbers or key in seen:
            continue
        seen.add(key)
        yield {
            "data_source": SOURCE,
            "prompt": [{"role": "user", "content": _ASKS.format(numbers=_listed(numbers), target=target)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": solution},
            "extra_info": {"index": made, "numbers": numbers, "target": target},
        }
        made += 1


def _listed(numbers: list[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def _combined(numbers: list[int], draw: random.Random) -> tuple[str, int]:
    """Return an expression of all numbers with integer intermediate values, and the value of the expression."""
    terms = [(str(number), number) for number in numbers]
    while len(terms) > 1:
        (left, a), (right, b) = (terms.pop(draw.randrange(len(terms))) for _ in range(2))
        operators = ["+", "-", "*", *(["/"] if b and a % b == 0 else [])]
        operator = draw.choice(operators)
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a // (b or 1)}[operator]
        terms.append((f"({left} {operator} {right})", value))
    expression, value = terms[0]
    return expression[1:-1], value
