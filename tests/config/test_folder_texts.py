"""Damaged text files of a model folder are reported with one sentence and the file name, before weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megappo.cli import main
from megappo.config import load_config
from megappo.config.model_files import load_architecture, load_tokenizer, resolve_stop_token_ids
from megappo.config.schema import Config
from megappo.errors import one_line
from megappo.ppo.models import ROLES, weight_sources
from megappo.rewards.model import RewardModel
from tests.support.data import character_tokenizer
from tests.support.models import write_model
from tests.support.places import QUICKSTART

INDEX = "model.safetensors.index.json"
OBJECTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", INDEX)
OPTIONAL = ("special_tokens_map.json", "added_tokens.json", "vocab.json", "chat_template.json")
TEXTS = ("merges.txt", "vocab.txt", "chat_template.jinja")
DAMAGES: dict[str, bytes | None] = {
    "empty": b"",
    "cut short": b'{"model_type": "lla',
    "a list": b'["model"]',
    "a text": b'"model"',
    "a number": b"7",
    "null": b"null",
    "nested": b'{"a": ' * 200_000,
    "no UTF-8": b'{"model_type": "\xff\xfe"}',
    "a folder": None,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a complete model with every text file. An index lists the weights."""
    model = write_model(tmp_path / "model", "llama", 1)
    character_tokenizer("{{ messages }}").save_pretrained(model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    shard = "model-00001-of-00001.safetensors"
    (model / "model.safetensors").rename(model / shard)
    (model / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(load_file(model / shard), shard)}))
    return model


def damage(path: Path, content: bytes | None) -> None:
    """Replace a file with the content. If the content is None, a folder replaces the file."""
    path.unlink(missing_ok=True)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)


def config_of(folder: Path) -> Config:
    return load_config(QUICKSTART, [f"model.path={folder}", "model.init=pretrained"])


def read_all(folder: Path) -> tuple[int, ...]:
    """Read all files that a run reads before models are built. Return the tokens that end a response."""
    config = config_of(folder)
    load_architecture(folder, config.model)
    ends = resolve_stop_token_ids(folder, load_tokenizer(config), ())
    weight_sources(config, ROLES)
    return ends


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        read_all(folder)
    sentence = str(caught.value)
    assert one_line(sentence) == sentence and len(sentence) < 500, sentence
    return sentence


def test_complete_folder_is_read(folder: Path) -> None:
    assert read_all(folder) == (1, 2)


@pytest.mark.parametrize("name", (*OBJECTS, *OPTIONAL))
@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_json_file_is_named(folder: Path, name: str, kind: str) -> None:
    damage(folder / name, DAMAGES[kind])
    sentence = refusal(folder)
    assert str(folder / name) in sentence and "; fetch or save it again" in sentence, sentence


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("kind", ("no UTF-8", "a folder"))
def test_damaged_text_file_is_named(folder: Path, name: str, kind: str) -> None:
    damage(folder / name, DAMAGES[kind])
    assert str(folder / name) in refusal(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (INDEX, {}, "is not an index of safetensors, its weight_map is null"),
        (INDEX, {"weight_map": []}, "its weight_map is []"),
        (INDEX, {"weight_map": {}}, "its weight_map is {}"),
        (INDEX, {"weight_map": {"a": 7}}, "lists 7 as the file of a"),
        (INDEX, {"weight_map": {"a": None}}, "lists null as the file of a"),
        (INDEX, {"weight_map": {"a": "gone.safetensors"}}, "lists 'gone.safetensors' as the file of a, and"),
        (INDEX, {"weight_map": {"a": "."}}, "lists '.' as the file of a"),
        ("generation_config.json", {"eos_token_id": "</s>"}, "is '</s>', must be a token or a list of tokens"),
        ("generation_config.json", {"eos_token_id": [1, None]}, "is [1, None], must be a token or a list of tokens"),
        ("generation_config.json", {"eos_token_id": {"a": 1}}, "must be a token or a list of tokens"),
        ("config.json", {"model_type": ["llama"]}, "is ['llama'], must be text"),
        ("config.json", {"model_type": "llama", "vocab_size": {}}, "its config.json is refused"),
        ("tokenizer_config.json", {"tokenizer_class": 7}, "holds no tokenizer that can be loaded"),
        ("tokenizer_config.json", {"added_tokens_decoder": 7}, "holds no tokenizer that can be loaded"),
        ("tokenizer.json", {}, "holds no tokenizer that can be loaded"),
        ("tokenizer.json", {"model": 7}, "holds no tokenizer that can be loaded"),
    ],
)
def test_invalid_content_is_reported(folder: Path, name: str, content: object, message: str) -> None:
    (folder / name).write_text(json.dumps(content))
    sentence = refusal(folder)
    assert message in sentence and str(folder) in sentence


@pytest.mark.parametrize("name", ("config.json", "tokenizer.json", "tokenizer_config.json"))
def test_damaged_files_of_reward_models_are_named(tmp_path: Path, folder: Path, name: str) -> None:
    damage(folder / name, b"[")
    with pytest.raises(ValueError, match="not valid JSON") as caught:
        RewardModel(str(folder), dtype=torch.float32, device=torch.device("cpu"))
    assert f"reward.model_path '{folder}' cannot be loaded (ValueError: {folder / name} " in str(caught.value)


def test_damaged_file_is_reported_before_loading(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(folder / "tokenizer_config.json", b'"a text"')
    overrides = [f"model.path={folder}", f"run.directory={folder / 'run'}"]
    assert main(["train", str(QUICKSTART), "--dry-run", *overrides]) == 2
    output = capsys.readouterr().err.splitlines()
    assert output == [
        f"megappo: error: model.path: {folder / 'tokenizer_config.json'} holds 'a text', must be a JSON object; fetch "
        "or save it again"
    ]
