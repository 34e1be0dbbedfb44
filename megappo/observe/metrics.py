"""Files of a run with its metrics."""

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
from megappo.observe.appending import AppendedFile
from megappo.observe.distributions import Distribution
from megappo.observe.json_values import JSONValue
from megappo.observe.loggers import Contained, Logger, make_logger
from megappo.observe.plain_files import check_plain, synced
from megappo.observe.wandb_log import WandbLogger

_METRICS_FILE = "metrics.jsonl"
_SAMPLES_FILE = "samples.jsonl"
_JUMPS_FILE = "jumps.jsonl"
_TENSORBOARD = "tensorboard"
_LONGEST_LINE = 2**26
_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class MetricsLog:
    """Writes `metrics.jsonl`, `samples.jsonl` and `jumps.jsonl`; TensorBoard, Weights & Biases and loggers of the
    user's where they are configured.

    A log that cannot be written after the start is reported, and the run goes on without it.
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
        """Append to the files of `directory`, which is created where it is missing; for one rank only.

        Args:
            directory: the run directory.
            run_name: the run's name at Weights & Biases, where there is a `wandb_project`, and for `loggers`.
            config: the whole configuration in JSON's types, for the same two.
            wandb_run: `logging.wandb_run`.
            loggers: the user's loggers: options by import path.

        Raises ConfigError where a configured logger cannot be made, ValueError where something else than a file has the
        name of one, OSError where the directory cannot be written.
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
            from megappo.observe.tensorboard_log import TensorBoardLogger  # whose libraries take a second to import

            made["TensorBoard's file"] = TensorBoardLogger(directory / _TENSORBOARD, config)
        self._old_events = None if tensorboard else directory / _TENSORBOARD
        """Folder in which earlier attempts may have written events; None if the run uses TensorBoard."""
        self._loggers = [(Contained(name), logger) for name, logger in made.items()]
        self._files = {name: _LinesFile(directory / name) for name in (_METRICS_FILE, _SAMPLES_FILE, _JUMPS_FILE)}
        self._contained = {name: Contained(str(directory / name)) for name in self._files}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a line of JSON, `step` first. Numbers that are not finite are written as text, so that every line is
        valid JSON."""
        self._write(_METRICS_FILE, {"step": step, **dict(sorted(metrics.items()))})
        self._tell("log", step, metrics)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, JSONValue]]) -> None:
        """Write a line of JSON per sample, `step` first, and tell loggers that have `log_samples`."""
        for sample in samples:
            self._write(_SAMPLES_FILE, {"step": step, **sample})
        self._tell("log_samples", step, samples)

    def log_distributions(self, step: int, distributions: Mapping[str, Distribution]) -> None:
        """Tell loggers that have `log_distributions`."""
        self._tell("log_distributions", step, distributions)

    def log_jump(self, step: int, jump: Mapping[str, JSONValue]) -> None:
        """Write a line of JSON for an update that stands out."""
        self._write(_JUMPS_FILE, {"step": step, **jump})

    def _tell(self, method: str, *arguments: Any) -> None:
        """Call a method of each logger that has it."""
        for contained, logger in self._loggers:
            if (call := getattr(logger, method, None)) is not None:
                contained(partial(call, *arguments))

    def _write(self, name: str, record: Mapping[str, JSONValue]) -> None:
        self._contained[name](partial(self._files[name].write, record))

    def check(self) -> None:
        """Raises ValueError if a file is damaged. `truncate_after` would raise the same error."""
        for file in self._files.values():
            file.check()

    def truncate_after(self, step: int, *, is_open: bool = False) -> None:
        """Drop what was logged of later steps than `step`, because a resumed run logs them again; where the step itself
        `is_open`, its metrics too, as they wait for its evaluation.

        Each file is replaced atomically: a run killed here leaves the old one or the new one. TensorBoard is told to
        ignore its old events; data sent to Weights & Biases stays there. Raises OSError where a file cannot be written.
        """
        for name, file in self._files.items():
            file.keep_until(step - (is_open and name == _METRICS_FILE))
        self._tell("forget_after", step - is_open)
        if self._old_events is not None and any(self._old_events.glob("events.*")):
            Contained("TensorBoard's file")(partial(_forget_events, self._old_events, step - is_open))

    def close(self) -> None:
        """Close all files; may be called twice."""
        for name, file in self._files.items():
            self._contained[name].finish(file.close)
        for contained, logger in self._loggers:
            contained.finish(logger.close)
        self._loggers = []


def _forget_events(directory: Path, step: int) -> None:
    """If TensorBoard is installed, make TensorBoard ignore events of later steps."""
    with suppress(ImportError):
        from megappo.observe.tensorboard_log import TensorBoardLogger

        logger = TensorBoardLogger(directory, {})
        logger.forget_after(step)
        logger.write_due()
        logger.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl, with values that are not finite as floats again.

    An unfinished last line of a killed run is skipped. Raises ValueError for any other line that is no JSON object with
    a `step`.
    """
    return [{name: _read(value) for name, value in record.items()} for _, record in _lines(path)]


def last_records(path: Path, most: int) -> list[dict[str, Any]]:
    """The last records of a file of lines with a `step` each, however long the file is. Raises ValueError as
    `read_metrics` does."""
    try:
        check_plain(path)
        with path.open(encoding="utf-8") as file:
            lines = deque(_whole_lines(file), maxlen=most)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {reason(error)}; put the run's own there") from error
    return [_record(line, f"{path}, line {n} of its last {len(lines)}") for n, line in enumerate(lines, start=1)]


def metric_value(value: JSONValue, path: Path) -> float:
    """A metric of a line as a float, infinite where it is beyond float's range. Raises ValueError for no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{path} holds {show(value)} where a number is to be; remove the line")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _read(value: JSONValue) -> JSONValue:
    return _NONFINITE.get(value, value) if isinstance(value, str) else value


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each complete line as text, with its line end, and its record."""
    try:
        check_plain(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; put the run's own there") from error
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(_whole_lines(file), start=1):
            yield line, _record(line, f"{path}, line {number}")


def _whole_lines(file: TextIO) -> Iterator[str]:
    """Lines with their ends. Raises ValueError for one that is too long to be a run's, before it takes the memory, and
    for what is no text."""
    try:
        while (line := file.readline(_LONGEST_LINE)).endswith("\n"):
            yield line
    except UnicodeDecodeError as error:
        raise ValueError(f"{file.name} is not UTF-8 ({reason(error)}); put the run's own there") from error
    if len(line) == _LONGEST_LINE:
        raise ValueError(f"{file.name} has a line of more than {_LONGEST_LINE} characters; put the run's own there")


def _record(line: str, where: str) -> dict[str, Any]:
    """The record of a line. Raises ValueError for anything but a JSON object with a `step`."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: also for a number of thousands of digits
        raise ValueError(f"{where} is not JSON ({reason(error)}); remove the line") from error
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        raise ValueError(f"{where} has no step; remove the line")
    return record


class _LinesFile:
    """A file of JSON lines, each of which is written whole or not at all."""

    def __init__(self, path: Path) -> None:
        """Append after the last complete line. Raises ValueError for what is no file, and OSError where it cannot be
        written."""
        self._path = path
        self._open()

    def _open(self) -> None:
        if self._path.exists():
            if not self._path.is_file():
                raise ValueError(f"{self._path} is no file, where the run would write; remove it")
            content = self._path.read_bytes()
            if content and not content.endswith(b"\n"):
                os.truncate(self._path, content.rfind(b"\n") + 1)
        self._file = AppendedFile(self._path)

    def write(self, record: Mapping[str, JSONValue]) -> None:
        """Append a line. Raises OSError."""
        text = json.dumps(_valid(record), ensure_ascii=False, allow_nan=False) + "\n"
        self._file.append(text.encode(errors="backslashreplace"))  # lone surrogates become JSON's own escapes

    def check(self) -> None:
        """Raises ValueError if a line is not a record."""
        for _ in _lines(self._path):
            pass

    def keep_until(self, step: int) -> None:
        """Drop the lines of later steps."""
        self.close()
        shorter = self._path.with_name(self._path.name + ".partial")
        with synced(shorter) as kept:
            kept.writelines(line.encode() for line, record in _lines(self._path) if record["step"] <= step)
        shorter.replace(self._path)
        self._open()

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()


def _valid(value: JSONValue) -> JSONValue:
    """The value in JSON's types, with numbers that are not finite as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {name: _valid(held) for name, held in value.items()}
    return [_valid(held) for held in value] if isinstance(value, list | tuple) else value
