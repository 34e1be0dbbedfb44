"""`megappo guide`: print a guide by topic, or one section of a guide."""

from __future__ import annotations

import argparse
from pathlib import Path

from megappo.errors import ConfigError, nearest_choices

GUIDES = Path(__file__).parents[1] / "guides"
TOPICS = {
    "first-run": "install, run the quickstart, read its output, stop and resume, use one GPU",
    "your-task": "data, chat templates and rewards of your task, and its checks",
    "ppo": "the formulas of PPO, their settings, and the metrics to watch",
    "agents": "train with tools, environments and agent programs in several turns",
    "scale": "layouts, plans, memory, SLURM and separate servers",
    "evaluate": "validation sets, pass@k, reports, samples and exports",
    "migrate": "come from verl, slime, TRL, OpenRLHF or NeMo-RL: names, defaults, units, checks",
    "troubleshoot": "find the cause of a flat reward, a growing KL, NaNs or slow steps",
    "gae": "inspect values and advantages token by token",
    "extend": "your own rewards, estimators, losses, engines and models, and where the code is",
}
"""Topics, with the text of the listing. Each topic is a file of `megappo/guides`."""
_SIMILARITY = 0.6
"""Minimum similarity of a suggested topic to an unknown topic."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `megappo guide`."""
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help=f"{', '.join(TOPICS)}; without it, list the topics")
    parser.add_argument("section", nargs="?", metavar="SECTION", help="words of a heading: print this section alone")


def run(arguments: argparse.Namespace) -> None:
    """Print the list of topics, a guide, or a section of a guide."""
    if arguments.topic is None:
        width = max(map(len, TOPICS))
        print("\n".join(f"megappo guide {topic:<{width}}  {about}" for topic, about in TOPICS.items()))
    elif arguments.section is None:
        print(text_of(arguments.topic), end="")
    else:
        print(section_of(arguments.topic, arguments.section))


def text_of(topic: str) -> str:
    """Return the Markdown text of a guide. Raises ConfigError for an unknown topic."""
    if topic not in TOPICS:
        near = nearest_choices(topic, TOPICS, 1, _SIMILARITY)
        hint = f"the nearest topic is {near[0]}" if near else f"the topics are {', '.join(TOPICS)}"
        raise ConfigError(f"there is no guide '{topic}'; {hint}")
    return (GUIDES / f"{topic}.md").read_text()


def section_of(topic: str, heading: str) -> str:
    """Return the first section whose heading contains `heading`, without regard to case, with its subsections.

    Raises ConfigError for an unknown topic or section.
    """
    lines = text_of(topic).splitlines()
    levels = _heading_levels(lines)
    start = next((n for n in levels if heading.lower() in lines[n].lower()), None)
    if start is None:
        headings = ", ".join(lines[n].lstrip("# ") for n in levels)
        raise ConfigError(f"the guide {topic} has no section '{heading}'; its sections are {headings}")
    end = next((n for n in levels if n > start and levels[n] <= levels[start]), len(lines))
    return "\n".join(lines[start:end]).rstrip()


def _heading_levels(lines: list[str]) -> dict[int, int]:
    """Return the level of each heading by the number of its line. Lines of code blocks are no headings."""
    levels, in_code = {}, False
    for number, line in enumerate(lines):
        if line.startswith("```"):
            in_code = not in_code
        elif line.startswith("#") and not in_code:
            levels[number] = len(line) - len(line.lstrip("#"))
    return levels
