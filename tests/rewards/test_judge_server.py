"""Servers that a run starts for a judge, with a replacement for SGLang: devices, arguments, and restarts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megappo.cli import main
from megappo.config import Config, ConfigError, derive, load_config
from megappo.config.sections.reward import reward_rules
from megappo.doctor import software
from megappo.doctor.software import generation_finding
from megappo.errors import RunError
from megappo.plan.hardware.machines import MACHINES
from megappo.plan.planner import make_plan, read_models
from megappo.rewards.scorer import RewardScorer
from megappo.rewards.served.servers import own_gpus, start_reward_servers
from megappo.runtime.process import Runtime
from tests.support import worlds
from tests.support.places import ROOT
from tests.support.rewards import rollouts

RUNTIME = Runtime(0, 1, 0, torch.device("cpu"))
FAKE = """
import http.server, json, os, sys
from pathlib import Path
arguments = json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
seen = Path(os.environ["FAKE"])
(seen / f"{os.getpid()}.json").write_text(json.dumps(arguments))
if (seen / "fails").exists():
    sys.exit("out of memory")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self, content=None):
        content = content or json.dumps({"extra_metric_labels": json.loads(arguments["extra-metric-labels"])}).encode()
        right = self.headers.get("Authorization") == f"Bearer {arguments['api-key']}"
        self.send_response(200 if right else 401)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            return self.do_GET()
        if "die" in asked["prompt"] and not (seen / "died").exists():
            (seen / "died").touch()
            if "for ever" in asked["prompt"]:
                (seen / "fails").touch()
            os._exit(1)
        self.do_GET(json.dumps({"choices": [{"text": f"Score: {len(asked['prompt'])}"}]}).encode())
http.server.ThreadingHTTPServer((arguments["host"], arguments["port"]), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start a process group of one process with the replacement for SGLang. Check that no server remains."""
    path = worlds.fake_package(tmp_path / "packages", "sglang", "0.5.23")
    (tmp_path / "packages" / "sglang" / "launch_server.py").write_text(FAKE)
    (tmp_path / "seen").mkdir()
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("FAKE", str(tmp_path / "seen"))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # the proxy must not be used
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.chdir(ROOT)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
    started = [int(path.stem) for path in (tmp_path / "seen").glob("*.json")]
    assert not any(psutil.pid_exists(pid) for pid in started)


def judged(folder: Path, server: dict[str, Any] | None = None, *overrides: str, **changes: Any) -> Config:
    """Return the quickstart with a judge and a separate server."""
    judge = {
        "server": server or {},
        "model": str(worlds.TINY),
        "chat": False,
        "prompt": "{answer}",
        "timeout_seconds": 10,
    }
    judge |= {"pattern": r"Score: (\d+)", **changes}
    reward: dict[str, Any] = {"functions": {"right": {"function": "exact"}, "taste": {"judge": judge, "weight": 2.0}}}
    reward["max_failure_fraction"] = 0.0  # the error then contains the reason
    return load_config(
        "configs/quickstart.yaml", [f"run.directory={folder}", f"reward={json.dumps(reward)}", *overrides]
    )


def scored(config: Config, *responses: str) -> list[float]:
    scorer = RewardScorer(config.reward, RUNTIME.device, start_reward_servers(config, RUNTIME))
    try:
        scores_B, metrics = scorer.score(rollouts(*responses))
        assert metrics["reward/failures"] == 0.0
    finally:
        scorer.close()
    scores: list[float] = scores_B.tolist()
    return scores


@pytest.mark.parametrize("name", ["host", "--port", "config", "model_path"])
def test_judge_server_arguments_of_the_run_are_refused(tmp_path: Path, name: str) -> None:
    config = judged(tmp_path / "run", {"arguments": {name: "x"}})
    (problem, *_) = reward_rules(config.reward)
    assert f"server.arguments has {name}, which a run decides for its own servers; remove it" in problem


@pytest.mark.waits
def test_judge_with_its_own_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The server ends during a request. The next server at the same address receives the open requests."""
    answers = [f"answer {n}" for n in range(20)]
    config = judged(tmp_path / "run", {"threads": 1, "arguments": {"context-length": 64}})
    assert scored(config, *answers, "die") == [2.0 * len(answer) for answer in [*answers, "die"]]
    first, second = [json.loads(path.read_text()) for path in (tmp_path / "seen").glob("*.json")]
    assert first.pop("extra-metric-labels") != second.pop("extra-metric-labels"), "the label of each start"
    assert first == second
    assert (first["model-path"], first["dtype"], first["host"]) == (str(worlds.TINY), "float32", "127.0.0.1")
    assert first["context-length"] == 64 and first["max-total-tokens"] == 65536
    assert not {"load-format", "skip-tokenizer-init", "json-model-override-args"} & first.keys()
    output = capsys.readouterr()
    assert "judge taste (http://127.0.0.1:" in output.err and "it is started again" in output.err
    assert first["api-key"] not in output.err + output.out
    assert (tmp_path / "run" / "engines" / "judge-taste.log").exists()


@pytest.mark.waits
def test_failing_restarts_of_a_judge_end_the_run(tmp_path: Path) -> None:
    """The run ends soon with the output of the server, despite a long request timeout. The first server may have ended
    before it was ready."""
    sentence = (
        r"a judge's server cannot be kept running: judge taste .* ended during its start; .*out of memory; "
        r"the server was started [23] times \(reward.functions.taste.judge.server.max_restarts 5\)"
    )
    with pytest.raises(RunError, match=f"(?s){sentence}"):
        scored(judged(tmp_path / "run", timeout_seconds=300.0), "fine", "die for ever")


def test_machine_of_a_judge_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"judge.server.machine is 3, must be below 1 "):
        start_reward_servers(judged(tmp_path / "run", {"machine": 3}), RUNTIME)


@pytest.mark.parametrize(
    ("server", "overrides", "outcome"),
    [
        ({}, (), (4,)),
        ({"first_device": 6, "tensor_parallel": 2}, (), (6, 7)),
        ({"tensor_parallel": 8}, (), "GPUs 4 to 11, but a rank sees 8 GPUs; start fewer ranks, or set first_device"),
        ({"first_device": 3}, (), "GPUs 3 to 3, but 4 ranks train there; set first_device to 4 or more"),
        ({}, ("rollout.servers={placement: disaggregated, count: 2}",),
         "but rollout servers use 4 to 5; set first_device to 6"),
    ],
)  # fmt: skip
def test_gpus_of_a_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: dict[str, Any], overrides: tuple[str, ...], outcome: Any
) -> None:
    """The machine has eight GPUs, and four ranks."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    config = judged(tmp_path, server, *overrides)
    own = config.reward.judges["taste"].server
    assert own is not None
    if isinstance(outcome, tuple):
        assert own_gpus(config, own, "taste", local_ranks=4) == outcome
    else:
        with pytest.raises(RunError, match=outcome):
            own_gpus(config, own, "taste", local_ranks=4)


def test_plan_includes_the_judge(tmp_path: Path) -> None:
    """On GPUs, the judge has separate devices. On a CPU, every rank has a share of the judge."""
    folder = worlds.pretrained(tmp_path / "judge")
    config = judged(tmp_path / "run", {"tensor_parallel": 2, "max_total_tokens": 1000}, model=str(folder))
    models = read_models(config, None).models
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    on_gpus = make_plan(config, models, MACHINES["h100"], 2)
    (judge,) = on_gpus.reward_servers
    assert (judge.name, judge.ranks, judge.total) == (
        "judge taste",
        2,
        pytest.approx(0.85 * MACHINES["h100"].memory_bytes),
    )
    assert judge.weights == pytest.approx(weights / 4, rel=0.05)  # bfloat16, on two ranks
    assert on_gpus.fullest.reward == 0
    on_cpu = make_plan(config, models, MACHINES["cpu"], 2)
    cache = 2 * 4 * 1000 * 2 * 1 * 16  # keys and values, float32, tokens, layers, one of two heads, its width
    assert on_cpu.reward_servers == () and on_cpu.fullest.reward == pytest.approx(weights / 2 + cache, rel=0.05)
    with pytest.raises(
        ConfigError, match=r"judge.server.memory_fraction 1e-08 gives the server .* weights take .* raise"
    ):
        make_plan(judged(tmp_path, {"memory_fraction": 1e-8}, model=str(folder)), models, MACHINES["h100"], 2)


def test_dry_run_and_doctor_check_the_judge_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No server is started. SGLang is required although another engine generates."""
    config = judged(tmp_path / "run")
    reward = f"reward={json.dumps(config.reward.model_dump(exclude_defaults=True))}"
    arguments = ["train", "configs/quickstart.yaml", "--dry-run", reward]
    assert main(arguments) == 0
    assert f"a judge, {worlds.TINY}, on a server that the run starts" in capsys.readouterr().out
    assert generation_finding(config).state == "fine"
    monkeypatch.setattr(software, "installed_version", lambda _name: None)
    finding = generation_finding(config)
    assert (finding.state, finding.text) == ("broken", "the server of a judge is SGLang, which is not installed")
    assert "set a url for the judge" in finding.remedy


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "nowhere"}, "reward.functions.taste.judge.model 'nowhere' is not a folder with a model"),
        ({"chat": True}, "has no chat template; set chat to false"),
        ({"prompt": None, "prompt_file": "nowhere"}, "judge.prompt_file 'nowhere' cannot be read (No such file"),
    ],
)
def test_missing_files_of_judges_are_reported(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    config = judged(tmp_path, **changes)
    with pytest.raises(ConfigError) as refused:
        derive(config, 2, read_models(config, None).models.actor)
    assert [sentence in problem for problem in refused.value.problems] == [True]
