"""The built-in rules, their names and their options."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megappo.cli import main
from megappo.config.schema import RewardSettings
from megappo.config.sections.data import DataSourceSettings
from megappo.data.sources import read_records
from megappo.rewards.arithmetic import answer_then_end
from megappo.rewards.registry import argument_names, check_prompts, check_reward, resolve
from megappo.rewards.rules import RULES
from megappo.types import Prompt
from tests.support.places import QUICKSTART


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
def test_quickstart_reward_needs_answer_and_end(raw_response: str, expected: float) -> None:
    """Without special tokens, most of these responses equal the answer."""
    sample: dict[str, Any] = {"prompt": "5+7=", "response": "12", "answer": "12", "metadata": {}}
    assert answer_then_end(**sample, raw_response=raw_response) == expected
    assert answer_then_end(**sample, raw_response=raw_response, end_token="<pad>") == 0


@pytest.mark.parametrize("rule", ["exact", "number", "gsm8k", "math_verify"])
def test_rules_need_an_answer(rule: str) -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match="needs an answer with every prompt"):
        score(rule, "1", None)


@pytest.mark.parametrize("rule", ["number", "gsm8k"])
def test_answer_without_number_is_an_error(rule: str) -> None:
    with pytest.raises(ValueError, match="contains no number"):
        score(rule, "1", "one")


ONE_NUMBER = {
    "12 apples": 12, "$5": 5, "50%": 50, "1,234": 1234, "-3": -3, "\u22123": -3, "1e5": 100000, "x = 7": 7, "+3": 3,
    "5.": 5, "12 km/h": 12, "(8)": 8, ".5": 0.5,
}  # fmt: skip
NOT_ONE = [
    "1/2", "3-4", "1 2", "2^10", "5!", "10\u00b3", "\u221a2", "\\frac{1}{2}", "1.234,56", "-$5", "5 / 7", "3+4",
    "\u00b13",
]  # fmt: skip


@pytest.mark.parametrize("rule", ["number", "gsm8k"])
@pytest.mark.parametrize("gold", ONE_NUMBER)
def test_answer_may_be_one_number_with_its_unit(rule: str, gold: str) -> None:
    worth = ONE_NUMBER[gold]
    assert score(rule, f"{worth}", gold) == 1 and score(rule, f"{worth + 1}", gold) == 0
    if rule == "gsm8k":
        assert score(rule, f"{worth}", f"4 of 5\n#### {gold}") == 1


@pytest.mark.parametrize("rule", ["number", "gsm8k"])
@pytest.mark.parametrize("gold", NOT_ONE)
def test_answer_with_several_numbers_is_an_error(rule: str, gold: str) -> None:
    """A comparison with the last number would accept 2 for the answer 1/2."""
    for answer in (gold, f"so\n#### {gold}") if rule == "gsm8k" else (gold,):
        with pytest.raises(ValueError, match="is not exactly one number"):
            score(rule, gold[-1], answer)


@pytest.mark.parametrize(
    ("reward", "answers", "sentence"),
    [
        ({"function": "number"}, ["3", "1/2", "4", "1 to 2"], "prompt 1 of 'data': the answer '1/2' is not exactly one "
         "number; use another reward than 'number', such as math_verify or exact .and so for 1 more prompts."),
        ({"function": "number"}, ["3", None], "prompt 1 of 'data': the reward 'number' needs an answer"),
        ({"function": "number"}, [""], "contains no number"),
        ({"function": "gsm8k"}, ["#### 3", "2\n#### 3/4"], "prompt 1 .* is not exactly one number; the reward 'gsm8k'"),
        ({"functions": {"a": {"function": "exact"}, "b": {"function": "number"}}}, ["x"], "contains no number"),
    ],
)  # fmt: skip
def test_answers_are_refused_before_a_run(reward: dict[str, Any], answers: list[str | None], sentence: str) -> None:
    prompts = [Prompt(i, (0,), "p", answer, {}) for i, answer in enumerate(answers)]
    with pytest.raises(ValueError, match=sentence):
        check_prompts(RewardSettings(**reward), prompts, "data")
    check_prompts(RewardSettings(function="exact"), prompts, "data")
    check_prompts(RewardSettings(**reward), prompts[:1] if answers[0] in ("3", "#### 3") else [], "data")


@pytest.mark.waits
def test_dry_run_checks_answers_and_unknown_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The dry run checks training and validation data."""
    for name, answers in (("good", "34"), ("bad", ["3", "3/4"])):
        lines = [json.dumps({"prompt": f"{answer}?=", "answer": answer}) for answer in answers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    good, bad = ({"source": str(tmp_path / f"{name}.jsonl")} for name in ("good", "bad"))
    for data, code in (({"train": good}, 0), ({"train": bad}, 2), ({"train": good, "validation": bad}, 2)):
        data_settings = json.dumps({**data, "apply_chat_template": False, "max_prompt_tokens": 8})
        overrides = [
            f"data={data_settings}",
            "reward={function: number}",
            *(["evaluation=null"] if len(data) == 1 else []),
        ]
        assert main(["train", str(QUICKSTART), "--dry-run", f"run.directory={tmp_path}", *overrides]) == code
        output = capsys.readouterr()
        assert "2 of 2 prompts of" in output.out and "tokens are <unk>" in output.out
        assert ("the answer '3/4' is not exactly one number" in output.err) == (code == 2)


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        (r"\$18", "so $18$", "so $19$"),
        (r"18\$", "18", "81"),
        (r"\$1,234.50", r"\boxed{1234.50}", r"\boxed{1}"),
        (r"\$\frac{1}{2}", "$0.5$", "$2$"),
        (r"2\cdot\$3", "$6$", "$2$"),
        (r"-\$3", "$-3$", "$3$"),
        (r"\text{\$}18", "18", "1"),
        (r"\$32,\!348", "32348", "32"),
        (r"costs \$18", "18", "1"),
        (r"$\$18$", "18", "1"),
        (r"\boxed{\$18}", "18", "1"),
        ("$18", "18", "1"),
        ("18$", "18", "81"),
        ("US$5", r"\boxed{5}", "4"),
        (r"$\frac12", "$1/2$", "$2$"),
        ("The answer is $18", "18", "1"),
        (r"\[ \frac{1}{2} \]", "$1/2$", "$2$"),
        (r"\$18", r"It costs \$18.", r"It costs \$17."),
    ],
)
def test_dollars_of_an_answer_are_money_or_delimiters(gold: str, right: str, wrong: str) -> None:
    """The answers are scored by the library itself."""
    pytest.importorskip("math_verify")
    assert score("math_verify", right, gold) == 1 and score("math_verify", wrong, gold) == 0


@pytest.mark.parametrize("gold", ["", "$", r"\$", "$$"])
def test_answer_of_only_dollars_is_no_expression(gold: str) -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match="is not a mathematical expression"):
        score("math_verify", "1", gold)


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
def test_missing_library_is_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ValueError, match=r"needs a library; pip install '.\[tasks\]' in"):
        check_reward(RewardSettings(function=library))


def test_model_needs_no_function() -> None:
    check_reward(RewardSettings(function="model", model_path="somewhere"))
    assert resolve(RewardSettings(function="exact")) is RULES["exact"]


USER_MODULE = """
def good(*, prompt, response, answer, metadata, bonus=0): return bonus
def short(response): return 0.25
def anything(response, **others): return sorted(others)
def neither(): return 1.0
def misspelt(*, respones, answer): return 1.0
def many(responses): return [len(response) for response in responses]
def all_lists(prompts, responses, answers, metadata): return [1.0 for _ in prompts]
def with_defaults(*, responses=(), answers=()): return [1.0 for _ in responses]
def verls_lists(data_sources, solution_strs, ground_truths, extra_infos=None): return [1.0 for _ in solution_strs]
def verls(data_source, solution_str, ground_truth, extra_info=None): return 1.0
"""


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"function": "gsm8"}, "did you mean 'gsm8k'"),
        ({"function": "exact", "batch": True}, "reward.batch is for Python functions"),
        ({"function": "exact", "options": {"wich": "last"}}, "unexpected keyword argument 'wich'"),
        ({"function": "number", "options": {"which": "middle"}}, "'middle', must be last or first"),
        ({"function": "gsm8k", "options": {"strict": 1}}, "is 1, must be true or false"),
        ({"function": "model", "model_path": "m", "options": {"a": 1}}, "does not use reward.options"),
        ({"function": "no_such_module:f"}, "module 'no_such_module' cannot be imported"),
        ({"function": "broken_rewards:f"}, r"failed \(ZeroDivisionError"),
        ({"function": "leaving_rewards:f"}, r"failed \(SystemExit: 3"),
        ({"function": "user_rules:goood"}, "did you mean 'user_rules:good'"),
        (
            {"function": "importing_rules:Pat"},
            "module 'importing_rules' has no function 'Pat'; define it in the",
        ),
        ({"function": "user_rules:"}, "write package.module:function"),
        ({"function": "user_rules:misspelt"}, r"\(answer=\): .* 'respones'; it may take prompt, response, .*, raw_"),
        ({"function": "user_rules:many"}, "has the parameters responses, .* many samples, .*; set reward.batch: true"),
        (
            {"function": "user_rules:all_lists"},
            "responses, answers, metadata, which .*; set reward.batch: true",
        ),
        ({"function": "user_rules:with_defaults"}, "set reward.batch: true .*, or take one sample: prompt, response"),
        ({"function": "user_rules:verls_lists"}, "solution_strs, .*; set reward.batch: true"),
        (
            {"function": "user_rules:verls", "batch": True},
            "solution_str, .* one sample, .*; set reward.batch: false .* or take lists: prompts, responses",
        ),
        (
            {"function": "user_rules:verls"},
            "called without arguments: .*; rename verl's solution_str to response",
        ),
        ({"function": "user_rules:good", "options": {"malus": 1}}, "unexpected keyword argument 'malus'"),
        (
            {"function": "user_rules:good", "batch": True},
            "response, answer, metadata, bonus, .*set reward.batch: false",
        ),
        ({"function": "user_rules:short", "batch": True}, "has the parameters response, .*; set reward.batch: false"),
    ],
)
def test_unusable_reward(
    settings: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user_rules.py").write_text(USER_MODULE)
    (tmp_path / "broken_rewards.py").write_text("1 / 0")
    (tmp_path / "importing_rules.py").write_text("from pathlib import Path")
    (tmp_path / "leaving_rewards.py").write_text("import sys; sys.exit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "user_rules", raising=False)
    with pytest.raises(ValueError, match=sentence):
        check_reward(RewardSettings(**settings))


@pytest.mark.parametrize(
    ("function", "batch", "names"),
    [
        ("good", False, ("prompt", "response", "answer", "metadata")),
        ("short", False, ("response",)),
        ("anything", False, ("prompt", "response", "answer", "metadata")),
        ("neither", False, ()),
        ("many", True, ("responses",)),
    ],
)
def test_functions_receive_only_their_parameters(
    function: str, batch: bool, names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user_rules.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "user_rules", raising=False)
    settings = RewardSettings(function=f"user_rules:{function}", batch=batch)
    check_reward(settings)
    assert argument_names(resolve(settings), batch=batch) == names


@pytest.mark.waits
def test_worker_imports_nothing_heavy() -> None:
    code = "import sys, megappo.rewards.processes.worker_main; print({'torch', 'pydantic', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
