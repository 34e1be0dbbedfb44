"""Defaults that depend on other settings of a configuration, with their reasons, for `megappo plan`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megappo.config import Config, resolve
from megappo.config.sections.roles import ActorSettings, CriticSettings
from megappo.errors import show

_RATES = {"actor": "as in DAPO, Open-Reasoner-Zero and verl", "critic": "as in Open-Reasoner-Zero"}


@dataclass(frozen=True)
class OpenSetting:
    """A setting that the configuration does not set."""

    setting: str
    """Name of the setting, such as `actor.minibatches`."""
    value: str
    """Chosen value in the syntax of an override."""
    why: str

    @property
    def sentence(self) -> str:
        """Setting, value and reason, such as `actor.minibatches=4: ...`. The first part can be copied as an
        override."""
        return f"{self.setting}={self.value}: {self.why}"


def choices(config: Config, ranks: int, *, on_cuda: bool) -> Iterator[OpenSetting]:
    """Return the unset settings that affect training, speed or memory. `config` is a configuration as loaded, before
    `resolve` fills in defaults."""
    if config.rollout.engine_name is None and config.rollout.load_from is None:
        rollout = resolve(config, on_cuda=on_cuda).rollout
        why = "the machine has GPUs" if on_cuda else "the machine has no GPU"
        yield OpenSetting(rollout.engine_setting, str(rollout.engine_name), why)
    if "prompts_per_step" not in config.rollout.model_fields_set:
        prompts = str(config.rollout.prompts_per_step)
        yield OpenSetting("rollout.prompts_per_step", prompts, "published recipes use 128 to 1,024")
    if "max_prompt_tokens" not in config.data.model_fields_set:
        yield OpenSetting("data.max_prompt_tokens", str(config.data.max_prompt_tokens), "OpenRLHF's default")
    if "max_response_tokens" not in config.rollout.model_fields_set:
        yield OpenSetting("rollout.max_response_tokens", str(config.rollout.max_response_tokens), "OpenRLHF's default")
    if "critic" not in config.model_fields_set and config.critic is not None:
        yield OpenSetting("critic", "{}", f"algorithm.estimator {config.algorithm.estimator} needs one")
    for name, role in config.trained.items():
        yield from _of_role(config, name, role, ranks)


def _of_role(config: Config, name: str, role: ActorSettings | CriticSettings, ranks: int) -> Iterator[OpenSetting]:
    layout, optimizer, grid = role.layout, role.optimizer, role.layout.grid(ranks)
    if "learning_rate" not in optimizer.model_fields_set:
        yield OpenSetting(f"{name}.optimizer.learning_rate", f"{optimizer.learning_rate:g}", _RATES[name])
    if role.minibatch_sequences is None and role.minibatches is None:
        count = str(role.minibatch_count(config.rollout.batch_sequences))
        yield OpenSetting(f"{name}.minibatches", count, "updates in each pass, as in verl's example for GSM8K")
    if "microbatch_budget_tokens" not in role.model_fields_set:
        why = f"not below the longest sample, {config.max_sequence_tokens} tokens"
        yield OpenSetting(f"{name}.microbatch_budget_tokens", str(role.microbatch_budget_tokens), why)
    if layout.sequence_parallel is None and layout.tensor_parallel > 1:
        why = f"{layout.tensor_parallel} ranks share the activations between tensor parallel regions"
        yield OpenSetting(f"{name}.layout.sequence_parallel", show(layout.shards_sequences), why)
    if optimizer.distributed is None and grid.copies > 1:
        why = f"{grid.copies} ranks have the same weights and share the optimizer's state"
        yield OpenSetting(f"{name}.optimizer.distributed", show(optimizer.shards_state(grid)), why)
