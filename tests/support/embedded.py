"""A base class of test engines that generate with the embedded engine and deliver the answers differently."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path

from megappo.config import Config
from megappo.engines.protocol import Completion, GenerateRequest, SamplingParams
from megappo.engines.transformers_engine import TransformersEngine, embedded_engine
from megappo.reshard.stream import WeightStream
from megappo.runtime.interrupts import NeverStop, Stop
from megappo.runtime.process import Runtime


class AroundEmbedded:
    """The embedded engine without checks of all ranks for a stop."""

    def __init__(
        self, *, config: Config, folder: Path, stop_token_ids: tuple[int, ...], runtime: Runtime, stop: Stop
    ) -> None:
        self.inner: TransformersEngine = embedded_engine(
            config=config, folder=folder, stop_token_ids=stop_token_ids, runtime=runtime, stop=NeverStop()
        )
        self.stop = stop
        self.on_tokens: Callable[[], None] = lambda: None

    @property
    def version(self) -> int:
        return self.inner.version

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        params: SamplingParams,
        done: MutableMapping[int, Completion] | None = None,
    ) -> list[Completion]:
        return self.inner.generate(requests, params, done)

    def update_weights(self, named_tensors: WeightStream, version: int) -> None:
        self.inner.update_weights(named_tensors, version)

    def close(self) -> None:
        self.inner.close()
