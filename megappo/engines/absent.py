"""Stand-in engine for a run that trains on saved samples (`rollout.load_from`). The engine only stores a weight
version."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from megappo.engines.protocol import Completion, GenerateRequest, SamplingParams
from megappo.reshard.stream import WeightStream


class AbsentEngine:
    """An `Engine` that ignores weights and cannot generate."""

    on_tokens: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, **_given: Any) -> None:
        """Create the engine. Accept the arguments of `EngineFactory` and ignore them."""
        self.version = 0
        """Version of the last weight update."""

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        params: SamplingParams,
        done: MutableMapping[int, Completion] | None = None,
    ) -> list[Completion]:
        """Raise RuntimeError. The configuration rules reject every setting that would need this engine to generate."""
        raise RuntimeError("rollout.load_from is set, so the run has no generation engine")

    def update_weights(self, named_tensors: WeightStream, version: int) -> None:
        """Store the version. No rank reads the stream."""
        self.version = version

    def close(self) -> None:
        """Release nothing, because the engine has no resources."""
