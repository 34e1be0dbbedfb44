"""What a run shows of itself to others: its files, its command lines, its listening sockets."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.support.harness import start
from tests.support.rewards import serving
from tests.support.worlds import environment

pytestmark = [pytest.mark.slow, pytest.mark.waits]

TOKEN = "a-t0ken-of-the-tests"


class Answers(BaseHTTPRequestHandler):
    """A reward server that says what it was told, with which every fourth sample has no score."""

    asked: ClassVar[list[str]] = []
    seen: ClassVar[set[str]] = set()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if not self.asked:
            self.seen.update(command_lines())
        self.asked.append(given := str(self.headers["Authorization"]) + str(self.headers["X-Key"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"score": given if len(self.asked) % 4 == 0 else 0.5}).encode())

    def log_message(self, *_: Any) -> None:
        pass


def command_lines() -> set[str]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.add(path.read_text(errors="replace").replace("\0", " "))
        except OSError:
            continue
    return found


def test_no_file_of_a_run_holds_a_token(tmp_path: Path) -> None:
    """Nor what it prints, nor a command line; and with another token it is the same run."""
    run = tmp_path / "run"
    for token, steps in ((TOKEN, 1), (TOKEN[::-1], 2)):
        Answers.asked.clear()
        with serving(Answers) as url:
            options = {"url": url, "key": "REWARD_KEY", "headers_from_environment": {"X-Key": "REWARD_KEY"}}
            reward = {"function": "megappo.rewards.http:scores", "batch": True, "options": options}
            done = start(
                "megappo", "train", "configs/quickstart.yaml", f"run.directory={run}", f"run.steps={steps}",
                "evaluation=null", "data.validation=null", "checkpoint.every_steps=1", "rollout.prompts_per_step=4",
                "rollout.samples_per_prompt=4", "actor.minibatch_sequences=16", "critic.minibatch_sequences=16",
                f"reward={json.dumps(reward)}",
                "actor.optimizer.schedule=constant",
                processes=2, environment=environment(REWARD_KEY=token),
            )  # fmt: skip
        printed = done.stdout + done.stderr
        assert done.returncode == 0, printed[-4000:]
        assert set(Answers.asked) == {f"Bearer {token}{token}"}
        assert "the first reward that failed" in printed and "(hidden)" in printed
        assert token not in printed and not any(token in line for line in Answers.seen)
    files = [path for path in run.rglob("*") if path.is_file()]
    assert {"config.yaml", "checkpoint.json", "samples.jsonl"} <= {path.name for path in files}
    tokens = (TOKEN.encode(), TOKEN[::-1].encode())
    assert not [path for path in files if any(token in path.read_bytes() for token in tokens)]
