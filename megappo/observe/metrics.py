"""The files of a run that hold its numbers."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

_METRICS_FILE = "metrics.jsonl"
_SAMPLES_FILE = "samples.jsonl"
_JUMPS_FILE = "jumps.jsonl"
_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class MetricsLog:
    """`metrics.jsonl`, `samples.jsonl` and `jumps.jsonl` always, TensorBoard and Weights & Biases by configuration."""

    def __init__(
        self,
        directory: Path,
        run_name: str,
        config: Mapping[str, Any],
        *,
        tensorboard: bool = True,
        wandb_project: str | None = None,
    ) -> None:
        """Append to the files of `directory`, which is made where it is missing; for one rank only.

        Args:
            directory: the run directory.
            run_name: the name of the run at Weights & Biases, where it has a `wandb_project`.
            config: the whole configuration in JSON's types, for the same.

        Raises ValueError where wandb is asked for and not installed.
        """
        self._directory = directory
        self._wandb: Any = None
        self._tensorboard: Any = None
        directory.mkdir(parents=True, exist_ok=True)
        if wandb_project is not None:
            self._wandb = _start_wandb(wandb_project, run_name, config, directory)
        if tensorboard:
            self._tensorboard = _start_tensorboard(directory, first_step=None)
        self._files = {name: _open(directory / name) for name in (_METRICS_FILE, _SAMPLES_FILE, _JUMPS_FILE)}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of JSON, `step` first; what is not finite is written as text, so that every line is valid JSON."""
        _write(self._files[_METRICS_FILE], {"step": step, **dict(sorted(metrics.items()))})
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """One line of JSON per sample, `step` first."""
        for sample in samples:
            _write(self._files[_SAMPLES_FILE], {"step": step, **sample})

    def log_jump(self, step: int, jump: Mapping[str, Any]) -> None:
        """One line of JSON for an update that stands out."""
        _write(self._files[_JUMPS_FILE], {"step": step, **jump})

    def truncate_after(self, step: int, *, is_open: bool = False) -> None:
        """Forget what was logged of later steps than `step`, because a resumed run logs them again; where the step
        itself `is_open`, its metrics too, which wait for its evaluation.

        Each file is replaced at once: a run killed here leaves the old one or the new one. TensorBoard is told to pass
        over its old events; what Weights & Biases was sent stays there.
        """
        for name, file in self._files.items():
            file.close()
            _keep_until(self._directory / name, step - (is_open and name == "metrics.jsonl"))
        self._files = {name: _open(self._directory / name) for name in self._files}
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = _start_tensorboard(self._directory, first_step=step + (not is_open))

    def close(self) -> None:
        """Finish all files; may be called twice."""
        for file in self._files.values():
            file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
        self._tensorboard = self._wandb = None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, values that are not finite as floats again.

    A last line that a killed run left unfinished is passed over. Raises ValueError for any other that is not JSON.
    """
    return [{name: _NONFINITE.get(value, value) for name, value in record.items()} for _, record in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each complete line as text, its end included, and what it holds."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            try:
                yield line, json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not JSON ({error}); remove the line") from error


def _keep_until(path: Path, step: int) -> None:
    """Drop the lines of later steps."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as kept:
        kept.writelines(line for line, record in _lines(path) if record["step"] <= step)
        kept.flush()
        os.fsync(kept.fileno())
    partial.replace(path)


def _open(path: Path) -> TextIO:
    """Open for appending behind the last complete line; lone surrogates become JSON's own escapes."""
    if path.exists():
        end = path.read_bytes().rfind(b"\n") + 1
        if end < path.stat().st_size:
            os.truncate(path, end)
    return path.open("a", encoding="utf-8", errors="backslashreplace")


def _write(file: TextIO, record: Mapping[str, Any]) -> None:
    valid = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    print(json.dumps(valid, ensure_ascii=False, allow_nan=False), file=file, flush=True)


def _start_tensorboard(directory: Path, first_step: int | None) -> Any:
    """A writer of events; earlier files' events from `first_step` on are passed over."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(directory / "tensorboard"), purge_step=first_step)


def _start_wandb(project: str, run_name: str, config: Mapping[str, Any], directory: Path) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ValueError(
            f"logging.wandb_project is '{project}', but wandb is not installed; pip install 'megappo[wandb]'"
        ) from error
    return wandb.init(project=project, name=run_name, config=dict(config), dir=str(directory))
