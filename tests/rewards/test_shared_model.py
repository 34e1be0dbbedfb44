"""A frozen reward model in one process for all ranks, with the same scores as a copy on each rank, and restarts."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from megappo.cli import main
from megappo.config import Config, ConfigError, load_config
from megappo.config.sections.reward import MODEL_SERVER
from megappo.doctor.settings import settings_findings
from megappo.engines.sglang.client import Endpoint, ServerFailure, call
from megappo.errors import RunError
from megappo.plan.bytes.rewards import reward_parameters
from megappo.plan.hardware.machines import MACHINES
from megappo.plan.planner import make_plan, read_models
from megappo.rewards import model_server
from megappo.rewards.http import ScoreServer
from megappo.rewards.model import RewardModel, RewardTexts
from megappo.rewards.processes.workers import RewardError
from megappo.rewards.scorer import RewardScorer
from megappo.rewards.served.served_model import BATCH_SAMPLES, ServedRewardModel
from megappo.rewards.served.servers import OwnServers, start_reward_servers
from megappo.runtime.process import Runtime
from tests.support.data import ALPHABET
from tests.support.places import ROOT
from tests.support.rewards import LLAMA, rollouts, save, with_code

pytestmark = pytest.mark.waits

RUNTIME = Runtime(0, 1, 0, torch.device("cpu"))
TEMPLATE = "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}{% endfor %}"


@pytest.fixture(autouse=True)
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start a process group of one process. Check that no server remains."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # the proxy must not be used
    monkeypatch.chdir(ROOT)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
    assert not servers()


def servers() -> list[psutil.Process]:
    """Return the processes that serve a reward model for this process."""
    return [p for p in psutil.Process().children(recursive=True) if "megappo.rewards.model_server" in p.cmdline()[1:3]]


def judged(tmp_path: Path, server: dict[str, Any] | None, **changes: Any) -> Config:
    """Return the quickstart with a reward model, in a separate process if `server` is not None."""
    folder = tmp_path / "model"
    if not folder.exists():
        torch.manual_seed(0)
        save(folder, LlamaForSequenceClassification(LlamaConfig(**LLAMA, num_labels=1)), TEMPLATE)
    reward = {"function": "model", "model_path": str(folder), "model_server": server, **changes}
    return load_config("configs/quickstart.yaml", [f"run.directory={tmp_path / 'run'}", f"reward={json.dumps(reward)}"])


@pytest.mark.slow
def test_all_reward_models_use_the_time_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare a copy, a process of the run, and an external server, on another day than the start of the run."""
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(LlamaConfig(**LLAMA, num_labels=1))
    save(tmp_path / "model", model, "{{ strftime_now('%d%m%Y%H') }}" + TEMPLATE)
    samples, scores = rollouts("a", "bc"), []
    for time in ("2024-07-26 09:00:00", "2031-01-02 11:00:00"):
        own = judged(tmp_path, {"threads": 1})
        config = own.model_copy(update={"data": own.data.model_copy(update={"template_time": time})})
        assert config.reward.model_server is not None
        started = start_reward_servers(config, RUNTIME)
        scorer = RewardScorer(config.reward, RUNTIME.device, started, template_time=time)
        try:
            scores.append(RewardScorer(judged(tmp_path, None).reward, RUNTIME.device, template_time=time))
            expected = scores[-1].score_local(samples)
            torch.testing.assert_close(scorer.score_local(samples), expected, atol=1e-5, rtol=1e-5)
            monkeypatch.delenv("http_proxy", raising=False)
            monkeypatch.setenv("REWARD_KEY", started.clients[MODEL_SERVER].key)
            elsewhere = judged(
                tmp_path, None, model_remote={"url": started.clients[MODEL_SERVER].url, "key": "REWARD_KEY"}
            )
            remote = RewardScorer(elsewhere.reward, RUNTIME.device, template_time=time)
            torch.testing.assert_close(remote.score_local(samples), expected, atol=1e-5, rtol=1e-5)
        finally:
            scorer.close()
    first, second = (copy.score_local(samples) for copy in scores)
    assert (first - second).abs().max() > 1e-3


def status_of(url: str, key: str, length: str) -> int:
    """Return the status for a request that announces `length` bytes and sends none."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=20) as connection:
        lines = ["POST /classify HTTP/1.1", f"Authorization: Bearer {key}", f"Content-Length: {length}", "", ""]
        connection.sendall("\r\n".join(lines).encode())
        return int(connection.recv(1000).split()[1])


@pytest.mark.slow
def test_shared_scores_equal_a_copy_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check chats and texts of any length, concurrent batches, and requests of another run with token ids. A client
    without the key receives no information."""
    config = judged(tmp_path, {"threads": 1, "batch_tokens": 60})
    folder = config.reward.model_path
    assert folder is not None
    samples = rollouts(*("ab" * (7 * n % 25) + "c" for n in range(130)))
    copy = RewardScorer(judged(tmp_path, None).reward, RUNTIME.device)
    started = start_reward_servers(config, RUNTIME)
    scorer = RewardScorer(config.reward, RUNTIME.device, started)
    try:
        expected = copy.score_local(samples)
        assert len({round(score, 3) for score in expected.tolist()}) == 25
        torch.testing.assert_close(scorer.score_local(samples), expected, atol=1e-5, rtol=1e-5)
        (process,) = servers()
        texts, server = RewardTexts(folder), replace(started.clients[MODEL_SERVER], check=started.check)
        prompts, responses = [f"{n}+1=" for n in range(5)], ["a" * n for n in range(5)]
        own = RewardModel(folder, dtype=torch.float32, device=RUNTIME.device)
        for batch_samples in (1, 3, BATCH_SAMPLES):
            shared = ServedRewardModel(texts, server, batch_samples)
            actual = torch.tensor(shared.score(prompts, responses))
            torch.testing.assert_close(actual, own.score(prompts, responses), atol=1e-5, rtol=1e-5)
        assert shared.score([], []) == []
        unusable, usable = shared.score(["", "3+1="], ["", "4"])
        assert "have no token in the reward model" in str(unusable)
        assert usable == pytest.approx(float(own.score(["3+1="], ["4"])), abs=1e-5)
        monkeypatch.delenv("http_proxy")  # an external server may be behind a proxy
        monkeypatch.setenv("REWARD_KEY", started.clients[MODEL_SERVER].key)
        elsewhere = {"url": started.clients[MODEL_SERVER].url, "key": "REWARD_KEY"}
        remote = RewardScorer(judged(tmp_path, None, model_remote=elsewhere).reward, RUNTIME.device)
        torch.testing.assert_close(remote.score_local(samples), expected, atol=1e-5, rtol=1e-5)
        monkeypatch.setenv("REWARD_KEY", "guessed")
        with pytest.raises(RewardError, match=r"/classify: HTTP 401"):
            RewardScorer(judged(tmp_path, None, model_remote=elsewhere).reward, RUNTIME.device).score_local(samples)
        stranger = Endpoint(0, started.clients[MODEL_SERVER].url, "guessed", 0)
        with pytest.raises(ServerFailure, match=r"refused /classify \(401\)"):
            call(stranger, "/classify", {"input_ids": [1]}, timeout_seconds=5)
        for length in ("abc", "-1", str(2**40)):
            assert (status_of(server.url, "guessed", length), status_of(server.url, server.key, length)) == (401, 400)
        assert servers() == [process] and process.is_running()

        broken = Endpoint(0, server.url, server.key, 0)
        with pytest.raises(ServerFailure, match="cannot be reached for /classify"):
            call(broken, "/classify", {}, timeout_seconds=5)  # the request has no input_ids
        torch.testing.assert_close(scorer.score_local(samples), expected, atol=1e-5, rtol=1e-5)
        assert servers() != [process]
    finally:
        scorer.close()
        copy.close()
    log = tmp_path / "run" / "engines" / "reward-model.log"
    assert "missing 1 required positional argument: 'input_ids'" in log.read_text()
    output = capsys.readouterr()
    assert "reward model (http://127.0.0.1:" in output.err and "it is started again" in output.err
    assert server.key not in output.err + output.out + log.read_text()


@pytest.mark.slow
def test_shared_model_without_a_score_costs_its_sample(tmp_path: Path) -> None:
    """A copy on every rank has the same behavior."""
    config = judged(tmp_path, {"threads": 1}, failure_score=-7.0)
    folder = config.reward.model_path
    assert folder is not None
    model = LlamaForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        for letter, worth in (("x", math.nan), ("y", math.inf)):
            model.model.embed_tokens.weight[ALPHABET.index(letter)] = worth
    model.save_pretrained(folder)
    started = start_reward_servers(config, RUNTIME)
    scorer, failures = RewardScorer(config.reward, RUNTIME.device, started), dict[int, str]()
    try:
        scores_B, metrics = scorer.score(rollouts("a", "x", "c", "cy"), failures)
    finally:
        scorer.close()
    assert scores_B[[1, 3]].tolist() == [-7.0, -7.0] and scores_B[[0, 2]].isfinite().all()
    assert metrics["reward/failures"] == 0.5
    assert set(failures) == {1, 3} and all("reward model gave nan, must be finite" in f for f in failures.values())


@pytest.mark.slow
@pytest.mark.parametrize("holder", ["own", "shared", "remote"])
def test_remote_code_requires_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: str) -> None:
    """Check code in the configuration, the tokenizer and the model, for each way to run the model."""
    for variable in ("HF_MODULES_CACHE", "HF_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / "cache"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    plain = judged(tmp_path, None)
    expected = RewardScorer(plain.reward, RUNTIME.device).score_local(samples := rollouts("a", "bc"))
    with_code(tmp_path / "model")
    server = {"threads": 1} if holder == "shared" else None
    remote = {"model_remote": {"url": "http://rewards:80"}} if holder == "remote" else {}
    config = judged(tmp_path, server, **remote)
    trusting = config.model_copy(update={"model": config.model.model_copy(update={"trust_remote_code": True})})

    def started(configuration: Config) -> OwnServers | None:
        settings = configuration.reward.model_server
        return None if settings is None else start_reward_servers(configuration, RUNTIME)

    with pytest.raises(ValueError, match=r"cannot be loaded .*trust_remote_code"):
        RewardScorer(config.reward, RUNTIME.device, started(config))
    (finding,) = [f for f in settings_findings(config, read_models(config, None).models, 2) if f.check == "reward"]
    assert finding.state == "broken" and "trust_remote_code" in finding.remedy
    scorer = RewardScorer(trusting.reward, RUNTIME.device, started(trusting), trust_remote_code=True)
    try:
        if holder != "remote":
            torch.testing.assert_close(scorer.score_local(samples), expected, atol=1e-5, rtol=1e-5)
    finally:
        scorer.close()
    (finding,) = [f for f in settings_findings(trusting, read_models(config, None).models, 2) if f.check == "reward"]
    assert finding.state == "fine"
    reward = f"reward={json.dumps(trusting.reward.model_dump(exclude_defaults=True))}"
    for trust, code in (("true", 0), ("false", 2)):
        overrides = ["--dry-run", reward, f"model.trust_remote_code={trust}", f"run.directory={tmp_path / 'run'}"]
        assert main(["train", "configs/quickstart.yaml", *overrides]) == code


def test_failing_external_server_costs_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary failures are retried. An answer that is no valid score is reported, and its numbers are not used."""
    monkeypatch.delenv("http_proxy")  # an external server may be behind a proxy
    answers = [(503, b"busy"), (200, b'{"embedding": [0.5], "meta_info": {}}'), (200, b'{"embedding": [0.5, 1.0]}')]
    numbers = [b"NaN", b"-Infinity", b"1e39", b"1" + b"0" * 400]
    answers += [(200, b'{"embedding": [' + number + b"]}") for number in numbers]
    answers += [(400, b'{"error": "too long"}')]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input_ids"]
            status, body = answers.pop(0)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    remote = {"url": f"http://127.0.0.1:{server.server_port}/", "concurrency": 1}
    config = judged(tmp_path, None, model_remote=remote, failure_score=-7.0)
    scorer, failures = RewardScorer(config.reward, RUNTIME.device), dict[int, str]()
    scores = scorer.score_local(rollouts(*["2"] * 7), failures).tolist()
    server.shutdown()
    assert scores == [0.5, *[-7.0] * 6] and not answers
    messages = ["must have a number as embedding", *["the reward model gave"] * 4, "HTTP 400"]
    assert all(message in failures[i] for i, message in enumerate(messages, 1))


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"function": "exact", "model_path": None}, "model_remote needs the tokenizer of model_path, which is"),
        ({"model_server": {}}, "model_server and model_remote are both given"),
        ({"model_remote": {"url": "rewards:80"}}, "url is 'rewards:80', must look like http://HOST:PORT"),
        ({"model_remote": {"url": "http://rewards", "key": "my-key"}}, "key is not a name of an environment variable"),
    ],
)
def test_invalid_external_models_are_refused(tmp_path: Path, reward: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        judged(tmp_path, None, **{"model_remote": {"url": "http://rewards:80"}, **reward})


def test_key_of_an_external_model_is_in_its_variable(tmp_path: Path) -> None:
    config = judged(tmp_path, None, model_remote={"url": "http://rewards:80", "key": "NO_SUCH_KEY"})
    with pytest.raises(ValueError, match="reward model's key is to be in the environment variable NO_SUCH_KEY"):
        RewardScorer(config.reward, RUNTIME.device)
    (finding,) = [f for f in settings_findings(config, read_models(config, None).models, 2) if f.check == "reward"]
    assert "which the server at http://rewards:80 has loaded" in finding.text


def test_absent_server_is_awaited_until_the_timeout(tmp_path: Path) -> None:
    """The wait ends after the timeouts of start and answer, or when the supervisor has given up the server."""
    folder, reasons = judged(tmp_path, None).reward.model_path, list[str]()
    assert folder is not None

    def check() -> None:
        if reasons:
            raise RunError(reasons[0])

    server = ScoreServer("http://127.0.0.1:9", 0.5, 1, "key", starting_seconds=0.5, check=check)
    absent = ServedRewardModel(RewardTexts(folder), server)
    (failure,) = absent.score(["a"], ["b"])
    assert "http://127.0.0.1:9/classify: " in str(failure) and "Connection refused, after" in str(failure)
    reasons.append("given up")
    with pytest.raises(RunError, match="given up"):
        absent.score(["a"], ["b"])


def test_loading_errors_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is immediate if the configuration of the folder shows the mistake, or else the end of the log of the
    process."""
    config = judged(tmp_path, {})
    assert config.reward.model_server is not None
    content = json.loads((tmp_path / "model" / "config.json").read_text())
    labels = {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(content | labels))
    with pytest.raises(ValueError, match=r"has 3 labels, must have 1"):
        start_reward_servers(config, RUNTIME)
    (finding,) = [f for f in settings_findings(config, read_models(config, None).models, 2) if f.check == "reward"]
    assert finding.state == "broken" and "has 3 labels, must have 1" in finding.text
    (tmp_path / "model" / "config.json").write_text(json.dumps(content))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"garbage")
    reward_parameters.cache_clear()  # the cache has the previous content of the file
    with pytest.raises(
        ConfigError, match=r"model.safetensors of a reward model is not a complete safetensors file .*; "
    ):
        make_plan(config, read_models(config, None).models, MACHINES["cpu"], 2)
    arguments = {"model-path": str(tmp_path / "model"), "dtype": "float32", "device": "cpu", "batch-tokens": 9}
    (tmp_path / "given.json").write_text(json.dumps(arguments))
    monkeypatch.setattr("sys.argv", ["model_server", "--config", str(tmp_path / "given.json")])
    assert model_server.main() == 1
    assert "cannot be loaded" in capsys.readouterr().err


def test_plan_doctor_and_dry_run_include_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A separate GPU has one copy. On a CPU, every rank has a share of the copy."""
    config, models = judged(tmp_path, {}), read_models(judged(tmp_path, {}), None).models
    weights = sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    on_gpus = make_plan(config, models, MACHINES["h100"], 2)
    (server,) = on_gpus.reward_servers
    assert (server.name, server.ranks, server.kv_cache) == ("reward model", 1, 0.0)
    assert server.weights == pytest.approx(weights / 2, rel=0.2)  # bfloat16; files have a header
    assert on_gpus.fullest.reward == 0
    on_cpu = make_plan(config, models, MACHINES["cpu"], 2)
    assert on_cpu.reward_servers == () and on_cpu.fullest.reward == pytest.approx(server.weights)
    copies = make_plan(judged(tmp_path, None), models, MACHINES["cpu"], 2)
    assert copies.fullest.reward == pytest.approx(2 * server.weights)
    elsewhere = judged(tmp_path, None, model_remote={"url": "http://rewards:80"})
    assert make_plan(elsewhere, models, MACHINES["cpu"], 2).fullest.reward == 0
    findings = settings_findings(config, models, 2)
    assert "which one process on machine 0 for all ranks loads" in next(f.text for f in findings if f.check == "reward")
    reward = f"reward={json.dumps(config.reward.model_dump(exclude_defaults=True))}"
    assert main(["train", "configs/quickstart.yaml", "--dry-run", reward]) == 0
    assert "weights, which one process on machine 0 for all ranks loads" in " ".join(capsys.readouterr().out.split())


def test_model_server_needs_a_model() -> None:
    with pytest.raises(ConfigError, match="model_server needs the model of model_path, which is null"):
        load_config("configs/quickstart.yaml", ["reward.model_server={}"])
