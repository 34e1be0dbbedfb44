"""Metric files of a run."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from megappo.errors import reason, show
from megappo.files.appending import AppendedFile
from megappo.files.json_values import JSONValue
from megappo.files.plain_files import check_plain, synced
from megappo.observe.distributions import Distribution
from megappo.observe.loggers import Contained, Logger, make_logger
from megappo.observe.wandb_log import WandbLogger

_METRICS_FILE = "metrics.jsonl"
_SAMPLES_FILE = "samples.jsonl"
_JUMPS_FILE = "jumps.jsonl"
_TENSORBOARD = "tensorboard"
_LONGEST_LINE = 2**26
_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class MetricsLog:
    """Writes `metrics.jsonl`, `samples.jsonl` and `jumps.jsonl`, and calls the configured loggers: TensorBoard, Weights
    & Biases and custom loggers.

    If a log cannot be written after the start, the failure is reported and the run continues.
    """

    def __init__(
        self,
        directory: Path,
        run_name: str,
        config: Mapping[str, JSONValue],
        *,
        tensorboard: bool = True,
        wandb_project: str | None = None,
        wandb_run: Mapping[str, JSONValue] | None = None,
        loggers: Mapping[str, Mapping[str, JSONValue]] | None = None,
    ) -> None:
        """Append to the files of `directory`, on one rank only. A missing directory is created.

        Args:
            directory: the run directory.
            run_name: name of the run for Weights & Biases and for `loggers`.
            config: all settings in JSON types, for all loggers.
            wandb_project: project at Weights & Biases. None: no run at Weights & Biases.
            wandb_run: `logging.wandb_run`.
            loggers: options of custom loggers by import path.

        Raises ConfigError if a configured logger cannot be created, ValueError if one of the paths exists and is not a
        file, and OSError if the directory cannot be written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        made: dict[str, Logger] = {}
        if wandb_project is not None:
            made["the run at Weights & Biases"] = WandbLogger(
                wandb_project, run_name, config, directory, wandb_run or {}
            )
        for path, options in (loggers or {}).items():
            made[path] = make_logger(path, options, directory, run_name, config)
        if tensorboard:
            from megappo.observe.tensorboard_log import TensorBoardLogger  # the libraries take a second to import

            made["TensorBoard's file"] = TensorBoardLogger(directory / _TENSORBOARD, config)
        self._old_events = None if tensorboard else directory / _TENSORBOARD
        """Folder in which earlier attempts may have written events; None if the run uses TensorBoard."""
        self._loggers = [(Contained(name), logger) for name, logger in made.items()]
        self._files = {name: _LinesFile(directory / name) for name in (_METRICS_FILE, _SAMPLES_FILE, _JUMPS_FILE)}
        self._contained = {name: Contained(str(directory / name)) for name in self._files}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a line of JSON that begins with `step`. Numbers that are not finite are written as text, so that every
        line is valid JSON."""
        self._write(_METRICS_FILE, {"step": step, **dict(sorted(metrics.items()))})
        self._notify("log", step, metrics)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, JSONValue]]) -> None:
        """Write a line of JSON per sample that begins with `step`, and call `log_samples` of the loggers."""
        for sample in samples:
            self._write(_SAMPLES_FILE, {"step": step, **sample})
        self._notify("log_samples", step, samples)

    def log_distributions(self, step: int, distributions: Mapping[str, Distribution]) -> None:
        """Call `log_distributions` of the loggers that implement the method."""
        self._notify("log_distributions", step, distributions)

    def log_jump(self, step: int, jump: Mapping[str, JSONValue]) -> None:
        """Write a line of JSON for an unusually large update."""
        self._write(_JUMPS_FILE, {"step": step, **jump})

    def _notify(self, method: str, *arguments: Any) -> None:
        """Call a method of each logger that implements the method."""
        for contained, logger in self._loggers:
            if (call := getattr(logger, method, None)) is not None:
                contained(partial(call, *arguments))

    def _write(self, name: str, record: Mapping[str, JSONValue]) -> None:
        self._contained[name](partial(self._files[name].write, record))

    def check(self) -> None:
        """Check that the files are readable. Raises ValueError if a file is damaged, as `truncate_after` does."""
        for file in self._files.values():
            file.check()

    def truncate_after(self, step: int, *, is_open: bool = False) -> None:
        """Remove logged data of steps after `step`, because a resumed run logs these steps again. If the step
        `is_open`, also remove the metrics of the step, because the evaluation of the step is missing.

        Each file is replaced atomically: a killed run leaves the old or the new file. TensorBoard ignores old events.
        Data at Weights & Biases is not removed. Raises OSError if a file cannot be written.
        """
        for name, file in self._files.items():
            file.keep_until(step - (is_open and name == _METRICS_FILE))
        self._notify("forget_after", step - is_open)
        if self._old_events is not None and any(self._old_events.glob("events.*")):
            Contained("TensorBoard's file")(partial(_forget_events, self._old_events, step - is_open))

    def close(self) -> None:
        """Close all files. May be called twice."""
        for name, file in self._files.items():
            self._contained[name].finish(file.close)
        for contained, logger in self._loggers:
            contained.finish(logger.close)
        self._loggers = []


def _forget_events(directory: Path, step: int) -> None:
    """Make TensorBoard ignore events of later steps, if TensorBoard is installed."""
    with suppress(ImportError):
        from megappo.observe.tensorboard_log import TensorBoardLogger

        logger = TensorBoardLogger(directory, {})
        logger.forget_after(step)
        logger.write_due()
        logger.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl. Values that are not finite are floats again.

    An incomplete last line of a killed run is skipped. Raises ValueError if any other line is not a JSON object with a
    `step`.
    """
    return [{name: _read(value) for name, value in record.items()} for _, record in _lines(path)]


def last_records(path: Path, most: int) -> list[dict[str, Any]]:
    """Return the last `most` records of a file like metrics.jsonl. The whole file need not fit in memory. Raises
    ValueError as `read_metrics` does."""
    try:
        check_plain(path)
        with path.open(encoding="utf-8") as file:
            lines = deque(_whole_lines(file), maxlen=most)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {reason(error)}; restore the file of the run") from error
    return [_record(line, f"{path}, line {n} of its last {len(lines)}") for n, line in enumerate(lines, start=1)]


def metric_value(value: JSONValue, path: Path) -> float:
    """Return a metric of a line as a float, infinite if the number exceeds the range of floats. Raises ValueError if
    the value is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{path} contains {show(value)} instead of a number; remove the line")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _read(value: JSONValue) -> JSONValue:
    return _NONFINITE.get(value, value) if isinstance(value, str) else value


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each complete line as text, including the line end, and as a record."""
    try:
        check_plain(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; restore the file of the run") from error
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(_whole_lines(file), start=1):
            yield line, _record(line, f"{path}, line {number}")


def _whole_lines(file: TextIO) -> Iterator[str]:
    """Yield lines with line ends. Raises ValueError if a line is longer than any line of a run, before the line is read
    completely, and if the file is not text."""
    try:
        while (line := file.readline(_LONGEST_LINE)).endswith("\n"):
            yield line
    except UnicodeDecodeError as error:
        raise ValueError(f"{file.name} is not UTF-8 ({reason(error)}); restore the file of the run") from error
    if len(line) == _LONGEST_LINE:
        raise ValueError(f"{file.name} has a line of more than {_LONGEST_LINE} characters; restore the file of the run")


def _record(line: str, where: str) -> dict[str, Any]:
    """Return the record of a line. Raises ValueError if the line is not a JSON object with a `step`."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError also covers numbers with thousands of digits
        raise ValueError(f"{where} is not JSON ({reason(error)}); remove the line") from error
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        raise ValueError(f"{where} has no step; remove the line")
    return record


class _LinesFile:
    """A file of JSON lines. Each line is written completely or not at all."""

    def __init__(self, path: Path) -> None:
        """Open the file for appending after the last complete line. Raises ValueError if the path is not a file, and
        OSError if the file cannot be written."""
        self._path = path
        self._open()

    def _open(self) -> None:
        if self._path.exists():
            if not self._path.is_file():
                raise ValueError(f"{self._path} is not a file, but the run writes to this path; remove it")
            content = self._path.read_bytes()
            if content and not content.endswith(b"\n"):
                os.truncate(self._path, content.rfind(b"\n") + 1)
        self._file = AppendedFile(self._path)

    def write(self, record: Mapping[str, JSONValue]) -> None:
        """Append a line. Raises OSError."""
        text = json.dumps(_valid(record), ensure_ascii=False, allow_nan=False) + "\n"
        self._file.append(text.encode(errors="backslashreplace"))  # lone surrogates become JSON escapes

    def check(self) -> None:
        """Check all lines. Raises ValueError if a line is not a record."""
        for _ in _lines(self._path):
            pass

    def keep_until(self, step: int) -> None:
        """Remove the lines of later steps."""
        self.close()
        shorter = self._path.with_name(self._path.name + ".partial")
        with synced(shorter) as file:
            file.writelines(line.encode() for line, record in _lines(self._path) if record["step"] <= step)
        shorter.replace(self._path)
        self._open()

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._file.close()


def _valid(value: JSONValue) -> JSONValue:
    """Return the value in JSON types, with numbers that are not finite as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {name: _valid(item) for name, item in value.items()}
    return [_valid(item) for item in value] if isinstance(value, list | tuple) else value
