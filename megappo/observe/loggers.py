"""Protocol of metric loggers, and loading of custom loggers.

A logger that fails at startup ends the run with a message. Later failures do not end the run: `Contained` turns every
exception of a logger into a message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from megappo.errors import ConfigError, reason
from megappo.files.json_values import JSONValue
from megappo.observe.terminal.messages import show_message
from megappo.plugins import check_call, failure_text, load_function


class Logger(Protocol):
    """Receives the metrics of each step. Any method may raise any exception."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step."""

    def forget_after(self, step: int) -> None:
        """Remove logged data of steps after `step`, if the logger supports this."""

    def close(self) -> None:
        """Finish and close the log."""

    # Optional methods:
    # log_distributions(step, distributions): for each name, the `edges` of the bins and the `counts` between the edges.
    # log_samples(step, samples): one mapping per sample, as in `samples.jsonl`. Called before the metrics of the step.


class LoggerFactory(Protocol):
    """A class or function that `logging.loggers` names by its import path."""

    def __call__(self, *, directory: Path, run_name: str, config: Mapping[str, JSONValue], **options: Any) -> Logger:
        """Create a logger on rank 0, before models are built.

        Args:
            directory: the run directory, which exists.
            run_name: `run.name`.
            config: all settings of the run, in JSON's types.
            options: options of the import path.

        An exception ends the run with a message.
        """
        ...


def find_logger(path: str, options: Mapping[str, JSONValue]) -> LoggerFactory:
    """Return the factory of an entry of `logging.loggers`. Raises ValueError if the factory cannot be imported or
    called."""
    factory = load_function(path, "logging.loggers")
    parameters, remedy = ("directory", "run_name", "config"), "change its parameters or its options"
    check_call(factory, parameters, options, what=f"logging.loggers '{path}'", remedy=remedy)
    return factory


def make_logger(
    path: str, options: Mapping[str, JSONValue], directory: Path, run_name: str, config: Mapping[str, JSONValue]
) -> Logger:
    """Create the logger of an entry of `logging.loggers`. Raises ConfigError if the factory fails or returns no
    logger."""
    factory = find_logger(path, options)
    try:
        logger = factory(directory=directory, run_name=run_name, config=config, **options)
    except Exception as error:  # of any type
        raise ConfigError(
            f"logging.loggers '{path}' failed ({failure_text(error)}); fix the logger, or remove the entry"
        ) from error
    if lacking := [name for name in ("log", "forget_after", "close") if not callable(getattr(logger, name, None))]:
        raise ConfigError(
            f"logging.loggers '{path}' has no {' and '.join(lacking)}; implement the methods of megappo.api.Logger"
        )
    return logger


class Contained:
    """Calls one logger. Reports the first of several consecutive failures, and the recovery."""

    def __init__(self, name: str) -> None:
        """Create the wrapper. `name`: name of the logger in messages, for example `metrics.jsonl`."""
        self._name, self._fails = name, False

    def __call__(self, work: Callable[[], object]) -> None:
        """Run `work`. An exception becomes a message, unless the previous call failed as well."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - clients of services raise any exception, and the run must continue
            if not self._fails:
                show_message(
                    f"{self._name} cannot be written: {reason(error)}; the run continues, and tries again at every step"
                )
            self._fails = True
        else:
            if self._fails:
                show_message(f"{self._name} is written again")
            self._fails = False

    def finish(self, work: Callable[[], object]) -> None:
        """Run the last work of a logger. An exception becomes a message."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - as above
            show_message(f"{self._name} cannot be finished: {reason(error)}")
