"""Records of runs: names on the disk, logged metrics, changed settings, and repeated steps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from megappo.config import load_config
from megappo.config.rules.metrics import logged_metrics
from megappo.observe.metric_docs import documented
from tests.runs.test_resume import whole_tensors
from tests.support.attempts import attempts, killed_at, timeless, train
from tests.support.config import TWO_TURNS
from tests.support.harness import start, succeed
from tests.support.saved import save_step, two_samples

pytestmark = [pytest.mark.slow, pytest.mark.waits]


NAMES = json.loads(Path(__file__).with_name("disk_names.json").read_text())
OTHERS = ("settings", "metrics", "versions", "own_files")
"""Parts of a checkpoint's content with names of settings, metrics, packages and files."""
REPLACED = {f"architectures.{role}.rope_parameters" for role in ("actor", "critic")}
"""Names that a later version computes anew when it reads a checkpoint without them."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with the settings of the recorded run."""
    folder = tmp_path_factory.mktemp("names")
    overrides = ("run.steps=3", "checkpoint.every_steps=2", "logging.save_experience={}", "evaluation=null")
    attempts(folder, train(folder / "run", *overrides))
    return folder / "run"


def keys(value: Any, prefix: str = "", depth: int = 3) -> Iterator[str]:
    """Yield the dotted keys of nested mappings, down to a depth."""
    if isinstance(value, dict) and depth:
        for name, inner in value.items():
            yield prefix + name
            yield from keys(inner, f"{prefix}{name}.", depth - 1)


def json_lines(path: Path) -> set[str]:
    """Return the keys of all lines of a file."""
    return {name for line in path.read_text().splitlines() for name in json.loads(line)}


def test_checkpoint_names(run: Path) -> None:
    folder = run / "checkpoints" / "step-000002"
    body = json.loads((folder / "checkpoint.json").read_text())["body"]
    assert set(NAMES["checkpoint.json"]) <= set(body)
    content = {name: value for name, value in body["content"].items() if name not in OTHERS}
    assert set(NAMES["checkpoint content"]) - set(keys(content)) == REPLACED
    assert set(OTHERS) <= set(body["content"])
    assert list(torch.load(folder / "random-00000.pt", weights_only=True)) == NAMES["random states"]


@pytest.mark.parametrize("file", ["metrics.jsonl", "samples.jsonl"])
def test_names_of_metrics_and_samples(run: Path, file: str) -> None:
    assert set(NAMES[file]) - json_lines(run / file) == set()


def test_columns_of_saved_experience(run: Path) -> None:
    columns = pq.read_schema(run / "experience" / "step-000002" / "rank-00000.parquet").names
    assert set(NAMES["experience"]) - set(columns) == set()


SMALL_RUN = (
    "run.steps=2", "rollout.prompts_per_step=4", "actor.minibatch_sequences=16", "critic.minibatch_sequences=16",
    "actor.layout={}", "critic.layout={}", "evaluation.every_steps=1", "checkpoint.every_steps=1",
)  # fmt: skip
GRPO = (
    "critic=null", "algorithm.estimator=grpo", "algorithm.whiten_advantages=false", "reference={}",
    "algorithm.kl_in_loss={coef: 0.01}", "rollout.dynamic_sampling={max_rounds: 2}", "algorithm.old_logprob=corrected",
    "reward.functions={one: {function: exact}, two: {function: exact}}", "reward.function=null", "reward.clip=[0, 1]",
    "reward.normalize=std",
)  # fmt: skip
EPISODES = (
    *TWO_TURNS, "data.validation=null", "evaluation=null", "algorithm.policy_loss=penalty",
    "checkpoint.huggingface_every_steps=1",
)  # fmt: skip


@pytest.mark.parametrize("overrides", [(), GRPO, EPISODES], ids=["gae", "grpo", "episodes"])
def test_runs_log_the_metrics_of_their_settings(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    arguments = [*SMALL_RUN, *overrides, f"run.directory={tmp_path / 'run'}"]
    succeed("megappo", "train", "configs/quickstart.yaml", *arguments, processes=1, timeout_seconds=120)
    config = load_config(tmp_path / "run" / "config.yaml")
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    logged = {name for name in last if not name.startswith("tool/")} - {"step"}
    assert all(documented(name) for name in logged)
    promised = set(logged_metrics(config, dict.fromkeys(config.trained, 0)))
    assert logged - promised == set()
    assert promised - logged <= {"mfu", "critic/explained_variance"}
    assert ("time/export" in last) == ("checkpoint.huggingface_every_steps=1" in overrides)


SETTINGS = (
    "run.steps=4", "checkpoint={every_steps: 1, keep_last: 9}", "actor.layout={}", "critic.layout={}",
    "actor.optimizer.schedule=linear", "critic.optimizer.schedule=cosine", "rollout.prompts_per_step=4",
    "actor.minibatch_sequences=16", "critic.minibatch_sequences=16", "evaluation=null",
    "reference.refresh_every_steps=1", "algorithm.kl_in_reward={kind: kl, coef: 0.01}",
)  # fmt: skip
OTHER_UPDATES = ("actor.epochs=2", "critic.minibatch_sequences=32")


def rates(run: Path) -> list[tuple[float, float]]:
    """Return the learning rates of actor and critic for each step."""
    lines = timeless(run / "metrics.jsonl")
    return [(line["actor/learning_rate"], line["critic/learning_rate"]) for line in lines if line["step"]]


def test_resume_with_changed_settings(tmp_path: Path) -> None:
    """After the change of epochs and minibatches, the learning rates equal those of a run with these settings. A
    reference that is no longer refreshed keeps its weights, also after a second resume."""
    fewer, fixed, all_of_them = tmp_path / "fewer", tmp_path / "fixed", tmp_path / "all"
    killed = killed_at(fewer, 3, "update_actor", 0, *SETTINGS, *OTHER_UPDATES, processes=1)
    attempts(tmp_path, killed, train(all_of_them, *SETTINGS, processes=1))
    shutil.copytree(fewer, fixed)
    still = (*SETTINGS, *OTHER_UPDATES, "reference.refresh_every_steps=null", "run.force_resume=true")
    output = attempts(
        tmp_path,
        train(fewer, *SETTINGS, processes=1),
        killed_at(fixed, 4, "update_actor", 0, *still, processes=1),
        train(fixed, *still, processes=1),
    )
    assert "changed since then: actor.epochs: 2 -> 1" in output
    after = torch.tensor(rates(fewer)[2:])
    assert torch.allclose(after, torch.tensor(rates(all_of_them)[2:]), rtol=1e-6)
    assert min(min(of_step) for of_step in rates(fewer)[:3]) > 0
    of_step = [whole_tensors(fixed / "checkpoints" / f"step-{step:06d}") for step in (1, 2, 3, 4)]
    references = [{name: t for name, t in state.items() if name.startswith("reference.")} for state in of_step]
    assert all(state.keys() == references[0].keys() != set() for state in references)
    for name, tensor in references[1].items():
        assert torch.equal(tensor, references[2][name]) and torch.equal(tensor, references[3][name]), name
    assert any(not torch.equal(tensor, references[0][name]) for name, tensor in references[1].items())


SMALL = (
    "rollout.prompts_per_step=4", "actor.minibatch_sequences=16", "critic.minibatch_sequences=16", "actor.layout={}",
    "critic.layout={}", "evaluation.every_steps=2", "actor.optimizer.schedule=constant",
    "critic.optimizer.schedule=constant",
)  # fmt: skip
OTHER_RATE = "actor.optimizer.learning_rate=5e-3"


def content(run: Path) -> dict[str, tuple[bytes, int]]:
    """Return the bytes and the modification time of every file in the directory except the lock, which names the last
    process."""
    files = [path for path in run.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(run)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def megappo(*arguments: str, code: int = 0) -> str:
    done = start("megappo", *arguments, processes=1, timeout_seconds=120)
    assert done.returncode == code, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


def rate_of(run: Path) -> float:
    return load_config(run / "config.yaml").actor.optimizer.learning_rate


def test_the_record_describes_only_trained_steps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("configs/quickstart.yaml", f"run.directory={run}", *SMALL)
    train = ("train", *arguments)
    megappo(*train, "run.steps=2")
    finished, rate = content(run), rate_of(run)
    output = megappo(*train, "run.steps=2", OTHER_RATE)
    assert "nothing is left to train" in output and f"the trained actor is in {run / 'final'}" in output
    assert content(run) == finished

    # These attempts end before the first step.
    save_step(tmp_path / "other", 1, two_samples(0))
    elsewhere = ("logging.save_experience={}", f"rollout.save_to={tmp_path / 'other'}")
    output = megappo(*train, "run.steps=3", OTHER_RATE, *elsewhere, code=2)
    assert "has experience of /runs/a; set a different folder, or remove this folder" in output
    megappo(*train, "run.steps=3", OTHER_RATE, "--dry-run")
    megappo("eval", *arguments, OTHER_RATE)
    assert content(run) == finished

    # The run trains its last step with a different learning rate.
    megappo(*train, "run.steps=3", OTHER_RATE)
    assert rate_of(run) == 5e-3
    change = f"actor.optimizer.learning_rate: {rate} -> 0.005"
    (line,) = map(json.loads, (run / "changes.jsonl").read_text().splitlines())
    assert line["step"] == 2 and change in line["changes"]
    card = (run / "final" / "README.md").read_text()
    assert "learning rate 0.005" in card and "after step 2: " in card
    output = megappo("report", str(run))
    assert f"settings changed after step 2: {change}" in output

    # If the export does not exist, the run writes the export with the settings of the last step.
    weights = (run / "final" / "model.safetensors").read_bytes()
    shutil.rmtree(run / "final")
    others = content(run)
    megappo(*train, "run.steps=3", "actor.optimizer.learning_rate=7e-3")
    assert {name: x for name, x in content(run).items() if not name.startswith("final/")} == others
    assert (run / "final" / "README.md").read_text() == card
    assert (run / "final" / "model.safetensors").read_bytes() == weights
