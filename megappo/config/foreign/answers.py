"""Answers for settings from other trainers: the type, and notes that are used in several answers."""

from __future__ import annotations

from typing import NamedTuple

ROLE = "ROLE"
"""Placeholder in the keys of an answer. It stands for the actor or the critic, as named by the user's key."""


class Counterpart(NamedTuple):
    """Answer for a name from another trainer."""

    keys: tuple[str, ...]
    """Dotted keys of megappo's settings. There are several keys if the name corresponds to several settings, or if the
    name is ambiguous. Without keys, megappo has no equivalent setting."""
    note: str = ""
    """Difference between the two settings, such as the unit. Without keys, the note is a reason or a remedy."""
    trainers: tuple[str, ...] = ()
    """Trainers that use the name, such as `verl`. The tuple is empty for a name that several trainers share."""


PROMPTS = "verl counts prompts, megappo counts samples: multiply by rollout.samples_per_prompt"
TOKENS = "the size of a microbatch is limited in tokens, not in samples"
PER_GROUP = "this counts the tokens of a context parallel group: multiply by context_parallel"
UPDATES = "it counts optimizer updates, not steps"
BOTH = "set both"
FOLLOWS = "it follows from minibatch_sequences, microbatch_budget_tokens and the layout"
ALWAYS = "microbatches are always packed by tokens"
PACKED = "it is not needed because samples are always packed without padding"
OWN_LOSS = "actor and critic have separate losses and optimizers; set critic.optimizer.learning_rate"
LAUNCHER = "the launcher decides the number of ranks: torchrun --nproc-per-node, or sbatch --nodes"
RESUMES = "a run continues from its own directory by itself; actor.start_from loads the weights of another run"
MEGATRON = "Megatron-Core always trains; actor.layout and critic.layout set the parallelism"
OWN_FUNCTION = "FILE.py:NAME of a function that takes prompt, response, answer and metadata"
LOADS = "a torch_dist checkpoint of Megatron-LM, a Hugging Face folder or another run"
KERNELS = "megappo chooses the kernels; set model.accelerations to auto for Transformer Engine"
LAYERS = "it is not needed because the architecture is read from the model's config.json"
SERVERS = "rollout.servers.arguments takes {NAME: VALUE} for every argument of the servers"
NO_RAY = "it is not needed because megappo runs without Ray"
OF_REFERENCE = "the reference uses the layout and the microbatches of the actor"
DEALT = "samples are always distributed over ranks by their tokens"
COLOCATED = "the reference uses the actor's ranks; critic.layout places the critic"
CLIPS = "a ratio below 1 - clip_low or above 1 + clip_high has no gradient; set both"
TEXT_ONLY = "megappo trains on text only"
PROFILE = "a list of step numbers; all ranks are traced"


def answer(keys: str, *names: str, note: str = "") -> dict[str, Counterpart]:
    """Map several names to one answer. Blanks separate the keys. Without keys, megappo has no equivalent setting."""
    return dict.fromkeys(names, Counterpart(tuple(keys.split()), note))


def under(prefix: str, answers: dict[str, Counterpart], role: str = "") -> dict[str, Counterpart]:
    """Add a prefix to each name of `answers` and replace ROLE by `role`."""
    return {
        f"{prefix}.{name}": answer_of_name._replace(
            keys=tuple(key.replace(ROLE, role or ROLE, 1) for key in answer_of_name.keys)
        )
        for name, answer_of_name in answers.items()
    }
