"""Exports have a model card with the metrics of the run, and can be uploaded."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants

from megappo import api
from megappo.checkpoint.exports.card import model_card, write_card
from megappo.checkpoint.exports.publishing import check_hub
from megappo.config import ConfigError, load_config
from megappo.models.hub import silence
from tests.support.checkpoints import one_step_run
from tests.support.places import QUICKSTART

pytestmark = pytest.mark.waits

NAME, COMMIT = "some-team/some-model", "0123456789abcdef"
METRICS = [
    {"step": 0, "eval/reward_mean": 0.125},
    *({"step": n, "reward/mean": n / 10, "response/length": 3.0, "kl/mean": float("nan")} for n in range(1, 9)),
    {"step": 9, "reward/mean": 0.9, "eval/reward_mean": 0.75},
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run with a checkpoint of step 1."""
    directory = one_step_run(tmp_path_factory.mktemp("published")) / "run"
    lines = [{"step": 1, "reward/mean": 0.25, "eval/reward_mean": 0.5}, {"step": 2, "reward/mean": 0.75}]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def test_card_has_the_metrics_of_the_last_steps() -> None:
    config = load_config(QUICKSTART)
    text = model_card(config, METRICS, role="actor", step=9)
    card = ModelCard(text)
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "tags": ["megappo", "reinforcement-learning", "gae", "actor"],
        "pipeline_tag": "text-generation",
    }
    assert "| `reward/mean` | 0.7 |" in text, "the mean of steps 5 to 9"
    assert "| `response/length` | 3 |" in text and "kl/mean" not in text
    assert "| `eval/reward_mean` at step 9 | 0.75 |" in text and "0.125" not in text
    assert "random weights for `configs/models/tiny_arithmetic`" in text
    assert "learning rate 0.001, linear" in text and "learning rate 0.002" in text
    assert "## Results" not in model_card(config, [], role="actor", step=0)


def test_card_names_the_base_model() -> None:
    begun = ("model.init=pretrained", "model.path=Some/Model@v1", "model.tokenizer=configs/models/tiny_arithmetic")
    config = load_config(QUICKSTART, [*begun, "critic.path=Some/Critic"])
    assert ModelCard(model_card(config, [], role="actor", step=1)).data.base_model == "Some/Model"
    card = ModelCard(model_card(config, [], role="critic", step=1))
    assert card.data.base_model == "Some/Critic" and "pipeline_tag" not in card.data.to_dict()
    adapters = ModelCard(model_card(config, [], role="actor", step=1, adapters=True))
    assert adapters.data.library_name == "peft" and "AutoPeftModelForCausalLM" in adapters.text


def test_names_in_a_card_are_escaped() -> None:
    name = "a <script>|[link](http://x)\n---\nlicense: mit"
    config = load_config(QUICKSTART).model_copy(
        update={"run": load_config(QUICKSTART).run.model_copy(update={"name": name})}
    )
    text = model_card(config, [], role="actor", step=1)
    assert ModelCard(text).data.license is None and text.count("\n---\n") == 1
    assert r"a \<script\>\|\[link\]\(http://x\)" in text and "\n---\nlicense" not in text


@pytest.mark.parametrize("written", ["{\n", "[1]\n", '{"step": "x"}\n'])
def test_card_without_metrics_has_a_note(tmp_path: Path, written: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(written)
    (note,) = write_card(tmp_path, load_config(QUICKSTART), tmp_path, role="actor", step=1)
    assert note.startswith("the model card has no results: ") and "metrics.jsonl" in note
    assert "## Training" in (tmp_path / "README.md").read_text()


def test_export_has_the_card_of_its_step(run: Path, tmp_path: Path) -> None:
    api.export(run, tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "actor after step 1" in text and "| `reward/mean` | 0.25 |" in text
    api.export(run, tmp_path / "megatron", form="torch_dist")
    assert not (tmp_path / "megatron" / "README.md").exists()


class Hub(ThreadingHTTPServer):
    """A server that answers the client of huggingface_hub as the Hub does, and stores the received files."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.keys: set[str | None] = set()
        self.refuses = False


class Handler(BaseHTTPRequestHandler):
    """The three requests of an upload of files that are small enough for the commit itself."""

    server: Hub

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.keys.add(self.headers["Authorization"])
        if self.server.refuses:
            self._answer({"error": "Storage is full"}, code=403)
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(sent))
            self._answer({"url": f"{self.server.address}/{NAME}", "name": NAME})
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif self.path == f"/api/models/{NAME}/preupload/main":
            paths = [file["path"] for file in json.loads(sent)["files"]]
            self._answer({"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]})
        elif self.path.startswith(f"/api/models/{NAME}/commit/main"):
            for line in map(json.loads, sent.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._answer(
                {
                    "success": True,
                    "commitOid": "0123456789abcdef",
                    "commitUrl": f"{self.server.address}/{NAME}/commit/0123456789abcdef",
                }
            )
        else:
            self._answer({"error": self.path}, code=404)

    def _answer(self, content: object, code: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy", "https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
        silence.cache_clear()
        yield server
        server.shutdown()


@pytest.mark.parametrize("public", [False, True])
def test_export_is_uploaded_unchanged(hub: Hub, run: Path, tmp_path: Path, public: bool) -> None:
    notes = api.export(run, tmp_path / "out", push_to_hub=NAME, public=public)
    assert notes[-1] == f"uploaded to {NAME}, commit {COMMIT[:12]}"
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert hub.files == written and {"README.md", "model.safetensors", "tokenizer.json"} <= written.keys()
    (created,) = hub.created
    visibility = "public" if public else "private"
    assert [created[key] for key in ("organization", "name", "visibility")] == [*NAME.split("/"), visibility], created
    assert hub.keys == {"Bearer hf_of_nobody"}


def test_failed_upload_leaves_the_export(hub: Hub, run: Path, tmp_path: Path, errors_of: Callable[..., str]) -> None:
    hub.refuses = True
    output = errors_of("export", run, tmp_path / "out", "--push-to-hub", NAME)
    assert (
        f"{tmp_path / 'out'} is written, but could not be uploaded to {NAME}" in output and "Storage is full" in output
    )
    assert f"hf upload {NAME} {tmp_path / 'out'}" in output and output.count("\n") == 1
    assert (tmp_path / "out" / "model.safetensors").exists() and not hub.files


def test_invalid_uploads_are_refused_before_the_export(
    hub: Hub, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="'../elsewhere', must be OWNER/NAME"):
        api.export(run, out, push_to_hub="../elsewhere")
    with pytest.raises(ConfigError, match="torch_dist is not such a format"):
        api.export(run, out, push_to_hub=NAME, form="torch_dist")
    with pytest.raises(ConfigError, match="public requires push_to_hub"):
        api.export(run, out, public=True)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError, match="no user is logged in to http://127.0.0.1"):
        api.export(run, out, push_to_hub=NAME)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=f"127.0.0.1:9 cannot be reached .* hf upload {NAME} OUT"):
        check_hub(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set; export without --push"):
        check_hub(NAME)
    assert not out.exists() and not hub.created
