"""SGLang on the trainer's device: it sleeps while the trainer computes, and takes the new weights when it wakes."""

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
from megappo.engines.sglang.guard import session_pids
from megappo.observe.stopwatch import Lap
from megappo.plan.here import this_machine
from megappo.plan.planner import make_plan, read_models
from megappo.ppo.measures import restart_metrics
from megappo.ppo.probe import default_tolerance_nats
from megappo.ppo.reporting import Reporter
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
_TOKENIZER_WORDS = 16
"""Of configs/models/tiny_arithmetic."""


class FreeMemoryReporter(Reporter):
    """Notes what is free on the device when a stage begins, and what each process holds."""

    free: ClassVar[dict[str, int]] = {}
    own: ClassVar[dict[str, int]] = {}
    """Bytes of this process's tensors."""
    others: ClassVar[dict[str, int]] = {}
    """Bytes of the largest process other than this one, where the driver says so."""

    def stage(self, name: str, waits_for: str = "") -> AbstractContextManager[Lap]:
        """The stage; what other processes hold counts too."""
        if torch.cuda.is_available():
            self.free[name] = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
            self.own[name] = torch.cuda.memory_allocated()
            self.others[name] = _largest_other()
        return super().stage(name, waits_for)


def _largest_other() -> int:
    import pynvml

    pynvml.nvmlInit()
    found = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
    return max((p.usedGpuMemory or 0 for p in found if p.pid != os.getpid()), default=0)


def server_settings(place: Place) -> dict[str, Any]:
    """Settings of a server here, with what takes the place of packages that a folder of wheels has no room for.

    FlashInfer's are 65 MB. sglang-kernel for torch 2.11 is older than SGLang asks for, and does; SGLang's own tree of
    prefixes in Rust is built for torch 2.14 and ends the server with another, and there is one in Python.
    """
    found: dict[str, Any] = {"max_total_tokens": 4096 if place.tiny else CACHE_TOKENS}
    if place.device == "cpu":
        return found | {"threads": 1}
    if installed_version("flashinfer-python") is None:
        found["arguments"] = {"attention-backend": "triton", "sampling-backend": "pytorch"}
    if Version(installed_version("sglang-kernel") or "0") < Version("0.4.9"):
        found["environment"] = {
            "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
            "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
        }
    return found


def check_sglang() -> None:
    """Raises Skip where it is not installed."""
    if installed_version("sglang") is None:
        raise Skip("sglang is not installed")


def sleep_train_wake(place: Place) -> Iterator[Row]:
    """Three steps of actor and critic, four updates each, through one server: rollout, sleep, update, wake, weights by
    shared memory or IPC. Both leave the device while they rest."""
    check_sglang()
    size = Size(8, 8, 16) if place.tiny else Size(256, 64, 1024)
    content = _settings(place, model_folder(place, "0.6B"), size)
    longest = size.prompt + size.response
    content["rollout"]["sglang"]["max_total_tokens"] = size.samples * longest + 512  # all responses at a time
    for role in ("actor", "critic"):
        content[role] |= {
            "offload": True, "minibatch_sequences": size.samples // 4, "microbatch_budget_tokens": 16 * longest
        }  # fmt: skip
    config = make_config(place, content, [f"actor.optimizer.learning_rate={1e-3 if place.tiny else 1e-6}"])
    found, weights_bytes = yield from _three_steps(place, config)
    yield from _beside_the_plan(config, found)
    if FreeMemoryReporter.own:
        stays = FreeMemoryReporter.own["rollout"]
        words = f"{stays / 1e9:.3f} GB while responses are made, less than half of a role's weights"
        yield judged("memory of a trainer that rests", stays < weights_bytes / 2, words, stays_bytes=stays)


def experts(place: Place) -> Iterator[Row]:
    """The same of an actor alone that stays, with two layers of 128 experts, whose routing in the engine the trainer
    goes by."""
    check_sglang()
    size = Size(8, 8, 16) if place.tiny else Size(64, 16, 256)
    content = _settings(place, model_folder(place, "30B-A3B", layers=2), size)
    words = [*ACTOR_ONLY, f"actor.optimizer.learning_rate={1e-3 if place.tiny else 1e-5}"]
    yield from _three_steps(place, make_config(place, content, words))


def _three_steps(place: Place, config: Config) -> Generator[Row, None, tuple[dict[str, float], int]]:
    """Yields the steps' rows; returns the last step's metrics and the bytes of the actor's weights."""
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
        words_of_memory = f"{awake / 1e9:.1f} GB free for the trainer with the server awake, {asleep / 1e9:.1f} asleep"
        yield judged("memory while asleep", asleep > awake, words_of_memory, awake_bytes=awake, asleep_bytes=asleep)
        held, kept = FreeMemoryReporter.others["rollout"], FreeMemoryReporter.others["update_actor"]
        yield measured("memory of the server", f"{held / 1e9:.2f} GB awake, {kept / 1e9:.2f} GB asleep",
                       awake_bytes=held, asleep_bytes=kept)  # fmt: skip
    return last, weights_bytes


def _beside_the_plan(config: Config, found: Mapping[str, float]) -> Iterator[Row]:
    """Seconds of a step's stages beside those of the plan, which takes every response to be at its longest."""
    plan = make_plan(config, read_models(config, None).models, this_machine(), 1)
    for name, planned in ({s.name: s.seconds for s in plan.stages} | {"step": plan.step_seconds}).items():
        seconds = found[f"time/{name}"]
        yield measured(f"{name} beside its plan", f"{seconds:.3f} s, planned {planned:.3f}", seconds=seconds,
                       planned_seconds=planned)  # fmt: skip
    yield measured("tokens of a step", f"{found['tokens_per_second']:.0f} tokens/s, planned "
                   f"{plan.tokens_per_second:.0f}", tokens_per_second=found["tokens_per_second"])  # fmt: skip


def killed(place: Place) -> Iterator[Row]:
    """A server that is killed while it generates is started again, and the step is as any other."""
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
        found, restarts = dict(t.metrics), engine.restarts
    yield judged("restarts", restarts == 1, f"{restarts} servers, 1 was killed")
    yield from _gaps("engine beside trainer after the restart, nats", found, dtype)


def _kill(session: int) -> None:
    for pid in session_pids(session):
        os.kill(pid, signal.SIGKILL)


def commands(place: Place) -> Iterator[Row]:
    """`megappo train` with a server as a user types it, killed by SIGKILL behind its first checkpoint and continued.
    The other steps build a trainer in a program of their own, which imports in another order."""
    check_sglang()
    directory, dtype = Path(place.scratch) / "typed", _dtype(place)
    layers = None if place.tiny else 4
    content = _settings(
        place, model_folder(place, "0.6B", layers=layers), Size(8, 8, 16) if place.tiny else Size(64, 16, 256)
    )
    content["run"] |= {"steps": STEPS, "directory": str(directory), "export_final_model": False}
    content["checkpoint"] = {"every_steps": 1}
    words = ["train", str(write_settings(place, content)), *ACTOR_ONLY]
    killed_step = kill(words, directory, most_seconds=200.0)
    yield measured("killed", f"by SIGKILL, with a checkpoint of step {killed_step}", step=killed_step)
    done = subprocess.run(
        [sys.executable, "-m", "megappo", *words],
        cwd=ROOT,
        env=own_variables(),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = logged(directory) if done.returncode == 0 else []
    steps = [line["step"] for line in lines]
    held = steps == list(range(1, STEPS + 1))
    said = f"steps {steps} were logged" if held else f"ended with {done.returncode}: {done.stderr[-300:]}"
    yield judged("the run that was killed and continued", held, said)
    for line in lines:
        yield from _gaps(f"step {line['step']}: engine beside trainer, nats", line, dtype)


def share_of_sevens(*, response: str, **_unread: Any) -> float:
    """A reward that anything can learn: sevens among the first characters."""
    return response.count("7") / 32


def learning(place: Place) -> Iterator[Row]:
    """A reward that rises through rollouts of a server that gets the new weights after every step."""
    check_sglang()
    size = Size(16, 8, 32) if place.tiny else Size(128, 8, 32)
    content = _settings(
        place, model_folder(place, "0.6B", layers=None if place.tiny else 4, words=_TOKENIZER_WORDS), size
    )
    content["reward"] = {"function": f"{__name__}:share_of_sevens"}
    content["actor"]["minibatch_sequences"] = size.samples // 2
    words = [*ACTOR_ONLY, f"actor.optimizer.learning_rate={1e-2 if place.tiny else 3e-5}"]
    rewards, worst = list[float](), 0.0
    with trainer(make_config(place, content, words)) as t:
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


def _gaps(what: str, found: Mapping[str, float], dtype: str) -> Iterator[Row]:
    """The mean over all tokens, and the largest ones. In bfloat16 a maximum over more tokens is larger by rounding
    alone, so that it is judged by what ends a run."""
    yield within(what, {"mean": found["mismatch/mean"]}, NATS[dtype])
    largest = {"probe": found["sync/probe_gap"], "rollout": found["mismatch/max"]}
    most = NATS[dtype] if dtype == "float32" else default_tolerance_nats(dtype)
    yield within(f"{what}, largest", largest, most)


def _dtype(place: Place) -> str:
    return "float32" if place.device == "cpu" else "bfloat16"


def _settings(place: Place, folder: Path, size: Size) -> dict[str, Any]:
    """Of a run with a server."""
    content = settings(place, folder, size, _dtype(place))
    content["rollout"] |= {"engine": "sglang", "sglang": server_settings(place)}
    return content


def _step(metrics: dict[str, float], step: int, n_bytes: int, dtype: str) -> Iterator[Row]:
    """What a sync cost, which has compared fingerprints or raised, and how far the engine is from the trainer."""
    what = f"step {step}"
    of_phases = {n: s for n, s in metrics.items() if n.startswith("sync/") and n.endswith("_seconds")}
    phases = ", ".join(f"{n.removeprefix('sync/').removesuffix('_seconds')} {s:.3f}" for n, s in of_phases.items())
    words = (
        f"{n_bytes / 1e9:.3g} GB in {metrics['sync/seconds']:.3f} s, {metrics['sync/gigabytes_per_second']:.2f} GB/s"
    )
    yield measured(f"{what}: sync with fingerprints", f"{words} ({phases})", seconds=metrics["sync/seconds"],
                   gigabytes_per_second=metrics["sync/gigabytes_per_second"])  # fmt: skip
    yield from _gaps(f"{what}: engine beside trainer, nats", metrics, dtype)
    yield judged(f"{what}: restarts", not metrics["engine/restarts"], f"{metrics['engine/restarts']:g} servers")
    stages = {n: s for n, s in metrics.items() if n.startswith("time/")}
    yield measured(
        f"{what}: time", ", ".join(f"{n.removeprefix('time/')} {s:.3f} s" for n, s in stages.items()), **stages
    )
