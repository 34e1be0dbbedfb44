"""Stand-in engine for a run that trains on saved samples (`rollout.load_from`). The engine only stores a weight
version."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from megappo.engines.base import EngineBase
from megappo.engines.protocol import Completion, GenerateRequest, PauseMode, SamplingParams, SyncReport
from megappo.reshard.stream import WeightStream


class AbsentEngine(EngineBase):
    """An `Engine` that ignores weights and cannot generate."""

    def __init__(self, **_arguments: Any) -> None:
        """Create the engine. Accept the arguments of `EngineFactory` and ignore them."""
        super().__init__()

    def submit(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> list[Future[Completion]]:
        """Raise RuntimeError. The configuration rules reject every setting that would need this engine to generate."""
        raise RuntimeError("rollout.load_from is set, so the run has no generation engine")

    def poll(self, wait_seconds: float, *, weights_changed: bool = False) -> None:
        """Do nothing, because no request was submitted."""

    def pause(self, mode: PauseMode) -> None:
        """Do nothing, because no request was submitted."""

    def update_weights(self, named_tensors: WeightStream, version: int) -> SyncReport:
        """Store the version. No rank reads the stream."""
        self.version = version
        return SyncReport(())
