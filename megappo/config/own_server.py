"""Settings of a server that the run starts for a reward, and keeps running: of a judge, or of a frozen reward model."""

from __future__ import annotations

from megappo.config.base import NonNegativeInt, PositiveInt, Processes, Seconds, Settings, Text
from megappo.config.engine import SGLangSettings


class OwnServerSettings(Settings):
    machine: NonNegativeInt = 0
    """Number of the trainers' machine that runs the server, in the order of their ranks."""
    first_device: NonNegativeInt | None = None
    """First GPU of the server on that machine; default: the one after the trainers'."""
    threads: Processes | None = None
    """CPU threads of each rank, without CUDA; default: the machine's cores over all of them."""
    host: Text | None = None
    """Interface that the server listens on, under a key of the run. Default: loopback, and where the trainers have
    several machines, the one that leads to the others."""
    max_restarts: NonNegativeInt = 5
    """Restarts of the server over the whole run, after which the run stops."""
    start_timeout_seconds: Seconds = 600.0
    """Longest time from the server's start to its first answer."""
    health_timeout_seconds: Seconds = 60.0
    """The server is started again where it has not answered a health check for so long."""

    @property
    def ranks(self) -> int:
        """Number of GPUs that the server uses."""
        return 1

    @property
    def as_servers(self) -> SGLangSettings:
        """The settings in the form of an SGLang server that megappo starts."""
        return SGLangSettings(
            placement="disaggregated",
            engines=1,
            threads=self.threads,
            max_restarts=self.max_restarts,
            start_timeout_seconds=self.start_timeout_seconds,
            health_timeout_seconds=self.health_timeout_seconds,
        )


class RewardModelServerSettings(OwnServerSettings):
    batch_tokens: PositiveInt = 16384
    """Most tokens that the server computes at a time, padding included."""
    timeout_seconds: Seconds = 600.0
    """Longest time for the answer to a request of 64 samples, earlier requests of other ranks included."""
