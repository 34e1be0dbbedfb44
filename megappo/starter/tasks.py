"""What `megappo init` writes of each task, before the layout is searched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megappo.starter.lines import Line
from megappo.starter.place import Place

TASKS = {
    "jsonl": "lines of your own, scored by a function of yours",
    "gsm8k": "grade school word problems",
    "tools": "word problems in several turns, with a calculator that the model may call",
    "lora": "grade school word problems, with low-rank adapters on one device",
}
_SMALL, _MIDDLE, _TINY = "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "HuggingFaceTB/SmolLM2-135M-Instruct"
_THINKING = (_SMALL, _MIDDLE)
"""Of these, models that think where they are not told otherwise; a plan says so of others."""


@dataclass(frozen=True)
class Asked:
    """What the user wants."""

    task: str
    name: str
    """Name of the run, and of the files beside the configuration."""
    model: str | None
    data: Path
    """A file of prompts, or the folder that `megappo data prepare` writes."""
    sums: Path
    """Folder of the quickstart's model, which knows nothing but digits and signs."""


def models(asked: Asked, place: Place) -> Sequence[str]:
    """Models to try, the largest first."""
    if asked.model is not None:
        return (asked.model,)
    if place.machine.is_cuda:
        return (_MIDDLE, _SMALL)
    if asked.task == "jsonl":
        return (str(asked.sums),)
    return (_SMALL if asked.task == "tools" else _TINY,)


def lines_of(asked: Asked, place: Place, model: str) -> list[Line]:
    """The settings of a task with a model."""
    is_tiny = model == str(asked.sums)
    return [
        *_run(asked, place),
        *_model(place, model, is_tiny=is_tiny),
        *_roles(asked, is_tiny=is_tiny),
        *_data(asked, model, is_tiny=is_tiny),
        *_rollout(asked, place, is_tiny=is_tiny),
        *_reward(asked),
        *_end(asked),
    ]


def _run(asked: Asked, place: Place) -> Iterator[Line]:
    yield Line("run.name", asked.name, "everything that the run writes is in runs/ under this name")
    yield Line("run.steps", 200, "a run that is started again with more goes on from its newest checkpoint")
    if place.nodes > 1 and not place.has_shared_disk:
        disk = f", and this folder is on {place.disk}" if place.disk else ""
        why = f"all nodes must see it{disk}: give a folder on a shared disk"
        yield Line("run.directory", f"runs/{asked.name}", why)
    yield Line("run.seed", 1, "the same seed on the same machine gives the same run")


def _model(place: Place, model: str, *, is_tiny: bool) -> Iterator[Line]:
    yield Line("model.path", model, "a folder, or a name of the Hugging Face hub, which is fetched once per machine")
    if is_tiny:
        yield Line("model.init", "random", "a model of 16 words to try things with: name one of yours, and remove this")
    if place.machine.is_cuda:
        yield Line("model.dtype", "bfloat16", "weights and activations; the optimizer keeps float32 copies")
    else:
        yield Line("model.dtype", "float32", "as fast as bfloat16 on most CPUs, and exact")
        yield Line("runtime.device", "cpu", "no GPU was found here: remove it where there is one")


def _roles(asked: Asked, *, is_tiny: bool) -> Iterator[Line]:
    if asked.task == "lora":
        for role in ("actor", "critic"):
            why = "adapters are trained, and the weights stand still: no gradients and no optimizer state of them"
            yield Line(f"{role}.lora", {"rank": 16, "alpha": 32}, why if role == "actor" else "")
        why = "adapters take some ten times the rate of whole models"
        yield Line("actor.optimizer.learning_rate", 1.0e-5, why)
        yield Line("critic.optimizer.learning_rate", 5.0e-5, "the critic starts from nothing and may learn faster")
        yield Line("reference.share_actor_base", True, "the actor without its adapters: no second model")
        return
    actor, critic = (1.0e-3, 2.0e-3) if is_tiny else (1.0e-6, 1.0e-5)
    why = "random weights of a small model take large steps" if is_tiny else "the usual rate for whole models in PPO"
    yield Line("actor.optimizer.learning_rate", actor, why)
    yield Line("critic.optimizer.learning_rate", critic, "the critic starts from nothing and may learn faster")
    yield Line("reference", {}, "a frozen copy of the model, from which the KL term is measured")


def _data(asked: Asked, model: str, *, is_tiny: bool) -> Iterator[Line]:
    if asked.task == "jsonl":
        yield Line("data.train.source", str(asked.data), "lines with `prompt` and `answer`; parquet files do as well")
    else:
        yield Line("data.train.source", str(asked.data / "train.parquet"), "megappo data prepare gsm8k writes it")
        yield Line("data.validation.source", str(asked.data / "test.parquet"), "scored by evaluations alone")
    if is_tiny:
        yield Line("data.apply_chat_template", False, "this model has no chat template; others want theirs")
    elif model in _THINKING:
        yield Line("data.chat_template_options", {"enable_thinking": False}, "thoughts would have no room")
    yield Line("data.max_prompt_tokens", 16 if is_tiny else 1024, "longer prompts are refused when the run starts")


def _rollout(asked: Asked, place: Place, *, is_tiny: bool) -> Iterator[Line]:
    if place.machine.is_cuda:
        yield Line("rollout.engine", "sglang", "generates on the trainers' own GPUs, and sleeps while they train")
    else:
        yield Line("rollout.engine", "transformers", "inside the trainer: a small model needs no server")
    prompts = 64 if place.machine.is_cuda else 16
    yield Line("rollout.prompts_per_step", prompts, "prompts of a step; more make steadier and slower steps")
    yield Line("rollout.samples_per_prompt", 4, "answers to each prompt")
    for role in ("actor", "critic"):
        yield Line(f"{role}.minibatch_sequences", prompts, "a quarter of the samples: four updates in a step")
    if is_tiny:
        yield Line("rollout.max_response_tokens", 4, "an answer of two digits and its end")
    elif asked.task == "tools":
        yield Line("rollout.max_response_tokens", 2048, "of all turns, and of what tools say between them")
    else:
        yield Line("rollout.max_response_tokens", 1024, "longer answers are cut: watch response/truncated")
    if asked.task == "tools":
        tools = {"format": "qwen", "tools": ["calculator"]}
        yield Line("rollout.environment.name", "tools", "a reply that calls no tool ends the episode")
        yield Line("rollout.environment.arguments", tools, "format: llama3 for Llama 3; python is another tool")
        yield Line("rollout.environment.max_turns", 4, "replies of the model in an episode")
        yield Line("rollout.environment.max_calls", 8, "calls of tools in an episode")


def _reward(asked: Asked) -> Iterator[Line]:
    if asked.task == "jsonl":
        why = "your function, in the file beside this one; it may take prompt, response, answer and metadata"
        yield Line("reward.function", f"{asked.name}_reward.py:score", why)
    else:
        yield Line("reward.function", "gsm8k", "1 where the last number of the answer is the right one, otherwise 0")


def _end(asked: Asked) -> Iterator[Line]:
    yield Line("algorithm.lam", 1.0, "rewards come at the end: returns without the bias of a critic that still learns")
    yield Line(
        "algorithm.kl_in_reward",
        {"kind": "kl", "coef": 0.001},
        "keeps the policy near the reference",
    )
    if asked.task != "jsonl":
        yield Line("evaluation.every_steps", 20, "the validation set, answered greedily")
    yield Line("checkpoint.every_steps", 20, "what a killed run loses at most")


EXAMPLE_LINES = "".join(f'{{"prompt": "{a}+{b}=", "answer": "{a + b}"}}\n' for a in range(10) for b in range(10))
"""Prompts and answers for whoever has none yet: sums of two digits."""
EXAMPLE_REWARD = '''"""The reward of a sample: whatever this function returns, as a number."""


def score(*, response: str, answer: str | None) -> float:
    """1 for the right answer. It may take `prompt` and `metadata` as well (what else the prompt\'s line has)."""
    return float(answer is not None and response.strip() == answer)
'''
"""A reward function for whoever has none yet."""
