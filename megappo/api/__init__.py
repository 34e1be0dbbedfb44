"""The public interface: functions for a run from Python, and the types of plug-ins. All other modules may change.

Names are imported on first use, so that importing this package is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megappo.algo.estimators import unwhitened
    from megappo.api.functions import evaluate, export, plan, train
    from megappo.api.protocols import AdvantageEstimator, PolicyLoss, PromptSource, RewardFunction
    from megappo.config.load import load_config
    from megappo.config.schema import Config
    from megappo.config.sections.engine import EngineCapabilities
    from megappo.engines.protocol import Completion, Engine, EngineFactory, GenerateRequest, SamplingParams
    from megappo.environments.protocol import Environment, LimitReached, Reply
    from megappo.environments.session import Session
    from megappo.errors import ConfigError, Interrupted, RunError
    from megappo.observe.loggers import Logger, LoggerFactory
    from megappo.plan.planner import Plan
    from megappo.types import Prompt

__all__ = [
    "AdvantageEstimator",
    "Completion",
    "Config",
    "ConfigError",
    "Engine",
    "EngineCapabilities",
    "EngineFactory",
    "Environment",
    "GenerateRequest",
    "Interrupted",
    "LimitReached",
    "Logger",
    "LoggerFactory",
    "Plan",
    "PolicyLoss",
    "Prompt",
    "PromptSource",
    "Reply",
    "RewardFunction",
    "RunError",
    "SamplingParams",
    "Session",
    "evaluate",
    "export",
    "load_config",
    "plan",
    "train",
    "unwhitened",
]

_HOMES = {
    "megappo.algo.estimators": ("unwhitened",),
    "megappo.api.functions": ("evaluate", "export", "plan", "train"),
    "megappo.api.protocols": ("AdvantageEstimator", "PolicyLoss", "PromptSource", "RewardFunction"),
    "megappo.config.sections.engine": ("EngineCapabilities",),
    "megappo.config.load": ("load_config",),
    "megappo.config.schema": ("Config",),
    "megappo.engines.protocol": ("Completion", "Engine", "EngineFactory", "GenerateRequest", "SamplingParams"),
    "megappo.environments.protocol": ("Environment", "LimitReached", "Reply"),
    "megappo.environments.session": ("Session",),
    "megappo.errors": ("ConfigError", "Interrupted", "RunError"),
    "megappo.observe.loggers": ("Logger", "LoggerFactory"),
    "megappo.plan.planner": ("Plan",),
    "megappo.types": ("Prompt",),
}
"""Names by the module that defines them."""
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # type checkers find missing names

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
        value = globals()[name] = getattr(import_module(_HOME[name]), name)
        return value
