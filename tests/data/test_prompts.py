"""Tokenisation of prompts: templates, tool calls, limits and fingerprints."""

from __future__ import annotations

import json
import random
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, cast

import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from megappo.config.sections.data import DataSettings, DataSourceSettings
from megappo.data import PromptDataset, prompts
from megappo.data.sources import Record, read_records
from megappo.data.unknown import unknown_token_warning
from megappo.environments.gateway.agent import task_of
from megappo.types import CHAT_MESSAGES
from tests.support import data as helpers_data
from tests.support.data import ALPHABET, character_tokenizer

Overlong = Literal["drop", "truncate", "error"]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m['role'][0] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def dataset(
    folder: Path, records: list[dict[str, Any]], *, template: str | None = TEMPLATE, **settings: Any
) -> PromptDataset:
    path = folder / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    source = DataSourceSettings(source=str(path))
    return PromptDataset(
        source, DataSettings(train=source, **{"max_prompt_tokens": 20} | settings), character_tokenizer(template)
    )


def test_text_becomes_a_user_message(tmp_path: Path) -> None:
    loaded = dataset(tmp_path, [{"prompt": "1+1", "answer": "2", "level": 1}])
    prompt = loaded[0]
    assert (len(loaded), prompt.text, prompt.answer, prompt.index) == (1, "<u>1+1<a>", "2", 0)
    assert "".join(ALPHABET[i] for i in prompt.token_ids) == prompt.text
    assert prompt.metadata == {"level": 1, CHAT_MESSAGES: [{"role": "user", "content": "1+1"}]}


CALLS = (  # format of Qwen2.5
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% for call in m.tool_calls %}"
    "{% if call.function is defined %}{% set call = call.function %}{% endif %}"
    "{{ call.name }} {{ call.arguments | tojson }}{% endfor %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.mark.parametrize("arguments", [{"city": "Rome"}, '{"city": "Rome"}', '{ "city" : "Rome" }'])
def test_arguments_of_previous_calls_are_quoted_once(tmp_path: Path, arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    chat = [
        {"role": "user", "content": "where"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "12"},
    ]
    loaded = dataset(tmp_path, [{"prompt": chat}], template=CALLS, max_prompt_tokens=200)
    assert loaded[0].text == '<u>where<a>look {"city": "Rome"}<t>12<a>'


def test_system_prompt_is_added_if_missing(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "x"}]
    loaded = dataset(tmp_path, [{"prompt": "x"}, {"prompt": own}], system_prompt="new")
    assert [loaded[i].text for i in range(2)] == ["<s>new<u>x<a>", "<s>own<u>x<a>"]


def test_plain_text_is_unchanged(tmp_path: Path) -> None:
    loaded = dataset(tmp_path, [{"prompt": "1+1="}], template=None, apply_chat_template=False)
    assert (loaded[0].text, loaded[0].metadata, len(loaded[0].token_ids)) == ("1+1=", {}, 4)


def test_overlong_prompts(tmp_path: Path) -> None:
    records = [{"prompt": "abcdef"}, {"prompt": "ab"}]
    plain: dict[str, Any] = {"apply_chat_template": False, "max_prompt_tokens": 3}
    dropped = dataset(tmp_path, records, **plain)
    assert (len(dropped), dropped.dropped, dropped.truncated, dropped[0].index) == (1, 1, 0, 1)
    cut = dataset(tmp_path, records, overlong_prompts="truncate", **plain)
    assert (len(cut), cut.dropped, cut.truncated) == (2, 0, 1)
    assert "".join(ALPHABET[i] for i in cut[0].token_ids) == "def"
    with pytest.raises(ValueError, match=r"prompt 0 of .* has 6 tokens, more than data\.max_prompt_tokens 3"):
        dataset(tmp_path, records, overlong_prompts="error", **plain)


@pytest.mark.parametrize("limit", [8, 9, 10, 12, 19])
@pytest.mark.parametrize(
    "chat",
    [
        [{"role": "user", "content": "0123456789abcdefgh"}],
        [{"role": "system", "content": "x"}, {"role": "user", "content": "0123456789abcdefgh"}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""},
         {"role": "user", "content": "0123456789"}, {"role": "assistant", "content": "y"}],
    ],
)  # fmt: skip
def test_truncated_chat_is_a_valid_chat(tmp_path: Path, chat: list[dict[str, str]], limit: int) -> None:
    """Only the necessary part of the last user message is removed from the start."""
    template = TEMPLATE.replace("{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}", "")
    if chat[-1]["role"] == "assistant":
        chat = [*chat, {"role": "tool", "content": ""}]
    tokenizer = character_tokenizer(template)

    def made(messages: list[dict[str, str]]) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    place = max(i for i, message in enumerate(chat) if message["role"] == "user")
    bare = len(made([*chat[:place], {"role": "user", "content": ""}, *chat[place + 1 :]]))
    settings: dict[str, Any] = {"overlong_prompts": "truncate", "max_prompt_tokens": limit, "template": template}
    if bare >= limit:
        sentence = rf"prompt 0 .* tokens, more than data.max_prompt_tokens {limit}, and the last character"
        with pytest.raises(ValueError, match=sentence):
            dataset(tmp_path, [{"prompt": chat, "level": 3}], **settings)
        return
    prompt = dataset(tmp_path, [{"prompt": chat, "level": 3}], **settings)[0]
    shorter = chat[place]["content"][-(limit - bare) :]
    expected = [*chat[:place], {"role": "user", "content": shorter}, *chat[place + 1 :]]
    assert prompt.metadata == {"level": 3, CHAT_MESSAGES: expected}
    assert prompt.text == made(expected) == "".join(ALPHABET[i] for i in prompt.token_ids)
    assert len(prompt.token_ids) == limit


def test_truncated_prompts_keep_their_messages(tmp_path: Path) -> None:
    """Reward models and agents get the messages without the role tags of the policy's template."""
    records = [{"prompt": "0123456789abcdefghij"}, {"prompt": "ab"}]
    loaded = dataset(tmp_path, records, overlong_prompts="truncate", max_prompt_tokens=12)
    assert loaded.truncated == 1
    assert [task_of(loaded[i]) for i in range(2)] == ["efghij", "ab"]
    chats = [loaded[i].metadata[CHAT_MESSAGES] for i in range(2)]
    assert chats == [[{"role": "user", "content": "efghij"}], [{"role": "user", "content": "ab"}]]


def test_truncated_text_keeps_the_first_special_token(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "the sum of twelve and thirty"}) + '\n{"prompt": "seven"}')
    source, tokenizer = DataSourceSettings(source=str(path)), byte_tokenizer()

    def made(limit: int) -> PromptDataset:
        data = DataSettings(
            train=source, max_prompt_tokens=limit, apply_chat_template=False, overlong_prompts="truncate"
        )
        return PromptDataset(source, data, tokenizer)

    cut, other = made(4)[0], made(4)[1]
    whole = tokenizer("the sum of twelve and thirty", add_special_tokens=False)["input_ids"]
    assert cut.token_ids == (other.token_ids[0], *whole[-3:]) and tokenizer.decode(other.token_ids[:1]) == "<b>"
    assert cut.text == tokenizer.decode(whole[-3:])
    with pytest.raises(ValueError, match=r"max_prompt_tokens 1, and the last character of the text alone"):
        made(1)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with tokens of several characters, a start token and an end token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sentences = ["the sum of twelve and thirty", "the difference of seven and eleven", "of the thirteen"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=["<b>", "<e>"])
    tokenizer.train_from_iterator(sentences, trained)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<b> $A <e>",
        special_tokens=[("<b>", tokenizer.token_to_id("<b>")), ("<e>", tokenizer.token_to_id("<e>"))],
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_very_long_prompts_are_limited_before_tokenisation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    seen: list[int] = []
    tokenise = PreTrainedTokenizerFast.__call__

    def counting(self: PreTrainedTokenizerFast, text: str | list[str], **options: Any) -> Any:
        seen.extend(len(t) for t in ([text] if isinstance(text, str) else text))
        return tokenise(self, text, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", counting)
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "the sum of " * 9_500_000 + "seven"}) + '\n{"prompt": "twelve"}\n')
    source = DataSourceSettings(source=str(path))

    def made(overlong: Overlong) -> PromptDataset:
        settings = DataSettings(
            train=source, max_prompt_tokens=20, apply_chat_template=False, overlong_prompts=overlong
        )
        return PromptDataset(source, settings, tokenizer)

    dropped, cut = made("drop"), made("truncate")
    with pytest.raises(ValueError, match=r"prompt 0 .* has at least \d+ tokens, more than data.max_prompt_tokens 20"):
        made("error")
    path.unlink()
    assert (len(dropped), dropped.dropped, dropped[0].text) == (1, 1, "twelve")
    assert (len(cut), cut.truncated, len(cut[0].token_ids)) == (2, 1, 20)
    assert cut[0].text.endswith(" sum of the sum of seven")
    assert sum(seen) < 10_000_000


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_tokenising_the_end_of_a_prompt_is_exact(overlong: Overlong, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is exact for texts below and above the limit."""
    draw = random.Random(5)
    vocabulary = ["the", "sum", "of", "twelve", " ", "\n", "ß", "数", "7", "aaaaaaaaaaaaaaaaaaaaaaaaaa", ", "]
    texts = [" ".join(draw.choices(vocabulary, k=draw.randint(1, 120))) for _ in range(60)]
    monkeypatch.setattr(helpers_data, "TEXTS", texts, raising=False)
    source = DataSourceSettings(source="tests.support.data:texts")
    settings = DataSettings(train=source, max_prompt_tokens=60, apply_chat_template=False, overlong_prompts=overlong)
    whole = PromptDataset(source, settings, byte_tokenizer())
    monkeypatch.setattr(prompts, "WHOLE_CHARACTERS", 40)
    monkeypatch.setattr(prompts, "END_CHARACTERS", 50)
    monkeypatch.setattr(prompts, "END_CHARACTERS_PER_TOKEN", 1)
    by_end = PromptDataset(source, settings, byte_tokenizer())
    assert len([t for t in texts if len(t) > 40]) > 5 and whole.dropped + whole.truncated > 5
    assert (by_end.dropped, by_end.truncated, by_end.fingerprint) == (whole.dropped, whole.truncated, whole.fingerprint)


def test_fingerprint_depends_on_prompts_and_answers(tmp_path: Path) -> None:
    def fingerprint(prompt: str, answer: str) -> str:
        return dataset(tmp_path, [{"prompt": prompt, "answer": answer}]).fingerprint

    prints = [fingerprint("a", "b"), fingerprint("a", "c"), fingerprint("b", "b")]
    assert len(set(prints)) == 3
    assert fingerprint("a", "b") == prints[0] and len(prints[0]) == 64


@pytest.mark.parametrize(
    ("prompt", "settings", "sentence"),
    [
        ("abc", {"template": None}, "has no chat template; name a file with one in data.chat_template, or set"),
        ("abc", {"max_prompt_tokens": 2}, "all 1 prompts of .* are longer"),
        ([{"role": "user", "content": "a"}], {"apply_chat_template": False}, "prompt 0 of .* is a list of chat"),
        ([{"role": "user", "content": "a"}], {"apply_chat_template": False, "template": None},
         "set data.apply_chat_template: true and data.chat_template to a file, because none exists"),
        ("a", {"apply_chat_template": False, "system_prompt": "s"}, "data.system_prompt is set, but"),
        ([{"role": "tool", "content": "a"}], {}, "the chat template refuses prompt 0 .*no tools here"),
        ("a", {"template": "{{ 1 + 'a' }}"}, r"the chat template refuses prompt 0 .*\(TypeError: unsupported operand"),
        ("a", {"template": "{{ messages[0]['content'].index('b') }}"}, r"refuses prompt 0 .*\(ValueError: substring"),
        ("a", {"template": "{{ 1 // 0 }}"}, r"refuses prompt 0 .*\(ZeroDivisionError: "),
        ("a", {"template": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"},
         r"refuses prompt 0 .*\(RecursionError: "),
        ("a", {"template": "{{ '\\ud800' }}"}, "prompt 0 of .*: the rendered chat contains half a surrogate pair"),
        ("ÄÖÜ", {"apply_chat_template": False}, "prompt 0 of .* has no token"),
    ],
)  # fmt: skip
def test_unusable_prompts(tmp_path: Path, prompt: Any, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        dataset(tmp_path, [{"prompt": prompt}], **settings)


def tokenizer_with_unknown(alphabet: str, **named: str) -> PreTrainedTokenizerFast:
    """Return a character tokenizer with `?` for unknown characters."""
    vocabulary = {character: i for i, character in enumerate(["?", *alphabet])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, **named)


@pytest.mark.parametrize(
    ("alphabet", "named", "pattern"),
    [
        ("abc", {"unk_token": "?"}, ""),
        ("ab", {"unk_token": "?"}, "1 of 2 prompts of DATA have unknown tokens: 2 of 7 tokens are \\?"),
        ("x", {"unk_token": "?"}, "2 of 2 prompts of DATA .*: 7 of 7 tokens are"),
        ("c", {}, "2 of 2 prompts of DATA .*: 5 of 7 tokens are"),  # unknown token without a setting
        ("a", {"unk_token": "?", "pad_token": "?"}, "2 of 2 prompts of DATA .*: 4 of 7 tokens are"),
        ("a", {"unk_token": "?", "eos_token": "?"}, ""),  # a template can write this token
    ],
)
def test_unknown_tokens_are_counted(tmp_path: Path, alphabet: str, named: dict[str, str], pattern: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "aab"}\n{"prompt": "acbc"}')
    source, tokenizer = DataSourceSettings(source=str(path)), tokenizer_with_unknown(alphabet, **named)
    settings = DataSettings(train=source, apply_chat_template=False, max_prompt_tokens=20)
    loaded = PromptDataset(source, settings, tokenizer)
    warning = unknown_token_warning(loaded, tokenizer)
    assert re.search(pattern.replace("DATA", re.escape(str(path))), warning) if pattern else warning == ""


ARGUMENTS: list[dict[str, Any]] = [
    {"city": "Rome"}, {"a": 1, "deep": {"x": [1, 2]}}, {"items": [{"k": 1}, {"l": [{"m": 2}]}]}, {},
]  # fmt: skip
"""Arguments of calls. All arguments have different fields."""


def read(source: str | Path) -> list[Record]:
    return read_records(DataSourceSettings(source=str(source)))


def jsonl(folder: Path, *records: Any) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def row_of(arguments: Any, content: str | None) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    user, result = {"role": "user", "content": "look"}, {"role": "tool", "content": "12", "name": "look"}
    return {"prompt": [user, {"role": "assistant", "content": content, "tool_calls": [call]}, result], "answer": "1"}


@pytest.mark.parametrize("kind", ["lines", "table", "verl", "datasets", "function"])
def test_text_arguments_equal_object_arguments(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates would quote text again. In the protocol of OpenAI such a message has no content."""
    expected = [record.prompt for record in read(jsonl(tmp_path, *(row_of(arguments, "") for arguments in ARGUMENTS)))]
    texts = [row_of(json.dumps(arguments), None) for arguments in ARGUMENTS]
    table = pyarrow.Table.from_pylist(texts)
    source: Any = tmp_path / f"{kind}.parquet"
    match kind:
        case "lines":
            source = jsonl(tmp_path, *texts)
        case "table":
            parquet.write_table(table, source)
        case "verl":
            rows = [
                {"data_source": "d", "prompt": row["prompt"], "reward_model": {"ground_truth": "1"}} for row in texts
            ]
            parquet.write_table(pyarrow.Table.from_pylist(rows), source)
        case "datasets":
            library = pytest.importorskip("datasets")
            library.Dataset(table).save_to_disk(tmp_path / "saved")
            source = f"datasets:{tmp_path}/saved"
        case "function":
            monkeypatch.setattr(helpers_data, "CHATS", texts, raising=False)
            source = "tests.support.data:chats"
    assert [record.prompt for record in read(source)] == expected


@pytest.mark.parametrize(
    ("call", "arguments"),
    [({"function": {"name": "f", "arguments": '{"b": [1, null], "a": "\\u00e9"}'}}, {"b": [1, None], "a": "é"}),
     ({"name": "f", "arguments": '{"x": 1}'}, {"x": 1}), ({"function": {"name": "f", "arguments": ""}}, {}),
     ({"function": {"name": "f"}}, None)],
)  # fmt: skip
def test_arguments_of_calls_are_read(tmp_path: Path, call: dict[str, Any], arguments: Any) -> None:
    message = {"role": "assistant", "content": "a", "tool_calls": [call]}
    [record] = read(jsonl(tmp_path, {"prompt": [message, {"role": "tool", "content": "r"}]}))
    [call_read] = cast(Any, record.prompt[0])["tool_calls"]
    assert call_read.get("function", call_read).get("arguments") == arguments


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [('{"city": ', r"line 1: a chat message calls a tool with arguments that are no JSON \(Expecting value"),
     ("[1]", r"a tool with the arguments \[1\], must be an object; fix it"),
     ([1], r"a tool with the arguments \[1\], must be an object; fix it"),
     ('"Rome"', r"a tool with the arguments 'Rome', must be an object; fix it"),
     ("[" * 100_000, "arguments that are no JSON"), ('{"a": "\\ud83d"}', "")],
)  # fmt: skip
def test_invalid_arguments_are_rejected(tmp_path: Path, arguments: Any, sentence: str) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    path = jsonl(tmp_path, {"prompt": [message, {"role": "tool", "content": "r"}]})
    with pytest.raises(ValueError, match=sentence) if sentence else nullcontext():
        read(path)


def test_invalid_calls_are_rejected(tmp_path: Path) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": ["look"]}
    with pytest.raises(ValueError, match="the tool call 'look' must be an object; fix it"):
        read(jsonl(tmp_path, {"prompt": [message, {"role": "tool", "content": "r"}]}))
