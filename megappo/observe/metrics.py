"""The files of a run that hold its numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megappo.config.schema import LoggingSettings


class MetricsLog:
    """`metrics.jsonl` and `samples.jsonl` always, TensorBoard and Weights & Biases by configuration."""

    def __init__(self, directory: Path, settings: LoggingSettings, run_name: str, config: Mapping[str, Any]) -> None:
        """Raises ValueError where wandb is asked for and not installed."""
        self._metrics = (directory / "metrics.jsonl").open("a", encoding="utf-8")
        self._samples = (directory / "samples.jsonl").open("a", encoding="utf-8")
        self._tensorboard: Any = None
        if settings.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(directory / "tensorboard"))
        self._wandb: Any = None
        if settings.wandb_project is not None:
            try:
                import wandb
            except ImportError as error:
                raise ValueError("logging.wandb_project needs wandb; pip install 'megappo[wandb]'") from error
            self._wandb = wandb.init(
                project=settings.wandb_project, name=run_name, config=dict(config), dir=str(directory)
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of JSON; what is not finite is written as text, so that every line stays valid JSON."""
        line: dict[str, Any] = {"step": step}
        line |= {name: value if math.isfinite(value) else str(value) for name, value in sorted(metrics.items())}
        print(json.dumps(line), file=self._metrics, flush=True)
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """One line of JSON per sample."""
        for sample in samples:
            print(json.dumps({"step": step, **sample}, ensure_ascii=False), file=self._samples, flush=True)

    def close(self) -> None:
        """Finish all files."""
        self._metrics.close()
        self._samples.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
