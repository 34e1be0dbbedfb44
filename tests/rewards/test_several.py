"""Several rewards with weights, the inputs of reward functions, and rewards of a server over HTTP."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pydantic import ValidationError
from transformers import LlamaConfig, LlamaForSequenceClassification

from megappo.config import ConfigError, load_config
from megappo.config.schema import RewardSettings
from megappo.rewards.http import ScoreServer
from megappo.rewards.processes.workers import RewardError
from megappo.rewards.registry import check_prompts
from megappo.rewards.scorer import RewardScorer
from megappo.runtime.ranks.tally import Totals
from megappo.types import Episode, Episodes, Rollouts
from tests.support.places import BASE
from tests.support.rewards import LLAMA, rollouts, save, serving

pytestmark = pytest.mark.waits

CPU = torch.device("cpu")
USER_MODULE = '''
def length(*, prompt, response, answer, metadata, token_ids, prompt_token_ids, truncated):
    return len(token_ids) + 10 * len(prompt_token_ids) + 100 * truncated

def told(*, prompts, responses, answers, metadata, conversations, truncated):
    """Return the number of messages, and whether the environment has sent 17."""
    said = [[m["content"] for m in messages if m["role"] == "environment"] for messages in conversations]
    return [len(m) + 10 * (s == ["17"]) + 100 * t for m, s, t in zip(conversations, said, truncated, strict=True)]

def size(*, prompt, response, answer, metadata):
    return float(response)

def moody(*, prompt, response, answer, metadata):
    if response == "bad": raise KeyError("bad")
    return 1.0
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Write the module of functions, and start a process group of one process."""
    (tmp_path / "several_rewards.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "several_rewards", raising=False)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def scored(settings: dict[str, Any], samples: Rollouts) -> tuple[list[float], Totals]:
    scorer = RewardScorer(RewardSettings.model_validate(settings), CPU)
    try:
        scores_B, metrics = scorer.score(samples)
        assert scorer.score_local(samples).tolist() == scores_B.tolist()
    finally:
        scorer.close()
    return scores_B.tolist(), metrics


SEVERAL = {
    "right": {"function": "exact"},
    "mood": {"function": "several_rewards:moody", "weight": 2.0},
    "short": {"function": "several_rewards:length", "weight": -0.5},
    "talk": {"function": "several_rewards:told", "batch": True, "weight": 0.25},
}


def test_several_rewards_are_summed_and_logged() -> None:
    """If one of the functions fails, the sample has the failure score once."""
    scores, metrics = scored({"functions": SEVERAL, "failure_score": -9.0, "workers": 2}, rollouts("2", "3", "bad"))
    assert scores == [1 + 2 - 10.5 + 0.75, 0 + 2 - 11 + 0.75, -9.0]
    means = {"right": 1 / 3, "mood": (1 + 1 - 9) / 3, "short": (21 + 22 + 123) / 3, "talk": (3 + 3 + 103) / 3}
    failures = {"reward/failures": pytest.approx(1 / 3), "reward/timeouts": 0.0}
    assert metrics == {f"reward/{name}": pytest.approx(mean) for name, mean in means.items()} | failures


def of_sources(samples: Rollouts, *sources: str) -> Rollouts:
    """Return the samples with prompts of these data sources."""
    prompts = [replace(p, metadata={"data_source": s}) for p, s in zip(samples.prompts, sources, strict=True)]
    return replace(samples, prompts=tuple(prompts))


def test_data_source_selects_the_functions() -> None:
    """A function without the data source of a sample is not called, even if it would fail. The mean of a function is
    over its own samples."""
    functions = {
        "sums": {"function": "exact", "weight": 3.0, "data_sources": ["sums"]},
        "mood": {"function": "several_rewards:moody", "data_sources": ["talk", "jokes"], "weight": 0.5},
        "long": {"function": "several_rewards:told", "batch": True, "weight": 0.1},
    }
    samples = of_sources(rollouts("2", "bad", "good", "3", "bad"), "sums", "sums", "jokes", "sums", "talk")
    scores, metrics = scored({"functions": functions, "failure_score": -9.0}, samples)
    assert scores == pytest.approx([3 + 0.2, 0.2, 0.5 + 0.2, 0.2, -9.0])
    means = {"sums": 1 / 3, "mood": (1 - 9) / 2, "long": (4 * 2 + 102) / 5, "failures": 1 / 5, "timeouts": 0.0}
    assert metrics == {f"reward/{name}": pytest.approx(mean) for name, mean in means.items()}


def test_function_without_samples_is_not_called() -> None:
    functions = {"a": {"function": "exact", "data_sources": ["a"]}, "b": {"function": "exact", "data_sources": ["b"]}}
    scores, metrics = scored({"functions": functions}, of_sources(rollouts("2", "3"), "a", "a"))
    assert scores == [1.0, 0.0] and metrics["reward/a"] == 0.5 and "reward/b" not in metrics


def test_metrics_of_two_rounds_include_all_samples() -> None:
    """The mean of a function includes all samples of all rounds that the function scored."""
    functions = {"a": {"function": "exact", "data_sources": ["a"]}, "b": {"function": "exact", "data_sources": ["b"]}}
    first, second = rollouts("2", "3", "3", "3"), rollouts("3", "3", "3", "2")
    parts = [
        scored({"functions": functions}, of_sources(samples, *sources))[1]
        for samples, sources in ((first, "abbb"), (second, "aaaa"), (second, "bbbb"))
    ]
    expected = {"a": 2 / 5, "b": 1 / 7, "failures": 0.0, "timeouts": 0.0}
    assert Totals.combined(parts) == {f"reward/{name}": pytest.approx(mean) for name, mean in expected.items()}


def test_prompts_without_function_are_refused_before_a_run() -> None:
    functions = {
        "sums": {"function": "gsm8k", "data_sources": ["sums"]},
        "talk": {"function": "several_rewards:moody", "data_sources": ["talk"]},
    }
    settings = RewardSettings.model_validate({"functions": functions})
    prompts = of_sources(rollouts("", "", ""), "sums", "talk", "sums").prompts
    check_prompts(settings, [replace(p, answer="#### 2") for p in prompts], "data")
    with pytest.raises(
        ValueError, match=r"prompt 0 of 'data': .*'1/2'.*\(and so for 1 more prompts\)"
    ):  # only for sums
        check_prompts(settings, [replace(p, answer="1/2") for p in prompts], "data")
    others = [*of_sources(rollouts("", ""), "code", "talk").prompts, replace(prompts[0], metadata={})]
    sentence = (
        r"prompt 0 of 'data': its data_source is 'code', but reward.functions are for sums, talk; add the data_source "
        r"to a function, or add a function without data_sources \(and so for 1 more prompts\)"
    )
    with pytest.raises(ValueError, match=sentence):
        check_prompts(settings, others, "data")


def test_reward_model_among_functions(tmp_path: Path) -> None:
    """The model has the same scores as alone with batches of the same size. The scores are added to the scores of the
    other functions."""
    torch.manual_seed(0)
    folder = save(tmp_path, LlamaForSequenceClassification(LlamaConfig(**LLAMA, num_labels=1)))
    samples = of_sources(rollouts("2", "3", "2"), "sums", "talk", "talk")
    alone, _ = scored({"function": "model", "model_path": folder}, of_sources(rollouts("3", "2"), "talk", "talk"))
    functions = {
        "right": {"function": "exact", "weight": 2.0},
        "liked": {"function": "model", "weight": 0.5, "data_sources": ["talk"]},
    }
    scores, metrics = scored({"functions": functions, "model_path": folder}, samples)
    assert scores == pytest.approx([2.0, 0.5 * alone[0], 2 + 0.5 * alone[1]], abs=1e-6)
    assert metrics["reward/liked"] == pytest.approx((alone[0] + alone[1]) / 2, abs=1e-6)


@pytest.mark.parametrize(
    ("functions", "path", "sentence"),
    [
        ({"a": {"function": "model"}}, None, "model_path belongs to function: model; set both or neither"),
        ({"a": {"function": "exact"}}, "folder", "model_path belongs to function: model; set both or neither"),
        ({"a": {"function": "model"}, "b": {"function": "model"}}, "folder", "functions has 'model' twice"),
        ({"a": {"function": "environment"}}, None, "functions has 'environment', which cannot be combined"),
        ({"a": {"function": "exact", "data_sources": []}}, None, "data_sources"),
    ],
)
def test_invalid_combinations_of_functions_are_refused(
    functions: dict[str, Any], path: str | None, sentence: str
) -> None:
    with pytest.raises(ValidationError, match=sentence):
        RewardSettings.model_validate({"functions": functions, "model_path": path})


@pytest.mark.parametrize(
    ("responses", "weights", "expected"),
    [
        (("3e38", "1"), (1.0, 1.0), [-9.0, 2.0]),
        (("-3e38", "2"), (2.0, 1.0), [-9.0, 6.0]),
        (("1e30", "1e10"), (1e9, 0.0), [-9.0, pytest.approx(1e19, rel=1e-6)]),
        (("-1e30", "0"), (1e9, 1e9), [-9.0, 0.0]),
        (("3e38", "5"), (2.0, -1.0), [pytest.approx(3e38, rel=1e-6), 5.0]),  # only the sum is finite
    ],
)
def test_sum_beyond_float32_costs_its_own_sample(
    responses: tuple[str, ...], weights: tuple[float, float], expected: list[float]
) -> None:
    """The sum counts as a failure. The score is never inf or NaN."""
    functions = {
        name: {"function": "several_rewards:size", "weight": weight}
        for name, weight in zip(("a", "b"), weights, strict=True)
    }
    scores, metrics = scored({"functions": functions, "failure_score": -9.0}, rollouts(*responses))
    assert scores == expected and metrics["reward/failures"] == expected.count(-9.0) / 2


def test_sum_beyond_float32_is_a_reward_error() -> None:
    functions = {name: {"function": "several_rewards:size", "weight": 1e9} for name in ("a", "b")}
    with pytest.raises(RewardError, match=r"the first: the weighted sum of reward.functions is inf, must be finite"):
        scored({"functions": functions}, rollouts("1e30", "1e30"))


def test_rewards_of_the_environment_count_in_the_sum() -> None:
    turns = torch.tensor([[3e38, 0.0], [1.0, 0.0]])
    episodes = Episodes((Episode(()), Episode(())), turns, ((), ()))
    samples = replace(rollouts("3e38", "2"), episodes=episodes, response_mask_BR=torch.ones(2, 2, dtype=torch.bool))
    scores, metrics = scored({"function": "several_rewards:size", "failure_score": -9.0}, samples)
    assert scores == [-9.0, 2.0] and metrics["reward/failures"] == 0.5
    assert samples.total_rewards_B(torch.tensor(scores)).isfinite().all()


@pytest.mark.parametrize("section", ["{'penalty': 1e39}", "{'penalty': .inf}", "{'penalty': 2e9}"])
def test_penalty_keeps_rewards_within_float32(section: str) -> None:
    with pytest.raises(ConfigError, match="reward.overlong.penalty"):
        load_config(BASE, [f"reward.overlong={section.replace('}', ', buffer_tokens: 4}')}".replace("'", "")])


def test_functions_receive_the_whole_conversation() -> None:
    messages = (
        {"by": "model", "text": "?", "reward": 0.0},
        {"by": "environment", "text": "17"},
        {"by": "model", "text": "!"},
    )
    episodes = Episodes((Episode(()), Episode((), failure="hung")), torch.zeros(2, 2), (messages, ()))
    samples = replace(rollouts("!", ""), episodes=episodes, response_mask_BR=torch.ones(2, 2, dtype=torch.bool))
    settings = {"functions": {"talk": SEVERAL["talk"]}, "failure_score": -1.0}
    scores, metrics = scored(settings, samples)
    assert scores == [0.25 * (5 + 10), -1.0] and metrics["reward/talk"] == 15, (
        "the function is not called for the failed episode"
    )


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("reward.functions={a: {function: exact}}", "function and functions are given together; give one of them"),
        ("reward={functions: {mean: {function: exact}}}", "'mean', which is not a valid or free metric name"),
        ("reward={functions: {a: {function: exact}}, batch: true}", "options and batch belong to a single function"),
        ("reward={workers: 1}", "none of function, judge, functions is given"),
    ],
)
def test_invalid_reward_settings_are_refused(word: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load_config(BASE, [word])


class Handler(BaseHTTPRequestHandler):
    """A server whose answer is determined by the response. The first request of a response that begins with `again`
    fails."""

    seen: ClassVar[list[str]] = []
    ended = threading.Event()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        response, first = body["response"], body["response"] not in self.seen
        self.seen.append(response)
        if response == "hang":
            self.ended.wait(20)
        code = 503 if response.startswith("again") and first else 403 if response == "refuse" else 200
        content = {"nothing": {}, "text": {"score": "1"}}.get(response, {"score": len(body["conversation"]) / 2})
        self.send_response(code)
        self.end_headers()
        self.wfile.write(b"<html>" if response == "html" else json.dumps(content).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Handler.seen, Handler.ended = [], threading.Event()
    with serving(Handler) as url:
        yield f"{url}/score"
        Handler.ended.set()


def test_reward_server(server: str) -> None:
    """Broken answers are retried until the deadline. Refused requests are not retried. Each failure costs its own
    sample."""
    options = {"url": server, "deadline_seconds": 4.0, "concurrent": 8}
    samples = rollouts("fine", "again", "hang", "refuse", "nothing", "text", "html", "again too")
    settings = {"function": "megappo.rewards.http:scores", "batch": True, "options": options, "failure_score": -1.0}
    scores, metrics = scored({**settings, "max_failure_fraction": 1.0}, samples)
    assert scores == [1.5, 1.5, -1, -1, -1, -1, -1, 1.5]
    assert metrics == {"reward/failures": 5 / 8, "reward/timeouts": 0.0}
    # Each sample is scored twice.
    assert {name: Handler.seen.count(name) for name in ("fine", "again", "refuse")} == {
        "fine": 2,
        "again": 3,
        "refuse": 2,
    }


def test_errors_of_a_server_are_reported(server: str) -> None:
    for response, message in (("refuse", "HTTP 403 Forbidden"), ("hang", "timed out")):
        with pytest.raises(OSError, match=message):
            ScoreServer(server, 0.5, 1).post("", {"response": response, "conversation": []}, lambda answer: answer)
    with pytest.raises(OSError, match=r"Connection refused, after [2-5] tries"):
        ScoreServer("http://127.0.0.1:9", 0.8, 1).post("/", {}, str)
