"""Logger for Weights & Biases. A resumed run continues under its id."""

from __future__ import annotations

import importlib
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megappo.errors import ConfigError, how_to_install, reason
from megappo.files.json_values import JSONValue
from megappo.files.plain_files import plain_text
from megappo.observe.distributions import Distribution

ID_FILE = "wandb-id"
"""File of the run directory with the id at Weights & Biases."""


def import_wandb(project: str) -> Any:
    """Import the package wandb. Raises ConfigError if the package is not installed, or if its import fails.

    Earlier runs leave a folder `wandb` in the working directory. Python imports this folder as an empty package if the
    real package is not installed.
    """
    place, remedy = f"logging.wandb_project is '{project}', but wandb", how_to_install("wandb")
    try:
        wandb = importlib.import_module("wandb")
    except Exception as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "wandb"
        problem = "is not installed" if is_missing else f"cannot be imported: {reason(error)}"
        raise ConfigError(f"{place} {problem}; {remedy}") from error
    if not hasattr(wandb, "init"):
        folder = next(iter(getattr(wandb, "__path__", ())), "wandb")
        raise ConfigError(f"{place} is not installed, and Python imports the folder {folder} instead; {remedy}")
    return wandb


class WandbLogger:
    """Logs a run to Weights & Biases."""

    def __init__(
        self,
        project: str,
        run_name: str,
        config: Mapping[str, JSONValue],
        directory: Path,
        settings: Mapping[str, JSONValue],
    ) -> None:
        """Start a run, or resume the run with the id in the run directory.

        `settings`: `logging.wandb_run`. Raises ConfigError if wandb is not installed or cannot start a run.
        """
        self._failure = f"logging.wandb_project is '{project}', but"
        self._wandb = import_wandb(project)
        self._sends_samples = bool(settings.get("samples"))
        selected = {name: settings[name] for name in ("entity", "group", "mode") if settings.get(name) is not None}
        named = settings.get("tags")
        tags = {"tags": list(named)} if named and isinstance(named, Sequence) else {}
        basics = {"project": project, "name": run_name, "config": dict(config), "dir": str(directory)}
        self._options = {**basics, **selected, **tags}
        self._file = directory / ID_FILE
        run_id = self._read_id()
        self._resumes = run_id is not None
        self._begin(run_id or _new_id())

    def _read_id(self) -> str | None:
        """Return the id in the run directory, or None without a valid id."""
        try:
            text = plain_text(self._file).strip()
        except (OSError, UnicodeDecodeError):
            return None
        return text if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text) else None

    def _begin(self, run_id: str) -> None:
        try:
            self._run = self._wandb.init(**self._options, id=run_id, resume="allow")
        except Exception as error:  # errors of wandb, of the service and of the network
            raise ConfigError(
                f"{self._failure} Weights & Biases cannot start a run: {reason(error)}; log in (wandb login, or "
                "export WANDB_API_KEY), export WANDB_MODE=offline and send it later (wandb sync), or set it to null"
            ) from error
        self._file.write_text(f"{run_id}\n", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step. After a resume, wandb skips steps that were sent before, with the same
        metrics."""
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, JSONValue]]) -> None:
        """Send a table of texts, if `logging.wandb_run.samples` is set."""
        if not self._sends_samples or not samples:
            return
        columns = list(dict.fromkeys(name for sample in samples for name in sample))
        rows = [[None if name not in sample else str(sample[name]) for name in columns] for sample in samples]
        self._run.log({"samples": self._wandb.Table(columns=columns, data=rows)}, step=step)

    def log_distributions(self, step: int, distributions: Mapping[str, Distribution]) -> None:
        """Send histograms."""
        histograms = {
            f"distributions/{name}": self._wandb.Histogram(
                np_histogram=(list(distribution.counts), list(distribution.edges))
            )
            for name, distribution in distributions.items()
        }
        self._run.log(histograms, step=step)

    def forget_after(self, step: int) -> None:
        """Start a new run if no step of the earlier run remains. Sent data is not removed."""
        if step < 1 and self._resumes:
            self._run.finish()
            self._begin(_new_id())
        self._resumes = False

    def close(self) -> None:
        """Wait until all data is sent."""
        self._run.finish()


def _new_id() -> str:
    return uuid.uuid4().hex[:12]
