"""Finds the engine that `rollout.engine` names: one of ours by its name, or the user's by an import path."""

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
"""Methods that `rollout.ahead: 1` needs where an environment plays episodes."""
_NEEDED_IN_FLIGHT = ("send", "finished", "abort")


def find_engine(settings: RolloutSettings) -> EngineFactory:
    """The factory of the engine that `settings`, completed by `resolve`, ask for.

    Raises ValueError for what cannot be imported, cannot be called as `EngineFactory` says, or is a class without the
    methods of an engine, and RunError without an SGLang that runs here, or the GPUs that its servers need.
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
    """Make the engine of a run by the factory that `find_engine` has found; a collective of the world. Raises as the
    factory does, and ValueError for an engine without the methods that the settings need."""
    options = {} if config.rollout.load_from is not None else config.rollout.engine_options
    engine = factory(config=config, folder=folder, stop_token_ids=stop_token_ids, runtime=runtime, stop=stop, **options)
    _check_methods(engine, config.rollout)
    return engine


def _check_methods(engine: object, settings: RolloutSettings) -> None:
    """Raise ValueError where an engine, or the class of one, lacks methods that the settings need."""
    lacking = [name for name in _NEEDED if not callable(getattr(engine, name, None))]
    if lacking:
        raise ValueError(
            f"rollout.engine '{settings.engine}' has no {', '.join(lacking)}; give it what "
            "megappo.engines.protocol.Engine says"
        )
    needed = _NEEDED_IN_FLIGHT if settings.in_flight else _NEEDED_AHEAD if settings.ahead else ()
    if settings.ahead and settings.episodes is not None:
        needed = (*needed, "listen") if settings.in_flight else _NEEDED_TALKING_AHEAD
    needed = () if settings.replays_arrivals or settings.load_from is not None else needed
    if not all(callable(getattr(engine, name, None)) for name in needed):
        raise ValueError(
            f"rollout.ahead is {settings.ahead}, but rollout.engine '{settings.engine}' has no {' and '.join(needed)} "
            "to generate with meanwhile; add them, or set rollout.ahead to 0"
        )
