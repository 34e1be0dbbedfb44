"""The steps, in the order in which they run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where steps run, and how large they are."""

    device: str
    """`cuda` or `cpu`."""
    tiny: bool
    """Sizes that show only that everything runs."""
    scratch: str
    """A folder for models and runs."""


@dataclass(frozen=True)
class Step:
    """A group of rows."""

    name: str
    part: int
    """Each part has a run of its own."""
    function: str
    """`module:function`; the function takes a `Place` and yields rows."""
    seconds: float
    """It is begun only where so many are left on a GPU."""
    most_seconds: float
    """It is ended after so many."""
    proves: str

    @property
    def is_alone(self) -> bool:
        """Whether it has a process of its own: a server must not find what an earlier one left on a GPU. The others go
        on in the process of the step before, and all do where sizes are tiny."""
        return self.part == 3


_HERE = "tests.gpu.acceptance"
STEPS = (
    Step("machine", 1, f"{_HERE}.machine:describe", 5, 60, "versions, memory, measured matrix rate and copy rate"),
    Step("kernels", 1, f"{_HERE}.kernels:exactness", 30, 120, "every kernel against float64, repeated bit for bit"),
    Step("losses", 1, f"{_HERE}.losses:every_policy_loss", 30, 120, "every policy loss against float64, its time"),
    Step("kernel-times", 1, f"{_HERE}.kernels:times", 60, 180, "the head beside public kernels and its floor"),
    Step("oracle", 1, f"{_HERE}.ppo_step:against_oracle", 60, 200, "a PPO step in float32 against the oracle"),
    Step("mfu", 1, f"{_HERE}.ppo_step:speed", 30, 120, "updates in bfloat16: seconds, tokens/s, MFU"),
    Step("two-processes", 1, f"{_HERE}.two_processes:on_one_device", 20, 90, "exchange and TP head over gloo"),
    Step("switches", 2, f"{_HERE}.switches:on_and_off", 60, 240, "each switch on and off: same numbers, seconds"),
    Step("experts", 2, f"{_HERE}.experts:beside_sequential", 25, 100, "grouped experts beside Megatron's"),
    Step("packs", 2, f"{_HERE}.packs:shapes", 20, 100, "packs of 1, 16 and 128 segments, one of 32k tokens"),
    Step("counts", 2, f"{_HERE}.counts:per_layer", 20, 80, "launches and waits of the host per layer"),
    Step("memory", 2, f"{_HERE}.memory:by_stage", 25, 120, "peak memory of each stage against the plan"),
    Step("resume", 2, f"{_HERE}.resume:killed_and_continued", 40, 150, "a run that is killed and goes on"),
    Step("servers", 3, f"{_HERE}.servers:sleep_train_wake", 60, 300, "SGLang: sleep, train, wake, weights by IPC"),
    Step("server-learning", 3, f"{_HERE}.servers:learning", 60, 180, "a reward that rises through a server"),
    Step("server-experts", 3, f"{_HERE}.servers:experts", 60, 160, "the same with experts, and their routing"),
    Step("server-graphs", 3, f"{_HERE}.server_graphs:as_asked_and_as_default", 90, 240, "graphs: tokens/s, answers"),
    Step("server-killed", 3, f"{_HERE}.servers:killed", 60, 300, "a server that is killed while it generates"),
    Step(
        "server-commands", 3, f"{_HERE}.servers:commands", 120, 400, "`megappo train` with a server, killed, continued"
    ),
)
