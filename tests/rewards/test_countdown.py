"""The reward of Countdown: each number at most once, the exact value, and no execution of text."""

from __future__ import annotations

import pytest

from megappo.rewards.countdown import expression_of_target
from megappo.rewards.registry import RewardChoice, resolve

PUZZLE = {"numbers": [6, 3, 4, 4], "target": 24}


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<answer>6 * 4 + 4 - 3 - 1</answer>", 0.2),
        ("thus <answer> (6 - 3) * 4 + 4 * 3 </answer>", 0.2),
        ("<answer>6 * 4 * (4 - 3)</answer>", 1.0),
        ("<answer>1</answer> or <answer>6*4*(4-3)</answer>", 1.0),
        ("<answer>6 \u00d7 4 \u00d7 (4 \u2212 3)</answer>", 1.0),
        ("<answer>-(3 - 4) * 6 * 4</answer>", 1.0),
        ("<answer>6 / 3 * 4 * 4</answer>", 0.2),
        ("6 * 4 * (4 - 3)", 0.0),
        ("<answer>6 * 4 * (4 - 3) = 24</answer>", 0.0),
        ("<answer>24</answer>", 0.2),
        ("<answer>6 / (4 - 4) + 3</answer>", 0.0),
        ("<answer>6 ** 4 - 4 * 3</answer>", 0.0),
        ("<answer>6 // 4 + 4 * 3</answer>", 0.0),
        ("<answer>__import__('os').getpid()</answer>", 0.0),
        ("<answer>" + "(" * 150 + "</answer>", 0.0),
        ("<answer>" + "9" * 10_000 + "</answer>", 0.0),
        ("<answer>06 * 4</answer>", 0.0),
        ("<answer></answer>", 0.0),
    ],
)
def test_scores(response: str, score: float) -> None:
    actual = expression_of_target(prompt="", response=response, answer=None, metadata=PUZZLE, format_score=0.2)
    assert actual == score


def test_fractions_are_exact() -> None:
    puzzle = {"numbers": [1, 3, 3, 7], "target": 7}
    response = "<answer>7 * (1 / 3) * 3</answer>"
    assert expression_of_target(prompt="", response=response, answer=None, metadata=puzzle) == 1.0


def test_records_without_numbers_are_failures() -> None:
    with pytest.raises(ValueError, match="needs numbers and target with every prompt"):
        expression_of_target(prompt="", response="", answer="24", metadata={})


def test_path_is_a_reward_function() -> None:
    path = "megappo.rewards.countdown:expression_of_target"
    assert resolve(RewardChoice(path, {"format_score": 0.1}, False)) is expression_of_target
