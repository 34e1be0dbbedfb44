#!/usr/bin/env python3
"""Draw the results of the benchmarks, one picture per question.

Usage: python -m benchmarks.plots FILE [FILE ...] [--out benchmarks/results] [--name DATE-MACHINE]

The program reads the `--json` files of trl.py, scaling.py, update.py, rollout.py, step.py, overhead.py and
planned.py, and the `learning.json` of learning.py. Several files of one program become one picture. The program
requires matplotlib (`pip install matplotlib`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Document = dict[str, Any]
OURS, OTHERS, THIRD = "#0b6e4f", "#b0b7bd", "#e09f3e"
_SIZE, _DPI = (8.0, 3.6), 100
STAGES = ("rollout", "reward", "forward", "advantages", "update_critic", "update_actor", "sync")


def _number(value: float) -> str:
    """Format small numbers with three digits, and large numbers as integers."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _bars(axes: Any, groups: Sequence[str], series: Mapping[str, Sequence[float]], colours: Sequence[str]) -> None:
    """Draw groups of bars with one bar per series. Labels show the heights."""
    width = 0.8 / len(series)
    for n, ((name, heights), colour) in enumerate(zip(series.items(), colours, strict=False)):
        places = [i + (n - (len(series) - 1) / 2) * width for i in range(len(groups))]
        drawn = axes.bar(places, heights, width, label=name, color=colour)
        axes.bar_label(drawn, fmt=_number, fontsize=6.5, padding=1)
    axes.set_xticks(range(len(groups)), groups)
    axes.margins(y=0.15)


def draw_trl(documents: Sequence[Document], figure: Any) -> bool:
    """Draw samples per second and peak memory of both sides."""
    rows = [row for document in documents for row in document["rows"]]
    if not rows:
        return False
    names = [
        _lengths(row["profile"])
        + _PRECISIONS[row["precision"]]
        + (f"\n{row['ranks']} ranks" if row["ranks"] > 1 else "")
        for row in rows
    ]
    labels = [f"{name}\n{row['median_speed']:.2f} times" for name, row in zip(names, rows, strict=True)]
    speed, memory = figure.subplots(1, 2, width_ratios=(3, 2))
    rates = {name: [row[f"{side}_samples_per_second"] for row in rows] for name, side in _SIDES}
    peaks = {name: [row[f"{side}_peak_bytes"] / 1e9 for row in rows] for name, side in _SIDES}
    _bars(speed, labels, rates, (OTHERS, OURS))
    _bars(memory, names, peaks, (OTHERS, OURS))
    for axes in (speed, memory):
        axes.tick_params(axis="x", labelsize=7)
    speed.set_title("samples per second")
    memory.set_title("peak memory, GB")
    figure.legend(*speed.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(f"A PPO step of TRL and of megappo, {documents[0]['threads']} threads")
    return True


_SIDES = (("TRL", "trl"), ("megappo", "megappo"))
_PRECISIONS = {"mixed": "", "bfloat16": "\nTRL in bfloat16", "float32": "\nfloat32"}


def _lengths(profile: str) -> str:
    """Return the name of a profile in a picture."""
    shape, _, numbers = profile.partition(":")
    match shape:
        case "full":
            return f"all {numbers}\ntokens"
        case "even":
            return f"{numbers.replace('-', ' to ')}\ntokens"
        case "tail":
            mean, longest = numbers.split("-")
            return f"mean {mean},\nup to {longest}"
        case _:
            return f"natural,\nup to {numbers}"


def draw_curves(documents: Sequence[Document], figure: Any) -> bool:
    """Draw the mean reward by step of both sides: each seed, and the mean of seeds."""
    curves = [curve for document in documents for curve in document["curves"]]
    if not curves:
        return False
    axes = figure.subplots()
    for name, side, colour in (("TRL", "trl", THIRD), ("megappo", "megappo", OURS)):
        of_seeds = [curve[side] for curve in curves]
        steps = range(1, min(map(len, of_seeds)) + 1)
        for rewards in of_seeds:
            axes.plot(range(1, len(rewards) + 1), rewards, color=colour, alpha=0.25, linewidth=0.8)
        means = [statistics.mean(rewards[step - 1] for rewards in of_seeds) for step in steps]
        axes.plot(steps, means, color=colour, linewidth=2, label=f"{name}, mean of {len(of_seeds)} seeds")
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.legend(frameon=False)
    figure.suptitle("Learning curves, with natural lengths")
    return True


def draw_scaling(documents: Sequence[Document], figure: Any) -> bool:
    """Draw tokens per second by number of processes, and perfect scaling."""
    axes = figure.subplots()
    series: defaultdict[str, list[Document]] = defaultdict(list)
    for document in documents:
        for row in document["rows"]:
            series[f"{row['axis']} parallel, {row['kind']}"].append(row)
    for n, (name, rows) in enumerate(series.items()):
        counts = [row["processes"] for row in rows]
        rates = [row["tokens_per_second"] for row in rows]
        axes.plot(counts, rates, marker="o", label=name, color=f"C{n}")
        for row in rows:
            made = row["tokens_per_second"] * row["median_seconds"]
            spread = [made / max(row["seconds"]), made / min(row["seconds"])]
            axes.plot([row["processes"]] * 2, spread, color=f"C{n}", alpha=0.4)
    cores, first = documents[0]["cores"], documents[0]["rows"][0]
    counts = sorted({row["processes"] for rows in series.values() for row in rows})
    perfect = [first["tokens_per_second"] / min(cores, first["processes"]) * min(cores, n) for n in counts]
    axes.plot(counts, perfect, color="black", linestyle=":", label=f"perfect on {cores} cores")
    axes.set_xticks(counts)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("processes")
    axes.set_ylabel("tokens per second")
    axes.legend(frameon=False, fontsize=8)
    figure.suptitle("A step on more processes")
    return True


def draw_update(documents: Sequence[Document], figure: Any) -> bool:
    """Draw updates relative to forward and backward of the bare model: every round, and the median."""
    axes = figure.subplots()
    labels = []
    for n, (document, row) in enumerate((d, row) for d in documents for row in d["rows"]):
        size, ranks = document["size"], document["ranks"]
        tokens = " to ".join(str(n) for n in sorted({size["shortest"], size["longest"]}))
        labels.append(f"{row['role']}\n{tokens} tokens\n{ranks} rank{'s' * (ranks > 1)}")
        axes.plot([n] * len(row["ratios"]), row["ratios"], "o", color=OURS, alpha=0.35, markersize=4)
        axes.plot([n - 0.25, n + 0.25], [row["median_ratio"]] * 2, color=OURS, linewidth=2)
        axes.annotate(f"{row['median_ratio']:.2f}", (n + 0.28, row["median_ratio"]), fontsize=8, va="center")
    axes.axhline(1, color="black", linestyle=":", linewidth=1)
    axes.set_xticks(range(len(labels)), labels, fontsize=7)
    axes.set_xlim(-0.6, len(labels) - 0.4)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("times the bare model's seconds")
    figure.suptitle("An update with optimizer, compared with forward and backward of the bare model")
    return True


def draw_rollout(documents: Sequence[Document], figure: Any) -> bool:
    """Draw tokens per second of the embedded engine and of `generate`, and the responses that a rank processes."""
    generation, answers = figure.subplots(1, 2)
    generations = [document["generation"] for document in documents]
    labels = [f"{g['sequences']} x {g['response_tokens']} tokens" for g in generations]
    made = [g["sequences"] * g["response_tokens"] for g in generations]
    rates = {
        name: [n / statistics.median(g[key]) for n, g in zip(made, generations, strict=True)]
        for name, key in (("generate", "generate_seconds"), ("megappo", "engine_seconds"))
    }
    _bars(generation, labels, rates, (OTHERS, OURS))
    generation.set_title("tokens per second")
    figure.legend(*generation.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    rows = documents[0]["answers"]
    _bars(answers, [f"{a['tokens']} tokens each" for a in rows], {"": [a["per_second"] for a in rows]}, (OURS,))
    answers.set_title("responses of a rank per second")
    figure.suptitle("Rollouts")
    return True


def draw_step(documents: Sequence[Document], figure: Any) -> bool:
    """Draw the seconds of each stage of a step."""
    axes = figure.subplots()
    for n, document in enumerate(documents):
        seconds = {row["stage"]: row["median_seconds"] for row in document["stages"]}
        left = 0.0
        for k, stage in enumerate(STAGES):
            axes.barh(n, seconds.get(stage, 0.0), left=left, color=f"C{k}", label=stage if n == 0 else None)
            left += seconds.get(stage, 0.0)
        axes.barh(n, max(0.0, seconds["step"] - left), left=left, color="black", label="other" if n == 0 else None)
    names = [
        f"{Path(d['config']).stem}\n{d['ranks']} rank{'s' * (d['ranks'] > 1)}, outside {d['outside_share']:.1%}"
        for d in documents
    ]
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_xlabel("seconds")
    axes.legend(frameon=False, fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    figure.suptitle("Stages of a step")
    return True


def draw_overhead(documents: Sequence[Document], figure: Any) -> bool:
    """Draw CPU milliseconds per sample by samples per step."""
    axes = figure.subplots()
    for document in documents:
        rows = document["rows"]
        samples = [row["samples"] for row in rows]
        per_sample = [1e3 * row["cpu_seconds_per_sample"] for row in rows]
        spread = [[1e3 * pick(row["cpu_seconds"]) / row["samples"] for row in rows] for pick in (min, max)]
        (line,) = axes.plot(samples, per_sample, marker="o", label=Path(document["config"]).stem)
        axes.fill_between(samples, *spread, color=line.get_color(), alpha=0.2)
    axes.set_xscale("log", base=2)
    axes.set_xticks(samples, [f"{n:,}" for n in samples])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("samples of a step")
    axes.set_ylabel("CPU ms of a sample")
    axes.legend(frameon=False)
    figure.suptitle("Cost of a sample outside generation and models")
    return True


def draw_planned(documents: Sequence[Document], figure: Any) -> bool:
    """Draw planned and measured seconds, stage by stage and size by size."""
    rows = [row for document in documents for row in document["rows"]]
    for axes, row in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
        stages = [stage for stage in row["planned"] if stage in row["measured"]]
        series = {side: [row[side][stage] for stage in stages] for side in ("planned", "measured")}
        _bars(axes, [stage.replace("_", "\n") for stage in stages], series, (OTHERS, OURS))
        axes.tick_params(axis="x", labelsize=5.5)
        axes.set_title(row["words"], fontsize=8)
    figure.axes[0].set_ylabel("seconds")
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle("Seconds planned by `megappo plan`, and measured seconds")
    return True


def draw_learning(documents: Sequence[Document], figure: Any) -> bool:
    """Draw the mean reward by step of each method: mean, minimum and maximum of seeds. Each task and lag has a
    separate panel."""
    runs = [run for document in documents for run in document["runs"]]
    panels = sorted({(run["task"], run["lag"]) for run in runs})
    for axes, (task, lag) in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        of_panel = [run for run in runs if (run["task"], run["lag"]) == (task, lag)]
        for method, colour in zip(dict.fromkeys(run["method"] for run in runs), (OTHERS, OURS, THIRD), strict=False):
            rewards = [run["rewards"] for run in of_panel if run["method"] == method]
            by_step = list(zip(*map(_smoothed, rewards), strict=False))
            steps = range(1, len(by_step) + 1)
            axes.plot(steps, [statistics.mean(x) for x in by_step], color=colour, linewidth=1.5, label=method)
            axes.fill_between(steps, [min(x) for x in by_step], [max(x) for x in by_step], color=colour, alpha=0.2)
        axes.set_title(f"{task}\nlag {lag}", fontsize=7)
        axes.set_xlabel("step")
    figure.axes[0].set_ylabel("mean reward")
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, frameon=False)
    return bool(panels)


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return moving means of five values."""
    return [statistics.mean(values[max(0, n - 4) : n + 1]) for n in range(len(values))]


Draw = Callable[[Sequence[Document], Any], bool]
PICTURES: dict[str, tuple[str, Draw]] = {
    "trl-speed": ("trl", draw_trl),
    "trl-curves": ("trl", draw_curves),
    "scaling": ("scaling", draw_scaling),
    "update": ("update", draw_update),
    "rollout": ("rollout", draw_rollout),
    "step": ("step", draw_step),
    "overhead": ("overhead", draw_overhead),
    "planned": ("planned", draw_planned),
    "learning": ("learning", draw_learning),
}
"""Benchmark and drawing function by the suffix of the picture's name. The function returns False if it has no data."""


def draw_all(documents: Sequence[Document], folder: Path, name: str) -> list[Path]:
    """Draw every picture with data in the documents. Returns the paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = []
    for kind, (benchmark, draw) in PICTURES.items():
        chosen = [document for document in documents if document.get("benchmark") == benchmark]
        if not chosen:
            continue
        figure = pyplot.figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
        if draw(chosen, figure):
            for axes in figure.axes:
                axes.spines[["top", "right"]].set_visible(False)
            path = folder / f"{name}{'-' if name else ''}{kind}.png"
            figure.savefig(path, metadata={"Software": None})
            written.append(path)
        pyplot.close(figure)
    return written


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", metavar="FOLDER")
    parser.add_argument("--name", default="", help="prefix of the pictures' names, such as the date")
    arguments = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        print("plots.py: error: matplotlib is not installed; `pip install matplotlib`", file=sys.stderr)
        return 2
    documents = [json.loads(path.read_text()) for path in arguments.files]
    unknown = [path for path, document in zip(arguments.files, documents, strict=True) if "benchmark" not in document]
    if unknown:
        print(f"plots.py: error: {unknown[0]} is not of a benchmark with a picture; omit it", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    for path in draw_all(documents, arguments.out, arguments.name):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
