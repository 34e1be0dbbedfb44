"""Settings that differ between a checkpoint and the run that continues from it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from megappo.config import Config
from megappo.config.data import OLD_PYTHON_PREFIX
from megappo.config.load import flat_settings
from megappo.config.reward import SERVER
from megappo.errors import ConfigError, secret_settings, show
from megappo.observe.json_values import JSONValue

_UNMENTIONED = (
    "run.name", "run.directory", "run.files", "run.private", "run.max_hours", "run.force_resume",
    "run.export_final_model", "runtime", "logging", "rollout.save_to",
    "rollout.sglang.request_timeout_seconds", "actor.offload", "critic.offload", "reference.offload",
)  # fmt: skip
"""Settings whose changes are not mentioned: nothing that is learned depends on them."""
_DANGEROUS = (
    "run.seed", "model", "actor.start_from", "critic.start_from", "critic.path",
    "critic.value_head_std", "critic.pretraining", "rollout.load_from",
    "actor.lora", "critic.lora", "reference", "data.train", "data.mixture", "data.curriculum",
    "data.apply_chat_template", "data.chat_template", "data.chat_template_options", "data.template_time",
    "data.system_prompt", "data.max_prompt_tokens", "data.overlong_prompts", "data.shuffle", "reward.function",
    "reward.functions", "reward.judge", "reward.options", "reward.batch", "reward.model_path", "reward.overlong",
    "reward.truncated_score", "reward.truncated_penalty", "reward.normalize", "reward.scale", "reward.shift",
    "reward.clip", "algorithm.estimator", "algorithm.estimator_options", "algorithm.policy_loss",
    "algorithm.policy_loss_options", "rollout.environment.name", "rollout.environment.arguments",
    "rollout.generation", "rollout.generation_options",
)  # fmt: skip
"""Settings whose changes make it another run: other models, data, task or objective."""
_JUDGES_SERVER = re.compile(r"\.judge\.(url|key|concurrency|timeout_seconds|retries|server(\..+)?)$")
"""A judge's settings on which its scores do not depend: where it is, and how patiently it is asked."""
_REWARD_SERVER = re.compile(
    r"(reward\.(?:functions\.[^.]+\.)?)options\."
    r"(url|key|headers_from_environment(\..+)?|concurrent|deadline_seconds)$"
)
"""A reward server's settings on which its scores do not depend: where it is, and how patiently it is asked."""
_SOURCES = {"data.train.source", "data.validation.source"}
_LENGTHS = ("run.steps", "run.epochs")


@dataclass(frozen=True)
class Changes:
    """Differences between a checkpoint's settings and the run's, one sentence for each setting."""

    harmless: tuple[str, ...]
    dangerous: tuple[str, ...]


def compare_settings(before: Mapping[str, JSONValue], now: Mapping[str, JSONValue], steps: tuple[int, int]) -> Changes:
    """Compare two configurations in JSON's types. `steps`: how many the run had and has now, however they are given."""
    old, new = dict(flat_settings(before)), dict(flat_settings(now))
    for key in _SOURCES & old.keys():
        old[key] = str(old[key]).removeprefix(OLD_PYTHON_PREFIX)
    if old.get("data.template_time") is None:  # from before runs recorded the time of their start
        old["data.template_time"] = new.get("data.template_time")
    if "algorithm.lam" in old:  # from before actor and critic had their own
        old["algorithm.lam.actor.number"] = old["algorithm.lam.critic"] = old.pop("algorithm.lam")
    harmless: list[str] = []
    dangerous: list[str] = []
    hidden = {*secret_settings(before), *secret_settings(now)}  # a version accepted them; they do not define the task
    decays = any(_decays(new, role) or _decays(old, role) for role in ("actor", "critic"))
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) == new.get(key) or key in hidden or _is_in(key, _UNMENTIONED):
            continue
        sentence = f"{key}: {_shown(old, key)} -> {_shown(new, key)}"
        if key in _LENGTHS and decays and steps[0] != steps[1]:
            dangerous.append(f"{sentence} (learning rates decay over the run's steps)")
        elif key == "critic.warmup_steps" and (_decays(new, "actor") or _decays(old, "actor")):
            dangerous.append(f"{sentence} (the actor's learning rate decays over the steps after it)")
        elif _is_in(key, _DANGEROUS) and not _JUDGES_SERVER.search(key) and not _is_of_reward_server(new, key):
            dangerous.append(sentence)
        else:
            harmless.append(sentence)
    return Changes(tuple(harmless), tuple(dangerous))


def tensor_changes(before: Mapping[str, JSONValue], now: Config) -> str | None:
    """Why the checkpoint's tensors cannot be those of these settings' roles; None where they can. Adapters are other
    tensors than weights, and frozen parameters have no moments."""
    for role, settings in now.trained.items():
        old = _section(before, role).get("lora")
        new = None if settings.lora is None else settings.lora.model_dump(mode="json")
        if old != new:
            return f"{role}.lora {show(old)} and not {show(new)}, so its checkpoints hold other tensors"
    if now.critic is not None:
        told = _section(before, "critic").get("freeze")
        frozen = sorted(map(str, told)) if isinstance(told, Sequence) else []
        if frozen != sorted(now.critic.freeze):
            words = f"critic.freeze {show(frozen)} and not {show(sorted(now.critic.freeze))}"
            return f"{words}, so its checkpoints hold other moments"
    return None


def keep_kl_unit(before: Mapping[str, JSONValue], config: Config) -> tuple[Mapping[str, JSONValue], Config]:
    """Keep the unit of an adaptive KL, and its target, from the checkpoint where the new settings do not name them.

    Returns the checkpoint's settings with their unit, which is the response in checkpoints from before there was a
    choice, and the settings to continue with.
    """
    algorithm_before = _section(before, "algorithm")
    old, kl = algorithm_before.get("kl_in_reward"), config.algorithm.kl_in_reward
    if not isinstance(old, Mapping) or kl is None:
        return before, config
    old = {"per": "response", **old}
    kept = {} if "per" in kl.model_fields_set else {"per": old["per"]}
    if "target" not in kl.model_fields_set and kept.get("per", kl.per) == old["per"]:
        kept["target"] = old.get("target")
    try:
        kept_kl = type(kl).model_validate(kl.model_dump(exclude_unset=True) | kept)
    except ValidationError as error:
        raise ConfigError(f"the checkpoint's algorithm.kl_in_reward is {show(old)}, which no run has") from error
    algorithm = config.algorithm.model_copy(update={"kl_in_reward": kept_kl})
    return (
        {**before, "algorithm": {**algorithm_before, "kl_in_reward": old}},
        config.model_copy(update={"algorithm": algorithm}),
    )


def _section(settings: Mapping[str, JSONValue], name: str) -> Mapping[str, JSONValue]:
    found = settings.get(name)
    return found if isinstance(found, Mapping) else {}


def _is_in(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(section + ".") for section in sections)


def _is_of_reward_server(settings: Mapping[str, JSONValue], key: str) -> bool:
    found = _REWARD_SERVER.match(key)
    return found is not None and settings.get(f"{found[1]}function") == SERVER


def _decays(settings: Mapping[str, JSONValue], role: str) -> bool:
    schedule = settings.get(f"{role}.optimizer.schedule", "constant")
    return schedule not in ("constant", "inverse_sqrt") or bool(settings.get(f"{role}.optimizer.warmup_ratio"))


def _shown(settings: Mapping[str, JSONValue], key: str) -> str:
    return show(settings[key]) if key in settings else "not set"
