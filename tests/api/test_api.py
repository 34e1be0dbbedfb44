"""`megappo.api` has a stable interface and a fast import, and the examples of its README run."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from megappo import api
from megappo.algo.estimators import ARGUMENTS
from megappo.observe.metrics import read_metrics
from megappo_kernels.objectives import OFFERED
from tests.house.commands import blocks
from tests.support import outside, outside_reward
from tests.support.harness import succeed
from tests.support.places import QUICKSTART, ROOT, TINY

SIGNATURES = {
    "evaluate": "(config: 'Config', *, weights: 'str | os.PathLike[str] | None' = None) -> 'dict[str, float]'",
    "export": "(run_directory: 'str | os.PathLike[str]', out: 'str | os.PathLike[str]', *, "
    "role: \"Literal['actor', 'critic']\" = 'actor', step: 'int | str' = 'latest', "
    "form: \"Literal['huggingface', 'torch_dist', 'peft']\" = 'huggingface', without_mtp: 'bool' = False, "
    "push_to_hub: 'str | None' = None, public: 'bool' = False, "
    "family: 'str | None' = None, trust_remote_code: 'bool' = False) -> 'list[str]'",
    "load_config": "(path: 'str | os.PathLike[str]', overrides: 'Sequence[str]' = ()) -> 'Config'",
    "plan": "(config: 'Config', *, machine: 'str | os.PathLike[str] | None' = None, gpus: 'int | None' = None, "
    "models_folder: 'str | os.PathLike[str] | None' = None) -> 'Plan'",
    "train": "(config: 'Config') -> 'Path'",
    "unwhitened": "(compute: '_Function') -> '_Function'",
}
METHODS = {
    "AdvantageEstimator": ["__call__(_, offered)"],
    "Engine": ["capabilities", "close()", "on_tokens", "pause(mode)", "poll(wait_seconds, weights_changed)", "replicas",
               "sleep()", "submit(requests, params)", "update_weights(named_tensors, version)", "usage", "version"],
    "EngineFactory": ["__call__(config, folder, stop_token_ids, runtime, stop, options)"],
    "Environment": ["run(session)"],
    "Logger": ["close()", "forget_after(step)", "log(step, metrics)"],
    "LoggerFactory": ["__call__(directory, run_name, config, options)"],
    "PolicyLoss": ["__call__(_, offered)"],
    "PromptSource": ["__call__(_, options)"],
    "RewardFunction": ["__call__(_, offered)"],
}  # fmt: skip
FIELDS = {
    "Completion": ["token_ids", "logprobs", "truncated", "weight_version", "routing", "episode", "broken_off",
                   "stretches"],
    "EngineCapabilities": ["routing", "prefix_cache", "keeps_requests", "separate_processes", "concurrent"],
    "GenerateRequest": ["token_ids", "seed", "prompt_id", "max_new_tokens", "min_new_tokens", "conversation",
                        "replica"],
    "Prompt": ["index", "token_ids", "text", "answer", "metadata", "source"],
    "Reply": ["token_ids", "logprobs", "text", "raw_text", "truncated", "weight_version"],
    "SamplingParams": [
        "temperature", "max_new_tokens", "stop_token_ids", "greedy", "routing", "stop_texts", "min_new_tokens",
    ],
}  # fmt: skip
SESSION = ["generate", "observe", "observe_token_ids", "reward", "serve", "turns", "use", "using"]
"""Attributes of a session in addition to `prompt` and `seed`. New attributes may be added."""
OTHERS = {"Config", "ConfigError", "Interrupted", "LimitReached", "Plan", "RunError", "Session"}


def methods(name: str) -> list[str]:
    """Return the members of a protocol as text."""
    protocol = getattr(api, name)
    members = []
    for member in {*vars(protocol), *protocol.__annotations__}:
        value = inspect.getattr_static(protocol, member, None)
        if inspect.isfunction(value) and (member == "__call__" or not member.startswith("_")):
            members.append(f"{member}({', '.join(list(inspect.signature(value).parameters)[1:])})")
        elif not member.startswith("_"):
            members.append(member)
    return sorted(members)


def test_names_and_signatures_are_stable() -> None:
    """A change of these signatures breaks programs and must be documented in CHANGELOG.md."""
    assert set(api.__all__) == set(dir(api)) == SIGNATURES.keys() | METHODS.keys() | FIELDS.keys() | OTHERS
    assert {name: str(inspect.signature(getattr(api, name))) for name in SIGNATURES} == SIGNATURES
    assert {name: methods(name) for name in METHODS} == METHODS
    assert {name: [*getattr(api, name).__dataclass_fields__] for name in FIELDS} == FIELDS
    assert all(hasattr(api.Session, name) for name in SESSION)
    with pytest.raises(AttributeError, match="no attribute 'xyzzy'"):
        getattr(api, "xyzzy")  # noqa: B009 - mypy also reports the attribute


def test_protocols_match_working_functions() -> None:
    """The comparison is done by mypy. The functions are the plug-ins of tests/runs/test_outside.py."""
    reward: api.RewardFunction = outside_reward.digits
    source: api.PromptSource = outside.questions
    estimator: api.AdvantageEstimator = outside.rest_of_rewards
    loss: api.PolicyLoss = outside.reinforce
    engine: type[api.Engine] = outside.PlainEngine
    assert all(callable(part) for part in (reward, source, estimator, loss, engine))


@pytest.mark.waits
def test_import_is_fast() -> None:
    code = (
        "import sys, time; began = time.process_time(); import megappo.api; took = time.process_time() - began; "
        "print(took, [m for m in ('torch', 'pydantic', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    took, heavy = done.stdout.split(maxsplit=1)
    assert float(took) < 0.1 and heavy.strip() == "[]", done.stdout


def one_process(folder: Path, **logging: object) -> None:
    """Write `my-run.yaml`, a fast quickstart for one process."""
    settings = yaml.safe_load(QUICKSTART.read_text())
    settings["model"]["path"] = str(TINY)
    settings["run"]["directory"] = str(folder / "runs")
    for role in ("actor", "critic"):
        settings[role] |= {"layout": {}, "minibatch_sequences": 16}
    settings["rollout"] |= {"prompts_per_step": 8, "samples_per_prompt": 2}
    settings["data"]["validation"]["limit"] = 2
    settings["evaluation"] = None
    settings["logging"] = {"tensorboard": False, **logging}
    (folder / "my-run.yaml").write_text(yaml.safe_dump(settings))


def output_of(folder: Path, program: str, processes: int = 0) -> str:
    """Return the output of a program of the user in `folder`."""
    file = folder / "my_run.py"
    file.write_text(f"import os\nos.chdir({str(folder)!r})\n{program}")
    path = os.pathsep.join([str(folder), str(ROOT), str(ROOT / "kernels")])
    return succeed(file, processes=processes, environment={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})


PROGRAM = """
from megappo.api import load_config, plan, train

print(plan(config := load_config("my-run.yaml", ["run.steps=1"]), machine="h100", gpus=8).verdict)
train(config)
"""
"""Program that each of several processes runs."""


def examples() -> Sequence[str]:
    return blocks((ROOT / "megappo" / "api" / "README.md").read_text(), "python")


@pytest.mark.waits
def test_python_run_with_all_kinds_of_plug_ins(tmp_path: Path) -> None:
    """One run uses all examples of the README."""
    run, *plug_ins = examples()
    (reward,) = (text for text in plug_ins if "def my_reward" in text)
    (tmp_path / "scores.py").write_text(reward)  # reward workers import only this file
    (tmp_path / "mine.py").write_text("\n".join(text for text in plug_ins if text != reward))
    one_process(tmp_path, loggers={"mine:MyLogger": {"metric": "reward/max"}})
    settings = yaml.safe_load((tmp_path / "my-run.yaml").read_text())
    del settings["critic"]
    settings["data"] |= {"train": {"source": "mine:my_sums", "options": {"size": 8}}}
    settings["rollout"] |= {"engine": "mine:MyEngine", "environment": {"name": "mine:MyEnvironment", "max_turns": 3}}
    settings["rollout"] |= {"max_response_tokens": 12}
    settings["reward"] = {"function": "scores:my_reward"}
    settings["algorithm"] = {"estimator": "mine:my_estimator", "policy_loss": "mine:my_loss", "dual_clip": None}
    (tmp_path / "my-run.yaml").write_text(yaml.safe_dump(settings))
    output = output_of(tmp_path, run.replace('"critic", role="critic"', '"actor"'))
    assert "'eval/reward_mean': " in output and "the actor after step 1 is in" in output
    (line,) = read_metrics(tmp_path / "runs" / "from-python" / "metrics.jsonl")
    assert "actor/far" in line and line["mismatch/max"] >= 0.0
    (logged,) = (tmp_path / "runs" / "from-python").glob("*.csv")
    assert logged.read_text() == f"1,{line['reward/max']}\n"


@pytest.mark.waits
def test_plan_and_train_on_two_processes(tmp_path: Path) -> None:
    """Each rank calls `plan` and `train`."""
    one_process(tmp_path)
    output = output_of(tmp_path, PROGRAM, processes=2)
    assert output.count("fits") >= 2, "each rank must print a plan"
    assert json.loads((tmp_path / "runs" / "metrics.jsonl").read_text())["step"] == 1


def test_arguments_of_methods_are_documented() -> None:
    text = (ROOT / "megappo" / "api" / "README.md").read_text()
    rows = [row for row in text.splitlines() if row.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert {*ARGUMENTS, *OFFERED} <= documented


def test_user_errors_raise_config_errors(tmp_path: Path) -> None:
    one_process(tmp_path)
    config = api.load_config(tmp_path / "my-run.yaml")
    with pytest.raises(api.ConfigError, match=r"gpus is 0, must be a whole number from 1 to"):
        api.plan(config, gpus=0)
    with pytest.raises(api.ConfigError, match=r"data\.validation"):
        api.evaluate(api.load_config(tmp_path / "my-run.yaml", ["data.validation=null", "evaluation=null"]))
    with pytest.raises(ValueError, match=r"nowhere contains no config\.yaml"):
        api.export(tmp_path / "nowhere", tmp_path / "out")
