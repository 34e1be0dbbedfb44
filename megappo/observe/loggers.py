"""Loggers of a run's metrics besides its own files: the protocol, and loggers of the user's.

A logger that fails to start ends the run with a message. Later a failed log must not end a run: `Contained` turns every
exception of a logger into a message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from megappo.errors import ConfigError, reason
from megappo.observe.json_values import JSONValue
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

    # Further methods are called where a logger has them:
    # log_distributions(step, distributions): by name, `edges` of bins and the `counts` between them.
    # log_samples(step, samples): texts of a step, before its metrics; a mapping each, as in `samples.jsonl`.


class LoggerFactory(Protocol):
    """A class or function that `logging.loggers` names by its import path."""

    def __call__(self, *, directory: Path, run_name: str, config: Mapping[str, JSONValue], **options: Any) -> Logger:
        """Make a logger, on rank 0, before models are built.

        Args:
            directory: the run directory, which exists.
            run_name: `run.name`.
            config: all settings of the run, in JSON's types.
            options: options given with the import path.

        An exception ends the run with a message.
        """
        ...


def find_logger(path: str, options: Mapping[str, JSONValue]) -> LoggerFactory:
    """The factory that an entry of `logging.loggers` names. Raises ValueError where it cannot be imported or called."""
    factory = load_function(path, "logging.loggers")
    given, remedy = ("directory", "run_name", "config"), "change its parameters or its options"
    check_call(factory, given, options, what=f"logging.loggers '{path}'", remedy=remedy)
    return factory


def make_logger(
    path: str, options: Mapping[str, JSONValue], directory: Path, run_name: str, config: Mapping[str, JSONValue]
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
