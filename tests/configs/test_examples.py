"""Each example in configs/examples is complete, short, and runs."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import shlex
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from megappo.config import load_config
from megappo.observe.metrics import read_metrics
from tests.support.attempts import attempts
from tests.support.harness import succeed
from tests.support.places import ROOT

EXAMPLES = sorted(path.parent for path in (ROOT / "configs" / "examples").glob("*/*.yaml"))
MOST_README_LINES = 20
FEW_STEPS = ("run.steps=2", "runtime.device=cpu")
SMALL = ("rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "actor.minibatch_sequences=8",
         "evaluation=null", "data.validation=null")  # fmt: skip
PRETRAINING = ROOT / "configs" / "examples" / "09_value_pretraining"


def configuration(example: Path) -> Path:
    """The YAML file of an example."""
    (path,) = example.glob("*.yaml")
    return path


def every(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("example", paths, ids=lambda path: path.name)


@every(EXAMPLES)
def test_example_has_one_configuration_and_a_short_readme(example: Path) -> None:
    names = {path.name for path in example.iterdir() if path.name != "__pycache__"}
    assert "README.md" in names and sum(name.endswith(".py") for name in names) <= 2
    assert names == {"README.md", configuration(example).name, *(name for name in names if name.endswith(".py"))}
    text = (example / "README.md").read_text()
    assert text.count("\n") <= MOST_README_LINES
    assert str(configuration(example).relative_to(ROOT)) in text


@every(EXAMPLES)
def test_example_is_valid_and_named_like_its_file(example: Path) -> None:
    config = load_config(configuration(example), [])
    assert config.run.name == configuration(example).stem == example.name.partition("_")[2].replace("-", "_")


def test_numbers_of_examples_are_consecutive() -> None:
    assert [int(example.name[:2]) for example in EXAMPLES] == list(range(1, len(EXAMPLES) + 1))


def runs_alone(example: Path) -> bool:
    """Return whether an example runs without a separate server and without another run."""
    text = configuration(example).read_text()
    return not re.search(r"servers: \{(?!kind: \"client)|judge:", text) and example != PRETRAINING


ALONE = [example for example in EXAMPLES if runs_alone(example)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Train each example of `ALONE` for two steps."""
    folder = tmp_path_factory.mktemp("examples")
    lines = []
    for example in ALONE:
        critic = (
            ["critic.minibatch_sequences=8"] if "critic" in yaml.safe_load(configuration(example).read_text()) else []
        )
        small = [*SMALL, *critic]
        arguments = ["train", str(configuration(example).relative_to(ROOT)), f"run.directory={folder / example.name}"]
        lines.append({"arguments": [*arguments, *FEW_STEPS, *small], "processes": 1, "expect": "0"})
    attempts(folder, *lines, timeout=280)
    return {example.name: folder / example.name for example in ALONE}


@pytest.mark.slow
@pytest.mark.waits
@every(ALONE)
def test_example_trains(example: Path, runs: Mapping[str, Path]) -> None:
    lines = read_metrics(runs[example.name] / "metrics.jsonl")
    assert lines[-1]["step"] == 2 and "reward/mean" in lines[-1]


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.parametrize(("example", "module"), [("16_own_engine", "engine.py"), ("17_own_server", "client.py")])
def test_own_engine_is_short_and_probed(example: str, module: str, runs: Mapping[str, Path]) -> None:
    """An engine of at most 60 lines generates two steps ahead, and each weight sync is proved by a probe."""
    lines = (ROOT / "configs" / "examples" / example / module).read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 60
    steps = read_metrics(runs[example] / "metrics.jsonl")
    assert all(0 <= step["sync/probe_gap"] < 1e-4 for step in steps) and len(steps) == 2
    assert any(step["rollout/in_flight"] + step["rollout/waiting"] > 0 for step in steps)


@pytest.mark.slow
@pytest.mark.waits
def test_logger_example_writes_a_row_per_step(runs: Mapping[str, Path]) -> None:
    run = runs["07_own_logger"]
    with (run / "own_logger.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    metrics = read_metrics(run / "metrics.jsonl")
    steps = [line for line in metrics if line["step"] > 0]
    assert [int(row[0]) for row in rows if int(row[0]) > 0] == [line["step"] for line in steps]
    assert float(rows[-1][1]) == steps[-1]["reward/mean"]


@pytest.mark.slow
@pytest.mark.waits
def test_value_pretraining_example(tmp_path: Path) -> None:
    """The three commands of the README, in small."""
    path = str(configuration(PRETRAINING).relative_to(ROOT))
    sizes = ("rollout.prompts_per_step=10", "actor.minibatch_sequences=80", "critic.minibatch_sequences=80")
    small = [*sizes, "runtime.device=cpu"]
    samples = f"{tmp_path}/samples"
    first = ["train", path, f"run.directory={tmp_path / 'first'}", "run.steps=4", f"rollout.save_to={samples}", *small]
    pretrain = ["train", path, f"run.directory={tmp_path / 'critic'}", "run.steps=2", f"rollout.load_from={samples}",
                "rollout.save_to=null", "--critic-only", *small]  # fmt: skip
    policy = ["train", path, f"run.directory={tmp_path / 'policy'}", "run.steps=1", "rollout.save_to=null",
              f"critic.start_from={tmp_path / 'critic'}", *small]  # fmt: skip
    lines = [{"arguments": arguments, "processes": 1, "expect": "0"} for arguments in (first, pretrain, policy)]
    attempts(tmp_path, *lines, timeout=280)
    assert "critic/held_out_explained_variance" in read_metrics(tmp_path / "critic" / "metrics.jsonl")[-1]


class Grader(BaseHTTPRequestHandler):
    """A server with OpenAI's protocol that gives every response the score 7."""

    def do_POST(self) -> None:
        """Answer a chat completion."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer({"choices": [{"message": {"content": "Score: 7"}, "finish_reason": "stop"}]})

    def do_GET(self) -> None:
        """List the model."""
        self._answer({"data": [{"id": "Qwen/Qwen3-8B"}]})

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def _answer(self, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def grader() -> Iterator[str]:
    """Address of a running grader."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Grader) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


@pytest.mark.slow
@pytest.mark.waits
def test_judge_example(tmp_path: Path, grader: str) -> None:
    """tests/sglang/test_judge.py runs a judge on a real server. The score 7 of 10 is the reward 0.7."""
    arguments = ["train", "configs/examples/12_judge/judge.yaml", f"run.directory={tmp_path / 'run'}"]
    succeed("megappo", *arguments, *FEW_STEPS, *SMALL, "critic.minibatch_sequences=8", f"reward.judge.url={grader}")
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["reward/mean"] == pytest.approx(0.7)


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs the full environment")
def test_disaggregated_example(tmp_path: Path) -> None:
    arguments = ["train", "configs/examples/14_disaggregated/disaggregated.yaml", f"run.directory={tmp_path / 'run'}"]
    succeed("megappo", *arguments, *FEW_STEPS, *SMALL, "critic.minibatch_sequences=8")
    assert [line.get("rollout/lag") for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["step"]] == [
        0,
        1,
    ]


def test_sweep_example_sets_a_value_for_each_task() -> None:
    """The command of the README, run by a shell in place of sbatch. tests/slurm runs array jobs."""
    text = (ROOT / "configs" / "examples" / "15_sweep" / "README.md").read_text()
    (line,) = [
        arguments
        for arguments in map(shlex.split, text.replace("\\\n", " ").splitlines())
        if arguments[:1] == ["sbatch"]
    ]
    script = line[line.index("--wrap") + 1]
    assert line[line.index("--array") + 1] == "0-2" and "bash launch/slurm/ppo.sbatch" in script
    values = script.split("set -- ")[1].split(";")[0].split()
    overrides = [word.replace("$1", value) for value in values for word in script.split() if "$1" in word]
    assert len(overrides) == 2 * len(values) == 6
    for name, rate in zip(overrides[::2], overrides[1::2], strict=True):
        config = load_config(configuration(EXAMPLES[-1]), [name, rate])
        assert config.actor is not None and config.run.name == f"sweep-{rate.partition('=')[2]}"
