"""Settings of servers for judges and reward models: requests to a server, and servers that the run starts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from megappo.config.base import NonNegativeInt, PositiveInt, Processes, Seconds, Settings, Text
from megappo.config.sections.engine import ServerSettings


class RequestSettings(Settings):
    url: Text | None = None
    """Address of a running server."""
    key: Text | None = None
    """Name of the environment variable with the server's key. Null: the server needs no key, or the run starts the
    server and generates the key."""
    concurrency: Annotated[int, Field(gt=0, le=4096)] = 64
    """Maximum number of concurrent requests of a rank. Each request has one sample."""
    timeout_seconds: Seconds = 120.0
    """Maximum duration of a request including retries. The sample of a request above the limit has failed."""
    retries: NonNegativeInt = 10
    """Maximum number of retries of a failed request, with increasing delays, within `timeout_seconds`."""

    def address_rules(self, like: str) -> Iterator[str]:
        """Yield a sentence for an address that is not like `like`, and for a key that is not the name of an environment
        variable."""
        if self.url is not None and not re.match(r"https?://[^/\s]+", self.url):
            yield f"url is '{self.url}', must look like {like}; correct url"
        if self.key is not None and not re.fullmatch(r"[A-Za-z_]\w*", self.key):
            yield "key is not a name of an environment variable; give the name of the variable that contains the key"


class OwnServerSettings(Settings):
    machine: NonNegativeInt = 0
    """Index of the trainer machine that runs the server. Machines are numbered in the order of their ranks."""
    first_device: NonNegativeInt | None = None
    """First GPU of the server on that machine. The default is the GPU after the trainers' GPUs."""
    threads: Processes | None = None
    """CPU threads of each rank without CUDA. The default divides the machine's cores by the number of ranks."""
    host: Text | None = None
    """Network interface of the server, protected by a key of the run. The default is the loopback interface. With
    trainers on several machines, the default is the interface that reaches the other machines."""
    max_restarts: NonNegativeInt = 5
    """Maximum number of server restarts in a run. The run stops if the server fails again."""
    start_timeout_seconds: Seconds = 600.0
    """Maximum time in seconds from the start of the server to its first answer."""
    health_timeout_seconds: Seconds = 60.0
    """Maximum time in seconds without an answer to a health check. The server is then restarted."""

    @property
    def ranks(self) -> int:
        """Number of GPUs that the server uses."""
        return 1

    @property
    def as_servers(self) -> ServerSettings:
        """Settings in the form for an SGLang server that megappo starts."""
        return ServerSettings(
            placement="disaggregated",
            count=1,
            threads=self.threads,
            max_restarts=self.max_restarts,
            start_timeout_seconds=self.start_timeout_seconds,
            health_timeout_seconds=self.health_timeout_seconds,
        )


class RewardModelServerSettings(OwnServerSettings):
    batch_tokens: PositiveInt = 16384
    """Maximum number of tokens that the server computes at once, including padding."""
    timeout_seconds: Seconds = 600.0
    """Maximum time in seconds for the answer to a request of 64 samples, including earlier requests of other ranks."""
