"""The command line: checks before a run starts, one line per problem, and exit code 2."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megappo import __version__
from megappo.cli import main
from megappo.config import Config, ConfigError
from megappo.config.sections.roles import LayoutSettings
from megappo.errors import Interrupted
from megappo.preflight.resolved import ResolvedRun
from megappo.runtime.waiting import pause
from tests.support.harness import start
from tests.support.places import BASE, QUICKSTART, ROOT


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Write the folder of a tiny model. Return an override."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 97, "max_position_embeddings": 256}
    heads = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **heads}))
    return f"model.path={tmp_path}"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Replace the trainer and the export. Return the recorded calls of the command line."""
    seen: list[tuple[Any, ...]] = []
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    trainer = types.ModuleType("megappo.ppo.run")
    vars(trainer).update(
        train=lambda run: seen.append(("train", run.config)), evaluate=lambda run: seen.append(("evaluate", run.config))
    )

    def export(*arguments: Any, without_mtp: bool, own: tuple[str | None, bool]) -> list[Path]:
        seen.append(("export", *arguments, without_mtp, *own))
        return []

    monkeypatch.setitem(sys.modules, "megappo.ppo.run", trainer)
    monkeypatch.setattr("megappo.checkpoint.exports.export.export_run", export)
    return seen


def spawn(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return start("megappo", *arguments, environment={**os.environ, "RANK": "0", "WORLD_SIZE": "1", **environment})


@pytest.mark.waits
def test_early_signal_requests_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM sends a signal before the time limit, while modules are imported."""

    def load(*_arguments: Any) -> Config:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(10)
        raise AssertionError("the process continues")

    monkeypatch.setattr("megappo.commands.train.load_config", load)
    child = os.fork()
    if child == 0:
        try:
            main(["train", "some.yaml"])
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 85


@pytest.mark.waits
def test_malformed_setting_in_a_process() -> None:
    done = spawn("train", str(BASE), "actor.epoch=2")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(
        "megappo: error: override 'actor.epoch=2': actor.epoch is not a setting; did you mean"
    )


@pytest.mark.waits
def test_rule_between_sections_in_a_process(model: str) -> None:
    done = spawn("train", str(BASE), model, "actor.layout.tensor_parallel=4", WORLD_SIZE="4", RANK="0")
    assert done.returncode == 2
    assert done.stderr == (
        "megappo: error: actor.layout.tensor_parallel 4 does not divide 2 (KV heads) of the actor model; "
        "the nearest is 2\n"
    )


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["plan", "a.yaml", "--rollout.prompts_per_step=8"], "without dashes: rollout.prompts_per_step=8"),
        (["plan", "a.yaml", "--rollout-batch-size", "128"], "without dashes: rollout.prompts_per_step=VALUE"),
        (["train", "a.yaml", "--dry_run"], "unrecognized arguments: --dry_run; did you mean --dry-run?"),
        (["plan", "a.yaml", "--xyzzy"], "--xyzzy; settings are written without dashes, such as run.steps=10\n"),
    ],
)
def test_unknown_options_have_a_remedy(arguments: list[str], remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The options are flags of other trainers, and misspelt options."""
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    output = capsys.readouterr().err
    assert output.startswith(f"usage: megappo {arguments[0]} ") and remedy in output


@pytest.mark.waits
def test_import_is_light() -> None:
    code = "import sys, megappo.cli; print([m for m in ('torch', 'transformers', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_train(calls: list[tuple[Any, ...]], model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(BASE), model, "run.steps=7"]) == 0
    (name, config) = calls[0]
    assert name == "train"
    assert isinstance(config, Config)
    assert config.run.steps == 7
    assert "16 sequences" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.minibatch_sequences=7", "actor.minibatch_sequences"),
        ("rollout.servers={nodes: 2}", "rollout.servers.nodes 2 does not divide tensor_parallel 1"),
    ],
)
def test_settings_are_refused_before_data_are_read(
    override: str, message: str, model: str, monkeypatch: pytest.MonkeyPatch, errors_of: Callable[..., str]
) -> None:
    from megappo.preflight import inputs
    from megappo.runtime import device

    monkeypatch.setattr(inputs, "read_inputs", lambda *_, **__: pytest.fail("the data were read"))
    monkeypatch.setattr(device, "runs_on_cuda", lambda settings: False)
    assert message in errors_of("train", BASE, model, "run.steps=null", "run.epochs=1", "rollout.engine=null", override)


@pytest.mark.waits
def test_quiet_and_other_ranks(
    calls: list[tuple[Any, ...]], model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    assert main(["train", str(BASE), model, "logging.console=quiet"]) == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main(["train", str(BASE), model]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err, len(calls)) == ("", "", 2)
    error_file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    early_errors = list[bool]()

    def wait(seconds: float) -> None:
        early_errors.append(error_file.exists())
        pause(seconds)

    monkeypatch.setattr("megappo.runtime.waiting.pause", wait)
    monkeypatch.setattr("megappo.cli.RANK_0_SPEAKS_WITHIN", 0.5)
    began = time.monotonic()
    assert main(["train", str(BASE), model, "run.steps=0"]) == 2
    assert time.monotonic() - began > 0.5, "rank 0 has time to report the same mistake"
    sentence = "megappo: error on rank 1: run.steps is 0, must be above 0"
    assert capsys.readouterr().err == "", "torchrun prints the error"
    assert early_errors == [False], "torchrun reports the first error file as the cause"
    assert sentence in error_file.read_text()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert main(["train", str(BASE), model, "run.steps=0"]) == 2
    assert sentence in capsys.readouterr().err, "torchrun prints only the error of the last restart"
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no folder" / "error.json"))
    assert main(["train", str(BASE), model, "run.steps=0"]) == 2
    assert sentence in capsys.readouterr().err, "torchrun cannot read the error"


def test_world_size_comes_from_the_environment(
    calls: list[tuple[Any, ...]], model: str, errors_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "32")
    errors = errors_of("train", BASE, model)
    assert "is below the 32 data parallel replicas" in errors
    assert all(line.startswith("megappo: error: ") for line in errors.splitlines())
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert "WORLD_SIZE is 'many'" in errors_of("train", BASE, model)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "")  # such a process does not wait for rank 0
    printed = errors_of("train", BASE, model, "run.steps=0")
    assert printed.startswith("megappo: error: run.steps is 0, must be above 0; ")
    assert calls == []


def test_eval(calls: list[tuple[Any, ...]], model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(BASE), model]) == 0
    assert main(["eval", str(BASE), model, "--weights", str(tmp_path), "model.tokenizer=t", "run.seed=9"]) == 0
    assert [call[0] for call in calls] == ["evaluate", "evaluate"]
    output = capsys.readouterr().out
    assert "rollout" in output
    assert "stopping" not in output and "a step takes" not in output  # an evaluation has no steps
    config = calls[1][1]
    assert (config.model.path, config.model.init) == (str(tmp_path), "pretrained")
    assert (config.model.tokenizer, config.run.seed) == ("t", 9)
    assert main(["eval", str(BASE), model, "data.validation=null", "evaluation=null"]) == 2
    assert "eval needs prompts; add data.validation" in capsys.readouterr().err


def test_eval_names_weights_that_are_no_model(
    calls: list[tuple[Any, ...]], model: str, tmp_path: Path, errors_of: Callable[..., str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()

    def error() -> str:
        return errors_of("eval", BASE, model, "--weights", run)

    assert error() == f"megappo: error: --weights '{run}' has no config.json; give a Hugging Face model folder\n"
    (run / "config.yaml").write_text("run: {}")
    assert f"--weights '{run}' is the directory of a run and has no config.json; `megappo export {run} OUT`" in error()
    (run / "final").mkdir()
    (run / "final" / "config.json").write_text("{}")
    assert error().endswith(f"is the directory of a run and has no config.json; give {run}/final\n")
    assert calls == []


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ((), ["validation.jsonl: 1 answer to each prompt, greedy, of at most"]),
        (("evaluation={every_steps: 1, max_response_tokens: 7}",), ["prompt, greedy, of at most 7 tokens"]),
        (("data.validation.limit=3",), ["the first 3 prompts of validation.jsonl: 1 answer"]),
        (
            ("data.validation_sets={hard: {source: h.jsonl, samples: 4, temperature: 0.7, pass_at: [1, 4]}}",),
            ["greedy", "h.jsonl: 4 answers to each prompt, at temperature 0.7, of at most", "pass@1, pass@4"],
        ),
    ],
)
def test_evaluation_prints_sets_samples_and_temperature(
    calls: list[tuple[Any, ...]], model: str, output_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch,
    settings: tuple[str, ...], parts: list[str],
) -> None:  # fmt: skip
    """The output contains no sizes of training."""
    monkeypatch.setenv("COLUMNS", "300")
    output = " ".join(output_of("eval", BASE, model, *settings).replace("\u2502", " ").split())
    assert all(part in output for part in parts), output
    assert (
        "prompts x" not in output
        and "temperature 1" not in output
        and "optimizer" not in output
        and "updates" not in output
    )


@pytest.mark.parametrize(
    ("layouts", "fewest"),
    [
        (("actor.layout={tensor_parallel: 2}", "critic.layout={pipeline_parallel: 2}"), 2),
        (("actor.layout={tensor_parallel: 2, pipeline_parallel: 2}", "critic.layout={}"), 4),
        (("actor.layout={ranks: 1}", "critic.layout={first_rank: 1, ranks: 2}"), 3),
    ],
)
@pytest.mark.parametrize("command", ["train", "eval"])
def test_one_process_reports_the_required_number(
    calls: list[tuple[Any, ...]], errors_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch, command: str,
    layouts: tuple[str, ...], fewest: int,
) -> None:  # fmt: skip
    """An evaluation with an engine inside the process needs no layout."""
    monkeypatch.delenv("MEGAPPO_LAUNCH", raising=False)
    servers = ("rollout.servers.kind=sglang", "rollout.servers={placement: colocated, tensor_parallel: 1}")
    output = errors_of(command, QUICKSTART, *layouts, *servers)
    assert f"this is 1 process, but the layouts need {fewest}; start {fewest} processes: torchrun " in output
    assert f"--nproc-per-node {fewest} -m megappo {command}" in output and calls == []
    assert main([command, str(QUICKSTART), *layouts]) == (0 if command == "eval" else 2)
    if command == "eval":
        assert {role.layout for role in calls[0][1].trained.values()} == {LayoutSettings()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_missing_gpu_is_reported_before_missing_engine(
    calls: list[tuple[Any, ...]], model: str, errors_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang should not be installed for a missing device."""
    monkeypatch.setattr("megappo.engines.sglang.version.installed_version", lambda name: None)
    arguments = ["train", str(BASE), model, "rollout.servers.kind=sglang"]
    printed = errors_of(*arguments, "runtime.device=cuda")
    assert printed.startswith("megappo: error: runtime.device is cuda, but this machine shows no CUDA")
    assert "SGLang is not installed, but the settings need it" in errors_of(*arguments, "runtime.device=cpu", code=1)
    assert calls == []


def test_export(calls: list[tuple[Any, ...]]) -> None:
    assert main(["export", "runs/a", "out"]) == 0
    assert main(["export", "runs/a", "out", "--role", "critic", "--step", "best", "--format", "torch_dist"]) == 0
    assert main(["export", "runs/a", "out", "--without-mtp"]) == 0
    assert main(["export", "runs/a", "out", "--family", "mine:FAMILY", "--trust-remote-code"]) == 0
    assert calls == [
        ("export", "runs/a", "out", "actor", "latest", "huggingface", False, None, False),
        ("export", "runs/a", "out", "critic", "best", "torch_dist", False, None, False),
        ("export", "runs/a", "out", "actor", "latest", "huggingface", True, None, False),
        ("export", "runs/a", "out", "actor", "latest", "huggingface", False, "mine:FAMILY", True),
    ]


@pytest.mark.parametrize("argv", [[], ["tune"], ["plan"], ["export", "a"], ["train", "a", "--wat"], ["export", *"abc"]])
def test_usage_errors(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: megappo" in capsys.readouterr().err


def test_configuration_without_a_command_has_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["a.yaml", "run.steps=1"])
    output = capsys.readouterr().err
    assert "a.yaml is a configuration, and a command must come first; write: megappo train a.yaml\n" in output


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"megappo {__version__}\n"


def test_disk_errors_are_one_sentence(calls: list[tuple[Any, ...]], model: str, errors_of: Callable[..., str]) -> None:
    trainer = vars(sys.modules["megappo.ppo.run"])

    def train(run: ResolvedRun) -> None:
        raise OSError(28, "No space left on device", "runs/x/metrics.jsonl")

    trainer["train"] = train
    assert errors_of("train", BASE, model, code=1) == (
        "megappo: error: writing failed, runs/x/metrics.jsonl: No space left on device; free some space or repair "
        "the disk and start again, a run continues from its newest checkpoint\n"
    )
    trainer["train"] = lambda run: Path("/no/such/file").read_text()
    with pytest.raises(FileNotFoundError):
        main(["train", str(BASE), model])


def test_stopped_runs_have_their_own_exit_code(calls: list[tuple[Any, ...]], model: str) -> None:
    trainer = vars(sys.modules["megappo.ppo.run"])
    for number, code in ((signal.SIGTERM, 85), (signal.SIGUSR1, 85), (signal.SIGINT, 130)):
        trainer["train"] = lambda run, number=number: (_ for _ in ()).throw(Interrupted(number))
        assert main(["train", str(BASE), model]) == code


def test_steps_to_trace_are_settings(calls: list[tuple[Any, ...]], model: str) -> None:
    assert main(["train", str(BASE), model, "--profile", "3,7-9"]) == 0
    assert calls[0][1].logging.profile_steps == (3, 7, 8, 9)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("0", "--profile is '0', must be a whole number from 1 to"),
        ("3-", "--profile is '', must be a whole number from 1 to"),
        ("x,3", "--profile is 'x', must be a whole number from 1 to"),
        ("5-3", "--profile 5-3 is no range of at most 100 steps; write a range such"),
        ("1-1000000", "--profile 1-1000000 is no range of at most 100 steps; write a range such"),
    ],
)
def test_invalid_trace_steps_are_refused(steps: str, message: str, model: str, errors_of: Callable[..., str]) -> None:
    assert message in errors_of("train", BASE, model, "--profile", steps)


def test_replay_accepts_no_other_settings(errors_of: Callable[..., str]) -> None:
    for arguments in ([], ["a.yaml", "--replay", "x"], ["--replay", "x", "run.steps=1"]):
        assert "train needs CONFIG, or --replay FOLDER alone" in errors_of("train", *arguments)


def test_value_errors_while_training(calls: list[tuple[Any, ...]], model: str, errors_of: Callable[..., str]) -> None:
    """A ValueError of this project is printed as one line. A ValueError of a library keeps its traceback."""
    trainer = vars(sys.modules["megappo.ppo.run"])
    failing = "def train(run):\n    raise ValueError('train.jsonl has\\nno prompts; add some')"
    exec(failing, trainer)
    assert errors_of("train", BASE, model) == "megappo: error: train.jsonl has no prompts; add some\n"
    trainer["train"] = lambda run: int("x")
    with pytest.raises(ValueError, match="invalid literal"):
        main(["train", str(BASE), model])
    trainer["train"] = lambda run: (_ for _ in ()).throw(ConfigError(["one", "two"]))
    assert errors_of("train", BASE, model) == "megappo: error: one\nmegappo: error: two\n"
    assert calls == []
