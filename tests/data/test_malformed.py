"""Malformed data end the command with one error message and exit code 2, before a model is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from megappo.cli import main
from tests.support.places import ROOT

GOOD = '{"prompt": "1+1=", "answer": "2"}\n'

FILES: dict[str, tuple[str, bytes, str]] = {
    "empty": ("a.jsonl", b"", "empty"),
    "not-json": ("a.jsonl", (GOOD + "{prompt: 1}\n").encode(), "line 2"),
    "not-an-object": ("a.jsonl", b"[1, 2]\n", "line 1"),
    "no-prompt": ("a.jsonl", b'{"promt": "1+1=", "answer": "2"}\n', "prompt"),
    "prompt-of-wrong-type": ("a.jsonl", b'{"prompt": 3, "answer": "2"}\n', "line 1"),
    "wrong-role": ("a.jsonl", b'{"prompt": [{"role": "robot", "content": "x"}], "answer": "2"}\n', "robot"),
    "some-answers-missing": ("a.jsonl", (GOOD + '{"prompt": "1+2="}\n').encode(), "answer"),
    "not-utf8": ("a.jsonl", GOOD.encode() + b'{"prompt": "\xff\xfe"}\n', "UTF-8"),
    "garbage-parquet": ("a.parquet", b"PAR1 this is not parquet", "parquet"),
    "unknown-kind": ("a.csv", b"prompt,answer\n", "a.csv"),
    "chat-without-template": ("a.jsonl", b'{"prompt": [{"role": "user", "content": "x"}], "answer": "2"}\n', "chat"),
    "all-too-long": ("a.jsonl", b'{"prompt": "1+1+1+1+1+1+1+1=", "answer": "8"}\n', "max_prompt_tokens"),
}


@pytest.mark.waits
@pytest.mark.parametrize("name", FILES)
def test_malformed_data_end_with_one_error(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, content, message = FILES[name]
    (tmp_path / file).write_bytes(content)
    monkeypatch.chdir(ROOT)
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    code = main(
        [
            "train", "configs/quickstart.yaml", f"run.directory={tmp_path / 'run'}", "actor.layout={}",
            "critic.layout={}", f"data.train.source={tmp_path / file}", "data.train.options={}",
            "logging={console: quiet, tensorboard: false}",
        ]
    )  # fmt: skip
    errors = capsys.readouterr().err.strip().splitlines()
    reported = [line for line in errors if line.startswith("megappo: error: ")]
    assert code == 2
    assert len(reported) == 1, errors
    assert message in reported[0]
    assert not any("Traceback" in line for line in errors)
    # The same directory can be used once the data are fixed.
    assert "holds a run" not in reported[0]
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""
