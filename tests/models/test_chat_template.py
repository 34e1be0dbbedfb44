"""The chat template of a run: its source, its variables, its end of a turn, and templates that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megappo.checkpoint.changes import compare_settings
from megappo.cli import main
from megappo.config import load_config
from megappo.config.load import save_config
from megappo.config.role_models import load_tokenizer
from megappo.config.sections.data import DataSettings
from megappo.config.templates import end_of_turn_notes, thinking_notes
from megappo.data import PromptDataset
from megappo.errors import ConfigError
from megappo.models.tokens import rendered
from megappo.plan.planner import planning
from megappo.ppo.run import data_lines
from megappo.preflight.inputs import read_inputs
from tests.support.places import BASE, ROOT, TINY

OWN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}\n"
SWITCH = (
    "\n  {% macro told() %}{{ enable_thinking | default('unset') }}{% endmacro %}\n"
    "{% for m in messages %}{{ m.content }}{% endfor %}{{ told() }}{{ '+' if extra is defined else '-' }}\n"
)
QUESTION = [{"role": "user", "content": "1+1="}]


def conversation(overrides: list[str], path: Path = BASE) -> str:
    """Return a conversation as prompts, environments and agents receive it."""
    return rendered(load_tokenizer(load_config(path, overrides)), QUESTION, goes_on=True)


def refusal(overrides: list[str], path: Path = BASE) -> str:
    with pytest.raises(ConfigError) as caught:
        conversation(overrides, path)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a configuration. The working directory is its parent."""
    made = tmp_path / "experiment"
    made.mkdir()
    shutil.copy(BASE, made / "run.yaml")
    monkeypatch.chdir(tmp_path)
    return made


def test_template_next_to_configuration_takes_precedence(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("here{{ messages }}")
    overrides = [f"model.path={TINY}", "data.chat_template=own.jinja"]
    assert conversation(overrides, folder / "run.yaml").startswith("here")
    (folder / "own.jinja").write_text(OWN)
    config = load_config(folder / "run.yaml", overrides)
    assert config.data.chat_template == OWN
    assert conversation(overrides, folder / "run.yaml") == "user:1+1=;"
    save_config(config, tmp_path / "saved.yaml")
    (folder / "own.jinja").write_text("changed {{ messages }}")
    again = load_config(tmp_path / "saved.yaml")
    assert again == config
    now = load_config(folder / "run.yaml", overrides).model_dump(mode="json")
    assert "data.chat_template: " in compare_settings(config.model_dump(mode="json"), now, (5, 5)).dangerous[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [("{}", "1+1=unset-"), ("{enable_thinking: false}", "1+1=False-"),
     ("{enable_thinking: true, extra: null}", "1+1=True+"), ("{enable_thinking: 0.5}", "1+1=0.5-"),
     (r"""{enable_thinking: "ä'\"%} \\n\n{{😀"}""", "1+1=ä'\"%} \\n\n{{😀-"),
     ("{enable_thinking: [1, {a: null, b: [true, -2]}]}", "1+1=[1, {'a': None, 'b': [True, -2]}]-")],
)  # fmt: skip
def test_template_receives_the_options(tmp_path: Path, options: str, expected: str) -> None:
    (tmp_path / "own.jinja").write_text(SWITCH)
    overrides = [f"model.path={TINY}", f"data.chat_template_options={options}"]
    assert conversation([*overrides, f"data.chat_template={tmp_path / 'own.jinja'}"]) == f"\n{expected}"


def test_prompts_and_exported_tokenizers_have_the_template(tmp_path: Path) -> None:
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
    assert rendered(saved, QUESTION, goes_on=True) == "\n1+1=False-"
    chosen = saved.apply_chat_template(QUESTION, tokenize=False, enable_thinking=True)
    assert chosen == "\n1+1=True-"


@pytest.mark.parametrize(
    ("override", "sentence"),
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
def test_invalid_templates_and_options_are_refused(override: str, sentence: str) -> None:
    assert sentence in refusal([f"model.path={TINY}", override])
    if "compile" in sentence:  # the line is a line of the file, although the options add lines before it
        assert sentence in refusal([f"model.path={TINY}", override, "data.chat_template_options.a=1"])


def test_special_token_is_not_an_option() -> None:
    overrides = [f"model.path={TINY}", "data.chat_template='{{ 1 }}'", "data.chat_template_options.eos_token=x"]
    assert "has eos_token, which is a token: " in refusal(overrides)


def test_file_without_template_is_refused(folder: Path) -> None:
    (folder / "own.jinja").write_text("no template")
    assert "own.jinja holds no template" in refusal(["data.chat_template=own.jinja"], folder / "run.yaml")
    (folder / "own.jinja").write_bytes(b"{{ \xff }}")
    assert "own.jinja cannot be read" in refusal(["data.chat_template=own.jinja"], folder / "run.yaml")


@pytest.mark.parametrize(
    ("tokens", "more", "has_note"),
    [(4096, [], True), (4097, [], False), (512, ["data.chat_template_options.enable_thinking=true"], False),
     (512, ["data.apply_chat_template=false"], False)],
)  # fmt: skip
def test_plan_warns_if_thoughts_have_no_room(tmp_path: Path, tokens: int, more: list[str], has_note: bool) -> None:
    model = shutil.copytree(TINY, tmp_path / "model")
    (model / "chat_template.jinja").write_text(SWITCH)
    config = load_config(
        BASE, [f"model.path={model}", "data.apply_chat_template=true", f"rollout.max_response_tokens={tokens}", *more]
    )
    notes = [note for note in planning(config, "h100", 1).notes if "enable_thinking" in note]
    assert len(notes) == has_note
    assert list(thinking_notes(config, SWITCH)) == notes
    assert all(f"rollout.max_response_tokens {tokens} is too low" in note for note in notes)


TAIL = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = f"{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}<|im_end|>\n{{% endfor %}}{TAIL}"
GLM = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
MISTRAL = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}"
    "{% endif %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}<eos>{% endif %}"
    "{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
LAST = "{{ messages[-1].content }}\nAssistant: <think>"
REFUSES = (
    "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}{{ messages[0].content }}<|im_end|>"
)


def model(folder: Path, template: str, *added: str) -> Path:
    """Write a model with a tokenizer that has the template and additional tokens. The only stop token is <eos>."""
    made = folder / "model"
    shutil.copytree(TINY, made)
    tokenizer = AutoTokenizer.from_pretrained(made)
    tokenizer.add_tokens(list(added), special_tokens=True)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(made)
    content = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(content | {"vocab_size": len(tokenizer)}))
    return made


def notes(folder: Path, *overrides: str) -> tuple[list[str], PreTrainedTokenizerBase]:
    changes = [f"model.path={folder}", "data.apply_chat_template=true", "data.max_prompt_tokens=90", *overrides]
    config = load_config(BASE, changes)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    stops = (tokenizer.convert_tokens_to_ids("<eos>"), *config.rollout.stop_token_ids)
    return list(end_of_turn_notes(config, tokenizer, stops)), tokenizer


@pytest.mark.parametrize(
    ("template", "added", "end"),
    [(CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"), (GLM, ("<|user|>", "<|assistant|>"), "<|user|>"),
     (CHATML.replace("{{ m.content }}", " {{ m.content | trim }} "), ("<|im_end|>",), "<|im_end|>")],
)  # fmt: skip
def test_end_of_turn_without_stop_token_is_reported(
    tmp_path: Path, template: str, added: tuple[str, ...], end: str
) -> None:
    folder = model(tmp_path, template, *added)
    [note], tokenizer = notes(folder)
    token = tokenizer.convert_tokens_to_ids(end)
    assert f"ends a turn of the model with token {token} '{end}', which is no stop token" in note
    assert note.endswith(f"; add {token} to rollout.stop_token_ids")
    assert notes(folder, f"rollout.stop_token_ids=[{token}]")[0] == []
    assert notes(folder, f"rollout.stop=['{end}']")[0] == []
    assert notes(folder, "data.apply_chat_template=false")[0] == []


def test_end_of_several_tokens_is_reported_as_text(tmp_path: Path) -> None:
    folder = model(tmp_path, CHATML.replace("<|im_end|>", "=="))
    [note], _ = notes(folder)
    assert "ends a turn of the model with '==', which" in note and note.endswith("; add '==' to rollout.stop")
    assert notes(folder, "rollout.stop=['==']")[0] == []


@pytest.mark.parametrize("template", [CHATML.replace("<|im_end|>", "<eos>"), MISTRAL, PLAIN, LAST, REFUSES])
def test_other_templates_have_no_note(tmp_path: Path, template: str) -> None:
    """These templates end a turn with a stop token, or with nothing, or have no turns of the model."""
    assert notes(model(tmp_path, template, "<|im_end|>"))[0] == []


@pytest.mark.waits
def test_dry_run_and_start_report_the_end_of_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    template = CHATML.replace("{{ m.role }}\n", "").replace("assistant\n", "")
    folder = model(tmp_path, template, "<|im_start|>", "<|im_end|>")
    overrides = [f"model.path={folder}", "data.apply_chat_template=true", "data.max_prompt_tokens=20"]

    def dry_run(*more: str) -> str:
        main(["train", "configs/quickstart.yaml", *overrides, *more, "--dry-run"])
        return capsys.readouterr().out

    def start(*more: str) -> str:
        config = load_config("configs/quickstart.yaml", [*overrides, *more])
        inputs = read_inputs(config)
        parts = SimpleNamespace(
            config=config, tokenizer=inputs.tokens.tokenizer, stop_token_ids=inputs.tokens.stop_token_ids,
            train_prompts=inputs.training, validation_prompts=inputs.validation,
        )  # fmt: skip
        return "\n".join(data_lines(cast(Any, parts)))

    end = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|im_end|>")
    note = f"ends a turn of the model with token {end} '<|im_end|>', which is no stop token"
    output = dry_run()
    assert note in output and f"add {end} to rollout.stop_token_ids" in output and "fine    stop tokens" not in output
    assert note in start()
    corrected = f"rollout.stop_token_ids=[{end}]"
    assert (
        note not in (output := dry_run(corrected))
        and f"{end} '<|im_end|>'" in output
        and "fine    stop tokens" in output
    )
    assert note not in start(corrected)
