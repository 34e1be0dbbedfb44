"""Stand-in for the engine of a run that trains on saved samples (`rollout.load_from`): it only keeps a weight
version."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from megappo.engines.protocol import Completion, GenerateRequest, SamplingParams
from megappo.reshard.stream import WeightStream


class AbsentEngine:
    """An `Engine` that takes no weights and answers no request."""

    on_tokens: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, **_given: Any) -> None:
        """Make the engine as an `EngineFactory` does."""
        self.version = 0
        """Version of the last weight update that the engine was told of."""

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        params: SamplingParams,
        done: MutableMapping[int, Completion] | None = None,
    ) -> list[Completion]:
        """Raise RuntimeError: the rules of the configuration refuse whatever would ask this engine."""
        raise RuntimeError("there is no engine with rollout.load_from")

    def update_weights(self, named_tensors: WeightStream, version: int) -> None:
        """Note the version; the stream is not asked for anything, on any rank."""
        self.version = version

    def close(self) -> None:
        """Do nothing: the engine holds no resources."""
