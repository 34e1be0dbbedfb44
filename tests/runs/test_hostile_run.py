"""Runs in which all responses of the model are attacks. The runs continue, and the attacks have no effect."""

from __future__ import annotations

import json
import random
import string
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from tokenizers import decoders

from megappo.environments.tools.confinement import why_not
from megappo.rewards.unexecuted import SCORERS
from tests.support.data import character_tokenizer
from tests.support.harness import start
from tests.support.hostile import FORMS, SECRET, HostileTargets, hostile
from tests.support.models import write_model
from tests.support.places import BASE
from tests.support.rewards import serving
from tests.support.worlds import environment

reasoning_gym = pytest.importorskip("reasoning_gym")
pytest.importorskip("math_verify")

pytestmark = [pytest.mark.slow, pytest.mark.waits]

RESPONSES, TOKENS = 200, 700
END = "~"
CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}" + END + "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Judge(BaseHTTPRequestHandler):
    """A judge that returns the first message of the request as its answer. For every 90th request, the search with
    the pattern of the judge does not end, and a worker reaches its time limit."""

    count: ClassVar[list[int]] = []

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.count.append(1)
        content = "Score: " + (request["messages"][0]["content"] if len(self.count) % 90 else "a" * 80 + "!")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"message": {"content": content}}]}).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def model(tmp_path: Path) -> list[str]:
    """Return the settings of a model that can generate any ASCII text."""
    folder = tmp_path / "model"
    write_model(
        folder, "llama", 3, num_hidden_layers=2, max_position_embeddings=2 * TOKENS,
        eos_token_id=string.printable.index(END),
    )  # fmt: skip
    made = character_tokenizer(CHAT, string.printable)
    made.backend_tokenizer.decoder = decoders.Fuse()
    made.add_special_tokens({"eos_token": END, "pad_token": "\v"})
    made.save_pretrained(folder)
    return [
        f"model.path={folder}", f"model.tokenizer={folder}", "critic=null", "algorithm.estimator=grpo",
        "reference={}", "actor.optimizer.warmup_updates=0", "actor.microbatch_budget_tokens=4096",
        "data.max_prompt_tokens=600",
        f"rollout.max_response_tokens={TOKENS}", "rollout.prompts_per_step=25", "rollout.samples_per_prompt=8",
        "actor.minibatch_sequences=200", "runtime.device=cpu", "data.validation=null", "evaluation=null",
        "checkpoint=null", "logging.sample_texts=400", 
        "algorithm.mismatch_stop_nats=100", f"run.directory={tmp_path / 'run'}",
    ]  # fmt: skip


def _train(
    tmp_path: Path, texts_of_model: list[str], *overrides: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """Train with these responses and return the metrics, the samples and the output of the run."""
    texts, home = tmp_path / "texts.json", tmp_path / "home"
    texts.write_text(json.dumps(texts_of_model))
    home.mkdir()
    engine = ["rollout.engine=tests.support.hostile:HostileEngine", f"rollout.engine_options={{texts: {texts}}}"]
    done = start("megappo", "train", BASE, *overrides, *engine, environment=environment(HOME=str(home), A_KEY=SECRET))
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-4000:]
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            assert process.environ().get("HOME") != str(home), process.cmdline()
    assert {path.name for path in home.iterdir()} <= {".cache", ".config"}, "files of libraries only"
    records = [[json.loads(line) for line in (tmp_path / f"run/{n}.jsonl").open()] for n in ("metrics", "samples")]
    return records[0], records[1], printed


def test_run_continues_with_200_hostile_responses(model: list[str], tmp_path: Path) -> None:
    """The scorers are reasoning-gym tasks that parse responses as code, math-verify, a number and a judge."""
    touched = tmp_path / "touched"
    forms = [form.format(text[: TOKENS - 60]) for text in hostile(touched) for form in FORMS]
    responses = random.Random(5).sample(forms, RESPONSES) + ["24"] * RESPONSES
    tasks = [path.rsplit(".", 1)[1] for path in SCORERS["reasoning_gym"]]
    rows = []
    for number in range(25):
        options = {"seed": number, "size": 1}
        task = tasks[number % len(tasks)]
        entry = reasoning_gym.create_dataset(task, **options)[0]
        rows.append({"prompt": f"{number}?", "answer": "24", "task": task, "options": options, "entry": entry})
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))
    with serving(Judge) as url:
        judge = {"url": f"{url}/v1", "model": "m", "prompt": "{answer}", "pattern": r"Score: (?:a|aa)*(\d+)$"}
        functions = {name: {"function": name} for name in ("reasoning_gym", "math_verify", "number")}
        reward: dict[str, Any] = {"function": None, "functions": functions | {"judge": {"judge": judge}}, "workers": 2}
        reward |= {"timeout_seconds": 2.0, "max_failure_fraction": 1.0}
        metrics, samples, _ = _train(
            tmp_path, responses, *model, f"reward={json.dumps(reward)}", "run.steps=2",
            "data.apply_chat_template=false", f"data.train={{source: {tmp_path / 'data.jsonl'}}}",
        )  # fmt: skip
    assert not touched.exists()
    first, second = ([sample for sample in samples if sample["step"] == step] for step in (1, 2))
    assert len(first) == len(second) == RESPONSES
    failed = [sample for sample in first if "score_failure" in sample]
    assert failed and metrics[0]["reward/failures"] == pytest.approx(len(failed) / RESPONSES)
    assert any("pattern takes more than" in sample["score_failure"] for sample in failed)
    assert all(sample["score"] >= 2 for sample in second if "score_failure" not in sample)
    assert sum("score_failure" in sample for sample in second) <= RESPONSES / 5, (
        "only samples with the endless pattern fail"
    )
    assert [line["step"] for line in metrics] == [1, 2]


@pytest.mark.skipif(bool(why_not()), reason=f"this machine cannot confine programs: {why_not()}")
def test_run_continues_with_hostile_programs(model: list[str], tmp_path: Path) -> None:
    """The programs run in the `python` tool, which returns their results to the model."""
    (tmp_path / "neighbour").mkdir()
    victim = HostileTargets(tmp_path / "neighbour")
    try:
        calls = [{"name": "python", "arguments": {"code": code}} for code in victim.attacks()]
        responses = [f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls]
        (tmp_path / "data.jsonl").write_text("".join(f'{{"prompt": "{n}?", "answer": "24"}}\n' for n in range(25)))
        tools = {"name": "tools", "arguments": {"tools": ["python"]}, "tools": {"workers": 2}}
        metrics, samples, _ = _train(
            tmp_path, responses, *model, "run.steps=1", "reward.function=number", "rollout.samples_per_prompt=4",
            "actor.minibatch_sequences=100", f"rollout.environment={json.dumps(tools)}", 
            "data.apply_chat_template=true", f"data.train={{source: {tmp_path / 'data.jsonl'}}}",
        )  # fmt: skip
        assert victim.is_untouched()
        assert len(samples) == 100 and SECRET not in json.dumps(samples)
        assert metrics[0]["tool/python/calls"] > 0.9 and metrics[0]["reward/mean"] > 0.5
    finally:
        victim.process.kill()
        victim.process.wait()
        victim.server.close()
