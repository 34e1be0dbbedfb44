"""Names of the Hub on machines without a network: an immediate error, or the cache."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, utils
from huggingface_hub.utils import filter_repo_objects

from megappo.config import ConfigError
from megappo.models import hub
from megappo.runtime.packages import installed_version
from tests.support.places import ROOT, TINY

pytestmark = [pytest.mark.waits, pytest.mark.versions]

MODEL = TINY

EVERY_COMMAND = """
import contextlib, io, json, sys, time
from megappo.runtime.memory.allocator import collections_put_off
with collections_put_off():
    import megappo.doctor, megappo.commands.dry_run, megappo.commands.plan, megappo.commands.serve
    from transformers import AutoConfig, AutoTokenizer
    from megappo.cli import main
answers = []
for words in json.loads(sys.argv[1]):
    said = io.StringIO()
    before = time.monotonic()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        code = main(words)
    answers.append((code, said.getvalue(), time.monotonic() - before))
print("answers", json.dumps(answers))
"""


def answers(tmp_path: Path, commands: list[list[str]], **environment: str) -> list[tuple[int, str]]:
    """Return the exit code and stderr of each command. The commands run in sequence, without a reachable Hub."""
    variables = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1"}
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "ALL_PROXY", "RANK", "WORLD_SIZE"):
        variables[name] = ""
    variables = {**os.environ, **variables, **environment}
    variables = {name: value for name, value in variables.items() if value}
    done = subprocess.run(  # the client of the Hub reads its variables at import
        [sys.executable, "-c", EVERY_COMMAND, json.dumps(commands)], cwd=ROOT, env=variables, capture_output=True,
        text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not re.search("retry|huggingface", done.stderr, re.IGNORECASE), "the output has raw lines of the client"
    results = json.loads(done.stdout.rpartition("answers")[2])
    # Busy machines import slowly, and the client retries each file for longer.
    assert all(seconds < 60 for _, _, seconds in results)
    return [(code, output) for code, output, _ in results]


def put_in_cache(tmp_path: Path, name: str) -> None:
    """Write the files that `hf download` writes."""
    folder = tmp_path / "hf" / "hub" / f"models--{name.replace('/', '--')}"
    shutil.copytree(MODEL, folder / "snapshots" / "0123abcd")
    (folder / "refs").mkdir()
    for revision in ("main", "v1"):
        (folder / "refs" / revision).write_text("0123abcd")


@pytest.mark.slow
def test_hub_name_without_network_is_refused_at_once(tmp_path: Path) -> None:
    config, elsewhere = "configs/quickstart.yaml", "model.path=Nobody/Nothing"
    commands = [
        ["plan", config, elsewhere],
        ["train", config, "critic.path=Nobody/Nothing"],
        ["train", config, "actor.layout={}", "critic.layout={}", "reference={path: Nobody/Nothing}"],
        ["train", config, "--dry-run", "model.tokenizer=Nobody/Nothing", f"run.directory={tmp_path / 'run'}"],
        ["eval", config, "--weights", "Nobody/Nothing"],
        ["doctor", config, elsewhere],
        *([["serve", config, "rollout.servers.kind=sglang", elsewhere]] if installed_version("sglang") else []),
    ]
    keys = ["model.path", "critic.path", "reference.path", "model.tokenizer", "--weights", "model.path", "model.path"]
    results = answers(tmp_path, commands)
    for (code, output), key, command in zip(results, keys, commands, strict=False):
        assert (code, output.count("\n")) == (2, 1), (command, output)
        assert output.startswith(f"megappo: error: {key} 'Nobody/Nothing' is no folder"), (command, output)
        assert "http://127.0.0.1:9 cannot be reached" in output
        assert "run `hf download Nobody/Nothing` with the same HF_HOME and set HF_HUB_OFFLINE=1 here, or give" in output


@pytest.mark.slow
def test_hub_name_in_the_cache_needs_no_network(tmp_path: Path) -> None:
    """Only the requested revision of the cache is used."""
    put_in_cache(tmp_path, "Some/Model")
    commands = [
        ["plan", "configs/quickstart.yaml", "model.path=Some/Model", "--gpus", "2"],
        ["train", "configs/quickstart.yaml", "--dry-run", "model.path=Some/Model", f"run.directory={tmp_path / 'run'}"],
        ["plan", "configs/quickstart.yaml", "model.path=Some/Model@v1", "--gpus", "2"],
        ["plan", "configs/quickstart.yaml", "model.path=Nobody/Nothing"],
        ["plan", "configs/quickstart.yaml", "model.path=Some/Model@v2"],
    ]
    results = answers(tmp_path, commands, HF_HUB_OFFLINE="1")
    assert results[:3] == [(0, "")] * 3
    assert (results[3][0], "HF_HUB_OFFLINE is set" in results[3][1]) == (2, True)
    assert results[4][0] == 2 and "run `hf download Some/Model --revision v2` with the same HF_HOME" in results[4][1]


def test_silent_hub_is_not_awaited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        with pytest.raises(ConfigError, match=f"and {endpoint} does not answer in 0.3 seconds .increase HF_HUB_ETAG"):
            hub.hub_folder("Some/Model")


def test_client_error_is_reported_as_the_cause(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The message `does not answer in N seconds` requires a wait of N seconds."""
    monkeypatch.setenv("ALL_PROXY", "socks4://me:hidden@127.0.0.1:1080")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://no.such.hub")
    utils.close_session()
    message = "does not hold it, and httpx cannot use the proxy ALL_PROXY=socks4://127.0.0.1"
    with pytest.raises(ConfigError, match=message) as caught:
        hub.hub_folder("Some/Model")
    utils.close_session()
    assert "does not answer" not in str(caught.value) and "hidden" not in str(caught.value)
    assert "Traceback" not in capfd.readouterr().err


class StandIn:
    """A client of the Hub with a fixed answer that records the timeouts."""

    def __init__(self, answer: Exception | None = None) -> None:
        self.answer, self.patience_seconds = answer, list[float]()

    def head(self, _endpoint: str, *, timeout: float) -> None:
        self.patience_seconds.append(timeout)
        if self.answer is not None:
            raise self.answer


def test_missing_files_extend_the_timeout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    silent = StandIn(hub.http_package().TimeoutException("no answer"))
    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: silent)
    monkeypatch.setattr(constants, "ENDPOINT", "http://silent")  # a process sends one request to each endpoint
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 77)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **_: str(MODEL if name == "S/M" else missing())
    )
    assert hub.hub_folder("S/M") == MODEL
    with pytest.raises(ConfigError, match="does not hold its weights, and http://silent does not answer in 77 s"):
        hub.hub_folder("S/M", weights=True)
    with pytest.raises(ConfigError, match="does not hold it, and http://silent does not answer in 77 s"):
        hub.hub_folder("S/N")
    assert silent.patience_seconds == [3.0, 77.0]  # one request each


def test_an_empty_revision_is_refused() -> None:
    assert hub.may_be_hub_name("Some/Model@v1") and not hub.may_be_hub_name("Some/Model@")
    with pytest.raises(ConfigError, match=r"model.path 'Some/Model@' has no revision after its @; add a"):
        hub.hub_folder("Some/Model@")


def missing() -> Path:
    raise FileNotFoundError


def test_snapshot_is_requested_once_without_subfolder_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[dict[str, Any]] = []

    def download(name: str, *, revision: str | None, local_files_only: bool = False, **patterns: list[str]) -> str:
        if not local_files_only:
            requests.append({"name": name, "revision": revision, **patterns})
        return str(MODEL)

    monkeypatch.setattr("huggingface_hub.utils.get_session", StandIn)
    monkeypatch.setattr(constants, "ENDPOINT", "http://answers")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    for key in ("model.path", "critic.path", "the model"):
        assert hub.hub_folder("Asked/Once", key=key, weights=True) == MODEL
    [patterns] = requests
    assert (patterns.pop("name"), patterns.pop("revision")) == ("Asked/Once", None)
    assert hub.hub_folder("Asked/Once@v1.0") == MODEL
    assert (requests[1]["name"], requests[1]["revision"]) == ("Asked/Once", "v1.0")
    files = [
        "config.json", "a.safetensors", "consolidated.safetensors", "consolidated-00001-of-00002.safetensors",
        "original/a.safetensors", "metal/b/c.safetensors", "original/tokenizer.model",
    ]  # fmt: skip
    assert list(filter_repo_objects(files, **patterns)) == ["config.json", "a.safetensors", "original/tokenizer.model"]
