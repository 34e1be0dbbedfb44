"""Records from each kind of source, and the error of each malformed source."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from megappo.config.sections.data import DataSourceSettings
from megappo.data.sources import Record, read_records

CHAT = [{"role": "user", "content": "2+2"}]


def read(source: str | Path, **settings: Any) -> list[Record]:
    return read_records(DataSourceSettings(source=str(source), **settings))


def jsonl(folder: Path, *records: Any) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), encoding="utf-8")
    return path


def verl_row(**changes: Any) -> dict[str, Any]:
    row = {"data_source": "d", "prompt": CHAT, "reward_model": {"ground_truth": "4", "style": "rule"}}
    return row | {"extra_info": {"index": 3}} | changes


def verl_file(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "data.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def test_jsonl(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "a\u2028b", "answer": 4, "level": 2}, {"prompt": CHAT, "answer": "x"})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n\r\n"))
    assert read(path) == [Record("a\u2028b", "4", {"level": 2}), Record(CHAT, "x", {})]
    assert len(read(path, limit=1)) == 1
    path = jsonl(tmp_path, {"q": "a"}, {"q": "b"})  # another key, and no answers
    assert [(r.prompt, r.answer) for r in read(path, prompt_key="q")] == [("a", None), ("b", None)]


def test_numbers_become_text(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "a", "answer": 3.5}, {"prompt": "b", "answer": -7})
    assert [r.answer for r in read(path)] == ["3.5", "-7"]
    path.write_text('{"prompt": "a", "answer": 1' + "0" * 4000 + "}")
    assert read(path)[0].answer == "1" + "0" * 4000


def test_parquet(tmp_path: Path) -> None:
    path = verl_file(tmp_path, verl_row(), verl_row(reward_model={"ground_truth": "5", "style": "rule"}))
    first, second = read(path)
    assert first == Record(CHAT, "4", {"index": 3, "data_source": "d"})
    assert second.answer == "5"


def test_parquet_file_with_named_columns(tmp_path: Path) -> None:
    """Files in the schema of verl can have other column names. Saved settings with all keys read the same records."""
    own = verl_file(tmp_path, {"question": "1+1=", "answer": "2", "level": 3})
    assert read(own, prompt_key="question") == [Record("1+1=", "2", {"level": 3})]
    own = verl_file(tmp_path, {**verl_row(), "question": "1+1=", "solution": "2"})
    assert read(own, prompt_key="question", answer_key="answer")[0].answer == "4"
    record = read(own, prompt_key="question", answer_key="solution")[0]
    assert (record.prompt, record.answer, record.metadata["data_source"]) == ("1+1=", "2", "d")
    with pytest.raises(ValueError, match="has no column 'solutoin', but 'solution'; set the source's answer_key"):
        read(own, answer_key="solutoin")


def test_files_are_read_in_order_of_names(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        folder = tmp_path / name
        folder.mkdir()
        jsonl(folder, {"prompt": name, "answer": name})
    (tmp_path / "d.jsonl").mkdir()
    assert [r.prompt for r in read(tmp_path / "[a-b]" / "*.jsonl")] == ["a", "b"]
    assert [r.prompt for r in read(tmp_path / "**" / "*.jsonl", limit=2)] == ["a", "b"]
    with pytest.raises(ValueError, match=r"no file has a name like '.*/e\*.jsonl' .*; change the pattern"):
        read(tmp_path / "e*.jsonl")


def with_tool_call(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    function = {"name": "look", "arguments": arguments}
    return [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "12", "name": "look"},
    ]


DIFFERENT_ROWS: list[dict[str, Any]] = [
    {"prompt": with_tool_call({"city": "Rome"}), "answer": "1", "extra": {"level": 1}, "level": 5},
    {"prompt": with_tool_call({"a": 1, "deep": {"x": [1, 2]}}), "answer": "2", "extra": {"from": {"book": "b"}}},
    {"prompt": with_tool_call({"deep": {"y": "z"}, "items": [{"k": 1}, {"l": [{"m": 2}, {"n": 3}]}]}), "answer": "3"},
    {"prompt": with_tool_call({}), "answer": "4", "level": 7, "extra": {"from": {"page": 3}, "tags": ["a", "b"]}},
]
"""Rows with pairwise different fields."""


def test_tables_and_json_lines_have_equal_records(tmp_path: Path) -> None:
    """Tables fill missing fields with nulls. These nulls are removed from nested fields, lists and metadata."""
    lines = read(jsonl(tmp_path, *DIFFERENT_ROWS))
    rows = []
    for row in DIFFERENT_ROWS:
        extra = {name: row[name] for name in ("extra", "level") if name in row}
        rows.append(verl_row(prompt=row["prompt"], reward_model={"ground_truth": row["answer"]}, extra_info=extra))
    records = read(verl_file(tmp_path, *rows))
    assert [record.metadata.pop("data_source") for record in records] == ["d"] * 4
    assert records == lines


def test_data_sets_and_json_lines_have_equal_records(hub: Any, tmp_path: Path) -> None:
    lines = read(jsonl(tmp_path, *DIFFERENT_ROWS))
    (tmp_path / "tables").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(DIFFERENT_ROWS), tmp_path / "tables" / "train-00000.parquet")
    assert read(f"datasets:{tmp_path}/tables") == lines
    hub.Dataset.from_list(DIFFERENT_ROWS).save_to_disk(tmp_path / "saved")
    assert read(f"datasets:{tmp_path}/saved") == lines


def test_reasoning_gym_is_reproducible() -> None:
    pytest.importorskip("reasoning_gym")
    first, again = (read("reasoning_gym:chain_sum", options={"size": 3, "max_terms": 2}) for _ in range(2))
    assert first == again
    assert first[0].metadata["task"] == "chain_sum"
    assert first[0].metadata["options"] == {"size": 3, "max_terms": 2, "seed": 0}
    assert first[0].metadata["entry"]["answer"] == first[0].answer


ROWS = [{"question": f"{i}+1", "answer": i + 1, "level": i % 2} for i in range(5)]
RECORDS = [Record(f"{i}+1", str(i + 1), {"level": i % 2}) for i in range(5)]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the library `datasets` with a cache in the folder of the test."""
    library = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    return library


def test_saved_data_sets_are_read(hub: Any, tmp_path: Path) -> None:
    rows = hub.Dataset.from_list(ROWS)
    rows.select([4, 3, 2, 1, 0]).save_to_disk(tmp_path / "one")
    assert read(f"datasets:{tmp_path}/one", prompt_key="question") == RECORDS[::-1]
    assert read(f"datasets:{tmp_path}/one", prompt_key="question", limit=2) == RECORDS[:2:-1]
    hub.DatasetDict({"train": rows, "held": rows.select([1])}).save_to_disk(tmp_path / "two")
    assert read(f"datasets:{tmp_path}/two", prompt_key="question") == RECORDS
    assert read(f"datasets:{tmp_path}/two:held", prompt_key="question") == RECORDS[1:2]
    hub.DatasetDict({"held": rows}).save_to_disk(tmp_path / "three")
    assert read(f"datasets:{tmp_path}/three", prompt_key="question") == RECORDS  # the only split


def test_data_sets_in_folders_are_read(hub: Any, tmp_path: Path) -> None:
    (tmp_path / "lines").mkdir()
    lines = [json.dumps(row) for row in ROWS]
    (tmp_path / "lines" / "train.jsonl").write_text("\n".join(lines[:4]))
    (tmp_path / "lines" / "test.jsonl").write_text(lines[4])
    assert read(f"datasets:{tmp_path}/lines", prompt_key="question") == RECORDS[:4]
    assert read(f"datasets:{tmp_path}/lines:default:test", prompt_key="question") == RECORDS[4:]


def test_unreadable_data_sets_are_rejected(hub: Any, tmp_path: Path) -> None:
    hub.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    hub.DatasetDict({"held": hub.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "two")
    for source, more, message in (
        (f"datasets:{tmp_path}/none", {}, f"there is no folder {tmp_path}/none"),
        (f"datasets:{tmp_path}/one:test", {"prompt_key": "question"}, "is a single split; remove test from it"),
        (f"datasets:{tmp_path}/one:main:train", {}, "a folder of save_to_disk has no configurations; remove main"),
        (f"datasets:{tmp_path}/two:test", {}, "has no split 'test', but held; append one of them"),
        (f"datasets:{tmp_path}/one", {}, "row 0 has no field 'prompt', but question"),
        (f"datasets:{tmp_path}/one", {"options": {"a": 1}}, "takes no options, got {'a': 1}; remove them"),
        ("datasets:nobody/nothing", {}, "'datasets:nobody/nothing' cannot be loaded ("),
    ):
        with pytest.raises(ValueError) as refused:
            read(source, **more)
        assert message in str(refused.value) and "\n" not in str(refused.value)


def test_revision_is_resolved_by_the_hub(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the hub, the library would read any revision in its cache."""
    requests = []

    def load(name: str, config: str | None, *, revision: str | None) -> Any:
        requests.append((name, config, revision))
        return datasets.Dataset.from_list([{"prompt": "1+1=", "answer": "2"}], split="train")

    datasets = pytest.importorskip("datasets")
    with pytest.raises(ValueError, match=r"not resolve revision v1 .* nobody/nothing --revision v1 --local-dir"):
        read("datasets:nobody/nothing@v1:main:train")
    monkeypatch.setattr(datasets, "load_dataset", load)
    known = {("some/set", "v1"): "0123abcd"}
    monkeypatch.setattr(
        "huggingface_hub.HfApi.dataset_info", lambda _, name, revision: SimpleNamespace(sha=known[name, revision])
    )
    assert read("datasets:some/set@v1:main:train") == read("datasets:some/set:main:train")
    assert requests == [("some/set", "main", "0123abcd"), ("some/set", "main", None)]


def test_code_of_a_data_set_is_not_run(hub: Any, tmp_path: Path) -> None:
    folder = tmp_path / "script"
    folder.mkdir()
    (folder / "script.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    with pytest.raises(ValueError, match="cannot be loaded"):
        read(f"datasets:{folder}")
    assert not (tmp_path / "ran").exists()


def test_old_datasets_versions_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs a library; pip install '.\[datasets\]'"):
        read("datasets:openai/gsm8k:main:train")
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(__version__="3.6.0"))
    with pytest.raises(ValueError, match=r"datasets 3\.6\.0 may run code of a data set, version 4"):
        read("datasets:openai/gsm8k:main:train")


def test_arithmetic_returns_all_pairs() -> None:
    records = read("megappo.data.arithmetic:sums", options={"max_operand": 2, "modulus": 3})
    assert len({r.prompt for r in records}) == 9
    assert (records[-1].prompt, records[-1].answer) == ("2+2=", "1")


def test_numpy_numbers_are_valid_answers(user_module: str) -> None:
    assert [r.answer for r in read(f"{user_module}:numpy_answers")] == ["4", "0.5"]


def raw(content: bytes, name: str = "data.jsonl") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def lines(*records: Any) -> Callable[[Path], Path]:
    return lambda folder: jsonl(folder, *records)


def rows(*records: dict[str, Any]) -> Callable[[Path], Path]:
    return lambda folder: verl_file(folder, *records)


def changed_parquet(change: Callable[[bytes], bytes]) -> Callable[[Path], Path]:
    """Return a writer of a row in verl's schema with changed bytes."""

    def write(folder: Path) -> Path:
        path = verl_file(folder, verl_row())
        path.write_bytes(change(path.read_bytes()))
        return path

    return write


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def arrow_column(name: str, column: pyarrow.Array) -> Callable[[Path], Path]:
    """Return a writer of two rows in verl's schema with one replaced column."""

    def write(folder: Path) -> Path:
        table = pyarrow.Table.from_pylist([verl_row(), verl_row()])
        table = table.set_column(table.column_names.index(name), name, column)
        parquet.write_table(table, folder / "data.parquet")
        return folder / "data.parquet"

    return write


RENAMED = changed_parquet(lambda content: content.replace(b"data_source", b"data_sourc\xff"))
NOT_UTF8 = pyarrow.array([b"d", b"\xff"]).view(pyarrow.string())
NO_DATE = pyarrow.array([{"when": 0}, {"when": 2**52}], pyarrow.struct([("when", pyarrow.timestamp("ms"))]))
GOOD = {"prompt": "a", "answer": "b"}
MALFORMED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing file": (lambda folder: folder / "none.jsonl", "does not exist"),
    "folder": (lambda folder: folder, "has an unknown type"),
    "unknown suffix": (raw(b"", "data.csv"), "has an unknown type; use FILE.jsonl"),
    "empty": (raw(b""), "is empty; it needs at least one record"),
    "blank lines": (raw(b"\n \n"), "is empty"),
    "invalid JSON": (raw(b'{"prompt": "a"}\n{"prompt": \n'), "line 2 is not JSON"),
    "not an object": (lines(GOOD, [1]), r"line 2 is \[1\], must be an object"),
    "near prompt key": (lines({"prompts": "a"}), "line 1 has no field 'prompt', but 'prompts'; set the source's"),
    "no prompt key": (lines({"x": "a"}), "no field 'prompt', but x;"),
    "prompt is a number": (lines({"prompt": 3}), "line 1: the prompt is 3, must be a text or a list"),
    "prompt is empty": (lines({"prompt": ""}), "line 1: the prompt is empty"),
    "no messages": (lines({"prompt": []}), "must be a text or a list of chat messages"),
    "message without content": (lines({"prompt": [{"role": "user"}]}), "must be an object with role and content"),
    "sharegpt keys": (lines({"prompt": [{"from": "human", "value": "a"}]}), "with role and content"),
    "unknown role": (lines({"prompt": [{"role": "human", "content": "a"}]}), "chat role 'human' must be one of system"),
    "unhashable role": (lines({"prompt": [{"role": [], "content": "a"}]}), r"chat role \[\] must be one of"),
    "content parts": (lines({"prompt": [{"role": "user", "content": [1]}]}), r"chat content \[1\] must be a text"),
    "answer in the prompt": (lines({"prompt": [*CHAT, {"role": "assistant", "content": "4"}]}), "is of the assistant"),
    "answer of wrong type": (lines({"prompt": "a", "answer": ["b"]}), "must be a text or a finite number"),
    "answer not a number": (raw(b'{"prompt": "a", "answer": NaN}'), "must be a text or a finite number"),
    "some answers": (lines(GOOD, {"prompt": "c"}), "line 2 has no answer, like 1 of 2 records"),
    "surrogate in the answer": (raw(b'{"prompt": "a", "answer": "\\ud800"}'), "line 1: the answer contains half a"),
    "parquet folder": (lambda folder: made(folder / "data.parquet"), "is a folder; name one file in it"),
    "parquet column not UTF-8": (RENAMED, "not a readable parquet file"),
    "parquet not UTF-8": (arrow_column("data_source", NOT_UTF8), "row 1 contains a value that cannot be read .'utf-8'"),
    "parquet impossible date": (arrow_column("extra_info", NO_DATE), "row 1 contains a value that cannot be read"),
    "not UTF-8": (raw(b'{"prompt": "a"}\n{"prompt": "\xe4"}\n'), "line 2 is not UTF-8"),
    "half a surrogate": (raw(b'{"prompt": "\\ud800"}'), "line 1: the prompt contains half a surrogate pair"),
    "digits without end": (raw(b'{"prompt": ' + b"1" * 5000 + b"}"), "line 1 is JSON that Python cannot read"),
    "garbage parquet": (raw(b"garbage", "data.parquet"), "not a readable parquet file"),
    "empty parquet file": (raw(b"", "data.parquet"), "not a readable parquet file"),
    "truncated parquet": (changed_parquet(lambda content: content[:-20]), "not a readable parquet file"),
    "other schema": (rows({"question": "a"}), "row 0 has no field 'prompt', but question; set the source's prompt_key"),
    "half of verl's schema": (rows({"reward_model": {"ground_truth": "1"}, "p": "a"}), "lacks the columns data_source"),
    "no ground truth": (rows(verl_row(), verl_row(reward_model={})), "row 1 has no reward_model.ground_truth"),
    "reward model is text": (rows(verl_row(reward_model="4")), "row 0 has no reward_model.ground_truth"),
    "extra info is text": (rows(verl_row(extra_info="x")), "row 0: extra_info is 'x', must be a struct"),
    "prompt is a struct": (rows(verl_row(prompt={"a": 1})), "row 0: the prompt is"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_file(name: str, tmp_path: Path) -> None:
    write, sentence = MALFORMED[name]
    path = write(tmp_path)
    with pytest.raises(ValueError, match=sentence) as caught:
        read(path)
    assert type(caught.value) is ValueError and str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


SUMS = "megappo.data.arithmetic:sums"
USER_MODULE = """
def good(): yield {"prompt": "a"}
def number(): return 3
def raises():
    yield {"prompt": "a"}
    raise KeyError("k")
def text(): yield "a"
def leaves():
    import sys
    sys.exit(3)
def says_much(): raise RuntimeError("one\\ntwo")
def unsendable(): yield {"prompt": "a", "metadata": {"f": lambda: 0}}
def numpy_answers():
    import numpy
    yield {"prompt": "a", "answer": numpy.int64(4)}
    yield {"prompt": "a", "answer": numpy.float32(0.5)}
def bad_metadata(): yield {"prompt": "a", "metadata": "m"}
class Pickled:
    def __init__(self, error): self.error = error
    def __reduce__(self): raise self.error
def pickles_badly(): yield {"prompt": "a", "metadata": {"x": Pickled(ValueError("closed file"))}}
def pickles_deeply():
    nested = []
    for _ in range(100_000): nested = [nested]
    yield {"prompt": "a", "metadata": {"x": nested}}
class Computed(dict):
    # its values are computed, and some cannot be
    def __init__(self, bad, **fields):
        super().__init__(fields | dict.fromkeys(bad))
        self.bad = bad
    def __getitem__(self, name):
        if name in self.bad: raise OSError(f"no column {name}")
        return super().__getitem__(name)
    def __repr__(self): raise OSError("no repr")
def computed_prompt(): yield Computed(["prompt"])
def computed_other(): yield Computed(["image"], prompt="a", answer="b")
def computed_metadata(): yield {"prompt": "a", "metadata": Computed(["x"])}
def computed_message(): yield {"prompt": [Computed(["content"], role="user")]}
def unshown(): yield Computed([])
def long_answer(): yield {"prompt": "a", "answer": 10**5000}
def endless():
    while True: yield {"prompt": "a"}
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "user_prompts.py").write_text(USER_MODULE)
    (tmp_path / "broken_prompts.py").write_text("1 / 0")
    (tmp_path / "leaving_prompts.py").write_text("import sys; sys.exit(3)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "user_prompts", raising=False)
    return "user_prompts"


@pytest.mark.parametrize(
    ("source", "options", "sentence"),
    [
        ("no_such_module:f", {}, "module 'no_such_module' cannot be imported"),
        ("broken_prompts:f", {}, r"failed \(ZeroDivisionError"),
        ("user_prompts", {}, "has an unknown type; use .* or package.module:function"),
        (".relative:f", {}, "write package.module:function"),
        ("user_prompts:god", {}, "has no function 'god'; did you mean 'user_prompts:good'"),
        ("user_prompts:good", {"size": 3}, r"cannot be called with \(size=\): "),
        ("user_prompts:number", {}, r"failed \(TypeError"),
        ("user_prompts:raises", {}, r"failed \(KeyError"),
        ("user_prompts:text", {}, "record 0 is 'a', must be a mapping"),
        ("leaving_prompts:f", {}, r"failed \(SystemExit: 3"),
        ("user_prompts:leaves", {}, r"failed \(SystemExit: 3\); fix the function"),
        ("user_prompts:says_much", {}, r"failed \(RuntimeError: one two\); fix"),
        ("user_prompts:unsendable", {}, "record 0: the metadata cannot be sent to a reward worker"),
        ("user_prompts:pickles_badly", {}, r"record 0: the metadata cannot be sent .*\(ValueError: closed file"),
        ("user_prompts:pickles_deeply", {}, r"record 0: the metadata cannot be sent .*\(RecursionError: "),
        ("user_prompts:computed_prompt", {}, r"record 0 cannot be read \(OSError: no column prompt\); keep"),
        ("user_prompts:computed_metadata", {}, r"record 0: the metadata cannot be read \(OSError: no column x"),
        ("user_prompts:computed_message", {}, r"0: a chat message cannot be read \(OSError: no column content"),
        ("user_prompts:unshown", {}, "record 0 is a Computed whose repr raises OSError, must be a mapping with"),
        ("user_prompts:long_answer", {}, r"record 0: the answer cannot be written as a text \(ValueError: "),
        (SUMS, {"max_operand": -1}, "max_operand is -1, must be a whole number of at least 0"),
        (SUMS, {"max_operand": "3"}, "max_operand is '3', must be a whole number"),
        (SUMS, {"max_operand": 1, "modulus": 0}, "modulus is 0, must be a whole number of at least 1"),
        (SUMS, {"max_operand": 1, "template": "{a}+{c}"}, "must contain {a} and {b} and no other field"),
        (SUMS, {"max_operand": 1, "template": "{a"}, "must contain {a} and {b} and no other field"),
        ("reasoning_gym:chain_sum", {"seed": None}, "option seed of .* is None, must be a whole number"),
        ("reasoning_gym:chain_sum", {"size": 2.5}, "option size of .* is 2.5, must be a whole number"),
        ("user_prompts:bad_metadata", {}, "record 0: the metadata are 'm'"),
        ("reasoning_gym:chain_sun", {}, "has no task 'chain_sun'; did you mean 'chain_sum'"),
        ("reasoning_gym:chain_sum", {"terms": 3}, "refuses the options"),
        ("reasoning_gym:chain_sum", {"min_terms": -1}, "refuses the options"),
    ],
)
def test_unusable_source(user_module: str, source: str, options: dict[str, Any], sentence: str) -> None:
    if source.startswith("reasoning_gym"):
        pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match=sentence) as caught:
        read(source, options=options)
    assert "\n" not in str(caught.value)


def test_only_known_fields_are_read(user_module: str) -> None:
    [record] = read(f"{user_module}:computed_other")
    assert (record.prompt, record.answer, record.metadata) == ("a", "b", {})


def test_limit_stops_an_endless_source(user_module: str) -> None:
    assert len(read(f"{user_module}:endless", limit=5)) == 5


def test_options_of_a_file_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a file and takes no options.* the override data.train.options={}"):
        read(jsonl(tmp_path, GOOD), options={"size": 3})
    with pytest.raises(ValueError, match="missing.jsonl' does not exist"):
        read(str(tmp_path / "missing.jsonl"), options={"size": 3})
