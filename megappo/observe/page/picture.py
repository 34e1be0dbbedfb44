"""Curves of metrics as a PNG. Requires matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megappo.errors import ConfigError, shortened
from megappo.observe.page.runs import RunMetrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS, _WIDTH, _HEIGHT, _DPI = 3, 4.2, 2.6, 110
"""Charts per row, width and height of a chart in inches, and dots per inch."""
_NAME_CHARACTERS = 60


def curves_picture(runs: Sequence[RunMetrics], names: Sequence[str]) -> bytes:
    """Return a PNG with a chart for each metric. A chart shows the curves of all runs. Raises ConfigError if matplotlib
    is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--png needs matplotlib, which is not installed; pip install matplotlib") from error
    columns = min(_COLUMNS, len(names))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(_WIDTH * max(columns, 1.5), _HEIGHT * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for at, chart in enumerate(axes):
        if at < len(names):
            _draw(chart, runs, names[at])
        else:
            chart.set_axis_off()
    labels = [shortened(run.label, _NAME_CHARACTERS) for run in runs]
    legend = figure.legend(axes[0].get_lines(), labels, loc="outside lower center", ncols=_COLUMNS)
    for text in legend.get_texts():
        text.set_parse_math(False)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=_DPI)
    return content.getvalue()


def _draw(chart: Axes, runs: Sequence[RunMetrics], name: str) -> None:
    for run in runs:
        points = [(step, run.lines[step].get(name, math.nan)) for step in sorted(run.lines)]
        finite = [(step, value) for step, value in points if math.isfinite(value)]
        is_sparse = 2 * len(finite) < len(points) or len(finite) < 3
        steps, values = zip(*finite, strict=True) if finite else ((), ())
        chart.plot(steps, values, linewidth=1.2, marker="." if is_sparse else None)
    chart.set_title(shortened(name, _NAME_CHARACTERS), fontsize=9, parse_math=False)
    chart.tick_params(labelsize=7)
    chart.grid(alpha=0.3)
