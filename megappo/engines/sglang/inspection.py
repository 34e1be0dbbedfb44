"""What a server says of itself when it is up, compared with what the run needs of it."""

from __future__ import annotations

from megappo.engines.sglang.client import Endpoint, call
from megappo.engines.sglang.server import EngineError
from megappo.observe.messages import tell
from megappo.plan.cache import PlannedCache

_LARGEST_PAGE_TOKENS = 256
"""SGLang holds whole pages of tokens, and leaves the rest of the last one out."""


def check_server(endpoint: Endpoint, cache: PlannedCache, timeout_seconds: float) -> None:
    """Raises EngineError for a server that cannot serve this run, ServerFailure for one that does not say."""
    said = call(endpoint, "/server_info", timeout_seconds=timeout_seconds, method="GET")
    held = said.get("max_total_num_tokens")
    if held is None:
        return
    if held < cache.longest_tokens:
        raise EngineError(
            f"{endpoint.name} has room for the keys and values of {held} tokens, the longest prompt and response are "
            f"{cache.longest_tokens}; free memory of its GPUs, or lower what the trainers hold there"
        )
    if cache.tokens is not None and held < cache.tokens - _LARGEST_PAGE_TOKENS:
        tell(
            f"{endpoint.name} has room for the keys and values of {held} tokens, planned were {cache.tokens}: less was "
            "free when it started"
        )
