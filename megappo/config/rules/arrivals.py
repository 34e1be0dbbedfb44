"""Rules for recorded arrivals and their replay, and the index of a record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from megappo.files.json_values import JSONValue
from megappo.observe.saved_samples import folder_of_step

if TYPE_CHECKING:
    from megappo.config.schema import Config

INDEX = "steps.jsonl"


class ArrivedStep(TypedDict):
    """One entry of the index."""

    step: int
    sizes: list[int]
    """Number of prompts per step and number of samples per prompt."""
    ranks: int
    rounds: list[list[dict[str, int]]]
    """`ticket`, `prompt` and `version` of each group, listed by sampling round."""
    cursor: dict[str, JSONValue]
    """State of the data cursor after the step."""
    metrics: dict[str, float]


def read_index(folder: Path) -> dict[int, ArrivedStep]:
    """Return the index entry of each step in a folder that `rollout.record_arrivals` wrote.

    A run that resumes from a checkpoint repeats some steps. A later entry therefore replaces earlier entries of the
    same step and of higher steps.

    Raises ValueError if the index cannot be read.
    """
    path = folder / INDEX
    entries: dict[int, ArrivedStep] = {}
    try:
        # The last line is empty, or incomplete if the run was killed.
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
            record: ArrivedStep = json.loads(line)
            step = int(record["step"])
            entries = {earlier: entry for earlier, entry in entries.items() if earlier < step} | {step: record}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from error
    return entries


def arrivals_rules(config: Config) -> Iterator[str]:
    """Check the settings for recording and replay of arrivals.

    Both need `rollout.ahead` of at least 2. A record must be complete, and its steps must have the sizes of the run's
    steps.
    """
    rollout = config.rollout
    replayed, records = rollout.replay_arrivals, rollout.record_arrivals
    for key, is_set in (("record_arrivals", records), ("replay_arrivals", replayed is not None)):
        if is_set and not rollout.in_flight:
            yield (
                f"rollout.{key} is set, but with rollout.ahead {rollout.ahead} each step waits for its own prompts, "
                f"so the seed already determines the training data; remove {key}, or set ahead to 2 or more"
            )
        if is_set and rollout.episodes is not None:
            yield f"rollout.{key} is set, but episodes cannot be recorded; remove {key}, or remove rollout.environment"
    if replayed is None or not rollout.in_flight:
        return
    folder = Path(replayed)
    if records:
        yield "rollout.record_arrivals records the same data that rollout.replay_arrivals reads; remove one of them"
    try:
        index = read_index(folder)
    except ValueError as error:
        yield (
            f"rollout.replay_arrivals: {error}; set it to the folder `arrivals` in the run directory of a run with "
            "rollout.record_arrivals: true"
        )
        return
    sizes = list(rollout.sizes)
    others = [line.get("sizes") for line in index.values() if line.get("sizes") != sizes]
    if others:
        yield (
            f"rollout.replay_arrivals '{folder}' has steps of {others[0]} prompts and samples per prompt, but the run "
            f"has {sizes}; set rollout.prompts_per_step and samples_per_prompt to the sizes of the record"
        )
    if not index:
        yield f"rollout.replay_arrivals '{folder}' has no step; use the record of a run that completed a step"
        return
    last, steps = max(index), config.run.steps
    if steps is not None and steps > last:
        yield (
            f"rollout.replay_arrivals '{folder}' ends with step {last}, before run.steps {steps}; set run.steps to at "
            "most the last recorded step"
        )
    gaps = sorted({*range(min(index), min(steps or last, last) + 1)} - index.keys())
    if gaps:
        yield (
            f"rollout.replay_arrivals '{folder}' lacks step {gaps[0]}, which was trained without "
            f"rollout.record_arrivals; set run.steps to {gaps[0] - 1}, or use a different record"
        )
    missing = [step for step in index if not folder_of_step(folder, step).is_dir()]
    if missing:
        yield f"rollout.replay_arrivals '{folder}' has no files for step {missing[0]}; copy the whole folder"
