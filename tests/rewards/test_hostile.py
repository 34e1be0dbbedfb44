"""Scoring never executes text of a response, and ordinary responses have the same scores as in the libraries."""

from __future__ import annotations

import builtins
import os
import time
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest
import sympy

from megappo.config.schema import RewardSettings
from megappo.rewards.expressions import read_expression, read_literal, read_whole
from megappo.rewards.processes.workers import RewardPool, RewardRequest
from megappo.rewards.rules import RULES, warm_up
from megappo.rewards.unexecuted import SCORERS, ExecutedError, make_safe, nothing_executed
from tests.support.hostile import hostile

pytest.importorskip("reasoning_gym")
pytest.importorskip("math_verify")

import reasoning_gym
from reasoning_gym.factory import DATASETS

TASKS = sorted(DATASETS.keys() - {"composite"})
OPTIONS = {"seed": 1, "size": 20}
DEAR = ("knight_swap", "intermediate_integration", "futoshiki", "sokoban", "zebra_puzzles", "puzzle24")
"""Tasks with problems that take a tenth of a second or more to create. Only a quarter of their problems is used."""
ORIGINALS: dict[str, Any] = {"eval": builtins.eval, "parse_expr": sympy.parse_expr, "sympy": sympy, "sp": sympy}


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.parametrize("rule", ["reasoning_gym", "math_verify"])
def test_hostile_responses_execute_nothing_and_end(rule: str, tmp_path: Path) -> None:
    """Score responses of every task in reward workers. A response that hangs fails only its own sample. No process,
    file or memory remains."""
    touched, before = tmp_path / "touched", set(psutil.Process().children(recursive=True))
    responses, golds = hostile(touched), list[tuple[str, dict[str, Any]]]()
    if rule == "math_verify":
        golds = [("1/2", {}), ("x^2+1", {})]
    else:
        for task in TASKS:
            entry = reasoning_gym.create_dataset(task, seed=1, size=1)[0]
            golds.append((str(entry["answer"]), {"task": task, "options": {"seed": 1, "size": 1}, "entry": entry}))
    requests = [RewardRequest("", r, r, gold, metadata) for gold, metadata in golds for r in responses]
    sane = RewardRequest("", "$1/2$", "", "1/2", {})
    if rule == "reasoning_gym":
        gold, metadata = next(g for g in golds if g[1]["task"] == "countdown")
        sane = RewardRequest("", gold, gold, gold, metadata)
    settings = RewardSettings(function=rule, workers=2, timeout_seconds=3.0, max_failure_fraction=1.0)
    with RewardPool(settings) as pool:
        start = time.monotonic()
        result = pool.score([*requests, sane])
        assert time.monotonic() - start < 240
    assert result.scores[-1] == 1.0
    right = {str(r.metadata.get("task")) for r, s in zip(requests, result.scores[:-1], strict=True) if s >= 1}
    assert right <= {"game_of_life_halting"}  # accepts any text except "True" as "False"
    assert not touched.exists() and os.listdir(tmp_path) == []
    assert set(psutil.Process().children(recursive=True)) <= before
    late = {(requests[i].metadata.get("task"), requests[i].response) for i in result.late}
    known = {("coin_flip", "1e999999999"), ("rubiks_cube", "R999999999 U"), (None, "$9^{9^{9^9}}$")}
    assert late <= known  # these responses end only at the timeout


def variants(answer: str) -> list[str]:
    """Return variants of an answer that models write, neither clearly right nor wrong."""
    rows = [row.split() for row in answer.splitlines()]
    letters = [list(row) for row in answer.splitlines()]
    return [str(list(answer)), str(answer.split()), str(rows), str(letters), f" {answer}"]


def wrong(answers: list[str], number: int) -> list[str]:
    other = answers[(number + 1) % len(answers)]
    return [other, f"{answers[number]}1", f"{answers[number]} + 1", f"the answer is {answers[number]}", "", other[:-1]]


@pytest.mark.waits
@pytest.mark.parametrize("task", TASKS)
def test_ordinary_answers_score_as_before(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with the scorers of the library without protection, for right, wrong, and reformatted answers."""
    warm_up("reasoning_gym")
    options = OPTIONS | {"size": 5} if task in DEAR else OPTIONS
    dataset = reasoning_gym.create_dataset(task, **options)
    entries = [dataset[n] for n in range(len(dataset))]
    answers = [str(entry["answer"]) for entry in entries]
    cases = [
        (response, entry)
        for n, entry in enumerate(entries)
        for response in [answers[n], *variants(answers[n]), *wrong(answers, n)]
    ]
    actual = [_attempt(_ours, options, task, response, entry) for response, entry in cases]
    for module, (name, _) in SCORERS["reasoning_gym"].items():
        monkeypatch.setattr(import_module(module), name, ORIGINALS[name])
    theirs = [_attempt(dataset.score_answer, response, entry) for response, entry in cases]
    expected = [float(score) if not isinstance(score, str) else score for score in theirs]
    compared = zip(cases, actual, expected, strict=True)
    different = [(r, e["answer"], ours, was) for (r, e), ours, was in compared if ours != was]
    assert not different, different[:3]


def test_ordinary_mathematics_scores_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up("math_verify")
    golds = ["1/2", "3", "x^2+1", "\\frac{3}{4}", "(1,2)", "0.25", "2^10", "10%"]
    responses = [
        form.format(gold) for gold in golds for form in ("{}", "${}$", "so \\boxed{{{}}}", "it is {}.", "${}+1$")
    ]
    responses += [
        "1/4 + 1/4",
        "answer: 2*1.5",
        "so 6/2 = 3",
        "is (1+2)",
        "2**10",
        "1024",
        "final answer is 3/4. I hope",
        "3 4",
    ]

    def scores() -> list[Any]:
        return [_attempt(_mathematics, response, gold) for gold in golds for response in responses]

    protected = scores()
    monkeypatch.setattr(import_module("math_verify.parser"), "parse_expr", sympy.parse_expr)
    import_module("math_verify.parser").parse_expr_cached.cache_clear()
    monkeypatch.setattr("megappo.rewards.rules.nothing_executed", nullcontext)
    assert protected == scores() and 1.0 in protected and 0.0 in protected


def _mathematics(response: str, gold: str) -> float:
    return RULES["math_verify"](prompt="", response=response, answer=gold, metadata={})


def _ours(options: dict[str, int], task: str, response: str, entry: dict[str, Any]) -> float:
    metadata = {"task": task, "options": options, "entry": entry}
    return RULES["reasoning_gym"](prompt="", response=response, answer=None, metadata=metadata)


def _attempt(score: Any, *arguments: Any) -> float | str:
    try:
        result: float = score(*arguments)
        return result
    except Exception as error:  # noqa: BLE001 - a scorer that raises has to raise as before
        return type(error).__name__


EXPRESSIONS = [
    "3+4*5", "(1+2)*3/4-5", "2**3", "3!", "4!!", "0.2[1]", "1.5*x", "x**2*sin(x)+C", "exp(x)*cos(2*x)/3 + C", "sqrt(2)",
    "-x**2/2", "7//2", "7%4", "abs(3-5)", "max(1,2)", "foo(x)", "2**(1/2)", "log(x+1)", "ln(3)", "5 ^ 3", "1e3", "0x10",
    "2j", "Integral(x*exp(x), x)", "asin(x/3)", "atan(2*x)/2", "--5", "x*y*z+12*alpha", "E**2", "pi/4", "1_000",
    "binomial(5,2)", "round(2.5)", "factorial(5)", "1.", ".5", "08", "x y", "2 3", "x=3", "",
]  # fmt: skip


@pytest.mark.parametrize("evaluate", [True, False])
def test_expressions_are_read_as_in_sympy(evaluate: bool) -> None:
    for text in EXPRESSIONS:
        ours, theirs = (_attempt(read, text, evaluate) for read in (_read, _read_by_sympy))
        assert type(ours) is type(theirs) and ours == theirs and str(ours) == str(theirs), text


def _read(text: str, evaluate: bool) -> Any:
    return read_expression(text, {"x": sympy.Symbol("x")}, evaluate=evaluate)


def _read_by_sympy(text: str, evaluate: bool) -> Any:
    return sympy.parse_expr(text, {"x": sympy.Symbol("x")}, evaluate=evaluate)


def test_invalid_expressions_are_refused(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    start = time.monotonic()
    for text in [*hostile(touched), "open", "N", "[1]", "(1, 2)", "x < 3", "x.args", "x[0]", "True", "lambda: 1"]:
        for evaluate in (True, False):
            value = _attempt(_read, text, evaluate)
            assert isinstance(value, str) or value == sympy.Integer(9000), (text[:40], str(value)[:80])
        assert isinstance(_attempt(read_whole, text), str) or text.startswith("+1") or set(text) <= set("1+-")
        _attempt(read_literal, text)
    assert not touched.exists() and time.monotonic() - start < 20
    assert read_whole("((0x12 + 3) << 0x2) - -5") == ((0x12 + 3) << 2) + 5
    with pytest.raises(ValueError, match="bits is too large"):
        read_whole("1 << 99999999999")


def test_text_that_becomes_code_is_an_error_in_every_scorer() -> None:
    """The check also covers versions of a library that read responses in other ways."""
    make_safe("math_verify")
    with nothing_executed():
        for run in (eval, exec, lambda text: exec(compile(text, "<own>", "exec"))):
            with pytest.raises(ExecutedError):
                run("1 + 1")
        assert sympy.sympify("1 + 1") == 2 and sympy.Number("2.5") == 2.5
        with pytest.raises(ValueError, match="Attribute is not supported"):
            sympy.sympify("print.__self__")
    assert sympy.sympify("print.__self__") is builtins
    assert eval("1 + 1") == 2
