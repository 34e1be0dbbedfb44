"""Prompts become tokens: templates, limits, fingerprints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers_data import ALPHABET, character_tokenizer

from megappo.config.schema import DataSettings, DataSourceSettings
from megappo.data import PromptDataset
from megappo.data.prompts import CHAT_MESSAGES

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
        source, DataSettings(**{"train": source, "max_prompt_tokens": 20} | settings), character_tokenizer(template)
    )


def test_a_text_becomes_a_user_message(tmp_path: Path) -> None:
    found = dataset(tmp_path, [{"prompt": "1+1", "answer": "2", "level": 1}])
    prompt = found[0]
    assert (len(found), prompt.text, prompt.answer, prompt.index) == (1, "<u>1+1<a>", "2", 0)
    assert "".join(ALPHABET[i] for i in prompt.token_ids) == prompt.text
    assert prompt.metadata == {"level": 1, CHAT_MESSAGES: [{"role": "user", "content": "1+1"}]}


def test_system_prompt_goes_where_there_is_none(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "x"}]
    found = dataset(tmp_path, [{"prompt": "x"}, {"prompt": own}], system_prompt="new")
    assert [found[i].text for i in range(2)] == ["<s>new<u>x<a>", "<s>own<u>x<a>"]


def test_plain_text_stays_as_it_is(tmp_path: Path) -> None:
    found = dataset(tmp_path, [{"prompt": "1+1="}], template=None, apply_chat_template=False)
    assert (found[0].text, found[0].metadata, len(found[0].token_ids)) == ("1+1=", {}, 4)


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


def test_fingerprint_knows_prompts_and_answers(tmp_path: Path) -> None:
    def fingerprint(prompt: str, answer: str) -> str:
        return dataset(tmp_path, [{"prompt": prompt, "answer": answer}]).fingerprint

    prints = [fingerprint("a", "b"), fingerprint("a", "c"), fingerprint("b", "b")]
    assert len(set(prints)) == 3
    assert fingerprint("a", "b") == prints[0] and len(prints[0]) == 64


@pytest.mark.parametrize(
    ("prompt", "settings", "sentence"),
    [
        ("abc", {"template": None}, "has no chat template; set data.apply_chat_template: false"),
        ("abc", {"max_prompt_tokens": 2}, "all 1 prompts of .* are longer"),
        ([{"role": "user", "content": "a"}], {"apply_chat_template": False}, "prompt 0 of .* is a list of chat"),
        ("a", {"apply_chat_template": False, "system_prompt": "s"}, "data.system_prompt is set, but"),
        ([{"role": "tool", "content": "a"}], {}, "the chat template refuses prompt 0 .*no tools here"),
        ("ÄÖÜ", {"apply_chat_template": False}, "prompt 0 of .* becomes no token at all"),
    ],
)
def test_unusable_prompts(tmp_path: Path, prompt: Any, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        dataset(tmp_path, [{"prompt": prompt}], **settings)
