"""SGLang servers: started, watched, given weights, asked for responses."""

from megappo.engines.sglang.engine import Pending, SGLangEngine, SyncError
from megappo.engines.sglang.fleet import Fleet
from megappo.engines.sglang.server import EngineError
from megappo.engines.sglang.spec import ServerSpec

__all__ = ["EngineError", "Fleet", "Pending", "SGLangEngine", "ServerSpec", "SyncError"]
