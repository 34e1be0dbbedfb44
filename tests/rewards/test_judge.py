"""Judges: their requests, the reading of their texts, and the cost of failing servers."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from megappo.checkpoint.changes import compare_settings
from megappo.cli import main
from megappo.config import ConfigError, load_config
from megappo.config.schema import RewardSettings
from megappo.config.sections.judge import JudgeSettings
from megappo.doctor.judges import judge_findings
from megappo.rewards.judge import JudgeText, Noted, Reading
from megappo.rewards.scorer import RewardScorer
from tests.support.places import BASE, ROOT
from tests.support.rewards import rollouts, serving

pytestmark = pytest.mark.waits

CPU = torch.device("cpu")
PROMPT = 'Q: {question}\nA: {answer}\nR: {reference}\n{"json": {{answer}}}'
KEY = "MEGAPPO_TEST_JUDGE_KEY"


@pytest.fixture(autouse=True)
def world(tmp_path: Path) -> Iterator[None]:
    """Start a process group of one process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Judge(BaseHTTPRequestHandler):
    """A judge whose behavior is determined by the answer in the prompt."""

    requests: ClassVar[list[dict[str, Any]]] = []
    keys: ClassVar[list[str | None]] = []
    together, most_together, expected_together = 0, 0, 0
    gate = threading.Event()
    lock = threading.Lock()
    ended = threading.Event()

    def do_GET(self) -> None:
        Judge.keys.append(self.headers["Authorization"])
        self.send_response({"/v1/models": 200, "/key/models": 401}.get(self.path, 404))
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "m"}, {"id": "n"}]}')

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = request["messages"][0]["content"] if "messages" in request else request["prompt"]
        behavior = re.findall(r"A: (.*)", prompt)[0]
        with self.lock:
            tries = sum(a == request for a in self.requests)
            self.requests.append(request)
            self.keys.append(self.headers["Authorization"])
            Judge.together += 1
            Judge.most_together = max(self.together, self.most_together)
            if self.together >= self.expected_together:
                self.gate.set()
        try:
            self.respond(behavior, tries)
        finally:
            with self.lock:
                Judge.together -= 1

    def respond(self, behavior: str, tries: int) -> None:
        code, text = 200, f"I thought of Score: 1, and then Score: {behavior}"
        if behavior == "slow":
            self.ended.wait(20)
        elif behavior.startswith("wait"):
            self.gate.wait(20)
        if behavior == "refused" or (behavior == "busy" and tries < 2) or behavior == "always busy":
            code = 400 if behavior == "refused" else 429
        if behavior == "closed" or (behavior == "closed once" and not tries):
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        answers: dict[str, Any] = {"no json": "<html>", "no choices": {"choices": []}, "empty": None}
        spoken = {
            "busy": "Score: 3",
            "closed once": "Score: 2",
            "wait": "Score: 5",
            "cut": "Score: 4",
            "silent once": "Score: 0",
        }
        content = spoken.get(behavior.split(" of ")[0], text)
        if behavior == "empty":
            content = answers.pop("empty")
        chat = self.path == "/v1/chat/completions"
        answer = answers.get(behavior, {"choices": [{"message": {"content": content}} if chat else {"text": content}]})
        body = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(code)
        if behavior == "cut" and not tries:  # the body is shorter than announced
            self.send_header("Content-Length", str(len(body) + 100))
        self.end_headers()
        self.wfile.write(b"" if behavior == "silent once" and not tries else body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Judge.requests, Judge.keys, Judge.ended = [], [], threading.Event()
    Judge.together = Judge.most_together = 0
    with serving(Judge) as url:
        yield f"{url}/v1"
        Judge.ended.set()


def judge(url: str, **changes: Any) -> dict[str, Any]:
    defaults = {"url": url, "model": "m", "prompt": PROMPT, "pattern": r"Score: (\S+)", "scale": [0, 5]}
    return defaults | {"unreadable": -0.5, "timeout_seconds": 4.0, "retries": 4} | changes


def scored(settings: dict[str, Any], *responses: str) -> tuple[list[float], dict[str, float]]:
    scorer = RewardScorer(RewardSettings.model_validate({"failure_score": -9.0, **settings}), CPU)
    try:
        scores_B, metrics = scorer.score(rollouts(*responses))
    finally:
        scorer.close()
    return scores_B.tolist(), dict(metrics)


def test_requests_of_a_judge(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fields of the prompt are inserted once. Braces in an answer are not changed."""
    monkeypatch.setenv(KEY, "a secret")
    settings = {"judge": judge(server, key=KEY, temperature=0.5, max_tokens=7)}
    assert scored(settings, "2.5", "{reference}")[0] == [0.5, -0.5]
    prompts = {answer: f'Q: 1+1=\nA: {answer}\nR: 2\n{{"json": {{answer}}}}' for answer in ("2.5", "{reference}")}
    fields = {"model": "m", "temperature": 0.5, "max_tokens": 7}
    requests = sorted(Judge.requests, key=lambda a: str(a["messages"]))
    assert requests == [
        {**fields, "messages": [{"role": "user", "content": prompts[a]}]} for a in ("2.5", "{reference}")
    ]
    assert set(Judge.keys) == {"Bearer a secret"}
    Judge.requests.clear()
    assert scored({"judge": judge(server, chat=False)}, "5")[0] == [1.0]
    assert [a["prompt"] for a in Judge.requests] == ['Q: 1+1=\nA: 5\nR: 2\n{"json": {answer}}']
    assert Judge.keys[-1] is None


def test_failures_cost_only_their_own_sample(server: str) -> None:
    """Temporary failures are retried, and refusals are not. An unreadable text is not a failure."""
    responses = [
        "2.5",
        "busy",
        "closed once",
        "cut",
        "slow",
        "refused",
        "always busy",
        "closed",
        "no json",
        "no choices",
    ]
    responses += ["empty", "six", "6", "nan", "-1", "silent once"]
    scores, metrics = scored({"judge": judge(server), "max_failure_fraction": 1.0}, *responses)
    assert scores == pytest.approx([0.5, 0.6, 0.4, 0.8, *[-9.0] * 6, *[-0.5] * 5, 0.0])
    seconds = metrics.pop("reward/judge/seconds")
    assert 4 <= seconds < 9  # the time of the slow request
    assert metrics == {"reward/failures": 6 / 16, "reward/timeouts": 0.0, "reward/judge/unreadable": 5 / 16}
    tries = {
        answer: sum(f"A: {answer}\n" in str(a["messages"][0]["content"]) for a in Judge.requests)
        for answer in responses
    }
    many = {"busy": 3, "closed once": 2, "cut": 2, "silent once": 2, "always busy": 5, "closed": 5}
    assert tries == dict.fromkeys(responses, 1) | many


@pytest.mark.parametrize(("concurrency", "together"), [(256, 200), (3, 3)])
def test_many_requests_are_concurrent(server: str, concurrency: int, together: int) -> None:
    """The server answers only after this number of requests has arrived."""
    Judge.expected_together, Judge.gate = together, threading.Event()
    settings = judge(server, timeout_seconds=30.0, concurrency=concurrency)
    scores, _ = scored({"judge": settings}, *[f"wait of {n}" for n in range(300)])
    assert scores == [1.0] * 300
    assert together <= Judge.most_together <= concurrency


def test_judge_among_other_functions(server: str) -> None:
    judge_settings = judge(server, pattern=None, scale=None, choices={"5": 1.0, "1": 0.0, "Score": -1.0})
    settings = {"functions": {"right": {"function": "exact"}, "taste": {"judge": judge_settings, "weight": 0.5}}}
    scores, metrics = scored(settings, "2", "5", "1")
    assert scores == [1.0 - 0.5, 0.5, 0.0]
    assert metrics.pop("reward/taste/seconds") < 5
    assert metrics == pytest.approx({"reward/failures": 0.0, "reward/timeouts": 0.0, "reward/right": 1 / 3,
                                     "reward/taste": 0.0, "reward/taste/unreadable": 0.0})  # fmt: skip


@pytest.mark.parametrize(
    ("reading", "text", "score"),
    [
        (Reading(r"(\d+)/10", (0, 10), {}, 0.0), "3/10, no: 7/10", 0.7),
        (Reading(r"x=(\S+)", None, {}, 0.0), "x=-1e3", -1000.0),
        (Reading(r"\[\[(\d)?\]\]", None, {}, 0.0), "[[4]] or [[]]", 4.0),
        (Reading(None, None, {"A": 1.0, "B": 0.0, "A+": 2.0}, 0.5), "B? No, A+.", 2.0),
        (Reading(None, None, {"yes": 1.0, "no": 0.0}, 0.5), "no, yes and yesterday", 1.0),
    ],
)
def test_last_verdict_counts(reading: Reading, text: str, score: float) -> None:
    result = reading.score(JudgeText(text))
    assert result == score and not isinstance(result, Noted)


@pytest.mark.parametrize("text", ["", "yesterday", "Yes"])
def test_text_without_verdict_is_unreadable(text: str) -> None:
    score = Reading(None, None, {"yes": 1.0, "no": 0.0}, 0.5).score(JudgeText(text))
    assert score == 0.5 and isinstance(score, Noted) and score.note


GRADE = Reading(r"Score: (\d+)", (1, 10), {}, -1.0)
RIGHT = Reading(None, None, {"Right": 1.0, "Wrong": 0.0}, -1.0)


@pytest.mark.parametrize(
    ("reading", "text", "score"),
    [
        (GRADE, "<think>I would say Score: 9, but</think>Score: 4", 1 / 3),
        (GRADE, "I would say Score: 9, but</think>\n\nScore: 4", 1 / 3),
        (GRADE, "<think>a</think> Score: 9 <think> of the student </think> Score: 1", 0.0),
        (GRADE, '<think effort="high">Score: 9</think>Score: 4', 1 / 3),
        (RIGHT, "[THINK]Right?[/THINK]Wrong", 0.0),
        (RIGHT, "<seed:think>Right?</seed:think>Wrong", 0.0),
        (RIGHT, "<|channel|>analysis<|message|>Right?<|end|><|start|>assistant<|channel|>final<|message|>Wrong", 0.0),
        (RIGHT, "\u25c1think\u25b7Right?\u25c1/think\u25b7Wrong", 0.0),
        (RIGHT, "<|START_THINKING|>Right?<|END_THINKING|>Wrong", 0.0),
    ],
)
def test_verdict_is_after_the_thoughts(reading: Reading, text: str, score: float) -> None:
    result = reading.score(JudgeText(text))
    assert result == pytest.approx(score) and not isinstance(result, Noted)


@pytest.mark.parametrize(
    ("reading", "text", "message"),
    [
        (GRADE, "<think>I would say Score: 9, but", "did not end its thoughts"),
        (GRADE, "\n<thinking>Score: 9", "did not end its thoughts"),
        (GRADE, "<think>Score: 9</think>", "no verdict"),
        (GRADE, "Okay. <think>Score: 9 hmm", "did not end its thoughts"),
        (GRADE, "<think>a</think>b <think>Score: 9", "did not end its thoughts"),
        (GRADE, "<scratchpad>Score: 9", "did not end its thoughts"),
        (GRADE, "<|begin_of_thought|>Score: 9", "did not end its thoughts"),
        (GRADE, "<think>a</think><think>Score: 9", "did not end its thoughts"),
        (RIGHT, "[THINK]Is that Right? Let me", "did not end its thoughts"),
        (RIGHT, "<|channel|>analysis<|message|>Is that Right?", "did not end its thoughts"),
    ],
)
def test_verdict_within_thoughts_does_not_count(reading: Reading, text: str, message: str) -> None:
    result = reading.score(JudgeText(text))
    assert result == -1.0 and isinstance(result, Noted) and message in result.note


class Protocol(BaseHTTPRequestHandler):
    """A server that answers with the JSON in the judged answer. A list has one answer per try."""

    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tries = sum(body == other for other in self.bodies)
        self.bodies.append(body)
        answers = json.loads(body["messages"][0]["content"] if "messages" in body else body["prompt"])
        content = json.dumps(answers[min(tries, len(answers) - 1)]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def protocol() -> Iterator[str]:
    Protocol.bodies = []
    with serving(Protocol) as url:
        yield f"{url}/v1"


def choice(content: Any, finish_reason: str | None = "stop", **fields: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"content": content}, "finish_reason": finish_reason, **fields}]}


def part(text: str, kind: str = "text") -> dict[str, str]:
    return {"type": kind, "text": text}


@pytest.mark.parametrize(
    ("answers", "score", "tries"),
    [
        ([choice("Score: 4")], 0.8, 1),
        ([choice("Score: 4", None)], 0.8, 1),
        ([choice("Score: 4", "STOP")], 0.8, 1),
        ([choice("I would say Score: 4, but", "length")], -0.5, 1),
        ([choice("I would say Score: 4, but", "max_tokens")], -0.5, 1),
        ([choice("Score: 4", "content_filter")], -0.5, 1),
        ([choice("Score: 4", "tool_calls")], -0.5, 1),
        ([choice(None, "length", reasoning_content="Score: 4")], -0.5, 1),
        ([choice([part("Sco"), part("re: 4")])], 0.8, 1),
        ([choice([{"type": "thinking", "thinking": [part("Score: 1")]}, part("Score: 4")])], 0.8, 1),
        ([choice([part("Score: 4", "reasoning")])], -0.5, 1),
        ([choice([])], -0.5, 1),
        ([choice([{"text": "Score: 4"}])], 0.8, 1),
        ([choice(part("Score: 4"))], 0.8, 1),
        ([choice("Score: 4", "")], 0.8, 1),
        ([choice(None, None) | {"choices": [{"finish_reason": "abort", "message": None}]}, choice("Score: 4")], 0.8, 2),
        ([{"choices": [{"error": {"code": 529}, "finish_reason": "error"}]}, choice("Score: 4")], 0.8, 2),
        ([{"errors": [{"message": "busy"}]}, choice("Score: 4")], 0.8, 2),
        ([choice(4)], -9.0, 1),
        ([choice("Score: 1", "abort"), choice("Score: 4")], 0.8, 2),
        ([choice("Score: 1", "error", error={"message": "upstream", "code": 502}), choice("Score: 4")], 0.8, 2),
        ([{"error": {"message": "overloaded"}}, choice("Score: 4")], 0.8, 2),
        ([{"error": "overloaded", "choices": []}, choice("Score: 4")], 0.8, 2),
        ([{"error": {"message": "no such model", "code": 404}}, choice("Score: 4")], -9.0, 1),
        ([choice("Score: 4") | {"error": None}], 0.8, 1),
    ],
)
def test_answers_of_the_protocol(protocol: str, answers: list[Any], score: float, tries: int) -> None:
    """Only a finished text contains a verdict. An error in an answer of status 200 is retried."""
    settings = {"judge": judge(protocol, prompt="{answer}"), "max_failure_fraction": 1.0}
    assert scored(settings, json.dumps(answers))[0] == pytest.approx([score])
    assert len(Protocol.bodies) == tries


def test_truncated_completion_is_unreadable(protocol: str) -> None:
    settings = {"judge": judge(protocol, prompt="{answer}", chat=False)}
    texts = [json.dumps([{"choices": [{"text": "Score: 5", "finish_reason": end}]}]) for end in ("stop", "length")]
    assert scored(settings, *texts)[0] == [1.0, -0.5]


def test_first_text_without_a_verdict_is_printed(protocol: str, capsys: pytest.CaptureFixture[str]) -> None:
    scorer = RewardScorer(RewardSettings.model_validate({"judge": judge(protocol, prompt="{answer}")}), CPU)
    try:
        for text in ("Score: 4", "Score: 4, but", "Score: 3, but"):
            end = "length" if "but" in text else "stop"
            scorer.score(rollouts(json.dumps([choice(text, end)])))
    finally:
        scorer.close()
    assert capsys.readouterr().err == (
        "megappo: the first text of the judge 'judge' without a verdict: the judge did not finish its text "
        "(finish_reason 'length'); raise max_tokens: ...Score: 4, but; samples without a verdict score `unreadable` "
        "and count in reward/judge/unreadable\n"
    )


def test_sampling_fields_can_be_left_out(protocol: str) -> None:
    """Newer models of OpenAI refuse `max_tokens` and a `temperature`."""
    answers = json.dumps([choice("Score: 5")])
    left_out: dict[str, Any] = {"temperature": None, "max_tokens": None}
    extra: dict[str, Any] = {"max_completion_tokens": 2048, "reasoning_effort": "low"}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"temperature": 0.0, "max_tokens": 512}),
        (left_out, {}),
        (left_out | {"extra_body": extra}, extra),
    ]
    for changes, fields in cases:
        Protocol.bodies.clear()
        assert scored({"judge": judge(protocol, prompt="{answer}", **changes)}, answers)[0] == [1.0]
        assert Protocol.bodies == [{"model": "m", "messages": [{"role": "user", "content": answers}], **fields}]


def test_endless_pattern_costs_only_its_own_sample(server: str) -> None:
    """The other samples of the call have their scores, and the worker continues."""
    hanging = judge(server, pattern=r"Score: (?:a|aa)+(\d)$", scale=None, unreadable=0.5)
    responses = [f"{'a' * 60}!", "a3", f"{'a' * 70}!", "aa4", "none"]
    scorer = RewardScorer(RewardSettings.model_validate({"judge": hanging, "max_failure_fraction": 1.0}), CPU)
    try:
        scores_B, metrics = scorer.score(rollouts(*responses))
    finally:
        scorer.close()
    assert metrics["reward/timeouts"] == 0.0 and metrics["reward/failures"] == pytest.approx(0.4)
    assert scores_B.tolist() == [0.0, 3.0, 0.0, 4.0, 0.5]


GOOD = {"url": "http://judge:1/v1", "model": "m", "prompt": "{answer}", "pattern": "(.)"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"url": None}, "none of url, server is given; set url, or server: {}"),
        ({"server": {}}, "url and server are given together"),
        ({"url": None, "server": {}, "key": "KEY"}, "key is for a running server"),
        ({"url": "judge:8000"}, "url is 'judge:8000', must look like http://HOST:PORT/v1"),
        ({"model": None}, "model"),
        ({"key": "sk-123"}, "key is not a name of an environment variable; give the name of the"),
        ({"prompt": None}, "none of prompt, prompt_file is given"),
        ({"prompt_file": "x"}, "prompt and prompt_file are given together"),
        ({"prompt": "{answer} {referense}"}, r"has \{referense\}, which is none of \{question\}, \{answer\}"),
        ({"prompt": "{question} {{answer}}"}, r"prompt has no \{answer\}, so the judge would not see"),
        ({"pattern": None}, "none of pattern, choices is given"),
        ({"choices": {"a": 1.0, "b": 2.0}}, "pattern and choices are given together"),
        ({"pattern": None, "choices": {"a": 1.0}}, "must be two or more words"),
        ({"pattern": None, "choices": {"a": 1.0, " ": 1.0}}, "must be two or more words"),
        ({"pattern": None, "choices": {"a": 1.0, "b": 0.0}, "scale": [0, 1]}, "scale applies to the numbers"),
        ({"pattern": "(a"}, "is not a regular expression"),
        ({"pattern": "(a)(b)"}, "has 2 groups, must have one"),
        ({"scale": [5, 1]}, r"scale is \[5.0, 1.0\], must be increasing"),
        ({"temperature": -1}, "temperature"),
        ({"concurrency": 0}, "concurrency"),
        ({"extra_body": {"max_tokens": 9}}, "extra_body has max_tokens; use the setting of the judge with this name"),
        ({"extra_body": {"n": 2}}, "extra_body has n; only one text per request is read; remove it"),
        ({"extra_body": {"top_p": float("nan")}}, "extra_body is not JSON"),
    ],
)
def test_invalid_judge_settings_are_refused(changes: dict[str, Any], sentence: str) -> None:
    JudgeSettings.model_validate(GOOD)
    with pytest.raises(ValueError, match=sentence):
        JudgeSettings.model_validate(GOOD | changes)


def test_judge_replaces_a_function(tmp_path: Path) -> None:
    for reward, sentence in [
        ({"judge": GOOD, "function": "exact"}, "function and judge are given together; give one of them"),
        ({"judge": GOOD, "batch": True}, "belong to a function, but a judge is set"),
        ({"functions": {"a": {}}}, "none of function, judge is given; give one of them"),
        ({"functions": {"a": {"judge": GOOD, "function": "exact"}}}, "function and judge are given together"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            load_config(BASE, [f"reward={json.dumps(reward)}"])


def test_prompt_in_a_file(tmp_path: Path, server: str) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text("A: {answer}")
    of_file = judge(server, prompt=None, prompt_file=str(path))
    assert scored({"judge": of_file}, "5")[0] == [1.0]
    assert JudgeSettings.model_validate(of_file).template == (("A: ", "answer"), ("", ""))
    for content, sentence in [("no field", "has no {answer}"), (None, "cannot be read (No such file")]:
        path.unlink() if content is None else path.write_text(content)
        with pytest.raises(ValueError, match=re.escape(f"prompt_file '{path}' {sentence}")):
            _ = JudgeSettings.model_validate(of_file).template


def test_missing_key_of_a_judge_is_reported(server: str) -> None:
    assert KEY not in os.environ
    with pytest.raises(ValueError, match=f"the environment variable {KEY}, .* is empty; export it"):
        RewardScorer(RewardSettings.model_validate({"judge": judge(server, key=KEY)}), CPU)


def test_judge_can_move_when_a_run_is_resumed() -> None:
    """The scores depend on the prompt, but not on the address of the judge."""
    for place in ({"judge": GOOD}, {"functions": {"taste": {"judge": GOOD}}}):
        before = {"reward": place}
        moved = {"url": None, "retries": 2, "server": {"machine": 1}}
        for changes, dangerous in ((moved, 0), ({"prompt": "? {answer}"}, 1)):
            now = json.loads(json.dumps(before).replace(json.dumps(GOOD), json.dumps(GOOD | changes)))
            assert len(compare_settings(before, now, (1, 1)).dangerous) == dangerous


@pytest.mark.parametrize(
    ("path", "model", "state", "message"),
    [
        ("/v1", "m", "fine", "serves m"),
        ("/v1/", "q", "broken", "serves m or n, not 'q'"),
        ("/key", "m", "broken", "rejects the key"),
        ("/other", "m", "broken", "HTTP 404"),
        ("", "m", "broken", "cannot be reached (Connection refused)"),
    ],
)
def test_doctor_checks_the_model_of_a_judge(server: str, path: str, model: str, state: str, message: str) -> None:
    url = server.removesuffix("/v1") + path if path else "http://127.0.0.1:9/v1"
    (finding,) = judge_findings(load_config(BASE, [f"reward={json.dumps({'judge': judge(url, model=model)})}"]))
    assert finding.state == state and message in finding.text.replace("[Errno 111] ", "")


def test_dry_run_asks_the_judge(
    server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    arguments = ["train", "configs/quickstart.yaml", "--dry-run", f"reward={json.dumps({'judge': judge(server)})}"]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    match = re.search(r"a judge scores the answers (\S+) and empty responses (\S+) on average", output)
    assert match and float(match[1]) > 0 and float(match[2]) == -0.5


def test_dry_run_reports_texts_without_a_verdict(
    protocol: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The thoughts of the judge are truncated at max_tokens."""
    monkeypatch.chdir(ROOT)
    prompt = json.dumps([choice("{answer} Score: 4 or", "length")])
    reward = {"judge": judge(protocol, prompt=prompt)}
    assert main(["train", "configs/quickstart.yaml", "--dry-run", f"reward={json.dumps(reward)}"]) == 0
    output = capsys.readouterr().out
    assert "8 texts of a judge on the answers have no verdict; the first: the judge did not finish its text" in output
