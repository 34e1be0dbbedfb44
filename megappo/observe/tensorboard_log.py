"""Event file of TensorBoard: metrics, a layout of charts, settings, and texts of samples."""

from __future__ import annotations

import io
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.histogram_pb2 import HistogramProto
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.plugins.custom_scalar.layout_pb2 import Category, Chart, Layout, MultilineChartContent
from tensorboard.plugins.hparams.api_pb2 import Experiment
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo
from tensorboard.summary.writer.record_writer import RecordWriter

from megappo.files.appending import AppendedFile
from megappo.files.json_values import JSONValue
from megappo.observe.distributions import Distribution, middles

LAYOUT: Mapping[str, Mapping[str, Sequence[str]]] = {
    "1 reward": {
        "score of samples": ("reward/mean",),
        "validation": ("eval/reward_mean",),
        "length of responses": ("response/length", "response/length_max"),
        "cut at the limit": ("response/truncated",),
    },
    "2 health": {
        "KL from the reference": ("kl/mean",),
        "KL of an update": ("actor/ppo_kl",),
        "clipped tokens": ("actor/clipfrac",),
        "entropy": ("actor/entropy",),
        "explained variance": ("critic/explained_variance",),
        "gradient norms": ("actor/grad_norm", "critic/grad_norm"),
        "engine and trainer": ("mismatch/mean", "mismatch/max"),
    },
    "3 speed": {
        "tokens per second": ("tokens_per_second",),
        "seconds": ("time/step", "time/rollout", "time/update_actor", "time/update_critic", "time/sync"),
    },
}
"""Charts of the tab "Custom Scalars": names of metrics by section and title."""
_SHOWN_CHARACTERS = 20_000
_SHOWN_SETTINGS = (bool, int, float, str)


class TensorBoardLogger:
    """A TensorBoard event file. Writes happen in the calling thread, so errors are raised in this thread."""

    def __init__(self, directory: Path, config: Mapping[str, JSONValue]) -> None:
        """Create a file in `directory` for a run with the settings `config`. Raises OSError if the file cannot be
        written."""
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._path = directory / name
        self._file = AppendedFile(self._path)
        self._config = config
        self._due = _event(file_version="brain.Event:2")
        """Events that must be written before the next step's event."""
        self._is_new = True

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step. Raises OSError."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._append(_event(step=step, summary=Summary(value=values)))

    def log_samples(self, step: int, samples: Sequence[Mapping[str, JSONValue]]) -> None:
        """Write the texts of a step. Raises OSError."""
        texts = [_value(f"samples/{number}", "text", _shown(sample)) for number, sample in enumerate(samples)]
        if texts:
            self._append(_event(step=step, summary=Summary(value=texts)))

    def log_distributions(self, step: int, distributions: Mapping[str, Distribution]) -> None:
        """Write histograms of a step. Raises OSError."""
        values = [_histogram(f"distributions/{name}", distribution) for name, distribution in distributions.items()]
        if values:
            self._append(_event(step=step, summary=Summary(value=values)))

    def _append(self, event: bytes) -> None:
        beginning = _first(self._config) if self._is_new else ()
        first = b"".join(_event(summary=Summary(value=[value])) for value in beginning)
        self._file.append(self._due + first + event)
        self._due, self._is_new = b"", False

    def forget_after(self, step: int) -> None:
        """Make TensorBoard ignore events of later steps in earlier files. Takes effect with the next event."""
        self._due += _event(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def write_due(self) -> None:
        """Write the events that are due before the next event. Raises OSError."""
        self._file.append(self._due)
        self._due, self._is_new = b"", False

    def close(self) -> None:
        """Close the file. A file without events is removed. May be called twice. Raises OSError."""
        self._file.close()
        if self._is_new:
            self._path.unlink(missing_ok=True)


def _event(**content: Any) -> bytes:
    """Return an event in the format of the file."""
    record = io.BytesIO()
    RecordWriter(record).write(Event(wall_time=time.time(), **content).SerializeToString())
    return record.getvalue()


def _first(config: Mapping[str, JSONValue]) -> Iterator[Summary.Value]:
    """Yield the first values of a file: the layout of charts, and the settings in the formats of TensorBoard's
    plug-ins."""
    sections = [
        Category(
            title=section,
            chart=[
                Chart(title=title, multiline=MultilineChartContent(tag=[f"^{re.escape(name)}$" for name in names]))
                for title, names in charts.items()
            ],
        )
        for section, charts in LAYOUT.items()
    ]
    start = SessionStartInfo()
    for key, value in _plain_settings(config):
        if isinstance(value, bool):
            start.hparams[key].bool_value = value
        elif isinstance(value, str):
            start.hparams[key].string_value = value
        else:
            start.hparams[key].number_value = value
    layout = Layout(category=sections).SerializeToString()
    experiment = HParamsPluginData(version=0, experiment=Experiment()).SerializeToString()
    session = HParamsPluginData(version=0, session_start_info=start).SerializeToString()
    yield _value("custom_scalars__config__", "custom_scalars", layout)
    yield _value("_hparams_/experiment", "hparams", content=experiment)
    yield _value("_hparams_/session_start_info", "hparams", content=session)


def _plain_settings(
    section: Mapping[str, JSONValue], prefix: str = ""
) -> Iterator[tuple[str, bool | int | float | str]]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _plain_settings(value, f"{prefix}{name}.")
        elif isinstance(value, _SHOWN_SETTINGS):
            yield f"{prefix}{name}", value


def _value(tag: str, plugin: str, text: bytes | None = None, content: bytes = b"") -> Summary.Value:
    """Return a value of a TensorBoard plug-in: a string, or only data of the plug-in."""
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=plugin, content=content))
    if text is None:
        return Summary.Value(tag=tag, metadata=metadata)
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype="DT_STRING", string_val=[text], tensor_shape=shape)
    return Summary.Value(tag=tag, metadata=metadata, tensor=tensor)


def _histogram(tag: str, distribution: Distribution) -> Summary.Value:
    """Return a histogram in the format of TensorBoard's first summaries. Sums use the middles of bins."""
    parts = list(middles(distribution))
    histogram = HistogramProto(
        min=distribution.edges[0], max=distribution.edges[-1], num=sum(distribution.counts),
        bucket=distribution.counts, bucket_limit=distribution.edges[1:], sum=sum(x * count for x, count in parts),
        sum_squares=sum(x * x * count for x, count in parts),
    )  # fmt: skip
    return Summary.Value(tag=tag, histo=histogram)


def _shown(sample: Mapping[str, JSONValue]) -> bytes:
    """Return a sample in Markdown. Code blocks show the texts of the model unchanged."""
    rows = []
    for name, value in sample.items():
        block = "\n".join(f"    {line}" for line in str(value)[:_SHOWN_CHARACTERS].splitlines())
        rows.append(f"**{name}**\n\n{block}\n")
    return "\n".join(rows).encode(errors="replace")
