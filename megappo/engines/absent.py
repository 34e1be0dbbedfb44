"""In place of an engine where steps are trained on saved samples (`rollout.load_from`): it has versions alone."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from megappo.engines.protocol import Completion, GenerateRequest, SamplingParams
from megappo.reshard.stream import WeightStream


class AbsentEngine:
    """Takes no weights and answers nothing."""

    on_tokens: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self) -> None:
        self._version = 0

    @property
    def version(self) -> int:
        """Of the last weights that it was told of."""
        return self._version

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        params: SamplingParams,
        done: MutableMapping[int, Completion] | None = None,
    ) -> list[Completion]:
        """Raises RuntimeError: rules refuse what would ask it."""
        raise RuntimeError("there is no engine with rollout.load_from")

    def update_weights(self, named_tensors: WeightStream, version: int) -> None:
        """Note the version; the stream is not asked for anything, on any rank."""
        self._version = version

    def close(self) -> None:
        """Nothing is open."""


def absent_engine(**_given: Any) -> AbsentEngine:
    """An `EngineFactory`."""
    return AbsentEngine()
