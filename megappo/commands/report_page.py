"""Collects what `megappo report --html` shows of runs. A file that is missing or damaged costs its part of the page,
which says why; metrics.jsonl alone must be there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megappo import __version__
from megappo.config.experience_rules import folder_of_run, saved_steps
from megappo.config.load import flat_settings, load_config
from megappo.config.schema import Config
from megappo.errors import one_line, reason, shortened
from megappo.observe.metrics import metric_value, read_metrics
from megappo.observe.page.curves import FIRST, Line, curves, descriptions, ordered, points_of
from megappo.observe.page.document import document
from megappo.observe.page.records import jumps, profile, written_samples
from megappo.observe.plain_files import check_plain
from megappo.ppo.advice import ADVICE, Advisor, told

_Part = TypeVar("_Part")
_WINDOW_STEPS = 5
_MOST_ADVICE = 500
_SETTING_CHARACTERS = 300


def page_of(directories: Sequence[Path]) -> bytes:
    """The page of some runs. Raises ValueError where a directory is not a run's, or its metrics.jsonl is damaged."""
    lines = [read_lines(directory) for directory in directories]
    names = [{name for line in of_run.values() for name in line} for of_run in lines]
    points = points_of(sum(map(len, names)))
    labels = _labels(directories)
    runs, settings = [], []
    for directory, of_run, label in zip(directories, lines, labels, strict=True):
        notes: list[str] = []
        config = _part(notes, "settings", partial(_config, directory))
        settings.append({} if config is None else _settings(config))
        about = {"name": label, "directory": str(directory), "notes": notes}
        runs.append(about | _of_run(directory, of_run, config, notes) | curves(of_run, points).plain())
        runs[-1] |= _experience(directory, config, notes, 1 / len(directories))
    every = ordered(set().union(*names))
    return document(
        {
            "version": __version__,
            "names": every,
            "first": [name for name in FIRST if name in every] or every[:6],
            "docs": descriptions(every),
            "runs": runs,
            "settings": list(_compared(settings)),
        }
    )


def read_lines(directory: Path) -> dict[int, Line]:
    """The metrics of each step of a run. Raises ValueError where there are none, or one is no number."""
    path = directory / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"{directory} holds no metrics.jsonl; name the directory of a run")
    lines: dict[int, Line] = {
        line["step"]: {name: metric_value(value, path) for name, value in line.items() if name != "step"}
        for line in read_metrics(path)
    }
    if not lines:
        raise ValueError(f"{path} has no step yet; wait until the run has ended its first")
    return lines


def _labels(directories: Sequence[Path]) -> list[str]:
    """Short names of runs that tell them apart."""
    names = [directory.resolve().name for directory in directories]
    return names if len(set(names)) == len(names) else [str(directory) for directory in directories]


def _part(notes: list[str], what: str, read: Callable[[], _Part]) -> _Part | None:
    """A part of the page; where its file cannot be read, None and a note."""
    try:
        return read()
    except (ValueError, OSError) as error:
        notes.append(f"The {what} cannot be shown: {reason(error)}.")
        return None


def _config(directory: Path) -> Config | None:
    path = directory / "config.yaml"
    if not path.exists():
        return None
    check_plain(path)
    return load_config(path)


def _of_run(directory: Path, lines: Mapping[int, Line], config: Config | None, notes: list[str]) -> dict[str, Any]:
    return {
        "status": _status(directory, lines, config),
        "result": _result(lines),
        "advice": [] if config is None else _advice(lines, config),
        "jumps": _part(notes, "updates that stood out", partial(jumps, directory)) or [],
        "profile": _part(notes, "profile", lambda: list(profile(directory))) or [],
    }


def _experience(directory: Path, config: Config | None, notes: list[str], share: float) -> dict[str, Any]:
    """Distributions and samples of the steps that were saved; without any, the samples that every run writes."""
    saved, found, samples = _part(notes, "saved experience", partial(_saved, directory, config)), None, None
    if saved:
        from megappo.observe.page.experience import histograms, saved_samples

        found = _part(notes, "distributions", partial(histograms, saved))
        samples = _part(notes, "saved samples", partial(saved_samples, saved, share))
    return {
        "histograms": found,
        "samples": samples or _part(notes, "samples", partial(written_samples, directory)) or [],
    }


def _saved(directory: Path, config: Config | None) -> dict[int, list[Path]]:
    """Files of each saved step."""
    steps = saved_steps(folder_of_run(directory, config))
    return {number: [step.file(rank) for rank in range(step.ranks)] for number, step in steps.items()}


def _status(directory: Path, lines: Mapping[int, Line], config: Config | None) -> str:
    last = max(lines, default=0)
    planned = None if config is None else config.run.steps
    told = f"step {last}" + ("" if planned is None else f" of {planned}")
    hangs = len(list(directory.glob("hang-*")))
    parts = [told, *(["the trained actor is in final/"] if (directory / "final").is_dir() else [])]
    return ", ".join([*parts, *([f"{hangs} reports of hangs"] if hangs else [])])


def _result(lines: Mapping[int, Line]) -> str:
    """What came of the reward."""
    parts = []
    for name, window in (("reward/mean", _WINDOW_STEPS), ("eval/reward_mean", 1)):
        values = [lines[step][name] for step in sorted(lines) if name in lines[step]]
        if values:
            last = values[-window:]
            where = f"in the last {len(last)} steps" if window > 1 else "in the last evaluation"
            parts.append(f"{name} {values[0]:.3f} at first, {sum(last) / len(last):.3f} {where}")
    return "; ".join(parts)


def _advice(lines: Mapping[int, Line], config: Config) -> list[list[Any]]:
    """Step, condition and sentence of what the run was told, worked out from its metrics again."""
    advisor, names = Advisor(config.algorithm), {told(name): name for name in ADVICE}
    said = ((step, sentence) for step in sorted(lines) for sentence in advisor.observe(step, lines[step]))
    return [[step, names[sentence].replace("_", " "), sentence] for step, sentence in said][-_MOST_ADVICE:]


def _settings(config: Config) -> dict[str, str]:
    """Settings by dotted key, without secrets."""
    flat = flat_settings(config.model_dump(mode="json"))
    texts = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in flat)
    return {key: shortened(one_line(text), _SETTING_CHARACTERS) for key, text in texts}


def _compared(settings: Sequence[Mapping[str, str]]) -> Iterator[list[Any]]:
    """Each setting with its value in each run; None where a run has none, or none is known."""
    for key in dict.fromkeys(key for of_run in settings for key in of_run):
        yield [key, [of_run.get(key) for of_run in settings]]
