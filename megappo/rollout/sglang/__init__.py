"""SGLang servers: started, watched, given weights, asked for responses."""

from megappo.rollout.sglang.engine import Pending, SGLangEngine, SyncError
from megappo.rollout.sglang.fleet import Fleet
from megappo.rollout.sglang.server import EngineError, ServerSpec

__all__ = ["EngineError", "Fleet", "Pending", "SGLangEngine", "ServerSpec", "SyncError"]
