"""The steps in their order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Device and sizes of the steps."""

    device: str
    """`cuda` or `cpu`."""
    tiny: bool
    """Use sizes that only show that the steps run."""
    scratch: str
    """A folder for models and runs."""


@dataclass(frozen=True)
class Step:
    """A group of rows."""

    name: str
    part: int
    """Number of the part. Each part is a separate run."""
    function: str
    """`module:function`. The function takes a `Place` and yields rows."""
    seconds: float
    """On a GPU, the step starts only if this time is left."""
    most_seconds: float
    """Time limit of the step."""
    proves: str

    @property
    def is_alone(self) -> bool:
        """Whether the step needs a separate process, because a server requires a GPU without leftovers of earlier
        servers. Other steps share a process, and tiny steps always share a process."""
        return self.part == 3


_PACKAGE = "tests.gpu.acceptance"
STEPS = (
    Step("machine", 1, f"{_PACKAGE}.machine:describe", 5, 60, "versions, memory, measured matrix rate and copy rate"),
    Step("kernels", 1, f"{_PACKAGE}.kernels:exactness", 30, 120, "every kernel against float64, bitwise repetition"),
    Step("losses", 1, f"{_PACKAGE}.losses:every_policy_loss", 30, 120, "every policy loss against float64, with times"),
    Step(
        "kernel-times", 1, f"{_PACKAGE}.kernels:times", 60, 180,
        "times of the output layer, public kernels and the floor",
    ),
    Step("oracle", 1, f"{_PACKAGE}.ppo_step:against_oracle", 60, 200, "a PPO step in float32 against the oracle"),
    Step("mfu", 1, f"{_PACKAGE}.ppo_step:speed", 30, 120, "updates in bfloat16: seconds, tokens/s, MFU"),
    Step("two-processes", 1, f"{_PACKAGE}.two_processes:on_one_device", 20, 90, "exchange and TP head over gloo"),
    Step("switches", 2, f"{_PACKAGE}.switches:on_and_off", 60, 240, "each switch on and off: equal numbers, seconds"),
    Step("experts", 2, f"{_PACKAGE}.experts:against_sequential", 25, 100, "grouped experts beside Megatron's"),
    Step("packs", 2, f"{_PACKAGE}.packs:shapes", 20, 100, "packs of 1, 16 and 128 segments, one of 32k tokens"),
    Step("counts", 2, f"{_PACKAGE}.counts:per_layer", 20, 80, "launches and synchronisations per layer"),
    Step("memory", 2, f"{_PACKAGE}.memory:by_stage", 25, 120, "peak memory of each stage against the plan"),
    Step("resume", 2, f"{_PACKAGE}.resume:killed_and_continued", 40, 150, "a run that is killed and continued"),
    Step("servers", 3, f"{_PACKAGE}.servers:sleep_train_wake", 60, 300, "SGLang: sleep, train, wake, weights by IPC"),
    Step("server-learning", 3, f"{_PACKAGE}.servers:learning", 60, 180, "a reward that rises through a server"),
    Step("server-experts", 3, f"{_PACKAGE}.servers:experts", 60, 160, "the same with experts, and their routing"),
    Step("server-graphs", 3, f"{_PACKAGE}.server_graphs:configured_and_default", 90, 240, "graphs: tokens/s, answers"),
    Step("server-killed", 3, f"{_PACKAGE}.servers:killed", 60, 300, "a server that is killed during generation"),
    Step(
        "server-commands", 3, f"{_PACKAGE}.servers:commands", 120, 400,
        "`megappo train` with a server, killed, continued",
    ),
)  # fmt: skip
