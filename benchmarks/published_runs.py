"""Compare the predictions of `megappo plan` with published measurements.

    python -m benchmarks.published_runs

The program prints a Markdown table; benchmarks/results contains the table with its sources. The published runs used
another program (NeMo RL 0.4 with Megatron-Core and vLLM) on machines of the same kind. They were not repeated with
megappo.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megappo.config import load_config
from megappo.plan.hardware.machine_file import find_machine
from megappo.plan.planner import Plan, make_plan, read_models

ROOT = Path(__file__).parents[1]
LLAMA, QWEN = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-32B"
LLAMA_LAYOUT = ("actor.layout={pipeline_parallel: 2}", "actor.recompute=full")
QWEN_LAYOUT = (
    "actor.layout={tensor_parallel: 4, pipeline_parallel: 4, sequence_parallel: true}",
    "actor.recompute=none",
)
ONE_STEP_OFF = ("rollout.ahead=1", "algorithm.old_logprob=corrected")


@dataclass(frozen=True)
class Published:
    """Row of the source's table."""

    name: str
    model: str
    trainers: int
    """Number of GPUs for training."""
    engines: int
    tensor_parallel: int
    """Tensor parallel size of an engine."""
    colocated: bool
    response_tokens: int
    """Mean response tokens. The longest samples had 4096 tokens, including the prompt."""
    tokens_per_second_per_gpu: float
    step_seconds: float
    overrides: tuple[str, ...]

    @property
    def gpus(self) -> int:
        """Number of GPUs of the run."""
        return self.trainers + (0 if self.colocated else self.engines * self.tensor_parallel)

    @property
    def prompt_tokens(self) -> int:
        """Mean prompt tokens, computed from the source's tokens per step of 2048 samples."""
        tokens = self.tokens_per_second_per_gpu * self.step_seconds * self.gpus
        return round(tokens / 2048) - self.response_tokens


RUNS = (
    Published("Llama 3.1 8B, on policy", LLAMA, 16, 16, 1, True, 1060, 1562, 97.7, LLAMA_LAYOUT),
    Published("Llama 3.1 8B, one step off", LLAMA, 8, 8, 1, False, 1129, 2161, 74.6, (*LLAMA_LAYOUT, *ONE_STEP_OFF)),
    Published("Qwen3 32B, on policy", QWEN, 32, 8, 4, True, 3206, 540, 393, QWEN_LAYOUT),
    Published("Qwen3 32B, one step off", QWEN, 32, 8, 4, False, 3207, 494, 215, (*QWEN_LAYOUT, *ONE_STEP_OFF)),
)


def plan_of(run: Published) -> Plan:
    """Return the plan of the same work on the same GPUs. All samples have the mean length."""
    placement = "colocated" if run.colocated else "disaggregated"
    fraction = 0.6 if run.colocated else 0.8
    overrides = [
        f"model.path={run.model}",
        f"data.max_prompt_tokens={run.prompt_tokens}",
        f"rollout.max_response_tokens={run.response_tokens}",
        f"rollout.servers={{placement: {placement}, count: {run.engines}, tensor_parallel: {run.tensor_parallel}, "
        f"memory_fraction: {fraction}}}",
        *run.overrides,
    ]
    config = load_config(ROOT / "benchmarks" / "published_runs.yaml", overrides)
    models = read_models(config, ROOT / "configs" / "models").models
    return make_plan(config, models, find_machine("h100"), run.trainers)


def table() -> Iterator[str]:
    """Yield the lines of the comparison."""
    names = ("run", "H100s", "tokens per sample", "rollout", "scores", "update", "sync", "planned step")
    yield f"| {' | '.join(names)} | published step | planned / published |"
    yield "|---" * 10 + "|"
    for run in RUNS:
        plan = plan_of(run)
        stages = {stage.name: stage.seconds for stage in plan.stages}
        parts = [f"{stages[name]:.3g}" for name in ("rollout", "forward", "update_actor", "sync")]
        tokens = f"{run.prompt_tokens} + {run.response_tokens}"
        ratio = plan.step_seconds / run.step_seconds
        cells = [run.name, str(run.gpus), tokens, *parts, f"{plan.step_seconds:.3g}", f"{run.step_seconds:g}"]
        yield f"| {' | '.join([*cells, f'{ratio:.2f}'])} |"


if __name__ == "__main__":
    print("\n".join(table()))
