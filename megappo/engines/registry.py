"""Find the engine of `rollout.engine`, which is the name of a built-in engine or an import path."""

from __future__ import annotations

import inspect
from pathlib import Path

from megappo.config import Config
from megappo.config.engine import ENGINES
from megappo.config.schema import RolloutSettings
from megappo.engines.absent import AbsentEngine
from megappo.engines.protocol import Engine, EngineFactory
from megappo.plugins import check_call, load_function
from megappo.runtime.interrupts import Stop
from megappo.runtime.process import Runtime
from megappo.runtime.sglang_cpu import require_sglang

_NEEDED = ("generate", "update_weights", "close")
_NEEDED_AHEAD = ("submit", "collect")
_NEEDED_TALKING_AHEAD = ("converse", "open_stream", "finish_stream")
"""Methods that `rollout.ahead: 1` requires if an environment runs the episodes."""
_NEEDED_IN_FLIGHT = ("send", "finished", "abort")


def find_engine(settings: RolloutSettings) -> EngineFactory:
    """Return the factory of the engine that the resolved settings select.

    Raises ValueError if the import fails, if the signature does not match `EngineFactory`, or if a class lacks the
    methods of an engine. Raises RunError if SGLang cannot run on this machine, or if the ranks cannot see the GPUs
    that the servers need.
    """
    assert settings.engine is not None, "the settings were not resolved"
    if settings.load_from is not None:
        return AbsentEngine
    if settings.has_servers:
        from megappo.engines.sglang.gpus import check_visible

        require_sglang()
        check_visible(settings.servers)
    factory = load_function(ENGINES.get(settings.engine, settings.engine), "rollout.engine")
    given = ("config", "folder", "stop_token_ids", "runtime", "stop")
    remedy = "change its parameters or rollout.engine_options"
    check_call(factory, given, settings.engine_options, what=f"rollout.engine '{settings.engine}'", remedy=remedy)
    if inspect.isclass(factory):
        _check_methods(factory, settings)
    return factory


def make_engine(
    factory: EngineFactory, config: Config, folder: Path, stop_token_ids: tuple[int, ...], runtime: Runtime, stop: Stop
) -> Engine:
    """Create the engine of a run with the factory from `find_engine`. This is a collective of the world.

    Raises the exceptions of the factory, and ValueError if the engine lacks methods that the settings require.
    """
    options = {} if config.rollout.load_from is not None else config.rollout.engine_options
    engine = factory(config=config, folder=folder, stop_token_ids=stop_token_ids, runtime=runtime, stop=stop, **options)
    _check_methods(engine, config.rollout)
    return engine


def _check_methods(engine: object, settings: RolloutSettings) -> None:
    """Raise ValueError if an engine or an engine class lacks methods that the settings require."""
    lacking = [name for name in _NEEDED if not callable(getattr(engine, name, None))]
    if lacking:
        raise ValueError(
            f"rollout.engine '{settings.engine}' has no {', '.join(lacking)}; implement the methods of "
            "megappo.engines.protocol.Engine"
        )
    needed = _NEEDED_IN_FLIGHT if settings.in_flight else _NEEDED_AHEAD if settings.ahead else ()
    if settings.ahead and settings.episodes is not None:
        needed = (*needed, "listen") if settings.in_flight else _NEEDED_TALKING_AHEAD
    needed = () if settings.replays_arrivals or settings.load_from is not None else needed
    if not all(callable(getattr(engine, name, None)) for name in needed):
        raise ValueError(
            f"rollout.ahead is {settings.ahead}, but rollout.engine '{settings.engine}' has no "
            f"{' and '.join(needed)} to generate during the update; add the methods, or set rollout.ahead to 0"
        )
