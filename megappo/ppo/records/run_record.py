"""Record of a run in its directory: settings, metrics, samples and other logs."""

from __future__ import annotations

from megappo.config import Config, save_config
from megappo.observe.changes import read_changes, record_changes
from megappo.observe.metrics import MetricsLog
from megappo.ppo.assembly.start import Start


class RunRecord:
    """Files of the main rank.

    The record describes trained steps. A run therefore does not change an existing record before the first step
    begins, or before the first log entry. A run that fails earlier does not change the files.
    """

    def __init__(self, config: Config) -> None:
        """Open the logs. Raises ConfigError if a configured logger cannot be created, and raises like `MetricsLog`."""
        self._config, self._start = config, Start(config)
        self._is_continued, self._has_settings = True, False
        logs = config.logging.model_dump(include={"tensorboard", "wandb_project", "wandb_run", "loggers"})
        self._log = MetricsLog(config.run.path, config.run.name, config.model_dump(mode="json"), **logs)

    def continue_after(self, start: Start) -> None:
        """Set the starting point of the run. Log entries of later steps are dropped before the first new entry.

        Raises ValueError if a file is damaged.
        """
        self._start, self._is_continued = start, not start.sentences
        if start.sentences:
            self._log.check()
            read_changes(self._config.run.path)

    def begin_step(self) -> None:
        """Prepare the record for entries of a step with these settings."""
        self.log()
        self._write_settings()

    def log(self) -> MetricsLog:
        """Return the logs. Entries of repeated steps are dropped first. Raises OSError."""
        if not self._is_continued:
            self._log.truncate_after(self._start.step, is_open=self._start.is_open)
            record_changes(self._config.run.path, self._start.step, self._start.changes)
            self._is_continued = True
        if self._start.checkpoint is None:
            self._write_settings()  # `lost_steps` reads the settings with the log
        return self._log

    def _write_settings(self) -> None:
        if not self._has_settings:
            save_config(self._config, self._config.run.path / "config.yaml")
            self._has_settings = True

    def close(self) -> None:
        """Close the logs."""
        self._log.close()
