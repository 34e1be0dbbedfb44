"""What a step finds out: rows of one table, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

OK, FAILED, SKIPPED, MEASURED = "ok", "failed", "skipped", "measured"
_HEADINGS = ("step", "what", "result", "verdict")


@dataclass(frozen=True)
class Row:
    """One finding."""

    what: str
    result: str
    """In words, with its bound where there is one."""
    verdict: str
    """`ok` or `failed` where there is something to hold, `measured` where there is not, `skipped` with its reason."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """The result once more; units in the names."""
    step: str = ""

    @staticmethod
    def of(values: Mapping[str, Any]) -> Row:
        """From the fields of a table that was stored."""
        return Row(**values)


class Skip(Exception):
    """Raised by a step that cannot run here, with the reason."""


def measured(what: str, result: str, **numbers: float) -> Row:
    """Nothing to hold."""
    return Row(what, result, MEASURED, numbers)


def skipped(what: str, reason: str) -> Row:
    """What could not run here."""
    return Row(what, reason, SKIPPED)


def failed(what: str, sentence: str) -> Row:
    """What went wrong."""
    return Row(what, f"failed: {sentence}", FAILED)


def judged(what: str, holds: bool, result: str, **numbers: float) -> Row:
    """Something that holds or does not."""
    return Row(what, result, OK if holds else FAILED, numbers)


def within(what: str, errors: Mapping[str, float], bound: float, **numbers: float) -> Row:
    """Errors that must not be above a bound; NaN is."""
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    holds = all(error <= bound for error in errors.values())
    return judged(what, holds, f"{worst} {errors[worst]:.1e}, bound {bound:.1e}", **errors, bound=bound, **numbers)


@dataclass
class Report:
    """The table of a run, written anew with every row, so that it is whole whenever the run ends."""

    path: Path
    """Without its ending: `.json` and `.md` are written."""
    head: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each step that ended by itself."""

    def add(self, step: str, row: Row) -> None:
        """Print a row and write the table."""
        self.rows.append(replace(row, step=step))
        print(f"{step:<16} {row.verdict:<8} {row.what}: {row.result}", flush=True)
        self.write()

    def write(self) -> None:
        """Both files."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {**self.head, "seconds": self.seconds, "rows": [asdict(row) for row in self.rows]}
        self.path.with_suffix(".json").write_text(json.dumps(content, indent=1))
        self.path.with_suffix(".md").write_text(markdown(self.head, self.rows))

    @property
    def verdict(self) -> str:
        """`failed` where any row is."""
        return FAILED if any(row.verdict == FAILED for row in self.rows) else OK


def markdown(head: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """The table with what it takes to repeat it."""
    told = [f"- {name}: {value}" for name, value in head.items()]
    lines = ["# GPU acceptance", "", *told, "", _line(_HEADINGS), "|---" * len(_HEADINGS) + "|"]
    lines += [_line((row.step, row.what, row.result, row.verdict)) for row in rows]
    counts = {v: sum(row.verdict == v for row in rows) for v in (OK, FAILED, MEASURED, SKIPPED)}
    return "\n".join([*lines, "", ", ".join(f"{count} {verdict}" for verdict, count in counts.items()), ""])


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def join(paths: Sequence[Path], out: Path) -> Report:
    """One table of several, such as both parts of a machine."""
    contents = [json.loads(path.read_text()) for path in paths]
    rows = [Row.of(row) for content in contents for row in content.pop("rows")]
    seconds = {step: taken for content in contents for step, taken in content.pop("seconds").items()}
    names = dict.fromkeys(name for content in contents for name in content)
    heads = {name: [content[name] for content in contents if name in content] for name in names}
    head = {name: "; ".join(dict.fromkeys(map(str, values))) for name, values in heads.items()}
    report = Report(out, head, rows, seconds)
    report.write()
    return report
