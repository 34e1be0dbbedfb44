"""Settings that differ between a checkpoint and the resumed run."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pydantic import ValidationError

from megappo.config import Config
from megappo.config.load import flat_settings
from megappo.config.renamed import replace_old_names
from megappo.config.sections.data import OLD_PYTHON_PREFIX
from megappo.config.sections.engine import ServerSettings
from megappo.config.sections.reward import SERVER
from megappo.errors import ConfigError, secret_settings, show
from megappo.files.json_values import JSONValue
from megappo.plugins import own_file, own_files

_UNMENTIONED = (
    "run.name", "run.directory", "run.files", "run.private", "run.max_hours", "run.force_resume",
    "run.export_final_model", "runtime", "logging", "rollout.save_to",
    "rollout.servers.request_timeout_seconds", "actor.offload", "critic.offload", "reference.offload",
)  # fmt: skip
"""Settings without effect on training. Their changes are not reported."""
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
"""Settings that define the run: models, data, task and objective. Their changes require `run.force_resume`."""
_JUDGES_SERVER = re.compile(r"\.judge\.(url|key|concurrency|timeout_seconds|retries|server(\..+)?)$")
"""Settings of a judge that do not change the scores: address, concurrency, timeout and retries."""
_REWARD_SERVER = re.compile(
    r"(reward\.(?:functions\.[^.]+\.)?)options\."
    r"(url|key|headers_from_environment(\..+)?|concurrent|deadline_seconds)$"
)
"""Settings of a reward server that do not change the scores: address, keys, concurrency and deadline."""
_SOURCES = {"data.train.source", "data.validation.source"}
_LONGEST_PATH_SHOWN = 50
_LENGTHS = ("run.steps", "run.epochs")
_SERVER_DEFAULTS = ServerSettings().model_dump(mode="json")


@dataclass(frozen=True)
class Changes:
    """Differences between the settings of a checkpoint and a run, one sentence per setting."""

    harmless: tuple[str, ...]
    dangerous: tuple[str, ...]

    def is_of(self, key: str) -> bool:
        """Return whether a setting has a different value."""
        return any(sentence.startswith(f"{key}: ") for sentence in (*self.harmless, *self.dangerous))


def compare_settings(
    before: Mapping[str, JSONValue],
    now: Mapping[str, JSONValue],
    steps: tuple[int, int],
    digests: Mapping[str, str] = MappingProxyType({}),
) -> Changes:
    """Compare two configurations in JSON types. `steps`: old and new number of steps of the run.

    `digests`: SHA-256 by path, for each file with a function of the earlier configuration. A function in a moved file
    is not a change.
    """
    before, _ = replace_old_names(before)
    old, new = dict(flat_settings(before)), dict(flat_settings(now))
    if "rollout.servers.kind" in old:  # checkpoints of versions that did not record default settings of servers
        old = {f"rollout.servers.{key}": value for key, value in flat_settings(_SERVER_DEFAULTS)} | old
    for key in _SOURCES & old.keys():
        old[key] = str(old[key]).removeprefix(OLD_PYTHON_PREFIX)
    if old.get("data.template_time") is None:  # checkpoints of versions that did not record the start time
        old["data.template_time"] = new.get("data.template_time")
    if "algorithm.lam" in old:  # checkpoints of versions with a single lambda
        old["algorithm.lam.actor.number"] = old["algorithm.lam.critic"] = old.pop("algorithm.lam")
    harmless: list[str] = []
    dangerous: list[str] = []
    # Secrets do not define the task. An older version accepted them in settings.
    hidden = {*secret_settings(before), *secret_settings(now)}
    decays = any(_decays(new, role) or _decays(old, role) for role in ("actor", "critic"))
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) == new.get(key) or key in hidden or _is_in(key, _UNMENTIONED):
            continue
        if former_file(old.get(key), new.get(key), digests) or _is_one_path(old.get(key), new.get(key)):
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


def _is_one_path(before: JSONValue, now: JSONValue) -> bool:
    """Return whether two texts are paths of one existing file or folder, such as its absolute and its relative path."""
    if not isinstance(before, str) or not isinstance(now, str):
        return False
    return os.path.exists(before) and os.path.exists(now) and os.path.samefile(before, now)


def former_files(
    before: Mapping[str, JSONValue], now: Mapping[str, JSONValue], digests: Mapping[str, str]
) -> dict[str, str]:
    """Return old paths by new paths, for files of functions that were moved after the checkpoint."""
    old, paths = dict(flat_settings(before)), {}
    for key, value in flat_settings(now):
        former = former_file(old.get(key), value, digests)
        if former is not None:
            paths[str(own_file(str(value)))] = former
    return paths


def former_file(before: JSONValue, now: JSONValue, digests: Mapping[str, str]) -> str | None:
    """Return the old path of a moved file, if both values of a setting name the same function. Otherwise return None.

    Two functions are the same if the files have the same content, or if the files have the same name and the old file
    no longer exists.
    """
    if not isinstance(before, str) or not isinstance(now, str) or before == now:
        return None
    old, new = own_file(before), own_file(now)
    if old is None or new is None or before.rpartition(":")[2] != now.rpartition(":")[2] or not new.is_file():
        return None
    is_moved = old.name == new.name and not old.exists()
    digest = digests.get(str(old))
    return str(old) if is_moved or digest == own_files(now).get(str(new)) else None


def tensor_changes(before: Mapping[str, JSONValue], now: Config) -> str | None:
    """Return why the tensors of a checkpoint do not fit the settings, or None if the tensors fit. Adapters and weights
    are different tensors, and frozen parameters have no moments."""
    for role, settings in now.trained.items():
        old = _section(before, role).get("lora")
        new = None if settings.lora is None else settings.lora.model_dump(mode="json")
        if old != new:
            return f"{role}.lora {show(old)} instead of {show(new)}, so its checkpoints contain other tensors"
    if now.critic is not None:
        value = _section(before, "critic").get("freeze")
        frozen = sorted(map(str, value)) if isinstance(value, Sequence) else []
        if frozen != sorted(now.critic.freeze):
            difference = f"critic.freeze {show(frozen)} instead of {show(sorted(now.critic.freeze))}"
            return f"{difference}, so its checkpoints contain other moments"
    return None


def keep_kl_unit(before: Mapping[str, JSONValue], config: Config) -> tuple[Mapping[str, JSONValue], Config]:
    """Take the unit and the target of an adaptive KL from the checkpoint, unless the new settings name them.

    Return the settings of the checkpoint with an explicit unit, and the settings of the resumed run. Checkpoints of
    older versions without this setting use the unit `response`.
    """
    algorithm_before = _section(before, "algorithm")
    old, kl = algorithm_before.get("kl_in_reward"), config.algorithm.kl_in_reward
    if not isinstance(old, Mapping) or kl is None:
        return before, config
    old = {"per": "response", **old}
    restored = {} if "per" in kl.model_fields_set else {"per": old["per"]}
    if "target" not in kl.model_fields_set and restored.get("per", kl.per) == old["per"]:
        restored["target"] = old.get("target")
    try:
        restored_kl = type(kl).model_validate(kl.model_dump(exclude_unset=True) | restored)
    except ValidationError as error:
        raise ConfigError(f"the checkpoint has algorithm.kl_in_reward {show(old)}, which is not valid") from error
    algorithm = config.algorithm.model_copy(update={"kl_in_reward": restored_kl})
    return (
        {**before, "algorithm": {**algorithm_before, "kl_in_reward": old}},
        config.model_copy(update={"algorithm": algorithm}),
    )


def _section(settings: Mapping[str, JSONValue], name: str) -> Mapping[str, JSONValue]:
    section = settings.get(name)
    return section if isinstance(section, Mapping) else {}


def _is_in(key: str, sections: tuple[str, ...]) -> bool:
    return any(key == section or key.startswith(section + ".") for section in sections)


def _is_of_reward_server(settings: Mapping[str, JSONValue], key: str) -> bool:
    match = _REWARD_SERVER.match(key)
    return match is not None and settings.get(f"{match[1]}function") == SERVER


def _decays(settings: Mapping[str, JSONValue], role: str) -> bool:
    schedule = settings.get(f"{role}.optimizer.schedule", "constant")
    return schedule not in ("constant", "inverse_sqrt") or bool(settings.get(f"{role}.optimizer.warmup_ratio"))


def _shown(settings: Mapping[str, JSONValue], key: str) -> str:
    """Return the value as readable text. A long path to a function is reduced to the end of the path."""
    if key not in settings:
        return "not set"
    value = settings[key]
    if isinstance(value, str) and own_file(value) is not None and len(value) > _LONGEST_PATH_SHOWN:
        value = f"...{value[-_LONGEST_PATH_SHOWN:]}"
    return show(value)
