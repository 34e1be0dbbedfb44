"""Damaged text files and broken links are reported with one sentence and the file name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megappo.config import load_config
from megappo.config.role_models import load_architecture, load_tokenizer
from megappo.config.schema import Config
from megappo.config.sections.data import DataSourceSettings
from megappo.config.sections.judge import JudgeSettings
from megappo.config.sections.reward import RewardSettings, reward_rules
from megappo.config.templates import read_template
from megappo.data.sources import read_records
from megappo.errors import link_to_nothing, one_line
from megappo.models.hub import hub_folder
from megappo.models.model_files import read_architecture, resolve_stop_token_ids
from megappo.models.weight_files import counted_files, tensor_files
from megappo.plugins import load_function
from megappo.ppo.assembly.models import ROLES, weight_sources
from megappo.ppo.assembly.origins import open_origin
from megappo.rewards.model import RewardModel
from tests.support.data import character_tokenizer
from tests.support.models import write_model
from tests.support.places import BASE, QUICKSTART, TINY

INDEX = "model.safetensors.index.json"
OBJECTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", INDEX)
OPTIONAL = ("special_tokens_map.json", "added_tokens.json", "vocab.json", "chat_template.json")
TEXTS = ("merges.txt", "vocab.txt", "chat_template.jinja")
DAMAGES: dict[str, bytes | None] = {
    "empty": b"", "cut short": b'{"model_type": "lla', "a list": b'["model"]', "a text": b'"model"', "a number": b"7",
    "null": b"null", "nested": b'{"a": ' * 200_000, "no UTF-8": b'{"model_type": "\xff\xfe"}', "a folder": None,
}  # fmt: skip


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


def test_damaged_file_is_reported_before_loading(folder: Path, errors_of: Callable[..., str]) -> None:
    damage(folder / "tokenizer_config.json", b'"a text"')
    overrides = [f"model.path={folder}", f"run.directory={folder / 'run'}"]
    output = errors_of("train", QUICKSTART, "--dry-run", *overrides).splitlines()
    assert output == [
        f"megappo: error: model.path: {folder / 'tokenizer_config.json'} holds 'a text', must be a JSON object; fetch "
        "or save it again"
    ]


def dangling(path: Path) -> Path:
    """Make the path a link to a file that does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to("../blobs/gone")
    return path


def sentence_on(path: Path) -> str:
    return re.escape(f"{path} is a link to ../blobs/gone, which does not exist; restore it, or replace the link")


def judge(path: Path) -> str:
    settings = JudgeSettings(url="http://a/v1", model="m", prompt_file=str(path), choices={"yes": 1.0, "no": 0.0})
    return str(settings.template)


READERS: dict[str, Callable[[Path], object]] = {
    "model.safetensors": lambda path: tensor_files(path.parent),
    "model.safetensors.index.json": lambda path: tensor_files(path.parent),
    "config.json": lambda path: read_architecture(path.parent),
    "model": read_architecture,
    "tokens": lambda path: hub_folder(str(path), key="model.tokenizer"),
    "run": lambda path: open_origin(str(path), "actor", read_architecture(TINY)),
    "train.jsonl": lambda path: read_records(DataSourceSettings(source=str(path))),
    "train.parquet": lambda path: read_records(DataSourceSettings(source=str(path))),
    "mine.py": lambda path: load_function(f"{path}:score", "reward.function"),
    "run.yaml": load_config,
    "layer.yaml": lambda path: load_config(BASE, [str(path)]),
    "prompt.txt": judge,
    "chat.jinja": lambda path: read_template({"data": {"chat_template": str(path)}}, path.parent),
}


@pytest.mark.parametrize("name", READERS)
def test_broken_link_is_reported(name: str, tmp_path: Path) -> None:
    path = dangling(tmp_path / "folder" / name)
    with pytest.raises(ValueError, match=sentence_on(path)):
        READERS[name](path)


def test_broken_link_of_a_shard_is_reported(tmp_path: Path) -> None:
    shard = dangling(tmp_path / "folder" / "model-00001-of-00001.safetensors")
    (shard.parent / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard.name}}))
    with pytest.raises(ValueError, match=sentence_on(shard)):
        tensor_files(shard.parent)
    dangling(shard.parent / "model.safetensors.index.json")
    with pytest.raises(ValueError, match="index.json is a link to"):
        counted_files(shard.parent)


def test_broken_link_to_a_reward_model_is_reported(tmp_path: Path) -> None:
    path = dangling(tmp_path / "model")
    (problem,) = reward_rules(RewardSettings(function="model", model_path=str(path)))
    assert re.match("reward.model_path: " + sentence_on(path), problem)


def test_broken_link_in_a_tokenizer_is_reported(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TINY, tmp_path / "model"))
    config = load_config(BASE, [f"model.path={folder}"])
    dangling(folder / "vocab.txt")
    load_tokenizer(config)  # does not read vocab.txt
    dangling(folder / "tokenizer.json")
    with pytest.raises(ValueError, match="model.path: " + sentence_on(folder / "tokenizer.json")):
        load_tokenizer(config)


def test_broken_link_to_a_parent_folder_is_detected(tmp_path: Path) -> None:
    folder = dangling(tmp_path / "models")
    assert re.match(sentence_on(folder), link_to_nothing(folder / "one" / "config.json"))
    assert link_to_nothing(tmp_path / "nowhere" / "file") == ""
