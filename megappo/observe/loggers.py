"""Loggers of a run's metrics besides its own files: TensorBoard, Weights & Biases, and loggers of the user's.

A logger that fails to start ends the run with a message. Later a failed log must not end a run: `Contained` turns every
exception of a logger into a message.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from megappo.errors import ConfigError, how_to_install, reason
from megappo.observe.appending import AppendedFile
from megappo.observe.messages import tell
from megappo.plugins import check_call, failure_words, load_function


class Logger(Protocol):
    """Receives the metrics of each step; any method may raise any exception."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step."""

    def forget_after(self, step: int) -> None:
        """Drop what was logged of later steps than `step`, where the logger can."""

    def close(self) -> None:
        """Finish and close the log."""


class LoggerFactory(Protocol):
    """A class or function that `logging.loggers` names by its import path."""

    def __call__(self, *, directory: Path, run_name: str, config: Mapping[str, Any], **options: Any) -> Logger:
        """Make a logger, on rank 0, before models are built.

        Args:
            directory: the run directory, which exists.
            run_name: `run.name`.
            config: all settings of the run, in JSON's types.
            options: options given with the import path.

        An exception ends the run with a message.
        """
        ...


def find_logger(path: str, options: Mapping[str, Any]) -> LoggerFactory:
    """The factory that an entry of `logging.loggers` names. Raises ValueError where it cannot be imported or called."""
    factory = load_function(path, "logging.loggers")
    given, remedy = ("directory", "run_name", "config"), "change its parameters or its options"
    check_call(factory, given, options, what=f"logging.loggers '{path}'", remedy=remedy)
    return factory


def make_logger(
    path: str, options: Mapping[str, Any], directory: Path, run_name: str, config: Mapping[str, Any]
) -> Logger:
    """Make the logger of an entry of `logging.loggers`. Raises ConfigError where that fails, or the result is no
    logger."""
    factory = find_logger(path, options)
    try:
        logger = factory(directory=directory, run_name=run_name, config=config, **options)
    except Exception as error:  # of any type
        raise ConfigError(
            f"logging.loggers '{path}' failed ({failure_words(error)}); fix it, or leave it out"
        ) from error
    if lacking := [name for name in ("log", "forget_after", "close") if not callable(getattr(logger, name, None))]:
        raise ConfigError(
            f"logging.loggers '{path}' has no {' and '.join(lacking)}; give it what megappo.api.Logger says"
        )
    return logger


class Contained:
    """Calls one logger; reports once that it fails and once that it works again."""

    def __init__(self, name: str) -> None:
        """`name`: name of the logger in messages, for instance `metrics.jsonl`."""
        self._name, self._fails = name, False

    def __call__(self, work: Callable[[], object]) -> None:
        """Run `work`. Its exception becomes a message, but only the first of consecutive failures does."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - a service's client raises what it likes, and the run goes on
            if not self._fails:
                tell(f"{self._name} cannot be written: {reason(error)}; the run goes on, and it is tried at every step")
            self._fails = True
        else:
            if self._fails:
                tell(f"{self._name} is written again")
            self._fails = False

    def finish(self, work: Callable[[], object]) -> None:
        """Run the last work of a logger; its exception becomes a message."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - as above
            tell(f"{self._name} cannot be finished: {reason(error)}")


class TensorBoardLogger:
    """A TensorBoard event file. The calling thread writes it, so that errors are raised there."""

    def __init__(self, directory: Path) -> None:
        """Create a file in `directory`. Raises OSError where it cannot be written."""
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendedFile(directory / name)
        self._due = _event(file_version="brain.Event:2")
        """Events that must be written before the next step's event."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step. Raises OSError."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._file.append(self._due + _event(step=step, summary=Summary(value=values)))
        self._due = b""

    def forget_after(self, step: int) -> None:
        """Make TensorBoard ignore earlier files' events of later steps, from the next step on."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._due += _event(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def close(self) -> None:
        """Close the file; may be called twice. Raises OSError."""
        self._file.close()


def _event(**content: Any) -> bytes:
    """An event in the format of the file."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    record = io.BytesIO()
    RecordWriter(record).write(Event(wall_time=time.time(), **content).SerializeToString())
    return record.getvalue()


class WandbLogger:
    """A run at Weights & Biases."""

    def __init__(self, project: str, run_name: str, config: Mapping[str, Any], directory: Path) -> None:
        """Start the run. Raises ConfigError where wandb is not installed or does not start one."""
        wanted = f"logging.wandb_project is '{project}', but"
        try:
            import wandb
        except ModuleNotFoundError as error:
            if error.name != "wandb":
                raise
            raise ConfigError(f"{wanted} wandb is not installed; {how_to_install('wandb')}") from error
        try:
            self._run = wandb.init(project=project, name=run_name, config=dict(config), dir=str(directory))
        except Exception as error:  # errors of its own, of its service and of the network
            raise ConfigError(
                f"{wanted} Weights & Biases does not begin a run: {reason(error)}; log in (wandb login, or export "
                "WANDB_API_KEY), export WANDB_MODE=offline to send it later (wandb sync), or set it to null"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def forget_after(self, step: int) -> None:
        """Does nothing: data that was sent stays there."""

    def close(self) -> None:
        """Wait until all data is sent."""
        self._run.finish()
