"""The built-in rules, and the names and options they are chosen by."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megappo.config.data import DataSourceSettings
from megappo.config.schema import RewardSettings
from megappo.data.sources import read_records
from megappo.rewards.arithmetic import answer_then_end
from megappo.rewards.registry import check_reward, resolve
from megappo.rewards.rules import RULES


def score(
    rule: str, response: str, answer: str | None, metadata: dict[str, Any] | None = None, **options: Any
) -> float:
    return RULES[rule](prompt="p", response=response, answer=answer, metadata=metadata or {}, **options)


@pytest.mark.parametrize(
    ("rule", "response", "answer", "options", "expected"),
    [
        ("exact", " 12\n", "12", {}, 1),
        ("exact", "12.", "12", {}, 0),
        ("number", "it is 7.", "7", {}, 1),
        ("number", "1,234 apples", "1234", {}, 1),
        ("number", "so -3", "-3", {}, 1),
        ("number", "10-3", "3", {}, 1),
        ("number", "(4)-3", "3", {}, 1),
        ("number", "x = \u22123", "-3", {}, 1),
        ("number", "3.50 dollars", "3.5", {}, 1),
        ("number", ".5", "0.5", {}, 1),
        ("number", "1e-05", "0.00001", {}, 1),
        ("number", "1, 2,3", "3", {}, 1),
        ("number", "3 then 4", "3", {"which": "first"}, 1),
        ("number", "3 then 4", "3", {"which": "last"}, 0),
        ("number", "none", "3", {}, 0),
        ("number", "9" * 400 + "1", "9" * 400 + "2", {}, 0),
        ("gsm8k", "5 and 7\n#### 12", "long\n#### 12", {}, 1),
        ("gsm8k", "#### $1,200 or 3", "1200", {}, 1),
        ("gsm8k", "so it is 12", "#### 12", {}, 1),
        ("gsm8k", "so it is 12", "#### 12", {"strict": True}, 0),
        ("gsm8k", "12 ####", "#### 12", {}, 0),
        ("gsm8k", "first 7, then 12", "#### 12", {}, 1),
        ("gsm8k", "first 12, then 7", "#### 12", {}, 0),
        ("gsm8k", "#### 2, no: #### 3", "3", {}, 1),
        ("gsm8k", "#### 3, no: #### 2", "3", {}, 0),
        ("gsm8k", "#### 12 or 13", "#### 12", {}, 1),
        ("gsm8k", "#### 13 or 12", "#### 12", {}, 0),
        ("gsm8k", "12", "#### 2\n#### 12", {}, 1),
        ("gsm8k", "12", "of 5 apples 12", {}, 1),
        ("gsm8k", "5", "of 5 apples 12", {}, 0),
        ("gsm8k", "none", "#### 12", {}, 0),
    ],
)
def test_rule(rule: str, response: str, answer: str, options: dict[str, Any], expected: float) -> None:
    assert score(rule, response, answer, **options) == expected


@pytest.mark.parametrize(
    ("raw_response", "expected"),
    [("12<eos>", 1), ("12", 0), ("<pad>12<eos>", 0), ("12<pad><eos>", 0), ("12<eos><pad>", 0), ("<eos>", 0)],
)
def test_the_quickstarts_reward_wants_answer_and_end(raw_response: str, expected: float) -> None:
    """Without special tokens most of them are the answer."""
    sample: dict[str, Any] = {"prompt": "5+7=", "response": "12", "answer": "12", "metadata": {}}
    assert answer_then_end(**sample, raw_response=raw_response) == expected
    assert answer_then_end(**sample, raw_response=raw_response, end_token="<pad>") == 0


@pytest.mark.parametrize("rule", ["exact", "number", "gsm8k", "math_verify"])
def test_an_answer_is_needed(rule: str) -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match="needs an answer with every prompt"):
        score(rule, "1", None)


@pytest.mark.parametrize("rule", ["number", "gsm8k"])
def test_an_answer_without_number_is_an_error(rule: str) -> None:
    with pytest.raises(ValueError, match="holds no number"):
        score(rule, "1", "one")


def test_math_verify() -> None:
    pytest.importorskip("math_verify")
    assert score("math_verify", "so $\\frac{2}{4}$", "1/2") == 1
    assert score("math_verify", "so \\boxed{3}", "\\boxed{4}") == 0
    assert score("math_verify", "nothing", "4") == 0


def test_reasoning_gym_scores_with_the_dataset() -> None:
    pytest.importorskip("reasoning_gym")
    source = DataSourceSettings(source="reasoning_gym:chain_sum", options={"size": 1})
    record = read_records(source)[0]
    assert score("reasoning_gym", str(record.answer), record.answer, record.metadata) == 1
    assert score("reasoning_gym", "no", record.answer, record.metadata) < 1
    tagged = f"<answer>no</answer> <answer> {record.answer} </answer>"
    assert score("reasoning_gym", tagged, record.answer, record.metadata, tagged=True) == 1
    assert score("reasoning_gym", str(record.answer), record.answer, record.metadata, tagged=True) == 0
    with pytest.raises(ValueError, match="needs prompts of a source 'reasoning_gym:TASK'"):
        score("reasoning_gym", "1", "1")


@pytest.mark.parametrize("library", ["math_verify", "reasoning_gym"])
def test_a_missing_library_is_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ValueError, match=r"needs a library; pip install 'megappo\[tasks\]'"):
        check_reward(RewardSettings(function=library))


def test_model_needs_no_function() -> None:
    check_reward(RewardSettings(function="model", model_path="somewhere"))
    assert resolve(RewardSettings(function="exact")) is RULES["exact"]


USER_MODULE = """
def good(*, prompt, response, answer, metadata, bonus=0): return bonus
def short(response): return 1
"""


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"function": "gsm8"}, "did you mean 'gsm8k'"),
        ({"function": "exact", "batch": True}, "reward.batch is for Python functions"),
        ({"function": "exact", "options": {"wich": "last"}}, "unexpected keyword argument 'wich'"),
        ({"function": "number", "options": {"which": "middle"}}, "'middle', must be last or first"),
        ({"function": "gsm8k", "options": {"strict": 1}}, "is 1, must be true or false"),
        ({"function": "model", "model_path": "m", "options": {"a": 1}}, "takes no reward.options"),
        ({"function": "no_such_module:f"}, "module 'no_such_module' cannot be imported"),
        ({"function": "broken_rewards:f"}, r"failed \(ZeroDivisionError"),
        ({"function": "leaving_rewards:f"}, r"failed \(SystemExit: 3"),
        ({"function": "user_rules:goood"}, "did you mean 'user_rules:good'"),
        ({"function": "user_rules:"}, "write package.module:function"),
        ({"function": "user_rules:short"}, "cannot be called with"),
        ({"function": "user_rules:good", "options": {"malus": 1}}, "unexpected keyword argument 'malus'"),
        ({"function": "user_rules:good", "batch": True}, r"cannot be called with \(prompts="),
    ],
)
def test_unusable_reward(
    settings: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user_rules.py").write_text(USER_MODULE)
    (tmp_path / "broken_rewards.py").write_text("1 / 0")
    (tmp_path / "leaving_rewards.py").write_text("import sys; sys.exit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "user_rules", raising=False)
    with pytest.raises(ValueError, match=sentence):
        check_reward(RewardSettings(**settings))


def test_a_worker_imports_nothing_heavy() -> None:
    code = "import sys, megappo.rewards.worker_main; print({'torch', 'pydantic', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
