"""Settings of a server that the run starts for a reward, for a judge or for a frozen reward model."""

from __future__ import annotations

from megappo.config.base import NonNegativeInt, PositiveInt, Processes, Seconds, Settings, Text
from megappo.config.engine import SGLangSettings


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
    def as_servers(self) -> SGLangSettings:
        """Settings in the form for an SGLang server that megappo starts."""
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
    """Maximum number of tokens that the server computes at once, including padding."""
    timeout_seconds: Seconds = 600.0
    """Maximum time in seconds for the answer to a request of 64 samples, including earlier requests of other ranks."""
