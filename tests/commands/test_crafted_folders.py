"""No command executes code of a run folder, a checkpoint or a model folder of another user."""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from megappo.checkpoint.files import Marker, read_marker, write_marker
from megappo.checkpoint.identity import architecture_digest
from megappo.cli import main
from megappo.commands.serve import make_service
from megappo.config import load_config
from megappo.engines.sglang.servers.fleet import KEY_VARIABLE
from megappo.preflight.resolved import resolve_for_device
from megappo.runtime.waiting import wait_until
from tests.support.checkpoints import one_step_run
from tests.support.places import BASE, ROOT, TINY
from tests.support.quick import cases

MODULE = "of_somebody_else"
CODE = """
import pathlib
pathlib.Path({trace!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
def make(**anything):
    return 1.0
FAMILY = METHOD = ENVIRONMENT = make
"""


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return one_step_run(tmp_path_factory.mktemp("first"))


@pytest.fixture
def crafted(first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a `model` with its own classes, and a `run`. The settings and the checkpoint of the run name
    the model, allow its code, and name functions of an importable module. The file `trace` exists if any of this code
    was executed."""
    root = shutil.copytree(first, tmp_path / "crafted")
    model, code = root / "model", CODE.format(trace=str(root / "trace"))
    for file in TINY.glob("token*"):
        shutil.copy(file, model)
    (tmp_path / "path").mkdir()
    for place in (tmp_path / "path" / f"{MODULE}.py", model / f"{MODULE}.py"):
        place.write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'path'}:{ROOT}:{ROOT / 'kernels'}")
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    own = {"AutoConfig": f"{MODULE}.OwnConfig", "AutoModelForCausalLM": f"{MODULE}.OwnModel"}
    own |= {"AutoModelForSequenceClassification": f"{MODULE}.OwnModel"}
    _change(model / "config.json", auto_map=own)
    _change(model / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, f"{MODULE}.OwnTokenizer"]})
    folder = root / "run/checkpoints/step-000001"
    marker = read_marker(folder)
    settings, name = marker.content["settings"], f"{MODULE}:make"
    settings["model"] |= {"path": str(model), "tokenizer": str(model), "trust_remote_code": True}
    settings["model"]["family"] = f"{MODULE}:FAMILY"
    settings["reward"] |= {"function": name}
    settings["data"] |= {"train": {"source": name}, "validation": {"source": name}}
    settings["rollout"]["engine"] = f"{MODULE}:ENVIRONMENT"
    settings["logging"]["loggers"] = {name: {}}
    settings["algorithm"] |= {"estimator": f"{MODULE}:METHOD", "policy_loss": f"{MODULE}:METHOD"}
    marker.content["identity"] = {"model": architecture_digest(model)}
    write_marker(folder, marker)
    (root / "run/config.yaml").write_text(yaml.safe_dump(settings))
    line = {"step": 1, "reward/mean": 0.5, "!!python/object/apply:os.system": 1}
    (root / "run/metrics.jsonl").write_text(json.dumps(line) + "\n")
    (root / "data.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}+1=", "answer": "1"}) + "\n" for n in range(16))
    )
    return root


def _change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def own_settings(crafted: Path, *more: str) -> list[str]:
    """Return the settings of a user who names the model and allows no code."""
    model = crafted / "model"
    named = [f"model.path={model}", f"model.tokenizer={model}", "model.init=pretrained", "critic=null"]
    named += [f"data.{of}.source={crafted / 'data.jsonl'}" for of in ("train", "validation")]
    named += ["data.apply_chat_template=false", "rollout.max_response_tokens=4", "runtime.device=cpu"]
    return [str(BASE), *named, "algorithm.estimator=grpo", "actor.optimizer.warmup_updates=0", *more]


def begun(crafted: Path, *more: str) -> list[str]:
    return own_settings(crafted, f"run.directory={crafted / 'mine'}", "run.steps=1", *more)


COMMANDS: dict[str, tuple[Callable[[Path], list[str]], int]] = {
    "export": (lambda root: ["export", str(root / "run"), str(root / "out")], 2),
    "export for megatron": (lambda root: ["export", str(root / "run"), str(root / "out"), "--format", "torch_dist"], 2),
    "report": (lambda root: ["report", str(root / "run")], 0),
    "report page": (lambda root: ["report", str(root / "run"), "--html", str(root / "page.html")], 0),
    "inspect": (lambda root: ["inspect", str(root / "run")], 2),
    "plan": (lambda root: ["plan", *own_settings(root)], 0),
    "doctor": (lambda root: ["doctor", *own_settings(root)], 0),
    "dry run": (lambda root: ["train", *begun(root), "--dry-run"], 0),
    "begin with the run": (lambda root: ["train", *begun(root, f"actor.start_from={root / 'run'}"), "--dry-run"], 0),
    "resume": (lambda root: ["train", *own_settings(root, f"run.directory={root / 'run'}", "run.steps=2")], 2),
    "replay": (lambda root: ["train", "--replay", str(root / "run/checkpoints/step-000001")], 2),
    "eval": (lambda root: ["eval", *begun(root), "--weights", str(root / "model")], 0),
}
"""The arguments and the exit code of each command."""


@pytest.mark.waits
@pytest.mark.parametrize("command", COMMANDS)
def test_folder_of_another_user_executes_no_code(
    crafted: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, expected = COMMANDS[command]
    monkeypatch.chdir(ROOT)
    code = main(arguments(crafted))
    output = capsys.readouterr()
    assert not (crafted / "trace").exists(), output
    assert MODULE not in sys.modules
    assert code == expected and "Traceback" not in output.out + output.err, output


@pytest.mark.waits
def test_server_of_a_crafted_model_executes_no_code(crafted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sglang")
    monkeypatch.setenv(KEY_VARIABLE, "a key")
    config = resolve_for_device(
        load_config(own_settings(crafted)[0], own_settings(crafted, "rollout.servers.kind=sglang")[1:])
    )
    service = make_service(config, host=None, port=0, index=0, linger_seconds=0.0)
    assert not service.spec.trust_remote_code
    assert service.spec.arguments(1, "key").get("trust-remote-code", False) is False
    assert not (crafted / "trace").exists() and MODULE not in sys.modules


def test_export_executes_only_the_named_code(crafted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other code is not executed."""
    arguments = ["export", str(crafted / "run"), str(crafted / "out")]
    assert main(arguments) == 2
    assert f"set --family {MODULE}:FAMILY if you trust this code" in capsys.readouterr().err
    assert main([*arguments, "--family", "elsewhere:FAMILY"]) == 2 and not (crafted / "trace").exists()
    assert main([*arguments, "--family", f"{MODULE}:FAMILY"]) == 2 and (crafted / "trace").exists()
    (crafted / "trace").unlink()
    folder = crafted / "run/checkpoints/step-000001"
    marker = read_marker(folder)
    marker.content["settings"]["model"]["family"] = None
    write_marker(folder, marker)
    assert main(arguments) == 0, capsys.readouterr()
    assert not (crafted / "trace").exists() and (crafted / "out/model.safetensors").exists()


FOLDERS = 50
DEAREST_EVERY = 5
HOSTILE: list[Any] = [
    f"{MODULE}:make", "__import__('os').system('x')", "!!python/object/apply:os.system [x]", "{{ x.__class__ }}", "-x",
    "", "../" * 20 + "etc/passwd", "/dev/zero", "a\0b", "\x1b[2J", "x" * 10_000, 10**400, -1, 2**63, 1e308, True, None,
    [], {}, [[]] * 50, {"": {"": {}}}, {"source": f"{MODULE}:make", "options": {"self": "x"}},
]  # fmt: skip


def _places(content: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield every path in the content of a marker."""
    for name, value in content.items():
        yield (*at, name)
        if isinstance(value, dict):
            yield from _places(value, (*at, name))


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.slow
@pytest.mark.waits
def test_generated_folders_execute_no_code(
    crafted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One to four values of the marker are replaced. Some files are devices, pipes or truncated. Commands that read the
    folder end soon, with one sentence or successfully."""
    monkeypatch.chdir(ROOT)
    draw, run = random.Random(7), crafted / "run"
    folder = run / "checkpoints/step-000001"
    whole, backup = read_marker(folder), shutil.copytree(folder, tmp_path / "kept")
    for path in tmp_path.iterdir():
        assert path.name in ("crafted", "kept", "path")
    for number in range(FOLDERS):
        shutil.rmtree(folder)
        shutil.copytree(backup, folder)
        content = copy.deepcopy(whole.content)
        content["settings"]["model"] |= {"family": None, "trust_remote_code": draw.random() < 0.5}
        for place in draw.sample(sorted(_places(content)), draw.randint(1, 4)):
            inside: Any = content
            for name in place[:-1]:
                inside = inside.get(name) if isinstance(inside, dict) else None
            if isinstance(inside, dict):
                inside[place[-1]] = draw.choice(HOSTILE)
        write_marker(folder, Marker(1, whole.files, content))
        if number % 3 == 0:
            victim = draw.choice(sorted(path for path in folder.iterdir() if path.name != "checkpoint.json"))
            victim.unlink()
            spoils: list[Callable[[Path], None]] = [_endless, os.mkfifo, Path.touch]
            draw.choice(spoils)(victim)
        (run / "config.yaml").write_text(yaml.safe_dump(content["settings"]))
        (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": draw.choice(HOSTILE)}) + "\n")
        for arguments in (
            ["export", str(run), str(tmp_path / "out")],
            ["report", str(run)],
            ["report", str(run), "--html", str(crafted / "page.html")],
            ["train", *own_settings(crafted, f"run.directory={run}", "run.steps=2")],
            ["train", *begun(crafted, f"actor.start_from={run}"), "--dry-run"],
        )[: 5 if number % DEAREST_EVERY == 0 else 4]:
            start = time.monotonic()
            code = main(arguments)
            output = "".join(capsys.readouterr())
            assert time.monotonic() - start < 30 and "Traceback" not in output, output
            assert code in (0, 2) and (code == 0 or "megappo: error: " in output), output
            assert not (crafted / "trace").exists() and MODULE not in sys.modules
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert {path.name for path in tmp_path.iterdir()} == {"crafted", "kept", "path"}


MODELS_OF_OTHERS = 50
FEW = 20
"""The number of cases that every test run includes."""
DEEP = '{"a":' * 50_000
LARGE_BYTES = 2**40
MEMORY_BYTES = 3 * 2**30
"""The commands need less memory in addition to the memory of the process."""


def damages(crafted: Path, victim: Path) -> dict[str, Callable[[Path], None]]:
    """Return functions that damage a file of a folder, by name."""
    touch = f"import pathlib; pathlib.Path({str(crafted / 'trace')!r}).touch()"

    def pickled(path: Path) -> None:
        path.write_bytes(b"cbuiltins\nexec\n(V" + touch.encode() + b"\ntR.")

    def values(path: Path) -> None:
        content = json.loads(path.read_text()) if path.suffix == ".json" else {}
        for place in random.Random(path.name).sample(sorted(content), min(2, len(content))):
            content[place] = HOSTILE[len(place) % len(HOSTILE)]
        path.write_text(json.dumps(content))

    def large(path: Path) -> None:
        path.write_text("{")
        os.truncate(path, LARGE_BYTES)

    def elsewhere(path: Path) -> None:
        names = {"x": "../../victim", "model.embed_tokens.weight": str(victim)}
        path.write_text(json.dumps({"weight_map": names, "auto_map": {"AutoConfig": f"{MODULE}.OwnConfig"}}))

    def deep(path: Path) -> None:
        path.write_text(DEEP)

    def tagged(path: Path) -> None:
        path.write_text(f"!!python/object/apply:os.system ['touch {crafted}/trace']")

    def linked(path: Path) -> None:
        path.symlink_to(victim)

    return {
        "endless": _endless, "pipe": os.mkfifo, "empty": Path.touch, "large": large, "deep": deep,
        "elsewhere": elsewhere, "pickle": pickled, "link": linked, "folder": Path.mkdir,
        "yaml": tagged, "values": values,
    }  # fmt: skip


FILES = (
    "model/config.json", "model/tokenizer.json", "model/tokenizer_config.json", "model/model.safetensors",
    "model/model.safetensors.index.json", "model/generation_config.json", "model/chat_template.jinja",
    "model/pytorch_model.bin", "model/value_head.safetensors", "run/config.yaml", "run/metrics.jsonl",
    "run/metrics.jsonl.partial", "run/samples.jsonl", "run/jumps.jsonl", "run/lock", "run/checkpoints",
    "run/profile/step-000001.md", "run/experience/step-000001/step.json",
    "run/checkpoints/step-000001/checkpoint.json", "run/checkpoints/step-000001/.metadata",
    "run/checkpoints/step-000002.new", "data.jsonl", "set/train-00000-of-00001.parquet", "set/test.jsonl",
)  # fmt: skip


def _nothing_runs() -> bool:
    """Return whether this process has no running child. Reward workers of a run that could not start end by
    themselves."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                return False
    return True


def _served(crafted: Path) -> int:
    """Return the exit code of `megappo serve` before a server is started."""
    try:
        arguments = own_settings(crafted, "rollout.servers.kind=sglang", f"run.directory={crafted / 'mine'}")
        make_service(
            resolve_for_device(load_config(arguments[0], arguments[1:])), host=None, port=0, index=0, linger_seconds=0.0
        )
    except ValueError:
        return 2
    return 0


@pytest.mark.waits
@pytest.mark.parametrize("number", cases(range(MODELS_OF_OTHERS), exhaustive=range(FEW, MODELS_OF_OTHERS)))
def test_commands_end_on_any_generated_folder(
    crafted: Path, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The damage consists of devices, pipes, links, pickles, endless texts and paths of other folders, in a model, a
    run and a data set. No other file changes, no code is executed, no command hangs or exhausts the memory, and no
    process remains."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv(KEY_VARIABLE, "a key")
    draw, victim = random.Random(number), tmp_path / "victim"
    victim.write_text("mine\nand mine")
    for name in ("set", "run/profile"):
        (crafted / name).mkdir(exist_ok=True)
    shutil.copy(crafted / "data.jsonl", crafted / "set/test.jsonl")
    done = damages(crafted, victim)
    for file in draw.sample(FILES, draw.randint(1, 3)):
        place, previous = crafted / file, None
        if place.is_dir():
            shutil.rmtree(place)
        elif place.exists():
            previous = place.read_bytes()
            place.unlink()
        place.parent.mkdir(parents=True, exist_ok=True)
        name = draw.choice(sorted(done))
        if name == "values" and previous is not None:
            place.write_bytes(previous)
        done[name](place)
    everything = {name: arguments for name, (arguments, _) in COMMANDS.items()}
    everything["data"] = lambda root: ["data", "prepare", "math", str(root / "out"), "--from", str(root / "set")]
    names = sorted(everything)
    used_bytes = psutil.Process().memory_info().vms
    _, hard = before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MEMORY_BYTES, hard))
    try:
        for name in names:
            start = time.monotonic()
            code = main(everything[name](crafted))
            output = "".join(capsys.readouterr())
            assert time.monotonic() - start < 30 and "Traceback" not in output, (name, output)
            has_message = "megappo: " in output or (name == "doctor" and "\nbroken " in output)
            assert code in (0, 1, 2) and (code == 0 or has_message), (name, code, output)
        assert _served(crafted) in (0, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert not (crafted / "trace").exists() and MODULE not in sys.modules
    assert victim.read_text() == "mine\nand mine" and victim.stat().st_nlink == 1
    assert {path.name for path in tmp_path.iterdir()} == {"crafted", "path", "victim"}
    assert wait_until(_nothing_runs, 20.0, every_seconds=0.05)
