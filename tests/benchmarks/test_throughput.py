"""The list of throughput measurements: commands are valid, and the page reports the results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.throughput import CONFIG, JOINED, MEASUREMENTS, eight_layers, page
from megappo.config import load_config
from tests.benchmarks.found import DOCUMENTS, STAGES
from tests.support.harness import start
from tests.support.places import ROOT

MODEL = ROOT / "configs" / "models" / "SmolLM2-135M-Instruct"
ROW = {"update_seconds": [2.0, 2.2], "bare_seconds": [2.0, 2.0], "median_cpu_ratio": 1.05, "form": "packed, sdpa"}
STEPS = {"samples": 16, "efficiency": 0.9, "peak_bytes": 3e9}


@pytest.mark.parametrize("measurement", MEASUREMENTS, ids=lambda m: m.name)
def test_measurement_commands_are_valid(measurement, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    command = measurement.command(MODEL, tmp_path)
    source = (ROOT / "benchmarks" / f"{measurement.program}.py").read_text()
    arguments = command[command.index(CONFIG) + 1 :]
    assert all(f'"{argument}"' in source for argument in arguments if argument.startswith("--"))
    overrides = [argument for argument in arguments if "=" in argument and not argument.startswith("--")]
    assert f"model.path={MODEL}" in overrides or measurement.is_small
    assert load_config(CONFIG, overrides).critic is not None


def test_all_parts_are_joined_once() -> None:
    joined = [part for parts in JOINED.values() for part in parts]
    assert sorted(joined) == sorted(m.name for m in MEASUREMENTS if m.program == "trl")


def test_small_model_has_eight_layers_and_no_weights(tmp_path: Path) -> None:
    folder = eight_layers(MODEL, tmp_path)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 8
    assert not list(folder.glob("*.safetensors"))


def test_throughput_page_reports_the_results(tmp_path: Path) -> None:
    documents = {name: json.loads(json.dumps(document)) for name, document in DOCUMENTS.items()}
    documents["joined"] = {"rows": [{**row, "speeds": [1.4, 1.6]} for row in documents.pop("trl")["rows"]]}
    for row in documents["update"]["rows"]:
        row |= ROW
    for row in documents["scaling"]["rows"]:
        row |= STEPS
    documents["step-dp2"] = documents.pop("step")
    for name, document in documents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"torch": "2.0", **document}))
    text = page(tmp_path)
    assert "torch 2.0" in text
    assert "| even:1-64 | mixed | 2 | 1.00 | 1.50 | 1.50 | 1.40 | 1.60 | 8.0 | 6.0 |" in text
    assert "| update | critic | 1 to 64 | 2.10 | 2.00 | 1.10 | 1.00 | 1.20 | 1.05 | packed, sdpa |" in text
    assert f"| step-dp2 | {' | '.join(['2.00'] * (len(STAGES) + 1))} | 2.0% |" in text
    assert "| 4,096 | 6.144 | 1.000 |" in text
    assert "| middle | update_actor | 1.00 | 1.10 | 0.91 |" in text
    assert "| data | strong | 4 | 16 | 1.10 | 400 | 90% | 3.0 |" in text


@pytest.mark.slow
@pytest.mark.waits
def test_existing_results_are_not_measured_again(tmp_path: Path) -> None:
    """Failed measurements are reported with the reason, and the page is still written."""
    overhead = tmp_path / "overhead.json"
    overhead.write_text(json.dumps({"benchmark": "overhead", **DOCUMENTS["overhead"]}))
    command = ["benchmarks.throughput", "--model", str(MODEL), "--out", str(tmp_path), "--only", "overhead"]
    done = start(*command)
    assert (done.returncode, done.stdout.split("\n")[0].startswith("overhead")) == (0, False), done.stderr
    assert "| 4,096 | 6.144 | 1.000 |" in (tmp_path / "smollm2-step.md").read_text()
    done = start(*command, "planned")
    assert done.returncode == 1
    assert "planned failed with status" in done.stdout and "planned.txt" in done.stdout
    assert "model.tokenizer" in (tmp_path / "planned.txt").read_text()


@pytest.mark.waits
def test_missing_results_are_an_error(tmp_path: Path) -> None:
    command = ["benchmarks.throughput", "--model", str(MODEL), "--out", str(tmp_path), "--only"]
    done = start(*command)
    assert done.returncode == 2
    assert done.stderr.startswith(f"throughput.py: error: {tmp_path} contains no results; the .txt files")
