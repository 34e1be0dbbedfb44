"""Chat templates that end a turn with a token that is not a stop token are reported before a run and at its start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megappo.cli import main
from megappo.config import load_config
from megappo.config.end_of_turn import end_of_turn_notes
from megappo.ppo.run import data_lines
from megappo.preflight.inputs import read_inputs
from tests.support.places import BASE, ROOT, TINY

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
    [
        (CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
        (GLM, ("<|user|>", "<|assistant|>"), "<|user|>"),
        (CHATML.replace("{{ m.content }}", " {{ m.content | trim }} "), ("<|im_end|>",), "<|im_end|>"),
    ],
)
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
