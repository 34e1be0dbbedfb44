"""Tests of `megappo init`: the written configurations pass the plan and the dry run, on this machine and on others."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from megappo.cli import main
from megappo.config import load_config
from megappo.config.fields import find_field
from megappo.plan.here import this_cpu
from megappo.starter.commented_yaml import Setting, overridden, to_yaml
from megappo.starter.target import file_system, find_target
from megappo.starter.tasks import TASKS
from tests.support.episodes import tokenizer
from tests.support.models import write_model
from tests.support.places import QUICKSTART, ROOT

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ON_A_GPU = ["--machine", "h100", "--gpus", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 whose tokenizer has a chat template with tools."""
    folder = tmp_path_factory.mktemp("model")
    model_tokenizer = tokenizer(TEMPLATE)
    model_tokenizer.eos_token = model_tokenizer.pad_token = "<|im_end|>"
    sizes = {
        "vocab_size": len(model_tokenizer),
        "eos_token_id": model_tokenizer.eos_token_id,
        "pad_token_id": model_tokenizer.eos_token_id,
    }
    write_model(folder, "qwen3", 1, max_position_embeddings=4096, **sizes)
    model_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create an empty working directory with prepared GSM8K data, on a machine without GPUs and scheduler."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEGAPPO_LAUNCH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for variable in ("RANK", "WORLD_SIZE", "SLURM_JOB_ID"):
        monkeypatch.delenv(variable, raising=False)
    for name in ("train", "test"):
        (tmp_path / "data" / "gsm8k").mkdir(parents=True, exist_ok=True)
        rows = {"prompt": ["how many are 3 and 4?"] * 300, "answer": ["#### 7"] * 300}
        pq.write_table(pa.table(rows), tmp_path / "data" / "gsm8k" / f"{name}.parquet")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        ({"prompt": "1+1=", "answer": "2"}, ("prompt", "answer")),
        ({"question": "1+1=", "answer": "2"}, ("question", "answer")),
        ({"problem": "1+1=", "solution": "2", "level": 1}, ("problem", "solution")),
        ({"text": "1+1="}, ("prompt", "answer")),
    ],
)
def test_keys_are_read_from_the_first_line(
    empty: Path, model: Path, line: dict[str, object], keys: tuple[str, str]
) -> None:
    (empty / "mine.jsonl").write_text(json.dumps(line) + "\n")
    assert main(["init", "--data", "mine.jsonl", "--model", str(model), "--output", "mine.yaml"]) == 0
    train = load_config("mine.yaml").data.train
    assert train is not None and (train.prompt_key, train.answer_key) == keys


def test_interval_of_checkpoints_suits_the_plan(empty: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, options in enumerate(([], ON_A_GPU, [*ON_A_GPU, "--model", str(model)])):
        assert main(["init", *options, "--output", f"run{number}.yaml"]) == 0
        capsys.readouterr()
        assert main(["plan", f"run{number}.yaml", *options[:4]]) == 0
        assert "suits the time of a step" not in capsys.readouterr().out


def program(folder: Path, name: str, output: str) -> None:
    """Put a program on the PATH that prints a text."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(f"#!/bin/sh\nprintf '%s\\n' '{output}'\n")
    (folder / "bin" / name).chmod(0o755)


@pytest.mark.waits
@pytest.mark.parametrize("machine", [ON_A_GPU, []], ids=["h100", "this machine"])
@pytest.mark.parametrize("task", TASKS)
def test_written_configuration_passes_plan_and_dry_run(
    task: str, machine: list[str], model: Path, empty: Path, output_of: Callable[..., str]
) -> None:
    output = output_of("init", task, "--model", model, "--output", "mine.yaml", *machine)
    assert "wrote mine.yaml" in output and f"megappo train --dry-run mine.yaml{' ' * bool(machine)}" in output
    text = Path("mine.yaml").read_text()
    bare = [line for line in text.splitlines() if ":" in line and "#" not in line and not line.endswith(":")]
    assert len(bare) < 8, "most values need a comment with the reason"
    settings = yaml.safe_load(text)
    assert settings["model"]["dtype"] == ("bfloat16" if machine else "float32")
    assert ("lora" in settings["actor"]) == (task == "lora")
    assert main(["plan", "mine.yaml", *machine]) == 0
    assert "dry run" in output_of("train", "--dry-run", "mine.yaml", *machine)


@pytest.mark.waits
@pytest.mark.parametrize("path", [ROOT / "configs/models/tiny_arithmetic", "models/tiny"])
def test_quickstart_model_passes_dry_run(path: Path | str, empty: Path, errors_of: Callable[..., str]) -> None:
    if isinstance(path, str):
        (empty / "models").mkdir()
        (empty / path).symlink_to(ROOT / "configs/models/tiny_arithmetic")
    assert main(["init", "--model", str(path), "--output", "tiny.yaml"]) == 0
    settings = yaml.safe_load(Path("tiny.yaml").read_text())
    assert settings["model"] == {"path": str(path), "init": "random", "dtype": "float32"}
    quickstart = yaml.safe_load(QUICKSTART.read_text())
    for section, name in (("rollout", "prompts_per_step"), ("actor", "epochs"), ("algorithm", "entropy_coef")):
        assert settings[section][name] == quickstart[section][name], "these values learn sums within 200 steps"
    assert main(["train", "--dry-run", "tiny.yaml"]) == 0
    printed = errors_of("init", "gsm8k", "--model", path)
    assert "has tokens for digits and signs only, but the prompts of gsm8k have words" in printed


@pytest.mark.waits
def test_lengths_and_template_follow_the_model(model: Path, empty: Path) -> None:
    short = empty / "short"
    shutil.copytree(model, short)
    content = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 512}
    (short / "config.json").write_text(json.dumps(content))
    (short / "chat_template.jinja").unlink()
    assert main(["init", "--model", str(short)]) == 0
    settings = yaml.safe_load(Path("jsonl.yaml").read_text())
    assert (settings["data"]["max_prompt_tokens"], settings["rollout"]["max_response_tokens"]) == (256, 256)
    assert settings["data"]["apply_chat_template"] is False and "init" not in settings["model"]
    assert main(["train", "--dry-run", "jsonl.yaml"]) == 0


@pytest.mark.waits
def test_init_without_arguments_writes_a_custom_run(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command also writes a function and prompts, and keeps existing files."""
    assert main(["init"]) == 0
    assert {file.name for file in empty.iterdir() if file.is_file()} == {"jsonl.yaml", "jsonl_reward.py", "jsonl.jsonl"}
    Path("jsonl_reward.py").write_text("def score(response: str) -> float:\n    return 0.5\n")
    assert main(["init", "--force"]) == 0 and "0.5" in Path("jsonl_reward.py").read_text()
    assert main(["plan", "jsonl.yaml"]) == 0 and main(["train", "--dry-run", "jsonl.yaml"]) == 0
    assert "scores the answers 0.5 and empty responses 0.5" in capsys.readouterr().out


def test_written_settings_exist(model: Path, empty: Path) -> None:
    def keys(section: dict[str, object], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
        names = []
        for name, value in section.items():
            names += keys(value, (*prefix, name)) if isinstance(value, dict) else [(*prefix, name)]
        return names

    for task in TASKS:
        assert main(["init", task, "--model", str(model), "--output", f"{task}.yaml", *ON_A_GPU]) == 0
        for key in keys(yaml.safe_load(Path(f"{task}.yaml").read_text())):
            assert any(find_field(key[:n]) for n in range(2, len(key) + 1)), key
        assert load_config(f"{task}.yaml").run.path == Path("runs", task), "each run must have a separate directory"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--output", "there.yaml"], "there.yaml exists already; add --force to overwrite it"),
        (["--output", "data"], "--output 'data' must end with .yaml"),
        (["--output", "a b.yaml"], "--output 'a b.yaml' must end with .yaml, after a name of letters"),
        (["--gpus", "0", "--machine", "h100"], "--gpus is '0', must be a whole number from 1 to 16384"),
        (["--gpus", "16", "--machine", "h100"],
         "counts the devices of a node, but a node of h100 has 8; for 16 in all write --nodes 2 --gpus 8"),
        (["--gpus", "many"], "--gpus is 'many', must be a whole number"),
        (["--nodes", "2"], "neither nvidia-smi nor sinfo shows a GPU here"),
        (["--gpus", "16384", "--nodes", "2", "--machine", "cpu"],
         "--gpus times --nodes is 32768, must be at most 16384"),
        (["--machine", "abacus"], "--machine is 'abacus', must be"),
        (["--data", "nothing.jsonl"], "--data 'nothing.jsonl' is no file"),
        (["--model", "there.yaml"], "model.path 'there.yaml' is a file"),
        (["--model", "no/such/folder"], "model.path 'no/such/folder': there is no such folder"),
    ],
)  # fmt: skip
def test_invalid_arguments_give_one_message(
    arguments: list[str], sentence: str, empty: Path, errors_of: Callable[..., str]
) -> None:
    (empty / "there.yaml").write_text("run: {}\n")
    before = sorted(path.name for path in empty.iterdir())
    error = errors_of("init", *arguments)
    assert sentence in error and len(error.splitlines()) == 1
    assert sorted(path.name for path in empty.iterdir()) == before


def test_model_that_does_not_fit_has_one_message(empty: Path, tmp_path: Path, errors_of: Callable[..., str]) -> None:
    big = tmp_path / "big"
    big.mkdir()
    sizes = {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 100, "num_attention_heads": 128}
    (big / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": 128000, "max_position_embeddings": 8192, **sizes})
    )
    error = errors_of("init", "--model", big, "--machine", "l40s")
    assert f"{big} does not fit on 1 x " in error and "no layout on 1 x l40s fits" in error
    assert "name a smaller --model, or a larger machine" in error and len(error.splitlines()) == 1
    assert not list(empty.glob("*jsonl*")) and not list(empty.glob(".*"))


@pytest.mark.parametrize(("gigabytes", "model"), [(100, "Qwen/Qwen3-0.6B"), (25, "Qwen/Qwen2.5-0.5B-Instruct")])
def test_tools_without_gpu_use_a_model_that_fits(
    gigabytes: int, model: str, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megappo.plan.here.machine_bytes", lambda: gigabytes * 10**9)
    assert main(["init", "tools"]) == 0
    assert yaml.safe_load(Path("tools.yaml").read_text())["model"]["path"] == model


def test_models_that_do_not_fit_are_named(
    empty: Path, monkeypatch: pytest.MonkeyPatch, errors_of: Callable[..., str]
) -> None:
    monkeypatch.setattr("megappo.plan.here.machine_bytes", lambda: 8 * 10**9)
    error = errors_of("init", "tools")
    assert "Qwen/Qwen3-0.6B and Qwen/Qwen2.5-0.5B-Instruct do not fit on this machine's" in error
    assert "name a smaller --model, or a larger machine, for example --machine h100 --gpus 8" in error
    assert "shorten the response" not in error and not (empty / "tools.yaml").exists()


@pytest.mark.waits
def test_devices_are_detected_from_the_machine(empty: Path) -> None:
    local = find_target(None, None, None, empty)
    assert (local.machine, local.devices, local.nodes, local.scheduler) == (this_cpu(), 1, 1, "")
    program(empty, "sinfo", "(null)\ngpu:a100:4(S:0-1)\ngpu:h200:8,nvme:1")
    of_slurm = find_target(None, None, 3, empty)
    assert (of_slurm.machine.name, of_slurm.devices, of_slurm.nodes, of_slurm.ranks) == ("h200", 8, 3, 24)
    assert of_slurm.scheduler == "slurm"
    program(empty, "nvidia-smi", "NVIDIA A100-SXM4-40GB, 40960\nNVIDIA A100-SXM4-40GB, 40960")
    own = find_target(None, None, None, empty)
    assert (own.machine.name, own.devices, own.machine.memory_bytes) == ("a100-40", 2, 40960 * 2**20)
    named = find_target("l40s", 4, None, empty)
    assert (named.machine.name, named.devices) == ("l40s", 4)
    program(empty, "nvidia-smi", "No devices were found")
    assert find_target(None, None, None, empty).machine.name == "h200"


@pytest.mark.waits
def test_cluster_start_command_is_printed(model: Path, empty: Path, output_of: Callable[..., str]) -> None:
    program(empty, "sinfo", "gpu:h100:8")
    os.environ["PATH"] += ":/bin:/usr/bin"
    output = output_of("init", "gsm8k", "--model", model, "--nodes", "2")
    assert "megappo plan gsm8k.yaml --machine h100 --gpus 16" in output
    line = f"sbatch --nodes 2 --gpus-per-node 8 {ROOT / 'launch/slurm/ppo.sbatch'} gsm8k.yaml"
    assert f"  MEGAPPO_ROOT={ROOT} {line}\n" in output
    assert "all nodes must see it" in Path("gsm8k.yaml").read_text()
    assert "--gpus 1" in output_of("init", "lora", "--model", model)


def test_file_systems_are_distinguished() -> None:
    mounts = "sda / ext4 rw\nserver:/home /home nfs4 rw\nlocal /home/me/scratch xfs rw\nbroken\n"
    places = {"/home/you": "nfs4", "/home/me/scratch/a": "xfs", "/homes": "ext4", "/home": "nfs4"}
    assert {folder: file_system(Path(folder), mounts) for folder in places} == places


def test_settings_become_yaml_with_comments() -> None:
    lines = [
        Setting("a.b", 1.0e-6, "small"),
        Setting("c", {"d": [1, 2]}),
        Setting("a.e.f", True, "long " * 40),
        Setting("a.e.g", 3),
    ]
    text = to_yaml(overridden(lines, [Setting("a.b", 2), Setting("a.e", {"h": None}, "anew")]))
    assert yaml.safe_load(text) == {"a": {"b": 2, "e": {"h": None}}, "c": {"d": [1, 2]}}
    long = to_yaml(lines)
    assert yaml.safe_load(long)["a"]["b"] == 1.0e-6 and all(len(line) <= 110 for line in long.splitlines())
    assert "b: 1.0e-06  # small" in long
