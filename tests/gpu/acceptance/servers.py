"""SGLang on the device of the trainer. The server sleeps during training and receives the new weights after sleep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch
from packaging.version import Version

from megappo.config import Config
from megappo.engines.sglang.servers.guard import session_pids
from megappo.observe.timing.stopwatch import Lap
from megappo.plan.here import this_machine
from megappo.plan.planner import make_plan, read_models
from megappo.ppo.reports.measures import restart_metrics
from megappo.ppo.reports.reporting import Reporter
from megappo.ppo.rollout.probe import default_tolerance_nats
from megappo.runtime.packages import installed_version
from tests.gpu.acceptance.packs import NATS
from tests.gpu.acceptance.registry import Place
from tests.gpu.acceptance.resume import kill, logged, own_variables
from tests.gpu.acceptance.table import Row, Skip, judged, measured, within
from tests.gpu.acceptance.workload import ACTOR_ONLY, Size, make_config, model_folder, settings, trainer, write_settings
from tests.support.places import ROOT

STEPS = 3
CACHE_TOKENS = 65536
LEARNING_STEPS = 12
_TOKENIZER_VOCABULARY = 16
"""Vocabulary size of configs/models/tiny_arithmetic."""


class FreeMemoryReporter(Reporter):
    """A reporter that records free memory of the device and memory of each process at the start of a stage."""

    free: ClassVar[dict[str, int]] = {}
    own: ClassVar[dict[str, int]] = {}
    """Bytes of tensors of this process."""
    others: ClassVar[dict[str, int]] = {}
    """Bytes of the largest other process, if the driver reports them."""

    def stage(self, name: str, waits_for: str = "") -> AbstractContextManager[Lap]:
        """Record memory and start the stage. Cached memory of this process counts as free."""
        if torch.cuda.is_available():
            self.free[name] = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
            self.own[name] = torch.cuda.memory_allocated()
            self.others[name] = _largest_other()
        return super().stage(name, waits_for)


def _largest_other() -> int:
    import pynvml

    pynvml.nvmlInit()
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
    return max((p.usedGpuMemory or 0 for p in processes if p.pid != os.getpid()), default=0)


def server_settings(place: Place) -> dict[str, Any]:
    """Return settings of a server, with replacements for packages that a folder of wheels cannot contain.

    FlashInfer has 65 MB. sglang-kernel for torch 2.11 is older than the required version, but sufficient. The Rust
    prefix tree of SGLang is built for torch 2.14 and crashes with another version; the Python tree replaces it.
    """
    options: dict[str, Any] = {"max_total_tokens": 4096 if place.tiny else CACHE_TOKENS}
    if place.device == "cpu":
        return options | {"threads": 1}
    if installed_version("flashinfer-python") is None:
        options["arguments"] = {"attention-backend": "triton", "sampling-backend": "pytorch"}
    if Version(installed_version("sglang-kernel") or "0") < Version("0.4.9"):
        options["environment"] = {
            "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
            "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
        }
    return options


def check_sglang() -> None:
    """Check the installation. Raises Skip if SGLang is not installed."""
    if installed_version("sglang") is None:
        raise Skip("sglang is not installed")


def sleep_train_wake(place: Place) -> Iterator[Row]:
    """Run three steps of actor and critic with four updates each and one server: rollout, sleep, update, wake,
    weights by shared memory or IPC. Both roles are offloaded while inactive."""
    check_sglang()
    size = Size(8, 8, 16) if place.tiny else Size(256, 64, 1024)
    content = _settings(place, model_folder(place, "0.6B"), size)
    longest = size.prompt + size.response
    content["rollout"]["servers"]["max_total_tokens"] = (
        size.samples * longest + 512
    )  # room for all responses at the same time
    for role in ("actor", "critic"):
        content[role] |= {
            "offload": True, "minibatch_sequences": size.samples // 4, "microbatch_budget_tokens": 16 * longest
        }  # fmt: skip
    config = make_config(place, content, [f"actor.optimizer.learning_rate={1e-3 if place.tiny else 1e-6}"])
    last_metrics, weights_bytes = yield from _three_steps(place, config)
    yield from _against_plan(config, last_metrics)
    if FreeMemoryReporter.own:
        stays = FreeMemoryReporter.own["rollout"]
        text = f"{stays / 1e9:.3f} GB during generation, less than half of the weights of a role"
        yield judged("memory of a trainer that rests", stays < weights_bytes / 2, text, stays_bytes=stays)


def experts(place: Place) -> Iterator[Row]:
    """Run three steps of an actor without offload, with two layers of 128 experts and routing replay."""
    check_sglang()
    size = Size(8, 8, 16) if place.tiny else Size(64, 16, 256)
    content = _settings(place, model_folder(place, "30B-A3B", layers=2), size)
    overrides = [*ACTOR_ONLY, f"actor.optimizer.learning_rate={1e-3 if place.tiny else 1e-5}"]
    yield from _three_steps(place, make_config(place, content, overrides))


def _three_steps(place: Place, config: Config) -> Generator[Row, None, tuple[dict[str, float], int]]:
    """Yield the rows of the steps. Return the metrics of the last step and the bytes of the weights of the actor."""
    FreeMemoryReporter.free.clear()
    dtype, started = _dtype(place), time.monotonic()
    with trainer(config, FreeMemoryReporter) as t:
        t.sync_weights()
        yield measured("first weights", f"{time.monotonic() - started:.1f} s after the start of trainer and server")
        for step in range(1, STEPS + 1):
            t.step = step
            t.ppo_step()
            yield from _step(t.metrics | restart_metrics(t.parts), step, t.parts.weights.total_bytes, dtype)
        version, last, weights_bytes = t.parts.engine.version, dict(t.metrics), t.parts.weights.total_bytes
    yield judged("versions", version == STEPS + 1, f"{version} after {STEPS} updates", version=version)
    if FreeMemoryReporter.free:
        awake, asleep = FreeMemoryReporter.free["rollout"], FreeMemoryReporter.free["update_actor"]
        free_memory = f"{awake / 1e9:.1f} GB free for the trainer with the server awake, {asleep / 1e9:.1f} asleep"
        yield judged("memory while asleep", asleep > awake, free_memory, awake_bytes=awake, asleep_bytes=asleep)
        awake_usage, asleep_usage = FreeMemoryReporter.others["rollout"], FreeMemoryReporter.others["update_actor"]
        yield measured("memory of the server", f"{awake_usage / 1e9:.2f} GB awake, {asleep_usage / 1e9:.2f} GB asleep",
                       awake_bytes=awake_usage, asleep_bytes=asleep_usage)  # fmt: skip
    return last, weights_bytes


def _against_plan(config: Config, metrics: Mapping[str, float]) -> Iterator[Row]:
    """Yield the seconds of the stages and of the plan, which assumes responses of maximum length."""
    plan = make_plan(config, read_models(config, None).models, this_machine(), 1)
    for name, planned in ({s.name: s.seconds for s in plan.stages} | {"step": plan.step_seconds}).items():
        seconds = metrics[f"time/{name}"]
        yield measured(f"{name} beside its plan", f"{seconds:.3f} s, planned {planned:.3f}", seconds=seconds,
                       planned_seconds=planned)  # fmt: skip
    yield measured("tokens of a step", f"{metrics['tokens_per_second']:.0f} tokens/s, planned "
                   f"{plan.tokens_per_second:.0f}", tokens_per_second=metrics["tokens_per_second"])  # fmt: skip


def killed(place: Place) -> Iterator[Row]:
    """Kill a server during generation. The server must restart, and the results of the step must be normal."""
    check_sglang()
    size, dtype = Size(8, 8, 16) if place.tiny else Size(64, 16, 256), _dtype(place)
    content = _settings(place, model_folder(place, "0.6B"), size)
    with trainer(make_config(place, content, ACTOR_ONLY)) as t:
        t.sync_weights()
        engine: Any = t.parts.engine
        (server,) = engine.fleet.servers.values()
        timer = threading.Timer(0.0 if place.tiny else 0.5, _kill, [server.session])
        timer.start()
        t.step = 1
        t.ppo_step()
        timer.join()
        metrics, restarts = dict(t.metrics), engine.usage.restarts
    yield judged("restarts", restarts == 1, f"{restarts} servers, 1 was killed")
    yield from _gaps("engine beside trainer after the restart, nats", metrics, dtype)


def _kill(session: int) -> None:
    for pid in session_pids(session):
        os.kill(pid, signal.SIGKILL)


def commands(place: Place) -> Iterator[Row]:
    """Run `megappo train` with a server, kill the run by SIGKILL after its first checkpoint, and continue the run.
    The other steps build a trainer in this program, with a different order of imports."""
    check_sglang()
    directory, dtype = Path(place.scratch) / "typed", _dtype(place)
    layers = None if place.tiny else 4
    content = _settings(
        place, model_folder(place, "0.6B", layers=layers), Size(8, 8, 16) if place.tiny else Size(64, 16, 256)
    )
    content["run"] |= {"steps": STEPS, "directory": str(directory), "export_final_model": False}
    content["checkpoint"] = {"every_steps": 1}
    arguments = ["train", str(write_settings(place, content)), *ACTOR_ONLY]
    killed_step = kill(arguments, directory, most_seconds=200.0)
    yield measured("killed", f"by SIGKILL, with a checkpoint of step {killed_step}", step=killed_step)
    done = subprocess.run(
        [sys.executable, "-m", "megappo", *arguments], cwd=ROOT, env=own_variables(), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    lines = logged(directory) if done.returncode == 0 else []
    steps = [line["step"] for line in lines]
    is_complete = steps == list(range(1, STEPS + 1))
    outcome = f"steps {steps} were logged" if is_complete else f"ended with {done.returncode}: {done.stderr[-300:]}"
    yield judged("the run that was killed and continued", is_complete, outcome)
    for line in lines:
        yield from _gaps(f"step {line['step']}: engine beside trainer, nats", line, dtype)


def share_of_sevens(*, response: str, **_unread: Any) -> float:
    """Return the number of sevens divided by 32, a reward that any model can learn."""
    return response.count("7") / 32


def learning(place: Place) -> Iterator[Row]:
    """Train with rollouts of a server that receives the new weights after every step. The reward must rise."""
    check_sglang()
    size = Size(16, 8, 32) if place.tiny else Size(128, 8, 32)
    content = _settings(
        place, model_folder(place, "0.6B", layers=None if place.tiny else 4, vocabulary=_TOKENIZER_VOCABULARY), size
    )
    content["reward"] = {"function": f"{__name__}:share_of_sevens"}
    content["actor"]["minibatch_sequences"] = size.samples // 2
    overrides = [*ACTOR_ONLY, f"actor.optimizer.learning_rate={1e-2 if place.tiny else 3e-5}"]
    rewards, worst = list[float](), 0.0
    with trainer(make_config(place, content, overrides)) as t:
        t.sync_weights()
        for step in range(1, (6 if place.tiny else LEARNING_STEPS) + 1):
            t.step = step
            t.ppo_step()
            rewards.append(t.metrics["reward/mean"])
            worst = max(worst, t.metrics["mismatch/mean"])
    first, last = rewards[0], sum(rewards[-3:]) / 3
    curve = " ".join(f"{reward:.2f}" for reward in rewards)
    yield judged("reward", last > first + 0.1, f"{first:.3f} at first, {last:.3f} at last ({curve})", first=first,
                 last=last)  # fmt: skip
    yield within("engine beside trainer, nats", {"mean of the worst step": worst}, NATS[_dtype(place)])


def _gaps(what: str, metrics: Mapping[str, float], dtype: str) -> Iterator[Row]:
    """Yield the mean gap over all tokens, and the largest gaps. In bfloat16, a maximum over more tokens is larger
    because of rounding, so its bound is the limit that stops a run."""
    yield within(what, {"mean": metrics["mismatch/mean"]}, NATS[dtype])
    largest = {"probe": metrics["sync/probe_gap"], "rollout": metrics["mismatch/max"]}
    most = NATS[dtype] if dtype == "float32" else default_tolerance_nats(dtype)
    yield within(f"{what}, largest", largest, most)


def _dtype(place: Place) -> str:
    return "float32" if place.device == "cpu" else "bfloat16"


def _settings(place: Place, folder: Path, size: Size) -> dict[str, Any]:
    """Return settings of a run with a server."""
    content = settings(place, folder, size, _dtype(place))
    content["rollout"] |= {"engine": None, "servers": server_settings(place)}
    return content


def _step(metrics: dict[str, float], step: int, n_bytes: int, dtype: str) -> Iterator[Row]:
    """Yield the cost of a sync, and the gap between engine and trainer. The sync has compared fingerprints or raised
    an error."""
    what = f"step {step}"
    of_phases = {n: s for n, s in metrics.items() if n.startswith("sync/") and n.endswith("_seconds")}
    phases = ", ".join(f"{n.removeprefix('sync/').removesuffix('_seconds')} {s:.3f}" for n, s in of_phases.items())
    text = f"{n_bytes / 1e9:.3g} GB in {metrics['sync/seconds']:.3f} s, {metrics['sync/gigabytes_per_second']:.2f} GB/s"
    yield measured(f"{what}: sync with fingerprints", f"{text} ({phases})", seconds=metrics["sync/seconds"],
                   gigabytes_per_second=metrics["sync/gigabytes_per_second"])  # fmt: skip
    yield from _gaps(f"{what}: engine beside trainer, nats", metrics, dtype)
    yield judged(f"{what}: restarts", not metrics["engine/restarts"], f"{metrics['engine/restarts']:g} servers")
    stages = {n: s for n, s in metrics.items() if n.startswith("time/")}
    yield measured(
        f"{what}: time", ", ".join(f"{n.removeprefix('time/')} {s:.3f} s" for n, s in stages.items()), **stages
    )
