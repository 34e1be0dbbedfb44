"""A run at Weights & Biases, which goes on under its id where the run is continued."""

from __future__ import annotations

import importlib
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megappo.errors import ConfigError, how_to_install, reason
from megappo.observe.distributions import Distribution
from megappo.observe.json_values import JSONValue
from megappo.observe.plain_files import plain_text

ID_FILE = "wandb-id"
"""File of the run directory with the run's id there."""


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
        words = "is not installed" if is_missing else f"cannot be imported: {reason(error)}"
        raise ConfigError(f"{place} {words}; {remedy}") from error
    if not hasattr(wandb, "init"):
        folder = next(iter(getattr(wandb, "__path__", ())), "wandb")
        raise ConfigError(f"{place} is not installed, and Python imports the folder {folder} instead; {remedy}")
    return wandb


class WandbLogger:
    """A run at Weights & Biases."""

    def __init__(
        self,
        project: str,
        run_name: str,
        config: Mapping[str, JSONValue],
        directory: Path,
        settings: Mapping[str, JSONValue],
    ) -> None:
        """Begin the run, or go on with the one whose id the run directory has.

        `settings`: `logging.wandb_run`. Raises ConfigError where wandb is not installed or does not start one.
        """
        self._wanted = f"logging.wandb_project is '{project}', but"
        self._wandb = import_wandb(project)
        self._sends_samples = bool(settings.get("samples"))
        given = {name: settings[name] for name in ("entity", "group", "mode") if settings.get(name) is not None}
        named = settings.get("tags")
        tags = {"tags": list(named)} if named and isinstance(named, Sequence) else {}
        told = {"project": project, "name": run_name, "config": dict(config), "dir": str(directory)}
        self._options = {**told, **given, **tags}
        self._file = directory / ID_FILE
        kept = self._kept()
        self._goes_on = kept is not None
        self._begin(kept or _new_id())

    def _kept(self) -> str | None:
        """The id in the run directory; None where there is none that could be one."""
        try:
            found = plain_text(self._file).strip()
        except (OSError, UnicodeDecodeError):
            return None
        return found if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", found) else None

    def _begin(self, run_id: str) -> None:
        try:
            self._run = self._wandb.init(**self._options, id=run_id, resume="allow")
        except Exception as error:  # errors of its own, of its service and of the network
            raise ConfigError(
                f"{self._wanted} Weights & Biases does not begin a run: {reason(error)}; log in (wandb login, or "
                "export WANDB_API_KEY), export WANDB_MODE=offline to send it later (wandb sync), or set it to null"
            ) from error
        self._file.write_text(f"{run_id}\n", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step. Those of a step that is there already, as a run that is continued may have, are
        left out by wandb: they are the same."""
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, JSONValue]]) -> None:
        """Send a table of texts, where that is asked for."""
        if not self._sends_samples or not samples:
            return
        columns = list(dict.fromkeys(name for sample in samples for name in sample))
        rows = [[None if name not in sample else str(sample[name]) for name in columns] for sample in samples]
        self._run.log({"samples": self._wandb.Table(columns=columns, data=rows)}, step=step)

    def log_distributions(self, step: int, distributions: Mapping[str, Distribution]) -> None:
        """Send histograms."""
        histograms = {
            f"distributions/{name}": self._wandb.Histogram(np_histogram=(list(found.counts), list(found.edges)))
            for name, found in distributions.items()
        }
        self._run.log(histograms, step=step)

    def forget_after(self, step: int) -> None:
        """Begin another run where nothing is kept of the one before; what was sent stays there."""
        if step < 1 and self._goes_on:
            self._run.finish()
            self._begin(_new_id())
        self._goes_on = False

    def close(self) -> None:
        """Wait until all data is sent."""
        self._run.finish()


def _new_id() -> str:
    return uuid.uuid4().hex[:12]
