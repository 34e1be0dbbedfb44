"""Reward functions that hang, die, raise or return invalid values cost only their own sample, and leave no
processes."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from megappo.config.schema import RewardSettings
from megappo.observe.ends import End
from megappo.observe.terminal.progress import PROGRESS
from megappo.rewards.limit import FailureLimit
from megappo.rewards.processes.channel import PoolEnd
from megappo.rewards.processes.workers import RewardError, RewardPool, RewardRequest
from megappo.rewards.scorer import RewardScorer
from megappo.runtime.watch.notices import Notices
from megappo.types import Prompt, Rollouts

pytestmark = pytest.mark.waits

USER_MODULE = '''
import json, os, pickle, struct, subprocess, sys, time

LEAKED = []

class Odd:
    """An object whose use raises the error for `word`."""
    def __init__(self, word): object.__setattr__(self, "word", word)
    def __getattribute__(self, name):
        word = object.__getattribute__(self, "word")
        if word == "attributes": raise OSError(name)
        return object.__getattribute__(self, name)
    def __float__(self):
        match object.__getattribute__(self, "word"):
            case "interrupt": raise KeyboardInterrupt
            case "exit": raise SystemExit(3)
            case "recursion": return float(self)
            case "mute": raise Mute
            case "generator": raise GeneratorExit
            case "text": return "1.0"
    def __repr__(self): raise Mute

class Mute(Exception):
    def __str__(self): raise ValueError("no text")
    __repr__ = __str__

class Nameless:
    def __repr__(self): raise Mute

def obey(*, prompt, response, answer, metadata):
    """Perform the action of the response."""
    match response:
        case "hang": time.sleep(1000)
        case "exit": os._exit(3)
        case "close": os.closerange(3, 1000)
        case "sys.exit": sys.exit(3)
        case "raise": raise KeyError("k")
        case "nan": return float("nan")
        case "large": return 1e300
        case "digits": return 10**400
        case "none": return None
        case "text": return "1.0"
        case "list": return [1.0, 2.0]
        case "pid": return os.getpid()
        case "print": print("noise")
        case "child": subprocess.run(["sleep", "1000"])
        case "metadata": return metadata["x"]
        case "terminate":
            child = subprocess.Popen(["sleep", "1000"])
            child.terminate()
            return float(child.wait())
        case "slow": time.sleep(0.3)
        case "leak":
            LEAKED.append(b"x" * 200_000_000)
            return os.getpid()
        case "grow":
            grown = []
            while True: grown.append(b"x" * 20_000_000); time.sleep(0.01)
        case "fork": return 2.0 if os.fork() else 3.0
        case "noise": write_everywhere(b"hello")
        case "frame": write_everywhere(framed(pickle.dumps(5.0)))
        case "frame of nothing": write_everywhere(framed(pickle.dumps(None)))
        case "frame without end": write_everywhere(struct.pack("!i", 2**31 - 1))
        case "score": write_everywhere(json.dumps([7.0, None]).encode())
        case "much": write_everywhere(b"x" * 70_000)
        case "mute": raise Mute
        case "KeyboardInterrupt": raise KeyboardInterrupt
        case "nameless": return Nameless()
    if response.startswith("odd "): return Odd(response[4:])
    return 1.0

def framed(message):
    """Return the format of connections of multiprocessing."""
    return struct.pack("!i", len(message)) + message

def write_everywhere(message):
    for descriptor in os.listdir("/proc/self/fd"):
        try: int(descriptor) > 2 and os.write(int(descriptor), message)
        except OSError: pass

def raw(*, prompt, response, answer, metadata, raw_response): return len(raw_response) - len(response)

def one_number(*, responses): return 1.0

def raw_batch(*, prompts, responses, answers, metadata, raw_responses):
    return [len(raw) - len(clean) for raw, clean in zip(raw_responses, responses)]

def anything(**given): return len(given)

def lengths(*, prompts, responses, answers, metadata, factor=1):
    if "hang" in responses: time.sleep(1000)
    if "short" in responses: return [1.0]
    if "raise" in responses: raise KeyError("k")
    if "mapping" in responses: return dict.fromkeys(range(len(responses)), 1.0)
    if "bytes" in responses: return bytes(range(len(responses)))
    if "bytearray" in responses: return bytearray(len(responses))
    if "text" in responses: return "1" * len(responses)
    if "digits" in responses: return [10**400 if r == "digits" else len(r) for r in responses]
    if "frame" in responses: write_everywhere(framed(pickle.dumps([(9.0, None)])))
    odd = lambda r: Odd(r[4:]) if r.startswith("odd ") else Nameless() if r == "nameless" else len(r)
    if "nameless" in responses: return map(odd, responses)
    return [factor * len(r) for r in responses]
'''


ODD = {
    "interrupt": "KeyboardInterrupt",
    "exit": "SystemExit: 3",
    "recursion": "RecursionError",
    "mute": "Mute",
    "generator": "GeneratorExit",
    "text": "TypeError",
    "attributes": "OSError: __class__",
}


@pytest.fixture(autouse=True)
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "user_rewards.py").write_text(USER_MODULE)
    (tmp_path / "exits_on_import.py").write_text("import os; os._exit(1)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "user_rewards", raising=False)
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert not left, f"remaining processes: {left}"


def settings(**changes: Any) -> RewardSettings:
    chosen: dict[str, Any] = {"function": "user_rewards:obey", "timeout_seconds": 1.0, "failure_score": -1.0}
    return RewardSettings(**chosen | {"max_failure_fraction": 1.0} | changes)


def requests(*responses: str) -> list[RewardRequest]:
    return [RewardRequest("p", response, response, "a", {"x": i}) for i, response in enumerate(responses)]


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("hang", "ran out of time"),
        ("child", "ran out of time"),
        ("exit", "ended its worker process"),
        ("close", "ended its worker process"),
        ("sys.exit", "SystemExit: 3"),
        ("raise", "KeyError: 'k'"),
        ("nan", "returned nan, must be finite"),
        ("large", "must be finite"),
        ("digits", "returned inf, must be finite and within float32"),
        ("none", "returned None, must be a number"),
        ("text", "returned '1.0', must be a number"),
        ("list", "returned a list, must be a number; set reward.batch: true for a function of lists"),
        ("mute", "Mute: Mute"),
        ("KeyboardInterrupt", "KeyboardInterrupt"),
        ("nameless", "returned no valid number: Mute"),
        *((f"odd {word}", f"returned no valid number: {error}") for word, error in ODD.items()),
    ],
)
def test_failure_costs_its_own_sample(response: str, reason: str) -> None:
    with RewardPool(settings()) as pool:
        result = pool.score(requests("fine", "metadata", response, "fine", "metadata"))
        assert result.scores.tolist() == [1.0, 1.0, -1.0, 1.0, 4.0]
        assert result.scores.dtype == torch.float32
        [(index, message)] = result.failures
        assert index == 2 and reason in message
        assert result.timeouts == (message == "ran out of time")
        assert pool.score(requests("fine")).scores.tolist() == [1.0]


@pytest.mark.waits
def test_workers_of_built_in_rules_get_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Built-in rules read text of a model. Custom functions receive all variables."""
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    for function, expected in (("exact", None), ("megappo.rewards.arithmetic:answer_then_end", "s3cret")):
        with RewardPool(RewardSettings(function=function)) as pool:
            variables = psutil.Process(pool.workers[0].supervisor.pid).environ()
        assert variables.get("WANDB_API_KEY") == expected and "PATH" in variables


WROTE = "wrote into file descriptors that are not its own"


@pytest.mark.parametrize("response", ["noise", "frame", "frame of nothing", "frame without end", "score", "much"])
def test_data_in_file_descriptors_is_no_score(response: str) -> None:
    """Such data is not a score of any sample, is not an error of the trainer, and does not block."""
    with RewardPool(settings(timeout_seconds=60.0)) as pool:
        started = time.monotonic()
        result = pool.score(requests("fine", "metadata", response, "fine", "metadata"))
        assert result.scores.tolist() == [1.0, 1.0, -1.0, 1.0, 4.0]
        assert result.failures == [(2, WROTE)]
        assert time.monotonic() - started < 9  # a frame that announces two gigabytes is not awaited


def test_all_workers_are_closed_before_the_first_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    closed_channels: list[int] = []
    with RewardPool(settings(workers=3)) as pool:
        workers, wait = list(pool.workers), subprocess.Popen.wait

        def count_and_wait(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
            closed_channels.append(sum(worker.channel.answers.fileno() < 0 for worker in workers))
            return wait(process, timeout)

        monkeypatch.setattr(subprocess.Popen, "wait", count_and_wait)
    assert closed_channels == [3, 3, 3]
    assert all(worker.supervisor.returncode == 0 for worker in workers)


@pytest.mark.parametrize(("function", "batch"), [("obey", False), ("lengths", True)])
def test_failure_names_the_raising_line(tmp_path: Path, function: str, batch: bool) -> None:
    lines = (tmp_path / "user_rewards.py").read_text().splitlines()
    line = next(n for n, text in enumerate(lines, 1) if "raise KeyError" in text and ("if" in text) == batch)
    with RewardPool(settings(function=f"user_rewards:{function}", batch=batch)) as pool:
        reasons = {message for _, message in pool.score(requests("raise")).failures}
    assert reasons == {f"KeyError: 'k' ({tmp_path / 'user_rewards.py'}:{line})"}


def test_one_number_for_a_batch_fails_with_the_remedy() -> None:
    with RewardPool(settings(function="user_rewards:one_number", batch=True)) as pool:
        reason = dict(pool.score(requests("a", "b")).failures)[1]
    assert reason == "returned 1.0, must be a list of numbers; set reward.batch: false for a function of one sample"


def test_invalid_number_of_a_batch_costs_its_own_sample() -> None:
    with RewardPool(settings(function="user_rewards:lengths", batch=True)) as pool:
        result = pool.score(requests("a", "digits", "abc"))
    assert result.scores.tolist() == [1.0, -1.0, 3.0]
    assert result.failures == [(1, "returned inf, must be finite and within float32")]


def test_raising_numbers_of_a_batch_cost_their_samples() -> None:
    """The worker continues."""
    responses = ["fine", "nameless", *(f"odd {word}" for word in ODD), "fine"]
    with RewardPool(settings(function="user_rewards:lengths", batch=True)) as pool:
        pids = [worker.pid for worker in pool.workers]
        result = pool.score(requests(*responses))
        assert result.scores.tolist() == [4.0, *[-1.0] * (1 + len(ODD)), 4.0]
        assert [worker.pid for worker in pool.workers] == pids


def test_many_failures_on_several_workers() -> None:
    responses = ["fine", "hang", "exit", "slow", "exit", "raise", "fine", "hang", "slow", "fine"] * 2
    started = time.monotonic()
    with RewardPool(settings(workers=2, timeout_seconds=2.0)) as pool:
        result = pool.score(requests(*responses))
    failed = [i for i, r in enumerate(responses) if r in ("hang", "exit", "raise")]
    assert [i for i, _ in result.failures] == failed
    assert result.timeouts == 4
    assert time.monotonic() - started < 30


def test_all_failures_are_counted_if_too_many() -> None:
    with RewardPool(settings(max_failure_fraction=0.1)) as pool:
        with pytest.raises(RewardError, match=r"^4 of 5 rewards failed, more than .* 0.1; fix the reward or its data"):
            pool.score(requests(*["raise"] * 4, "fine"))
        assert pool.score(requests("fine")).scores.tolist() == [1.0]


def test_hanging_reward_ends_the_run_at_the_limit() -> None:
    """All samples would take 20 seconds. No sample after the limit is awaited."""
    lines = list[str]()

    def look(failures: int) -> bool:
        lines.append(PROGRESS.text())
        return failures > 2

    PROGRESS.enter("reward")
    with RewardPool(settings(workers=1, timeout_seconds=0.5, max_failure_fraction=0.05)) as pool:
        with pytest.raises(
            RewardError,
            match=r"^3 of 40 rewards failed \(3 ran out of time, reward.timeout_seconds is 0.5\), more than .* 0.05; "
            "raise reward.timeout_seconds, or fix the reward; the first: ran out of time",
        ):
            pool.score(requests(*["hang"] * 40))
        result = pool.run(requests("fine", *["hang"] * 39), look)
        assert (len(result.failures), result.timeouts, result.scores.tolist()) == (3, 3, [1.0, *[-1.0] * 39])
        assert "scores" not in PROGRESS.text()
    PROGRESS.leave()
    assert "4 of 40 scores of this rank, 3 timed out (reward.timeout_seconds is 0.5)" in lines[-1]


def test_limit_counts_the_failures_of_all_ranks() -> None:
    notices = [Notices(store) for store in [dist.HashStore()] * 2]
    first = FailureLimit(notices[0], 1, 10, 0.5, ranks=2).of("f")
    assert not first(8), "8 of 10 known samples, before rank 1 has begun"
    second = FailureLimit(notices[1], 1, 10, 0.5, ranks=2).of("f")
    assert not second(2), "10 of 20"
    assert second(3)
    time.sleep(1.1)  # a rank without a new failure checks once per second
    assert first(8)
    assert not FailureLimit(notices[0], 2, 10, 0.5, ranks=1).of("f")(1), "the next call begins at 0"


def test_worker_killed_between_calls_is_replaced() -> None:
    with RewardPool(settings()) as pool:
        pid = int(pool.score(requests("pid")).scores[0])
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
        result = pool.score(requests("fine", "fine"))
        assert (result.scores.tolist(), result.failures) == ([1.0, 1.0], [])


def test_signals_to_the_whole_job_cost_no_sample() -> None:
    """A scheduler sends signals to every process. The parent decides when to stop, and can stop its children."""
    with RewardPool(settings(timeout_seconds=5)) as pool:
        pid = int(pool.score(requests("pid")).scores[0])
        supervisor = psutil.Process(pid).ppid()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.kill(pid, number)
            os.kill(supervisor, number)
        result = pool.score(requests("pid", "terminate"))
        assert (result.scores.tolist(), result.failures) == ([float(pid), -15.0], [])


def test_leaking_worker_is_replaced() -> None:
    with RewardPool(settings(worker_memory_gigabytes=0.5, timeout_seconds=5)) as pool:
        pids = [int(pool.score(requests("leak")).scores[0]) for _ in range(6)]
        result = pool.score(requests("fine", "metadata"))
    assert result.failures == [] and result.scores.tolist() == [1.0, 1.0]
    assert len(set(pids)) >= 2
    assert max(pids.count(pid) for pid in pids) <= 3  # two or three calls exceed 0.5 GB


def test_too_large_function_is_refused() -> None:
    """Otherwise its workers would be restarted after every first sample."""
    sentence = r"uses 0.0\d+ GB after the import of reward.function '.*', above reward.worker_memory_gigabytes 0.01; "
    with pytest.raises(ValueError, match=sentence):
        RewardPool(settings(worker_memory_gigabytes=0.01))


def test_exhausted_memory_costs_only_one_sample() -> None:
    with RewardPool(settings(worker_memory_gigabytes=0.3, timeout_seconds=30)) as pool:
        start = time.monotonic()
        result = pool.score(requests("fine", "grow", "fine"))
        assert time.monotonic() - start < 10 and result.scores.tolist() == [1.0, -1.0, 1.0]
        assert result.failures == [(1, "used more than twice reward.worker_memory_gigabytes")] and not result.timeouts


def test_stopped_worker_is_replaced() -> None:
    with RewardPool(settings()) as pool:
        os.kill(int(pool.score(requests("pid")).scores[0]), signal.SIGSTOP)
        result = pool.score(requests("fine", "fine"))
        assert (result.scores.tolist(), result.timeouts) == ([-1.0, 1.0], 1)


def test_forking_function_answers_once() -> None:
    """A score of the child would be read as the score of the next sample."""
    with RewardPool(settings()) as pool:
        for _ in range(5):
            result = pool.score(requests("fork", "metadata", "fork", "metadata"))
            assert (result.scores.tolist(), result.failures) == ([2.0, 1.0, 2.0, 3.0], [])


def test_prints_are_not_in_the_output(capfd: pytest.CaptureFixture[str]) -> None:
    with RewardPool(settings()) as pool:
        pool.score(requests("print"))
    assert "noise" not in capfd.readouterr().out


def test_trivial_functions_cost_little() -> None:
    with RewardPool(settings(function="exact", timeout_seconds=10.0)) as pool:
        many = requests(*["a"] * 2000)
        pool.score(many)
        started = time.perf_counter()
        assert pool.score(many).scores.sum() == 2000
        assert (time.perf_counter() - started) / 2000 < 1e-3  # typically 5e-5


def test_no_samples() -> None:
    with RewardPool(settings()) as pool:
        assert pool.score([]).scores.shape == (0,)


class Unpicklable:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> str:
        raise self.error


def test_unpicklable_metadata_is_refused() -> None:
    with RewardPool(settings()) as pool:
        for value, reason in [
            (lambda: 0, ""),
            *((Unpicklable(e("x")), e.__name__) for e in (ValueError, RecursionError)),
        ]:
            with pytest.raises(ValueError, match=rf"metadata of sample 0 cannot be sent .*\({reason}"):
                pool.score([RewardRequest("p", "r", "r", "a", {"f": value})])


def test_batch_function() -> None:
    with RewardPool(settings(function="user_rewards:lengths", batch=True, options={"factor": 2})) as pool:
        assert pool.score(requests("a", "bb", "")).scores.tolist() == [2.0, 4.0, 0.0]
        for response, reason in [
            ("hang", "ran out of time"),
            ("short", "returned 1 scores for 2 samples"),
            ("raise", "KeyError: 'k'"),
            ("mapping", "returned a dict, must be a list of numbers"),
            ("bytes", "returned a bytes, must be a list of numbers"),
            ("bytearray", "returned a bytearray, must be a list of numbers"),
            ("text", "returned a str, must be a list of numbers"),
            ("frame", WROTE),
        ]:
            result = pool.score(requests("a", response))
            assert result.scores.tolist() == [-1.0, -1.0]
            assert [(index, message.split(" (/")[0]) for index, message in result.failures] == [
                (0, reason),
                (1, reason),
            ]


@pytest.mark.parametrize(
    ("function", "batch", "expected"),
    [("raw", False, [5, 0]), ("raw_batch", True, [5, 0]), ("anything", False, [4, 4])],
)
def test_functions_can_receive_special_tokens(function: str, batch: bool, expected: list[float]) -> None:
    seen = [RewardRequest("p", "3", raw, "a", {}) for raw in ("3<eos>", "3")]
    with RewardPool(settings(function=f"user_rewards:{function}", batch=batch)) as pool:
        assert pool.score(seen).scores.tolist() == expected


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"function": "no_such_module:f"}, ValueError, "cannot be imported"),
        ({"function": "exits_on_import:f", "workers": 3}, RewardError, "ended its worker process during its import"),
        ({"function": "user_rewards:lengths", "batch": True, "workers": 2}, ValueError, "set workers: 1"),
    ],
)
def test_failing_start_of_a_pool(changes: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        RewardPool(settings(**changes))


PARENT = """
import sys, time
from megappo.config.schema import RewardSettings
from megappo.rewards.processes.workers import RewardPool, RewardRequest
pool = RewardPool(RewardSettings(function="user_rewards:obey", timeout_seconds=1000.0, workers=2))
print(*[pid for worker in pool.workers for pid in (worker.pid, worker.supervisor.pid)], flush=True)
pool.score([RewardRequest("p", "hang", "hang", None, {})])
"""


@pytest.mark.slow
def test_workers_die_with_their_parent(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(workers) == 4
    time.sleep(0.2)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _gone, alive = psutil.wait_procs(workers, timeout=5)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def rollouts(*responses: str) -> Rollouts:
    B = len(responses)
    ones = torch.ones(B, dtype=torch.int64)
    prompts = tuple(Prompt(i, (0,), "1+1=", "2", {}) for i in range(B))
    return Rollouts(
        prompts=prompts,
        sample_ids_B=torch.arange(B),
        group_ids_B=torch.arange(B),
        sequences=tuple(torch.tensor([0, 1]) for _ in range(B)),
        response_lengths_B=ones,
        engine_logprob_BR=torch.zeros(B, 1),
        response_mask_BR=torch.ones(B, 1, dtype=torch.bool),
        ends=(End.COMPLETE,) * B,
        weight_versions_B=torch.zeros(B, dtype=torch.int64),
        responses=responses,
        raw_responses=responses,
        special_tokens_B=torch.zeros(B, dtype=torch.int64),
    )


@pytest.fixture
def world_of_one(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_scorer(world_of_one: None) -> None:
    scorer = RewardScorer(settings(max_failure_fraction=0.5), torch.device("cpu"))
    try:
        scores, metrics = scorer.score(rollouts("fine", "raise", "hang", "fine"))
        assert scores.tolist() == [1.0, -1.0, -1.0, 1.0]
        assert metrics == {"reward/failures": 0.5, "reward/timeouts": 0.25}
        with pytest.raises(RewardError, match="2 of 3 rewards failed"):
            scorer.score(rollouts("raise", "raise", "fine"))
        with pytest.raises(RewardError, match="rewards failed"):
            scorer.score_local(rollouts("raise"))
    finally:
        scorer.close()


def test_scorer_checks_first() -> None:
    with pytest.raises(ValueError, match="did you mean 'exact'"):
        RewardScorer(RewardSettings(function="exakt"), torch.device("cpu"))


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_unclosed_channel_closes_each_descriptor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second close could close a new descriptor with the same number, such as a connection to another rank."""
    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    PoolEnd()  # as for an error that ends a run before its pool
    gc.collect()
    assert not ignored
