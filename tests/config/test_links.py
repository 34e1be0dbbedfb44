"""A broken link is reported as a broken link if a file or a folder is expected."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megappo.config import load_config
from megappo.config.chat_template import read_template
from megappo.config.data import DataSourceSettings
from megappo.config.hub import hub_folder
from megappo.config.judge import JudgeSettings
from megappo.config.model_files import load_tokenizer, read_architecture
from megappo.config.reward import RewardSettings, reward_rules
from megappo.data.sources import read_records
from megappo.errors import link_to_nothing
from megappo.plugins import load_function
from megappo.ppo.origins import open_origin
from megappo.reshard.files import counted_files, tensor_files
from tests.support.places import BASE, TINY


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
