"""The rows of steps in a table, as Markdown and as JSON."""

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
    """One result."""

    what: str
    result: str
    """Text of the result, with its bound if one exists."""
    verdict: str
    """`ok` or `failed` for checks, `measured` without a check, `skipped` with a reason."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the result; units are part of the names."""
    step: str = ""

    @staticmethod
    def of(values: Mapping[str, Any]) -> Row:
        """Create a row from the fields of a stored table."""
        return Row(**values)


class Skip(Exception):
    """Raised by a step that cannot run on this machine, with the reason."""


def measured(what: str, result: str, **numbers: float) -> Row:
    """Return a row without a check."""
    return Row(what, result, MEASURED, numbers)


def skipped(what: str, reason: str) -> Row:
    """Return a row for a step or a part that cannot run on this machine."""
    return Row(what, reason, SKIPPED)


def failed(what: str, sentence: str) -> Row:
    """Return a row for a failure."""
    return Row(what, f"failed: {sentence}", FAILED)


def judged(what: str, is_ok: bool, result: str, **numbers: float) -> Row:
    """Return a row for a check."""
    return Row(what, result, OK if is_ok else FAILED, numbers)


def within(what: str, errors: Mapping[str, float], bound: float, **numbers: float) -> Row:
    """Return a row for errors that must not exceed a bound. NaN exceeds every bound."""
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    is_ok = all(error <= bound for error in errors.values())
    return judged(what, is_ok, f"{worst} {errors[worst]:.1e}, bound {bound:.1e}", **errors, bound=bound, **numbers)


@dataclass
class Report:
    """The table of a run. The files are written after every row, so they are complete whenever the run ends."""

    path: Path
    """Path without suffix; `.json` and `.md` are written."""
    head: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each completed step."""

    def add(self, step: str, row: Row) -> None:
        """Print a row and write the table."""
        self.rows.append(replace(row, step=step))
        print(f"{step:<16} {row.verdict:<8} {row.what}: {row.result}", flush=True)
        self.write()

    def write(self) -> None:
        """Write both files."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {**self.head, "seconds": self.seconds, "rows": [asdict(row) for row in self.rows]}
        self.path.with_suffix(".json").write_text(json.dumps(content, indent=1))
        self.path.with_suffix(".md").write_text(markdown(self.head, self.rows))

    @property
    def verdict(self) -> str:
        """Return `failed` if any row failed, otherwise `ok`."""
        return FAILED if any(row.verdict == FAILED for row in self.rows) else OK


def markdown(head: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """Return the table as Markdown, with the head."""
    head_lines = [f"- {name}: {value}" for name, value in head.items()]
    lines = ["# GPU acceptance", "", *head_lines, "", _line(_HEADINGS), "|---" * len(_HEADINGS) + "|"]
    lines += [_line((row.step, row.what, row.result, row.verdict)) for row in rows]
    counts = {v: sum(row.verdict == v for row in rows) for v in (OK, FAILED, MEASURED, SKIPPED)}
    return "\n".join([*lines, "", ", ".join(f"{count} {verdict}" for verdict, count in counts.items()), ""])


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def join(paths: Sequence[Path], out: Path) -> Report:
    """Join several tables, such as the parts of a machine, into one."""
    contents = [json.loads(path.read_text()) for path in paths]
    rows = [Row.of(row) for content in contents for row in content.pop("rows")]
    seconds = {step: taken for content in contents for step, taken in content.pop("seconds").items()}
    names = dict.fromkeys(name for content in contents for name in content)
    heads = {name: [content[name] for content in contents if name in content] for name in names}
    head = {name: "; ".join(dict.fromkeys(map(str, values))) for name, values in heads.items()}
    report = Report(out, head, rows, seconds)
    report.write()
    return report
