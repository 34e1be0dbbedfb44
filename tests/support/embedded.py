"""A base class of test engines that generate with the embedded engine and deliver the answers differently."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megappo.config import Config
from megappo.config.sections.engine import EngineCapabilities
from megappo.engines.base import EngineBase
from megappo.engines.protocol import Completion, GenerateRequest, SamplingParams, SyncReport
from megappo.engines.transformers_engine import TransformersEngine, embedded_engine
from megappo.reshard.stream import WeightStream
from megappo.runtime.process import Runtime
from megappo.runtime.watch.interrupts import NeverStop, Stop


class AroundEmbedded(EngineBase):
    """The embedded engine without checks of all ranks for a stop."""

    capabilities = EngineCapabilities(concurrent=True)

    def __init__(
        self, *, config: Config, folder: Path, stop_token_ids: tuple[int, ...], runtime: Runtime, stop: Stop
    ) -> None:
        super().__init__()
        self.inner: TransformersEngine = embedded_engine(
            config=config, folder=folder, stop_token_ids=stop_token_ids, runtime=runtime, stop=NeverStop()
        )
        self.stop = stop

    def complete(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> list[Completion]:
        """Return the answers of the embedded engine in order."""
        futures = self.inner.submit(requests, params)
        self.inner.poll(0.0)
        return [future.result() for future in futures]

    def update_weights(self, named_tensors: WeightStream, version: int) -> SyncReport:
        report = self.inner.update_weights(named_tensors, version)
        self.version = version
        return report

    def close(self) -> None:
        self.inner.close()
