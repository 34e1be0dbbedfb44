"""Profile of a step: a torch trace of every rank, and a summary page of all ranks.

The time of each stage on a rank has three parts: computing (GPU kernels, or torch operators on a CPU), exchanging
(collectives without simultaneous computation), and idle. Idle time includes Python, waiting for engines and reward
functions, and late kernel launches.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from megappo.errors import writing
from megappo.observe.timing.step_profile import FOLDER, RankProfile, page, shares

_STAGE = "megappo: "
_EXCHANGE = re.compile(r"c10d|gloo|nccl|record_param_comms", re.IGNORECASE)


class StepProfiler:
    """Traces the selected steps on every rank."""

    def __init__(self, directory: Path, steps: Iterable[int], *, rank: int, on_cuda: bool) -> None:
        """Create a profiler for the given steps. `directory`: the run directory."""
        self._folder, self._steps, self._rank, self._on_cuda = directory / FOLDER, frozenset(steps), rank, on_cuda
        self._step = 0
        self._running: profile | None = None

    def begin(self, step: int) -> None:
        """Start a trace if the step is selected."""
        self.cancel()
        if step in self._steps:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_cuda else [])]
            self._step, self._running = step, profile(activities=activities)
            self._running.start()

    @property
    def is_running(self) -> bool:
        """Whether the current step is traced. All ranks have the same value."""
        return self._running is not None

    def stage(self, name: str) -> AbstractContextManager[record_function | None]:
        """Mark a stage in the trace."""
        return record_function(f"{_STAGE}{name}") if self._running is not None else nullcontext()

    def end(self) -> RankProfile:
        """Write the trace of this rank and return the profile. Raises OSError or RuntimeError if the trace cannot be
        written."""
        running, self._running = self._running, None
        assert running is not None, "the step is not traced"
        running.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(self._folder / f"step-{self._step:06d}-rank-{self._rank}.json.gz"))
        return read_events(running.events(), on_cuda=self._on_cuda)

    def write_page(self, ranks: Sequence[RankProfile]) -> Path:
        """Write the page of all ranks, and the numbers as JSON. Return the path of the page."""
        path = self._folder / f"step-{self._step:06d}.md"
        device = torch.cuda.get_device_name() if self._on_cuda else "CPU"
        with writing(path):
            path.with_suffix(".json").write_text(json.dumps([asdict(rank) for rank in ranks], indent=1))
            path.write_text(page(self._step, ranks, f"{device}, torch {torch.__version__}"), encoding="utf-8")
        return path

    def cancel(self) -> None:
        """Stop the trace of an unfinished step."""
        if self._running is not None:
            self._running.stop()
            self._running = None


def read_events(events: Iterable[FunctionEvent], *, on_cuda: bool) -> RankProfile:
    """Return the profile of a rank from torch events. GPU events, or all operators on a CPU, count as computing. Events
    with the prefix `megappo: ` mark stages.

    With a GPU, NCCL events on the host are only launches, but gloo events on the host are collectives.
    """
    stages, work, exchange = [], [], []
    seconds: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in events:
        interval = (event.time_range.start, event.time_range.end)
        on_device = event.device_type != DeviceType.CPU
        if event.name.startswith(_STAGE):
            if not on_device:
                stages.append((event.name.removeprefix(_STAGE), interval))
        elif _EXCHANGE.search(event.name):
            if on_device == on_cuda or "gloo" in event.name.lower():
                exchange.append(interval)
        elif on_device == on_cuda and not event.is_user_annotation:
            work.append(interval)
            seconds[event.name] += 1e-6 * (event.self_device_time_total if on_cuda else event.self_cpu_time_total)
            calls[event.name] += 1
    stages.sort(key=lambda stage: stage[1])
    return RankProfile(shares(stages, work, exchange), dict(seconds), dict(calls))
