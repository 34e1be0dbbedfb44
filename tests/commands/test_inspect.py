"""`megappo inspect`: lists of samples, single samples token by token, and invalid files."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from megappo.cli import main
from megappo.config import load_config, save_config
from megappo.observe.page.experience import saved_samples
from megappo.observe.saved_samples import MARKER, read_numbers
from megappo.ppo.records.experience_files import read_samples
from tests.support.places import BASE
from tests.support.saved import SPOKEN, rows, samples, save_step, two_episodes, two_samples


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Save steps 3 and 10. Step 10 has two ranks."""
    directory = tmp_path / "run"
    save_step(directory / "experience", 3, two_samples(0))
    save_step(directory / "experience", 10, two_samples(0), two_samples(2))
    overrides = [f"run.directory={directory}", "algorithm.lam={actor: 0.5, critic: 0.5}", "algorithm.gamma=1.0"]
    save_config(load_config(BASE, overrides), directory / "config.yaml")
    return directory


def inspect_lines(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> list[str]:
    """Return the lines that the command prints, or its errors."""
    assert main(["inspect", *map(str, arguments)]) == code
    output = capsys.readouterr()
    assert all(line.isprintable() for line in (output.out + output.err).splitlines())
    return (output.err if code else output.out).splitlines()


def test_sample_is_shown_token_by_token(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = inspect_lines(capsys, run, "--sample", 2)
    assert lines[0] == f"sample 2 of step 10 of {run}"
    assert lines[1].startswith("settings: estimator gae, gamma 1, lambda 0.5, ")
    assert lines[2:6] == [
        "prompt 0: 0+4=",
        r"response, 3 tokens, ended by itself: 4\x1b[2J!<eos>",
        "right answer: 4",
        "reward: 1, from the score 2",
    ]
    table = [line.split() for line in lines[7:11]]
    assert table == [
        ["position", "id", "token", "mask", "reward", "value", "return", "advantage", "old/engine", "version"],
        ["0", "4", r"'\x1b[2J'", "1", "0", "0.5", "0.75", "0.25", "1.649", "7"],
        ["1", "5", r"'é\n'", "0", "0", "-", "-", "-", "-", "7"],
        ["2", "6", "'ok'", "1", "1", "0.5", "1", "0.5", "1", "7"],
    ]
    assert len({len(line) for line in lines[7:11]}) == 1
    assert lines[12:] == [
        "tokens: 3, the model's own 2, in the losses 2",
        "rewards: sum 1, on the last own token 100.0% of their size, on tokens that are not the model's 0.0%",
        "return of the first own token: 0.75, off the sum of rewards by 0.25 "
        "(with gamma 1 and lambda 1 by no more than rounding)",
        "returns: mean 0.875, standard deviation 0.125",
        "values: mean 0.5, standard deviation 0; explained variance 0.000, correlation with returns 0.000",
        "advantages: mean 0.375, standard deviation 0.125",
    ]


def test_truncated_sample_shows_the_loss_mask(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = inspect_lines(capsys, run, "--step", 3, "--sample", 1)
    assert lines[2:5] == [
        "prompt -1 (its episode failed): 1+4=",
        "response, 1 tokens, cut at the response limit: 9<eos>",
        "reward: -0.5",
    ]
    assert [line.split() for line in lines[6:8]] == [
        ["position", "id", "token", "mask", "loss", "reward", "value", "return", "advantage", "old/engine", "version"],
        ["0", "9", "'9'", "1", "0", "-0.5", "0.5", "-0.5", "-1", "1", "8"],
    ]
    assert lines[9] == "tokens: 1, the model's own 1, in the losses 0"


def test_rewards_of_other_tokens_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = two_samples(0)
    astray = replace(saved.experience, rewards_BR=rows([0.25, 0.5, 0.25], [0.0]))
    save_step(tmp_path / "experience", 1, replace(saved, experience=astray))
    lines = inspect_lines(capsys, tmp_path, "--sample", 0)
    assert lines[1] == "settings: not known (no config.yaml next to it)"
    message = "rewards: sum 0.5, on the last own token 25.0% of their size, on tokens that are not the model's 50.0%"
    assert message in lines
    assert [line.split()[4] for line in lines[7:11]] == ["reward", "0.25", "0.5", "0.25"]


def listed(lines: list[str]) -> list[str]:
    """Return the ids of the samples in a list."""
    start = next(i for i, line in enumerate(lines) if line.startswith("sample "))
    return [line.split()[0] for line in lines[start + 1 : lines.index("", start)]]


def test_samples_are_listed_and_filtered(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = inspect_lines(capsys, run)
    assert lines[0] == f"step 10 of {run}: 4 of its 16 samples are saved"
    assert lines[3:6] == [
        "sample  reward  tokens  end             prompt  response        right answer",
        r"     0       1       3  complete        0+4=    4\x1b[2J!<eos>  4",
        "     1    -0.5       1  response_limit  1+4=    9<eos>",
    ]
    assert lines[10] == "tokens: 8, the model's own 6, in the losses 4"
    message = "values: mean 0.5, standard deviation 0; explained variance 0.000, correlation with returns 0.000"
    assert message in lines[11:]
    assert listed(inspect_lines(capsys, run, "--step", 3)) == ["0", "1"]
    assert listed(inspect_lines(capsys, run, "--text", "!<eos>")) == ["0", "2"]
    assert listed(inspect_lines(capsys, run, "--text", "1+4")) == ["1", "3"]
    assert listed(inspect_lines(capsys, run, "--reward", "0.5:")) == ["0", "2"]
    assert listed(inspect_lines(capsys, run, "--reward=-0.5:0", "--length", ":1")) == ["1", "3"]
    assert listed(inspect_lines(capsys, run, "--length", "2:3", "--sort", "reward")) == ["0", "2"]
    assert listed(inspect_lines(capsys, run, "--sort", "reward")) == ["0", "2", "1", "3"]
    assert listed(inspect_lines(capsys, run, "--sort", "length")) == ["0", "2", "1", "3"]
    some = inspect_lines(capsys, run, "--rows", 1, "--reward=:0")
    assert "2 match the criteria" in some and "and 1 more; --rows 2 shows all" in some
    assert inspect_lines(capsys, run / "experience")[1:] == lines[1:]
    assert "0 match the criteria" in inspect_lines(capsys, run, "--text", "nowhere")


def test_rewards_of_turns_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rewards of turns count in the list, its filter and order, and the file."""
    save_step(tmp_path / "experience", 1, two_episodes(0))
    path = tmp_path / "experience" / "step-000001" / "rank-00000.parquet"
    table = parquet.read_table(path)
    assert table["score"].to_pylist() == [0.875, -0.5] and table["reward"].to_pylist() == [1.0, -0.5]
    read = read_samples(path)
    assert read.given_B.tolist() == [0.125, -0.5] and read.experience.scored.scores_B.tolist() == [0.25, -0.5]
    assert [line.split()[1] for line in inspect_lines(capsys, tmp_path)[4:6]] == ["1", "-0.5"]
    assert listed(inspect_lines(capsys, tmp_path, "--reward", "0.9:1")) == ["0"]
    assert listed(inspect_lines(capsys, tmp_path, "--reward", "0.2:0.3")) == []
    assert "reward: 1, from the score 0.875" in inspect_lines(capsys, tmp_path, "--sample", 0)
    assert r"the episode failed: raised: no \x1b[2J" in inspect_lines(capsys, tmp_path, "--sample", 1)
    assert read_numbers([path]).rewards_B.tolist() == [1.0, -0.5]
    shown = saved_samples({1: [path]}, 1.0)
    assert [sample["reward"] for sample in shown] == [1, -0.5]
    assert [sample["failure"] for sample in shown] == [None, f"raised: no {SPOKEN}"]


def test_columns_follow_the_saved_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """KL and versions of tokens are optional columns."""
    for whole in (True, False):
        save_step(tmp_path / f"{whole}" / "experience", 1, samples((4, 2), whole=whole))
        names = inspect_lines(capsys, tmp_path / f"{whole}", "--sample", 0)
        header = next(line for line in names if line.startswith("position")).split()
        assert ("kl" in header, "value" in header) == (whole, whole) and header[-1] == "version"
        assert any(line.startswith("values: ") for line in names) == whole
        assert inspect_lines(capsys, tmp_path / f"{whole}")


def test_moved_run_is_read_at_its_new_path(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moved = run.rename(run.with_name("moved"))
    assert listed(inspect_lines(capsys, moved)) == ["0", "1", "2", "3"]


def test_configured_folder_of_samples_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    save_config(load_config(BASE, [f"rollout.save_to={tmp_path / 'elsewhere'}"]), run / "config.yaml")
    errors = inspect_lines(capsys, run, code=2)
    message = f"has no saved experience (in {tmp_path / 'elsewhere'}); run it with 'logging.save_experience={{}}'"
    assert message in errors[0]
    save_step(tmp_path / "elsewhere", 1, two_samples(0))
    assert listed(inspect_lines(capsys, run)) == ["0", "1"]
    (run / "config.yaml").write_text("run: [\x1b[2J]\n")
    save_step(run / "experience", 2, two_samples(0))
    assert inspect_lines(capsys, run)[1].startswith("settings: not known (")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--step", "4"), "step 4 is not saved; saved are 3, 10; take 3 or 10"),
        (("--step", "-4"), "--step is '-4', must be a whole number from 0"),
        (("--sample", "4"), "step 10 has no sample 4; saved are 0, 1, 2, 3"),
        (("--sample", "x"), "--sample is 'x', must be a whole number"),
        (("--reward", "1:0"), "--reward is '1:0', must be LOW:HIGH, such as 0.5:1"),
        (("--length", "3"), "--length is '3', must be LOW:HIGH"),
        (("--length", "a:"), "--length is 'a:', must be LOW:HIGH"),
        (("--rows", "0"), "--rows is '0', must be a whole number from 1"),
    ],
)
def test_missing_steps_and_samples_are_reported(
    run: Path, arguments: tuple[str, str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in inspect_lines(capsys, run, f"{arguments[0]}={arguments[1]}", code=2)[0]


def test_folder_without_a_run_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is no directory; name the directory of a run" in inspect_lines(capsys, tmp_path / "none", code=2)[0]
    assert "has no saved experience" in inspect_lines(capsys, tmp_path, code=2)[0]


TWO = {"sample_id": [0, 1]}
CRAFTED: dict[str, dict[str, Any]] = {
    "column sample_id has no numbers": {"sample_id": ["0", "1"]},
    "column reward has no numbers": {"reward": [None, 1.0]},
    "column prompt has no texts": {"prompt": [1, 2]},
    "column raw_response has no texts": {"raw_response": [{"a": 1}, {"a": 2}]},
    "column response_mask has no list in each row": {"response_mask": [True, False]},
    "column returns has no numbers": {"returns": [["1", "2", "3"], ["4"]]},
    "columns values and response_tokens differ in length": {"values": [[0.5], [0.5, 0.5, 0.5]]},
    "column token_rewards has no list in each row": {"token_rewards": [None, [1.0]]},
    "column advantages has no numbers": {"advantages": [[0.5, None, 0.5], [0.5]]},
    "column response_token_texts has no lists of texts": {"response_token_texts": [[1, 2, 3], [1]]},
    "2 texts of 3 tokens": {"response_token_texts": [["a", "b"], ["c"]]},
}


@pytest.mark.parametrize("problem", CRAFTED)
def test_crafted_files_are_refused(run: Path, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "experience" / "step-000003" / "rank-00000.parquet"
    table = parquet.read_table(path)
    for name, values in CRAFTED[problem].items():
        column = pyarrow.array(values)
        table = table.set_column(table.column_names.index(name), name, column)
    parquet.write_table(table, path)
    errors = inspect_lines(capsys, run, "--step", 3, "--sample", 0, code=2)
    assert f"{path} contains no saved samples ({problem}); name the saved experience of a run" in errors[0]


def test_incomplete_steps_are_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check missing columns, a missing file of a rank, and a marker with a very large number of ranks."""
    folder = run / "experience" / "step-000003"
    table = parquet.read_table(folder / "rank-00000.parquet")
    parquet.write_table(table.drop_columns(["returns"]), folder / "rank-00000.parquet")
    assert "there is no column returns" in inspect_lines(capsys, run, "--step", 3, code=2)[0]
    marker = json.loads((folder / MARKER).read_text())
    (folder / MARKER).write_text(json.dumps(marker | {"ranks": 10**15}))
    assert "step.json cannot be read (ranks: " in inspect_lines(capsys, run, "--step", 3, code=2)[0]
    (folder / MARKER).write_text(json.dumps(marker | {"ranks": 2}))
    assert "rank-00001.parquet is not a readable parquet file" in inspect_lines(capsys, run, "--step", 3, code=2)[0]


@pytest.mark.waits
def test_inspect_does_not_import_torch(run: Path) -> None:
    code = (
        "import sys; from megappo.cli import main; "
        f"assert main(['inspect', {str(run)!r}]) == main(['inspect', {str(run)!r}, '--sample', '0']) == 0; "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
