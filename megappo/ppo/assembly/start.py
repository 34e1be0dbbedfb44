"""Choose where a run starts: at the newest checkpoint in the run directory, or at the beginning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from megappo.checkpoint.changes import compare_settings, former_files, keep_kl_unit, tensor_changes
from megappo.checkpoint.exports.card import exported_step
from megappo.checkpoint.files import Marker, checkpoints_directory, put_all_in_place
from megappo.checkpoint.identity import settings_of
from megappo.checkpoint.select import select_checkpoint
from megappo.checkpoint.versions import PACKAGES, recorded_versions
from megappo.config import Config, ConfigError, Derived, load_config
from megappo.config.reading.explain import explain
from megappo.errors import show
from megappo.observe.metrics import read_metrics
from megappo.plugins import own_files
from megappo.ppo.assembly.named_files import missing_files
from megappo.preflight.template_time import at_one_time, recorded_time
from megappo.runtime.process import Runtime
from megappo.runtime.ranks.objects import broadcast_object


@dataclass(frozen=True)
class Start:
    """Starting point of a run."""

    config: Config
    """Settings of the run: the user's settings, except the settings that a checkpoint fixes."""
    sentences: tuple[str, ...] = ()
    """Messages for the user that describe the starting point."""
    checkpoint: tuple[Path, Marker] | None = None
    """Folder and marker of the checkpoint from which the run continues. None for a new run."""
    changes: tuple[str, ...] = ()
    """Differences from the run before the checkpoint: settings, versions and code files."""
    trained: Config | None = None
    """Settings of the last step if no step is left to train, otherwise None."""

    @property
    def has_work(self) -> bool:
        """True if a step is left to train, or to evaluate and log."""
        return self.trained is None or self.is_open

    @property
    def step(self) -> int:
        """Number of the last finished step. -1 before the evaluation that precedes the first step."""
        return self.checkpoint[1].step if self.checkpoint is not None else -1

    @property
    def is_open(self) -> bool:
        """True if the last finished step still has to be evaluated and logged."""
        return self.checkpoint is not None and bool(self.checkpoint[1].content["trainer"].get("is_open", False))


def choose_start(config: Config, derived: Derived, runtime: Runtime) -> Start:
    """Return the newest complete checkpoint of the run directory, or the beginning. A collective of the world.

    Raises ConfigError if the directory holds a run that cannot be continued, or that cannot be continued with these
    settings.
    """
    if runtime.is_main:
        put_all_in_place(checkpoints_directory(config.run.path))
    chosen = select_checkpoint(checkpoints_directory(config.run.path), runtime)
    config = at_one_time(config, None if chosen is None else recorded_time(chosen[1]))
    if chosen is None:
        return _begin(config, runtime)
    folder, marker, sentences = chosen
    steps = (run_steps(marker), derived.steps)
    requested, (then, config) = config, keep_kl_unit(marker.content["settings"], config)
    changes = compare_settings(then, config.model_dump(mode="json"), steps, marker.content.get("own_files", {}))
    missing = [sentence for key, sentence in missing_files(config) if changes.is_of(key)]
    if missing:  # A wrong file name does not indicate a different run, so it is reported as missing.
        raise ConfigError(missing)
    other = tensor_changes(then, config)
    if other is not None:
        raise ConfigError(
            f"run.directory '{config.run.path}' holds a run with {other}; set it back, or choose another run.directory"
        )
    problem, notes = _steps_left(config, marker.step, derived.steps)
    if problem:
        raise ConfigError(problem)
    if changes.dangerous and not config.run.force_resume:
        raise ConfigError(
            f"run.directory '{config.run.path}' holds a run with other settings ({'; '.join(changes.dangerous)}); "
            "set them back, choose another run.directory, or set run.force_resume: true to continue with them"
        )
    sentences.append(f"continuing after step {marker.step} from {folder}")
    changed = (*changes.dangerous, *changes.harmless, *_changes_of_code(marker, config))
    sentences += [f"changed since then: {change}" for change in changed]
    sentences += _kl_sentences(requested, config) + notes
    trained = None
    if marker.step == derived.steps:
        trained, problems = _recorded_settings(marker, config)
        sentences += problems
    return Start(config, tuple(sentences), (folder, marker), changed, trained)


def _recorded_settings(marker: Marker, config: Config) -> tuple[Config, list[str]]:
    """Return the settings in the checkpoint, or `config` and a warning if this version cannot read them."""
    try:
        return Config.model_validate({**settings_of(marker), "model": config.model.model_dump()}), []
    except ValidationError as error:
        return config, [
            "a model card would contain the given settings, because this version cannot read the settings in the "
            f"checkpoint: {explain(error)[0]}"
        ]


def _changes_of_code(marker: Marker, config: Config) -> Iterator[str]:
    """Return the versions and the user's code files that differ from the checkpoint."""
    before = marker.content["versions"]
    for name, version in recorded_versions().items():
        if before.get(name) != version and (name in before or name != PACKAGES):
            yield f"{name} {before.get(name)} -> {version}"
    files = marker.content.get("own_files", {})  # absent from checkpoints of older versions
    settings = config.model_dump(mode="json")
    former = former_files(marker.content["settings"], settings, files)
    for file, digest in own_files(settings).items():
        if files.get(former.get(file, file), digest) != digest:
            yield f"the content of {file}"


def is_exported(start: Start, runtime: Runtime) -> bool:
    """Return whether an earlier attempt exported the actor after the last step. A collective of the world."""
    is_last = start.trained is not None and runtime.is_main
    return broadcast_object(is_last and exported_step(final_folder(start.config)) == start.step)


def final_folder(config: Config) -> Path:
    """Return the folder of the exported trained actor."""
    return config.run.path / "final"


def _steps_left(config: Config, done: int, steps: int) -> tuple[str, list[str]]:
    """Return an error if the run has finished more than `steps` steps, and a note if no step is left.

    Returns ("", []) if a step is left.
    """
    key = "run.steps is" if config.run.epochs is None else f"run.epochs {config.run.epochs:g} are steps up to"
    if done > steps:
        return (
            f"{key} {steps}, and the run in {config.run.path} has done {done} already; set run.steps to {done} or "
            "more, or choose another run.directory"
        ), []
    over = f"{key} {steps}, which the run has done: nothing is left to train; raise it to continue"
    return "", [over] if done == steps else []


def _kl_sentences(requested: Config, effective: Config) -> list[str]:
    """Return a message if the adaptive KL keeps the unit of the run, although these settings would give a new run
    another unit."""
    requested_kl, kl = requested.algorithm.kl_in_reward, effective.algorithm.kl_in_reward
    if requested_kl is None or kl is None or requested_kl.per == kl.per or kl.controller != "adaptive":
        return []
    return [
        f"the adaptive KL target remains {kl.target_nats:g} nats per {kl.per}, as at the start of the run; set "
        "algorithm.kl_in_reward.per for another unit"
    ]


def run_steps(marker: Marker) -> int:
    """Return the number of PPO steps planned for the run of a checkpoint."""
    # Checkpoints from before `run.epochs` existed store the number of steps only in their settings.
    steps = marker.content.get("steps") or (marker.content["settings"].get("run") or {}).get("steps")
    if type(steps) is not int:
        raise ConfigError(
            f"the checkpoint of step {marker.step} records {show(steps)} as the number of steps, which is no "
            "integer; start a new run"
        )
    return steps


def _begin(config: Config, runtime: Runtime) -> Start:
    """Return the start of a new run. Notify the user if a run was stopped before its first checkpoint.

    Raises ConfigError if the run directory cannot be used.
    """
    problem, lost = broadcast_object(lost_steps(config) if runtime.is_main else (None, 0))
    if problem is not None:
        raise ConfigError(problem)
    sentence = f"the run in {config.run.path} was stopped before its first checkpoint and begins again"
    return Start(config, (sentence,) if lost else ())


def lost_steps(config: Config) -> tuple[str | None, int]:
    """Return (reason why the run directory cannot be used, number of logged lines that will be repeated)."""
    metrics = config.run.path / "metrics.jsonl"
    if not metrics.exists() or not metrics.stat().st_size:
        return None, 0
    try:
        lines = read_metrics(metrics)
        saved = config.run.path / "config.yaml"
        before = load_config(saved) if saved.exists() else None
    except ValueError as error:
        return str(error), 0
    # An asynchronous checkpoint may have been unfinished until the next checkpoint was due.
    settings = before.checkpoint if before is not None else None
    last = lines[-1]["step"] if lines else -1
    has_ended = (before is not None and last == before.run.steps) or (config.run.path / "final").exists()
    if settings is not None and not has_ended and last < 2 * settings.every_steps:
        return None, len(lines)
    return (
        f"run.directory '{config.run.path}' holds a run without any checkpoint to continue from; choose another "
        "run.directory or run.name, or remove the folder"
    ), 0
