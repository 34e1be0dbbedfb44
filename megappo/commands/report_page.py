"""Collects the content of `megappo report --html`. metrics.jsonl is required. If another file is missing or damaged,
its part of the page is replaced by a note."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megappo import __version__
from megappo.config.load import flat_settings, load_config
from megappo.config.rules.experience import folder_of_run
from megappo.config.schema import Config
from megappo.errors import one_line, reason, shortened
from megappo.files.plain_files import check_plain
from megappo.observe.changes import change_notes
from megappo.observe.evaluations import evaluation_label, evaluation_results
from megappo.observe.page.curves import Line, curves, descriptions, first_shown, ordered, points_of
from megappo.observe.page.document import document
from megappo.observe.page.records import jumps, profile, written_samples
from megappo.observe.page.runs import RunMetrics
from megappo.observe.saved_samples import saved_steps
from megappo.ppo.reports.advice import ADVICE, Advisor, advice_text

_Part = TypeVar("_Part")
_WINDOW_STEPS = 5
_MOST_ADVICE = 500
_SETTING_CHARACTERS, _CHANGE_CHARACTERS = 300, 2_000


def page_of(runs: Sequence[RunMetrics]) -> bytes:
    """Return the page for one run or several."""
    points = points_of(sum(len(run.names) for run in runs))
    pages, settings = [], []
    for run in runs:
        notes: list[str] = []
        config = _part(notes, "settings", partial(_config, run.directory))
        settings.append({} if config is None else _settings(config))
        changes = _part(notes, "changes of settings", partial(change_notes, run.directory)) or []
        notes += [shortened(f"Settings changed {one_line(change)}.", _CHANGE_CHARACTERS) for change in changes]
        about = {"name": run.label, "directory": str(run.directory), "notes": notes}
        pages.append(about | _of_run(run, config, notes) | curves(run.lines, points).plain())
        pages[-1] |= _experience(run.directory, config, notes, 1 / len(runs))
    every = ordered(set[str]().union(*(run.names for run in runs)))
    return document(
        {
            "version": __version__,
            "names": every,
            "first": first_shown(every),
            "docs": descriptions(every),
            "runs": pages,
            "settings": list(_compared(settings)),
        }
    )


def _part(notes: list[str], what: str, read: Callable[[], _Part]) -> _Part | None:
    """Return a part of the page. If its file cannot be read, return None and append a note."""
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


def _of_run(run: RunMetrics, config: Config | None, notes: list[str]) -> dict[str, Any]:
    directory, lines = run.directory, run.lines
    return {
        "status": _status(directory, lines, config),
        "result": _result(lines, config),
        "advice": [] if config is None else _advice(lines, config),
        "jumps": _part(notes, "updates that stood out", partial(jumps, directory)) or [],
        "profile": _part(notes, "profile", lambda: list(profile(directory))) or [],
    }


def _experience(directory: Path, config: Config | None, notes: list[str], share: float) -> dict[str, Any]:
    """Return distributions and samples of the saved steps. Without saved steps, return the samples that every run
    writes."""
    saved, distributions, samples = _part(notes, "saved experience", partial(_saved, directory, config)), None, None
    if saved:
        from megappo.observe.page.experience import histograms, saved_samples

        distributions = _part(notes, "distributions", partial(histograms, saved))
        samples = _part(notes, "saved samples", partial(saved_samples, saved, share))
    return {
        "histograms": distributions,
        "samples": samples or _part(notes, "samples", partial(written_samples, directory)) or [],
    }


def _saved(directory: Path, config: Config | None) -> dict[int, list[Path]]:
    """Return the files of each saved step."""
    return {number: step.files for number, step in saved_steps(folder_of_run(directory, config)).items()}


def _status(directory: Path, lines: Mapping[int, Line], config: Config | None) -> str:
    last = max(lines, default=0)
    planned = None if config is None else config.run.steps
    progress = f"step {last}" + ("" if planned is None else f" of {planned}")
    hangs = len(list(directory.glob("hang-*")))
    parts = [progress, *(["the trained actor is in final/"] if (directory / "final").is_dir() else [])]
    return ", ".join([*parts, *([f"{hangs} reports of hangs"] if hangs else [])])


def _result(lines: Mapping[int, Line], config: Config | None) -> str:
    """Return the first and the last values of evaluation results and of the training reward."""
    right_above = {} if config is None else config.data.thresholds
    results = evaluation_results({name for line in lines.values() for name in line})
    windows = {name: (evaluation_label(name, right_above), 1) for name in results}
    parts = []
    for name, (label, window) in (windows | {"reward/mean": ("reward/mean", _WINDOW_STEPS)}).items():
        values = [x for step in sorted(lines) if math.isfinite(x := lines[step].get(name, math.nan))]
        if values:
            last = values[-window:]
            where = f"in the last {len(last)} steps" if window > 1 else "in the last evaluation"
            parts.append(f"{label} {values[0]:.3f} at first, {sum(last) / len(last):.3f} {where}")
    return "; ".join(parts)


def _advice(lines: Mapping[int, Line], config: Config) -> list[list[Any]]:
    """Return (step, condition, sentence) for each advice of the run. The advice is computed from the metrics again."""
    advisor, names = Advisor(config.algorithm), {advice_text(name): name for name in ADVICE}
    advice = ((step, sentence) for step in sorted(lines) for sentence in advisor.observe(step, lines[step]))
    return [[step, names[sentence].replace("_", " "), sentence] for step, sentence in advice][-_MOST_ADVICE:]


def _settings(config: Config) -> dict[str, str]:
    """Return settings by dotted key, without secrets."""
    flat = flat_settings(config.model_dump(mode="json"))
    texts = ((key, value if isinstance(value, str) else json.dumps(value)) for key, value in flat)
    return {key: shortened(one_line(text), _SETTING_CHARACTERS) for key, text in texts}


def _compared(settings: Sequence[Mapping[str, str]]) -> Iterator[list[Any]]:
    """Yield each setting with its value in each run. The value is None if the setting is missing or unknown."""
    for key in dict.fromkeys(key for of_run in settings for key in of_run):
        yield [key, [of_run.get(key) for of_run in settings]]
