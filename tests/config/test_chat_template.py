"""The chat template of a run: whose it is, what it is told, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megappo.checkpoint.changes import compare_settings
from megappo.config import load_config
from megappo.config.chat_template import thinking_notes
from megappo.config.data import DataSettings
from megappo.config.load import save_config
from megappo.config.model_files import load_tokenizer
from megappo.config.tokens import rendered
from megappo.data import PromptDataset
from megappo.errors import ConfigError
from megappo.plan.planner import planning
from tests.support.places import BASE, TINY

OWN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}\n"
SWITCH = (
    "\n  {% macro told() %}{{ enable_thinking | default('unset') }}{% endmacro %}\n"
    "{% for m in messages %}{{ m.content }}{% endfor %}{{ told() }}{{ '+' if extra is defined else '-' }}\n"
)
ASKED = [{"role": "user", "content": "1+1="}]


def words(overrides: list[str], path: Path = BASE) -> str:
    """A conversation as prompts, environments and agents get it."""
    return rendered(load_tokenizer(load_config(path, overrides)), ASKED, goes_on=True)


def refusal(overrides: list[str], path: Path = BASE) -> str:
    with pytest.raises(ConfigError) as caught:
        words(overrides, path)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration in a folder of its own, and the working directory beside it."""
    made = tmp_path / "experiment"
    made.mkdir()
    shutil.copy(BASE, made / "run.yaml")
    monkeypatch.chdir(tmp_path)
    return made


def test_a_file_beside_the_configuration_comes_first_and_becomes_a_setting(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("here{{ messages }}")
    given = [f"model.path={TINY}", "data.chat_template=own.jinja"]
    assert words(given, folder / "run.yaml").startswith("here")
    (folder / "own.jinja").write_text(OWN)
    config = load_config(folder / "run.yaml", given)
    assert config.data.chat_template == OWN
    assert words(given, folder / "run.yaml") == "user:1+1=;"
    save_config(config, tmp_path / "saved.yaml")
    (folder / "own.jinja").write_text("changed {{ messages }}")
    again = load_config(tmp_path / "saved.yaml")
    assert again == config
    now = load_config(folder / "run.yaml", given).model_dump(mode="json")
    assert "data.chat_template: " in compare_settings(config.model_dump(mode="json"), now, (5, 5)).dangerous[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("{}", "1+1=unset-"),
        ("{enable_thinking: false}", "1+1=False-"),
        ("{enable_thinking: true, extra: null}", "1+1=True+"),
        ("{enable_thinking: 0.5}", "1+1=0.5-"),
        (r"""{enable_thinking: "ä'\"%} \\n\n{{😀"}""", "1+1=ä'\"%} \\n\n{{😀-"),
        ("{enable_thinking: [1, {a: null, b: [true, -2]}]}", "1+1=[1, {'a': None, 'b': [True, -2]}]-"),
    ],
)
def test_a_template_is_told_the_options(tmp_path: Path, options: str, expected: str) -> None:
    (tmp_path / "own.jinja").write_text(SWITCH)
    given = [f"model.path={TINY}", f"data.chat_template_options={options}"]
    assert words([*given, f"data.chat_template={tmp_path / 'own.jinja'}"]) == f"\n{expected}"


def test_prompts_and_exported_tokenizers_have_it(tmp_path: Path) -> None:
    config = load_config(BASE, [f"model.path={TINY}", "data.chat_template_options.enable_thinking=false"])
    config = config.model_copy(update={"data": config.data.model_copy(update={"chat_template": SWITCH})})
    tokenizer = load_tokenizer(config)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    settings = DataSettings.model_validate(
        {"train": {"source": str(tmp_path / "prompts.jsonl")}, "max_prompt_tokens": 40, "chat_template": SWITCH}
    )
    assert settings.train is not None
    assert PromptDataset(settings.train, settings, tokenizer)[0].text == "\n2+2=False-"
    tokenizer.save_pretrained(tmp_path / "saved")
    saved: Any = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert rendered(saved, ASKED, goes_on=True) == "\n1+1=False-"
    chosen = saved.apply_chat_template(ASKED, tokenize=False, enable_thinking=True)
    assert chosen == "\n1+1=True-"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("data.chat_template=gone.jinja", "'gone.jinja' is not a file next to the configuration or in "),
        ("data.chat_template='{% for %}'", "data.chat_template does not compile (line 1: "),
        ("data.chat_template=\"{{ 1 }}\\n{% if %}\"", "data.chat_template does not compile (line 2: "),
        ("data.chat_template_options={messages: 1}", "messages is set by the data; remove it"),
        ("data.chat_template_options={strftime_now: 1}", "strftime_now is set by data.template_time; remove it"),
        ("data.chat_template_options={'a b': 1}", "'a b' is not a valid variable name; use letters"),
        ("data.chat_template_options={if: 1}", "'if' is not a valid variable name"),
        ("data.chat_template_options={a: 1}", "the tokenizer has no chat template; set data.chat_template"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused(given: str, sentence: str) -> None:
    assert sentence in refusal([f"model.path={TINY}", given])
    if "compile" in sentence:  # with lines before it the number is still that of the file
        assert sentence in refusal([f"model.path={TINY}", given, "data.chat_template_options.a=1"])


def test_a_special_token_is_no_option() -> None:
    given = [f"model.path={TINY}", "data.chat_template='{{ 1 }}'", "data.chat_template_options.eos_token=x"]
    assert "has eos_token, which is a token: " in refusal(given)


def test_a_file_that_is_no_template_is_refused(folder: Path) -> None:
    (folder / "own.jinja").write_text("no template")
    assert "own.jinja holds no template" in refusal(["data.chat_template=own.jinja"], folder / "run.yaml")
    (folder / "own.jinja").write_bytes(b"{{ \xff }}")
    assert "own.jinja cannot be read" in refusal(["data.chat_template=own.jinja"], folder / "run.yaml")


@pytest.mark.parametrize(
    ("tokens", "more", "said"),
    [
        (4096, [], True),
        (4097, [], False),
        (512, ["data.chat_template_options.enable_thinking=true"], False),
        (512, ["data.apply_chat_template=false"], False),
    ],
)
def test_a_plan_says_where_thoughts_have_no_room(tmp_path: Path, tokens: int, more: list[str], said: bool) -> None:
    model = shutil.copytree(TINY, tmp_path / "model")
    (model / "chat_template.jinja").write_text(SWITCH)
    config = load_config(
        BASE, [f"model.path={model}", "data.apply_chat_template=true", f"rollout.max_response_tokens={tokens}", *more]
    )
    notes = [note for note in planning(config, "h100", 1).notes if "enable_thinking" in note]
    assert len(notes) == said
    assert list(thinking_notes(config, SWITCH)) == notes
    assert all(f"rollout.max_response_tokens {tokens} is too low" in note for note in notes)
