"""Markdown tables of all settings and metrics, for `megappo settings --markdown`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megappo.config.reference import SettingFacts, sections
from megappo.observe.metric_docs import METRICS


def reference() -> str:
    """Return one table for each section of the settings, and one table of the metrics."""
    return f"# Settings\n\n{settings_tables()}\n\n# Metrics\n\n{metrics_table()}"


def settings_tables() -> str:
    """Return a table for each kind of section, with a heading that lists the places of the section."""
    known = sections()
    headings = {section.kind: ", ".join(f"`{place}`" for place in section.places) for section in known}
    anchors = {kind: anchor(heading) for kind, heading in headings.items()}
    parts = []
    for section in known:
        parts.append(f"## {headings[section.kind]}")
        if section.about:
            parts.append(section.about)
        rows = [_row(setting, anchors) for setting in section.settings]
        parts.append(table(["setting", "value", "default", "meaning"], rows))
    return "\n\n".join(parts)


def metrics_table() -> str:
    """Return the table of all metrics that a run logs."""
    return table(["metric", "unit", "meaning", "healthy"], [[f"`{name}`", *doc] for name, doc in METRICS.items()])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def anchor(heading: str) -> str:
    """Return the anchor of a heading on GitHub."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _row(setting: SettingFacts, anchors: dict[str, str]) -> list[str]:
    value = f"[section](#{anchors[setting.section]})" if setting.section else setting.value
    default = setting.default if setting.default in ("required", "its defaults") else f"`{setting.default}`"
    return [f"`{setting.name}`", value, default, setting.meaning]
