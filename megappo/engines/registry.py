"""Find the engine of `rollout.engine` or `rollout.servers.kind`: the name of a built-in engine, or an import path."""

from __future__ import annotations

import inspect
from pathlib import Path

from megappo.config import Config
from megappo.config.rollout import RolloutSettings
from megappo.config.sections.engine import ENGINES, EngineCapabilities
from megappo.engines.absent import AbsentEngine
from megappo.engines.protocol import Engine, EngineFactory
from megappo.plugins import check_call, load_function
from megappo.runtime.process import Runtime
from megappo.runtime.watch.interrupts import Stop

_METHODS = ("submit", "poll", "pause", "update_weights", "sleep", "close")
_ATTRIBUTES = ("on_tokens", "capabilities", "version", "usage", "replicas")
"""Attributes of an engine. A class may set them in `__init__`."""


def find_engine(settings: RolloutSettings) -> EngineFactory:
    """Return the factory of the engine that the resolved settings select.

    Raises ValueError if the import fails, if the signature does not match `EngineFactory`, or if a class lacks the
    methods of an engine. Raises RunError if the servers cannot run on this machine, or if the ranks cannot see the
    GPUs that the servers need.
    """
    name, setting = settings.engine_name, settings.engine_setting
    assert name is not None, "the settings were not resolved"
    if settings.load_from is not None:
        return AbsentEngine
    known = ENGINES.get(name)
    if known is not None and known.check is not None:
        load_function(known.check, setting)(settings.server_settings)
    factory = load_function(name if known is None else known.factory, setting)
    given = ("config", "folder", "stop_token_ids", "runtime", "stop")
    remedy = "change its parameters or rollout.engine_options"
    check_call(factory, given, settings.engine_options, what=settings.engine_text, remedy=remedy)
    if inspect.isclass(factory):
        _check_members(factory, settings)
    return factory


def make_engine(
    factory: EngineFactory, config: Config, folder: Path, stop_token_ids: tuple[int, ...], runtime: Runtime, stop: Stop
) -> Engine:
    """Create the engine of a run with the factory from `find_engine`. This is a collective of the world.

    Raises the exceptions of the factory, and ValueError if the engine lacks members that the settings require.
    """
    options = {} if config.rollout.load_from is not None else config.rollout.engine_options
    engine = factory(config=config, folder=folder, stop_token_ids=stop_token_ids, runtime=runtime, stop=stop, **options)
    _check_members(engine, config.rollout)
    return engine


def _check_members(engine: object, settings: RolloutSettings) -> None:
    """Raise ValueError if an engine or an engine class lacks members that the settings require."""
    lacking = [name for name in _METHODS if not callable(getattr(engine, name, None))]
    lacking += sorted(getattr(engine, "__abstractmethods__", ()))
    if not inspect.isclass(engine):
        lacking += [name for name in _ATTRIBUTES if not hasattr(engine, name)]
    if lacking:
        raise ValueError(
            f"{settings.engine_text} has no {', '.join(lacking)}; extend megappo.engines.base.EngineBase, "
            "or implement the members of megappo.engines.protocol.Engine"
        )
    needs_engine = not (settings.replays_arrivals or settings.load_from is not None)
    capabilities = getattr(engine, "capabilities", None)  # of a class, possibly a property
    lacks_concurrency = isinstance(capabilities, EngineCapabilities) and not capabilities.concurrent
    if settings.ahead and needs_engine and lacks_concurrency:
        raise ValueError(
            f"rollout.ahead is {settings.ahead}, but {settings.engine_text} has no capability `concurrent` "
            "to generate during the update; implement it, or set rollout.ahead to 0"
        )
