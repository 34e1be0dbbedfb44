"""`megappo data prepare NAME OUT` converts small files in the published format and rejects other files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from huggingface_hub import constants
from pyarrow import parquet

from megappo.cli import main
from megappo.config.sections.data import DataSourceSettings
from megappo.config.sections.reward import RewardSettings
from megappo.data.prepare import SETS, TEST_PUZZLES, boxed
from megappo.data.sources import Record, read_records
from megappo.rewards.registry import check_prompts
from megappo.rewards.rules import gsm8k, math_verify
from megappo.types import Prompt

GSM8K = [
    {"question": "Tom has 3 apples and buys 4. How many? ", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
    {"question": "A car costs?", "answer": "It is #### 1 first, so\n#### 12,500."},
]
MATH = [
    {"problem": "Half of $1$?", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{\frac{1}{2}}$."},
    {"problem": "Sum?", "level": "Level 5", "type": "Geometry", "solution": r"Not \boxed{3}, but \boxed{x^{2}+1}."},
]


def verl(text: str, answer: str, index: str) -> dict[str, Any]:
    return {
        "data_source": "math_dapo", "prompt": [{"role": "user", "content": text}], "ability": "MATH",
        "reward_model": {"style": "rule-lighteval/MATH_v2", "ground_truth": answer}, "extra_info": {"index": index},
    }  # fmt: skip


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def read(path: Path) -> list[Record]:
    return read_records(DataSourceSettings(source=str(path)))


def test_gsm8k_from_a_hub_folder(tmp_path: Path, output_of: Callable[..., str]) -> None:
    """The folder also has the other configuration of the repository."""
    for part in range(2):
        write(tmp_path / f"hub/main/train-0000{part}-of-00002.parquet", [GSM8K[part]])
    write(tmp_path / "hub/main/test-00000-of-00001.parquet", GSM8K[:1])
    write(tmp_path / "hub/socratic/train-00000-of-00001.parquet", GSM8K)
    out = tmp_path / "out"
    printed = output_of("data", "prepare", "gsm8k", out, "--from", tmp_path / "hub")
    assert printed == f"{out}/train.parquet: 2 prompts\n{out}/test.parquet: 1 prompt\n"
    first, second = read(out / "train.parquet")
    assert [first.answer, second.answer] == ["7", "12500"]
    assert first.prompt == [
        {
            "role": "user",
            "content": "Tom has 3 apples and buys 4. How many? Let's think step by step and output the final answer "
            'after "####".',
        }
    ]
    assert first.metadata == {
        "split": "train", "index": 0, "question": "Tom has 3 apples and buys 4. How many?",
        "answer": GSM8K[0]["answer"], "data_source": "openai/gsm8k",
    }  # fmt: skip
    row = parquet.read_table(out / "train.parquet").to_pylist()[0]
    assert list(row) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "7"} and row["ability"] == "math"
    prompts = [Prompt(i, (0,), "p", record.answer, {}) for i, record in enumerate((first, second))]
    check_prompts(RewardSettings(function="gsm8k"), prompts, "data")
    assert gsm8k(prompt="", response="so #### 12,500", answer=second.answer, metadata={}) == 1


def test_gsm8k_from_one_jsonl_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = write(tmp_path / "test.jsonl", GSM8K), tmp_path / "out"
    assert main(["data", "prepare", "gsm8k", str(out), "--from", str(file)]) == 0
    assert [path.name for path in out.iterdir()] == ["test.parquet"]
    assert [record.answer for record in read(out / "test.parquet")] == ["7", "12500"]


def test_math_data_set(tmp_path: Path) -> None:
    write(tmp_path / "hub/data/train-00000-of-00001.parquet", MATH)
    write(tmp_path / "hub/data/test-00000-of-00001.parquet", MATH[1:])
    assert main(["data", "prepare", "math", str(tmp_path / "out"), "--from", str(tmp_path / "hub")]) == 0
    first, second = read(tmp_path / "out/train.parquet")
    assert [first.answer, second.answer] == [r"\frac{1}{2}", "x^{2}+1"]
    assert first.metadata["level"] == "Level 1" and first.metadata["type"] == "Algebra"
    assert str(first.prompt[-1]).count("within \\\\boxed{}") == 1
    pytest.importorskip("math_verify")
    assert math_verify(prompt="", response=r"\boxed{0.5}", answer=first.answer, metadata={}) == 1


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"\boxed{5}", "5"), (r"\boxed {5 } and text", "5"), (r"\fbox{7}", "7"),
        (r"\boxed{\left\{1,2\right\}}", r"\left\{1,2\right\}"), (r"\boxed{\text{a {b} c}} \boxed{x_{1}}", "x_{1}"),
        (r"\boxed{open", None), ("none", None),
    ],
)  # fmt: skip
def test_answer_is_in_the_last_box(solution: str, answer: str | None) -> None:
    assert boxed(solution) == answer


def test_dapo_removes_duplicate_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The published file repeats each prompt a hundred times."""
    rows = [verl("a?", "1", "x"), verl("b?", "2", "y")]
    write(tmp_path / "hub/data/dapo-math-17k.parquet", rows * 100)
    write(tmp_path / "other/aime-2024.parquet", rows * 32)
    out = tmp_path / "out"
    for source in (tmp_path / "hub/data/dapo-math-17k.parquet", tmp_path / "other/aime-2024.parquet"):
        assert main(["data", "prepare", "dapo", str(out), "--from", str(source)]) == 0
    assert capsys.readouterr().out == f"{out}/dapo-math-17k.parquet: 2 prompts\n{out}/aime-2024.parquet: 2 prompts\n"
    for name in ("dapo-math-17k", "aime-2024"):
        assert parquet.read_table(out / f"{name}.parquet").to_pylist() == rows
    assert [record.answer for record in read(out / "aime-2024.parquet")] == ["1", "2"]


def test_countdown_is_generated_from_a_seed(tmp_path: Path) -> None:
    for name, seed in (("one", "1"), ("again", "1"), ("other", "2")):
        command = ["data", "prepare", "countdown", str(tmp_path / name), "--seed", seed, "--count", "200"]
        assert main(command) == 0
    train, test = read(tmp_path / "one/train.parquet"), read(tmp_path / "one/test.parquet")
    assert (len(train), len(test)) == (200, TEST_PUZZLES)
    assert train == read(tmp_path / "again/train.parquet") != read(tmp_path / "other/train.parquet")
    puzzles = [(record.metadata["target"], *sorted(record.metadata["numbers"])) for record in (*train, *test)]
    assert len(set(puzzles)) == len(puzzles)
    for record in train:
        numbers, target = record.metadata["numbers"], record.metadata["target"]
        assert sorted(map(int, re.findall(r"\d+", record.answer or ""))) == sorted(numbers)
        exact = re.sub(r"\d+", lambda match: f"Fraction({match[0]})", record.answer or "")
        assert eval(exact, {"Fraction": Fraction}) == target
        question = str(record.prompt[-1])
        assert str(target) in question and all(str(number) in question for number in numbers)


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("gsm8k", {"train.jsonl": [{"question": "q", "answer": "7"}]}, "line 1 has no number after #### in the"),
        ("gsm8k", {"train.jsonl": [{"problem": "q"}]}, "line 1 has None as its question, must be a text"),
        ("math", {"train.jsonl": [{"problem": "q", "solution": "7"}]}, r"line 1 has no \boxed{} in the solution"),
        ("dapo", {"dapo-math-17k.jsonl": [{"prompt": "q"}]}, "line 1 lacks data_source, reward_model, unlike the"),
        ("gsm8k", {}, "contains no train.parquet or train.jsonl, and no parts"),
        ("gsm8k", {"train_socratic.jsonl": GSM8K}, "contains no train.parquet or train.jsonl"),
        ("gsm8k", {"train-00000-of-00002.parquet": GSM8K}, "which are not the parts of one train; use one file"),
        ("gsm8k", {"a/train.jsonl": GSM8K, "b/train.jsonl": GSM8K}, "contains a/train.jsonl, b/train.jsonl, which are"),
        ("gsm8k", {"train.jsonl": GSM8K}, "contains no test.parquet or test.jsonl"),
    ],
)
def test_unsupported_files_are_rejected(
    tmp_path: Path, name: str, files: dict[str, Any], message: str, errors_of: Callable[..., str]
) -> None:
    (tmp_path / "hub").mkdir()
    written = [write(tmp_path / "hub" / file, rows) for file, rows in files.items()]
    source = written[0] if message.startswith("line") else tmp_path / "hub"
    error = errors_of("data", "prepare", name, tmp_path / "out", "--from", source)
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.glob("out/*.partial"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gsm9k"], "there is no data set 'gsm9k'; the nearest of gsm8k, math, dapo or countdown is gsm8k"),
        (["countdown", "--from", "x"], "countdown is generated from a seed and reads no file; remove --from x"),
        (["countdown", "--count", "0"], "--count is '0', must be a whole number from 1"),
        (["gsm8k", "--from", "nowhere"], "--from nowhere: there is no such file or folder"),
        (["gsm8k", "--from", __file__], "the name does not identify a split of gsm8k; rename the file to train"),
    ],
)
def test_invalid_arguments_are_rejected(
    arguments: list[str], message: str, tmp_path: Path, errors_of: Callable[..., str]
) -> None:
    name, *options = arguments
    assert message in errors_of("data", "prepare", name, tmp_path / "out", *options)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the empty cache of a Hub that cannot be reached."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("name", SETS)
def test_missing_network_error_includes_the_remedy(
    name: str, cache: Path, tmp_path: Path, errors_of: Callable[..., str]
) -> None:
    repository = SETS[name][0].repository
    assert errors_of("data", "prepare", name, tmp_path / "out") == (
        f"megappo: error: the data set '{repository}' could not be fetched from the hub (HF_HUB_OFFLINE is set); on a "
        f"machine with a network, run `hf download --repo-type dataset {repository} --local-dir FOLDER`, and use "
        "--from FOLDER\n"
    )


def test_cached_hub_files_are_read(cache: Path, tmp_path: Path) -> None:
    cached = cache / "datasets--openai--gsm8k"
    for name in ("train", "test"):
        write(cached / f"snapshots/abc/main/{name}-00000-of-00001.parquet", GSM8K)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("abc")
    assert main(["data", "prepare", "gsm8k", str(tmp_path / "out")]) == 0
    assert len(read(tmp_path / "out/train.parquet")) == len(read(tmp_path / "out/test.parquet")) == 2


def test_missing_file_error_names_the_command() -> None:
    with pytest.raises(ValueError, match=r"`megappo data prepare gsm8k gone/gsm8k` writes it$"):
        read(Path("gone/gsm8k/train.parquet"))
    with pytest.raises(ValueError, match="check the path"):
        read(Path("gone/gsm8k/others.parquet"))
