"""Data for TensorBoard, Weights & Biases and custom loggers, also distributions of a step."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megappo.config import load_config
from megappo.files.json_values import JSONValue
from megappo.observe.distributions import EDGES, Distribution, counts_of, middles, of_all_ranks
from megappo.observe.ends import End
from megappo.observe.metric_docs import METRICS
from megappo.observe.metrics import MetricsLog
from megappo.observe.tensorboard_log import LAYOUT
from megappo.ppo.reports.measures import distributed_numbers
from megappo.types import Experience, Prompt, Rollouts, Scored
from tests.observe.conftest import FakeWandb
from tests.support.events import read_events, scalars
from tests.support.harness import environment
from tests.support.places import BASE, ROOT

WANDB_FOLDER = os.environ.get("MEGAPPO_TEST_WANDB", "")
"""Folder in which tests/run.sh has installed wandb, because wandb is not part of the environment."""
HAS_WANDB = importlib.util.find_spec("wandb") is not None or Path(WANDB_FOLDER, "wandb").is_dir()
PART = """
import sys
from pathlib import Path
from megappo.observe.distributions import Distribution
from megappo.observe.metrics import MetricsLog

first, last = map(int, sys.argv[2:])
options = {"mode": "offline", "group": "g", "tags": ("x",), "samples": True}
log = MetricsLog(Path(sys.argv[1]), "r", {}, tensorboard=False, wandb_project="p", wandb_run=options)
log.truncate_after(first - 1)
for step in range(first, last + 1):
    log.log_samples(step, [{"prompt": "1+1=", "response": "2"}])
    log.log(step, {"reward/mean": step / 10})
    log.log_distributions(step, {"value": Distribution((0.0, 1.0, 3.0), (step, 6))})
log.close()
"""
"""Program that logs the steps from the first to the last argument."""
SAMPLES: list[dict[str, Any]] = [
    {"prompt": "1+1=", "response": "<script>2</script>\n# two", "score": 1.0},
    {"prompt": "2+2="},
]


def test_tensorboard_shows_important_charts_first(tmp_path: Path) -> None:
    """The charts contain existing metrics, the settings are hyperparameters, and texts are not changed."""
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    config: dict[str, JSONValue] = {
        "run": {"steps": 3, "name": "r"},
        "algorithm": {"lam": 0.95, "whiten": True, "none": None},
        "of": [1],
    }
    log = MetricsLog(tmp_path, "r", config)
    log.log_samples(1, SAMPLES)
    for step in (1, 2):
        log.log(step, {"reward/mean": 0.5})
    log.close()
    events = read_events(tmp_path)
    (event,) = events.Tensors("custom_scalars__config__")
    layout = Layout()
    layout.ParseFromString(event.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == list(LAYOUT) and "reward" in layout.category[0].title
    shown = [name for charts in LAYOUT.values() for names in charts.values() for name in names]
    assert layout.category[0].chart[0].multiline.tag == ["^reward/mean$"] and not set(shown) - METRICS.keys()
    (text, *_) = events.Tensors("samples/0")
    content = text.tensor_proto.string_val[0].decode()
    assert text.step == 1 and all(f"    {line}" in content for line in ("<script>2</script>", "# two"))
    assert len(events.Tensors("samples/1")) == 1
    hparams = HParamsPluginData()
    hparams.ParseFromString(events.summary_metadata["_hparams_/session_start_info"].plugin_data.content)
    settings = hparams.session_start_info.hparams
    assert settings["run.steps"].number_value == 3 and settings["algorithm.whiten"].bool_value
    assert settings["run.name"].string_value == "r" and len(settings) == 4
    assert scalars(tmp_path, "reward/mean") == [(1, 0.5), (2, 0.5)]


def begin(folder: Path, **options: Any) -> MetricsLog:
    return MetricsLog(folder, "r", {}, tensorboard=False, wandb_project="p", wandb_run=options)


def test_resumed_run_keeps_the_wandb_id(tmp_path: Path, wandb: FakeWandb) -> None:
    """A resumed run uses the same ID, and a new run a new ID. An invalid ID in the file is replaced."""
    first = begin(tmp_path, group="g", tags=("x", "y"), entity="e", mode="offline")
    first.truncate_after(-1)
    assert wandb.begun[0].items() >= {"group": "g", "tags": ["x", "y"], "entity": "e", "mode": "offline"}.items()
    begin(tmp_path / "b")
    assert "tags" not in wandb.begun[1] and "mode" not in wandb.begun[1]
    begin(tmp_path).truncate_after(7)
    ids = [run["id"] for run in wandb.begun]
    assert ids[2] == ids[0] != ids[1] and all(run["resume"] == "allow" for run in wandb.begun)
    begin(tmp_path).truncate_after(-1)
    own_id = (tmp_path / "wandb-id").read_text().strip()
    assert [run["id"] for run in wandb.begun[3:]] == [ids[0], own_id] != [ids[0]] * 2
    (tmp_path / "wandb-id").write_text("../../x\n")
    begin(tmp_path)
    assert len(wandb.begun[-1]["id"]) == 12 and "/" not in wandb.begun[-1]["id"]


def test_samples_are_sent_to_wandb_on_request(tmp_path: Path, wandb: FakeWandb) -> None:
    begin(tmp_path / "a").log_samples(1, SAMPLES)
    assert wandb.logged == []
    begin(tmp_path / "b", samples=True).log_samples(1, SAMPLES)
    rows = [["1+1=", "<script>2</script>\n# two", "1.0"], ["2+2=", None, None]]
    assert wandb.logged == [(1, {"samples": (["prompt", "response", "score"], rows)})]


def test_wandb_settings_are_passed_on() -> None:
    overrides = ["logging.wandb_project=p", "logging.wandb_run={group: g, tags: [x], mode: offline}"]
    options = load_config(BASE, overrides).logging.model_dump(include={"wandb_run"})["wandb_run"]
    assert options == {"entity": None, "group": "g", "tags": ("x",), "mode": "offline", "samples": False}


def records(path: Path) -> Iterator[Any]:
    """Yield the records of a `.wandb` file, which has the log format of LevelDB after seven bytes."""
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # a complete record or the last part of a record
            record = messages.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.skipif(not HAS_WANDB, reason="wandb is not installed")
def test_real_wandb_joins_a_requeued_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In offline mode, `resume` has no effect. The two folders have one ID, and `wandb sync --append` joins the
    steps."""
    for first, last in ((1, 3), (4, 5)):
        command = [sys.executable, "-c", PART, str(tmp_path), str(first), str(last)]
        variables = environment() | {"WANDB_SILENT": "true"}
        variables["PYTHONPATH"] += os.pathsep + WANDB_FOLDER
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    monkeypatch.setattr(sys, "path", [*sys.path, WANDB_FOLDER])
    histories: list[list[tuple[int, float]]] = []
    runs = set()
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    for file in files:
        histories.append([])
        for record in records(file):
            if record.WhichOneof("record_type") == "run":
                runs.add((record.run.run_id, record.run.project, record.run.run_group, *record.run.tags))
            elif record.WhichOneof("record_type") == "history":
                values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                step = record.history.step.num
                histories[-1].append((step, json.loads(values["reward/mean"])))
                shown = [json.loads(values[f"distributions/value/{name}"]) for name in ("_type", "bins", "values")]
                assert shown == ["histogram", [0, 1, 3], [step, 6]]
    assert histories == [[(1, 0.1), (2, 0.2), (3, 0.3)], [(4, 0.4), (5, 0.5)]]
    assert runs == {((tmp_path / "wandb-id").read_text().strip(), "p", "g", "x")}


def test_documented_example_of_a_logger(tmp_path: Path) -> None:
    """The rows of later steps are removed when a run resumes. Samples go to loggers with `log_samples`."""
    loggers = {f"{ROOT}/configs/examples/07_own_logger/csv_logger.py:CsvLogger": {"names": ["reward/mean"]}}
    log = MetricsLog(tmp_path, "r", {}, tensorboard=False, loggers=loggers)
    for step in (1, 2, 3):
        log.log_samples(step, [{"prompt": "1+1=", "response": "2"}])
        log.log(step, {"reward/mean": step / 2})
    log.truncate_after(1)
    log.log(2, {"reward/mean": 7.0, "kl/mean": 0.0})
    log.close()
    assert (tmp_path / "r.csv").read_text().split() == ["1,0.5", "2,7.0"]


NAN = float("nan")


def test_number_and_spacing_of_bin_edges() -> None:
    assert len(EDGES) <= 512 and all(low < high for low, high in itertools.pairwise(EDGES))
    assert all(0 < high / low - 1 < 0.11 for low, high in itertools.pairwise([edge for edge in EDGES if edge > 0]))
    assert [-edge for edge in reversed(EDGES)] == list(EDGES) and EDGES[-1] >= 1e6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_numbers_are_counted_in_their_bins(dtype: torch.dtype) -> None:
    """Zeros and numbers beyond the edges are counted. Numbers that are not finite are ignored."""
    g = torch.Generator().manual_seed(int(np.random.default_rng().integers(2**31)))
    numbers = torch.cat([torch.randn(500, generator=g) * 10.0**n for n in range(-7, 8)] + [torch.zeros(9)]).to(dtype)
    counts = counts_of(numbers.reshape(3, -1))
    edges = np.asarray(EDGES)
    plain = np.clip(numbers.double().numpy(), np.nextafter(edges[0], 0), edges[-1])
    bins, _ = np.histogram(
        -plain, -edges[::-1]
    )  # bins of numpy include the lower edge, these bins include the upper edge
    assert counts.tolist() == bins[::-1].tolist() and int(counts.sum()) == numbers.numel()
    assert not counts_of(torch.tensor([NAN, float("inf"), float("-inf")])).any()


def of_worlds(experience: Experience, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Distribution]]:
    """Yield the distributions for one rank, and for two ranks with the same experience."""
    for size in (1, 2):
        monkeypatch.setattr("torch.distributed.all_reduce", lambda counts, size=size: counts.mul_(size))
        yield of_all_ranks(distributed_numbers(experience), torch.device("cpu"))


def test_only_tokens_of_the_model_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values at other tokens are ignored. Without critic or reference, their distributions are
    absent."""
    mask_BR = torch.tensor([[True, True, False], [True, False, False]])
    rollouts = Rollouts(
        prompts=(Prompt(0, (1,), "", None, {}),) * 2, sample_ids_B=torch.arange(2), group_ids_B=torch.arange(2),
        sequences=(torch.zeros(4),) * 2, response_lengths_B=torch.tensor([2, 1]),
        engine_logprob_BR=torch.where(mask_BR, torch.tensor(-1.0), torch.tensor(NAN)), response_mask_BR=mask_BR,
        ends=(End.COMPLETE,) * 2, weight_versions_B=torch.ones(2, dtype=torch.int64), responses=("",) * 2,
        raw_responses=("",) * 2, special_tokens_B=torch.zeros(2, dtype=torch.int64),
    )  # fmt: skip
    garbage_BR = torch.where(mask_BR, torch.tensor(0.5), torch.tensor(777.0))
    scored = Scored(rollouts, torch.tensor([1.0, 0.0]), torch.where(mask_BR, torch.tensor(-1.0), torch.tensor(5.0)),
                    None, None)  # fmt: skip
    experience = Experience(scored, garbage_BR, 2 * garbage_BR, None, mask_BR)
    for ranks, distributions in enumerate(of_worlds(experience, monkeypatch), start=1):
        counts = {name: [(x, n) for x, n in middles(of) if n] for name, of in distributions.items()}
        assert {name: [n // ranks for _, n in of] for name, of in counts.items()} == {
            "reward": [1, 1], "response length": [1, 1], "advantage": [3], "return": [3], "ratio to the engine": [3],
        }  # fmt: skip
        for name, expected in (("advantage", 0.5), ("return", 1.0), ("ratio to the engine", 1.0)):
            assert counts[name][0][0] == pytest.approx(expected, rel=0.1)
        assert all(sum(of.counts) % ranks == 0 for of in distributions.values())


def test_tensorboard_shows_distributions(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, "r", {})
    log.log(3, {"reward/mean": 0.5})
    log.log_distributions(3, {"value": Distribution((0.0, 1.0, 3.0), (2, 6))})
    log.log_distributions(4, {})
    log.close()
    (event,) = read_events(tmp_path).Histograms("distributions/value")
    shown = event.histogram_value
    assert (event.step, shown.min, shown.max, shown.num, shown.sum) == (3, 0.0, 3.0, 8.0, 2 * 0.5 + 6 * 2.0)
    assert (list(shown.bucket_limit), list(shown.bucket)) == ([1.0, 3.0], [2.0, 6.0])
