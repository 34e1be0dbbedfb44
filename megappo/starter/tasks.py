"""Settings that `megappo init` writes for each task, except the layout."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megappo.config import ConfigError
from megappo.config.sections.engine import DEFAULT_ENGINE, DEFAULT_SERVERS
from megappo.models.chat_template import template_in
from megappo.models.model_files import read_config_json
from megappo.starter.commented_yaml import Setting
from megappo.starter.target import RunTarget

TASKS = {
    "jsonl": "custom prompts in JSON lines, scored by a custom function",
    "gsm8k": "grade school word problems",
    "tools": "word problems in several turns, with a calculator that the model may call",
    "lora": "grade school word problems, with low-rank adapters on one device",
}
_SMALL, _MIDDLE, _TINY = "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "HuggingFaceTB/SmolLM2-135M-Instruct"
_WITH_TOOLS = "Qwen/Qwen2.5-0.5B-Instruct"
"""Smallest suggested model with a chat template that describes tools."""
_THINKING = (_SMALL, _MIDDLE)
"""Models that think by default. For other models, `megappo plan` prints a note."""

_FIELDS = {
    "prompt_key": ("prompt", "question", "problem", "query", "instruction", "input"),
    "answer_key": ("answer", "solution", "ground_truth", "target", "label", "output"),
}
"""Usual names of the fields of prompts and answers. The first name is the default."""


@dataclass(frozen=True)
class StarterRequest:
    """Options of `megappo init` with their defaults."""

    task: str
    name: str
    """Name of the run and of the files next to the configuration."""
    model: str | None
    data: Path
    """File of prompts, or the folder of `megappo data prepare`."""
    sums: Path
    """Folder of the quickstart's model, which has tokens only for digits and signs."""


@dataclass(frozen=True)
class ModelFolder:
    """Properties of a model's folder that affect settings. Models that are missing on this machine have the
    defaults."""

    positions: int = 40_960
    """Maximum sequence length in tokens."""
    has_template: bool = True
    """Whether the tokenizer has a chat template."""
    is_tiny: bool = False
    """Whether this is the model of the quickstart."""

    @classmethod
    def read(cls, model: str, request: StarterRequest) -> ModelFolder:
        """Read the folder. Raises ConfigError if the task needs words and the model is the model of the quickstart."""
        folder = Path(model)
        if not (folder / "config.json").is_file():
            return cls()
        is_tiny = folder.resolve() == request.sums.resolve()
        if is_tiny and request.task != "jsonl":
            raise ConfigError(
                f"--model '{model}' has tokens for digits and signs only, but the prompts of {request.task} have "
                "words; use the task jsonl or another --model"
            )
        positions = read_config_json(folder).get("max_position_embeddings")
        return cls(
            positions if isinstance(positions, int) else cls.positions,
            bool(template_in(folder)),
            is_tiny,
        )


def models(request: StarterRequest, target: RunTarget) -> Sequence[str]:
    """Return the candidate models, largest first."""
    if request.model is not None:
        return (request.model,)
    if target.machine.is_cuda:
        return (_MIDDLE, _SMALL)
    if request.task == "jsonl":
        return (str(request.sums),)
    return (_SMALL, _WITH_TOOLS) if request.task == "tools" else (_TINY,)


def settings_of(request: StarterRequest, target: RunTarget, model: str) -> list[Setting]:
    """Return the settings of a task with a model. Raises the errors of `ModelFolder.read`."""
    folder = ModelFolder.read(model, request)
    prompt_tokens = 16 if folder.is_tiny else min(1024, folder.positions // 2)
    return [
        *_run(request, target),
        *_model(target, model, folder),
        *_roles(request, folder),
        *_data(request, model, folder, prompt_tokens),
        *_rollout(request, target, folder, folder.positions - prompt_tokens),
        *_reward(request),
        *_end(request, folder),
    ]


def _run(request: StarterRequest, target: RunTarget) -> Iterator[Setting]:
    yield Setting("run.name", request.name, "the run writes all its files to runs/ under this name")
    yield Setting("run.steps", 200, "a restart with a larger number continues from the newest checkpoint")
    if target.nodes > 1 and not target.has_shared_disk:
        disk = f", and this folder is on {target.disk}" if target.disk else ""
        why = f"all nodes must see it{disk}: set a folder on a shared disk"
        yield Setting("run.directory", f"runs/{request.name}", why)
    yield Setting("run.seed", 1, "the same seed on the same machine gives the same run")


def _model(target: RunTarget, model: str, folder: ModelFolder) -> Iterator[Setting]:
    yield Setting("model.path", model, "a folder, or a Hugging Face name, which is downloaded once per machine")
    if folder.is_tiny:
        yield Setting("model.init", "random", "a model of 16 tokens for tests: set your model, and remove this")
    if target.machine.is_cuda:
        yield Setting("model.dtype", "bfloat16", "weights and activations; the optimizer keeps float32 copies")
    else:
        yield Setting("model.dtype", "float32", "as fast as bfloat16 on most CPUs, and exact")
        yield Setting("runtime.device", "cpu", "no GPU was found: remove this setting on a machine with GPUs")


def _roles(request: StarterRequest, folder: ModelFolder) -> Iterator[Setting]:
    if request.task == "lora":
        for role in ("actor", "critic"):
            why = "only adapters are trained: the frozen weights have no gradients and no optimizer state"
            yield Setting(f"{role}.lora", {"rank": 16, "alpha": 32}, why if role == "actor" else "")
        why = "adapters need about ten times the learning rate of whole models"
        yield Setting("actor.optimizer.learning_rate", 1.0e-5, why)
        yield Setting("critic.optimizer.learning_rate", 5.0e-5, "the critic is untrained at first and can learn faster")
        yield Setting("reference.share_actor_base", True, "the actor without its adapters: no second model")
        return
    actor, critic = (1.0e-3, 2.0e-3) if folder.is_tiny else (1.0e-6, 1.0e-5)
    why = (
        "random weights of a small model take large steps"
        if folder.is_tiny
        else "the usual rate for whole models in PPO"
    )
    yield Setting("actor.optimizer.learning_rate", actor, why)
    yield Setting("critic.optimizer.learning_rate", critic, "the critic is untrained at first and can learn faster")
    yield Setting("reference", {}, "a frozen copy of the model for the KL term")


def _data(request: StarterRequest, model: str, folder: ModelFolder, prompt_tokens: int) -> Iterator[Setting]:
    if request.task == "jsonl":
        why = "lines with a prompt and an answer; parquet files are supported, too"
        yield Setting("data.train.source", str(request.data), why)
        yield from _keys(request.data)
    else:
        yield Setting("data.train.source", str(request.data / "train.parquet"), "written by megappo data prepare gsm8k")
        yield Setting("data.validation.source", str(request.data / "test.parquet"), "used only by evaluations")
    if not folder.has_template:
        yield Setting(
            "data.apply_chat_template", False, "this model has no chat template; remove this for models with one"
        )
    elif model in _THINKING:
        yield Setting("data.chat_template_options", {"enable_thinking": False}, "responses are too short for thinking")
    yield Setting("data.max_prompt_tokens", prompt_tokens, "longer prompts are dropped, and the run prints how many")


def _keys(data: Path) -> Iterator[Setting]:
    """Yield the fields of prompt and answer in the first line of a file, if they do not have the default names."""
    try:
        with data.open(encoding="utf-8") as file:
            first = json.loads(file.readline())
    except (OSError, ValueError):  # the file does not exist yet, or is no text of JSON lines
        return
    for key, names in _FIELDS.items():
        name = next((name for name in names if isinstance(first, dict) and name in first), names[0])
        if name != names[0]:
            yield Setting(f"data.train.{key}", name, "the field in each line")


def _rollout(request: StarterRequest, target: RunTarget, folder: ModelFolder, most_tokens: int) -> Iterator[Setting]:
    if target.machine.is_cuda:
        yield Setting(
            "rollout.servers.kind", DEFAULT_SERVERS, "generates on the trainers' GPUs, and sleeps during training"
        )
    else:
        yield Setting("rollout.engine", DEFAULT_ENGINE, "inside the trainer: a small model needs no server")
    why = "prompts of a step; more prompts give less noise and slower steps"
    if folder.is_tiny:  # the values of the quickstart
        yield Setting("rollout.prompts_per_step", 50, why)
        yield Setting("rollout.samples_per_prompt", 8, "responses to each prompt; random weights are rarely right")
        for role in ("actor", "critic"):
            yield Setting(f"{role}.epochs", 2, "passes over the samples of a step")
            yield Setting(f"{role}.minibatch_sequences", 200, "half of the samples: four updates in a step")
    else:
        prompts = 64 if target.machine.is_cuda else 16
        yield Setting("rollout.prompts_per_step", prompts, why)
        yield Setting("rollout.samples_per_prompt", 4, "responses to each prompt")
        for role in ("actor", "critic"):
            yield Setting(f"{role}.minibatch_sequences", prompts, "a quarter of the samples: four updates in a step")
    if folder.is_tiny:
        yield Setting("rollout.max_response_tokens", 4, "an answer of two digits and an end-of-sequence token")
    elif request.task == "tools":
        yield Setting(
            "rollout.max_response_tokens", min(2048, most_tokens), "tokens of all turns and of the results of tools"
        )
    else:
        yield Setting(
            "rollout.max_response_tokens",
            min(1024, most_tokens),
            "longer answers are truncated: watch response/truncated",
        )
    if request.task == "tools":
        tools = {"format": "qwen", "tools": ["calculator"]}
        yield Setting("rollout.environment.name", "tools", "a turn without a tool call ends the episode")
        yield Setting("rollout.environment.arguments", tools, "format: llama3 for Llama 3; python is another tool")
        yield Setting("rollout.environment.max_turns", 4, "turns of the model in an episode")
        yield Setting("rollout.environment.max_calls", 8, "tool calls in an episode")


def _reward(request: StarterRequest) -> Iterator[Setting]:
    if request.task == "jsonl":
        why = "your function in the file next to this one, with arguments prompt, response, answer and metadata"
        yield Setting("reward.function", f"{request.name}_reward.py:score", why)
    else:
        yield Setting("reward.function", "gsm8k", "1 if the last number of the response is correct, otherwise 0")


def _end(request: StarterRequest, folder: ModelFolder) -> Iterator[Setting]:
    yield Setting("algorithm.lam", 1.0, "rewards come at the end: returns without the bias of an untrained critic")
    if folder.is_tiny:
        yield Setting("algorithm.entropy_coef", 0.1, "random weights must explore; remove this for a trained model")
    yield Setting("algorithm.kl_in_reward", {"kind": "kl", "coef": 0.001}, "keeps the policy near the reference")
    if request.task != "jsonl":
        yield Setting("evaluation.every_steps", 20, "greedy answers to the validation set")


def checkpoint_interval(steps: int) -> Setting:
    """Return the setting of the interval that the plan recommends."""
    return Setting("checkpoint.every_steps", steps, "a killed run loses at most this number of steps")


EXAMPLE_LINES = "".join(f'{{"prompt": "{a}+{b}=", "answer": "{a + b}"}}\n' for a in range(10) for b in range(10))
"""Example prompts and answers: sums of two digits."""
EXAMPLE_REWARD = '''"""The reward of a sample: the number that this function returns."""


def score(*, response: str, answer: str | None) -> float:
    """Return 1 for the right answer. Other arguments: `prompt` and `metadata` (other fields of the prompt\'s line)."""
    return float(answer is not None and response.strip() == answer)
'''
"""Example of a reward function."""
