"""Rules for recorded arrivals and their replay, and the index of such a record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from megappo.config.rules.experience import folder_of_step
from megappo.observe.json_values import JSONValue

if TYPE_CHECKING:
    from megappo.config.schema import Config

INDEX = "steps.jsonl"


class ArrivedStep(TypedDict):
    """An entry of the index."""

    step: int
    sizes: list[int]
    """Prompts of a step, and samples of each."""
    ranks: int
    rounds: list[list[dict[str, int]]]
    """`ticket`, `prompt` and `version` of each group, by the round of sampling that asked for it."""
    cursor: dict[str, JSONValue]
    """Where the data's cursor stood after the step."""
    metrics: dict[str, float]


def read_index(folder: Path) -> dict[int, ArrivedStep]:
    """The index entry of each step in a folder that `rollout.record_arrivals` has filled.

    A run that continues from a checkpoint trains on some steps again, so an entry replaces earlier entries of its step
    and of later steps. Raises ValueError where the folder is not such a record.
    """
    path = folder / INDEX
    found: dict[int, ArrivedStep] = {}
    try:
        # The last line is empty, or was cut when the run was killed.
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
            record: ArrivedStep = json.loads(line)
            step = int(record["step"])
            found = {earlier: kept for earlier, kept in found.items() if earlier < step} | {step: record}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from error
    return found


def arrivals_rules(config: Config) -> Iterator[str]:
    """Recording and replay need prompts in flight (`rollout.ahead` of 2 and more); a record must be complete and of
    steps of the same size."""
    rollout = config.rollout
    given, records = rollout.replay_arrivals, rollout.record_arrivals
    for key, asked in (("record_arrivals", records), ("replay_arrivals", given is not None)):
        if asked and not rollout.in_flight:
            yield (
                f"rollout.{key} is set, but with rollout.ahead {rollout.ahead} a step waits for prompts of its own, "
                f"and what it is trained on follows from the seed; remove {key}, or set ahead to 2 or more"
            )
        if asked and rollout.episodes is not None:
            yield f"rollout.{key} is set, but episodes are not recorded; remove {key}, or rollout.environment"
    if given is None or not rollout.in_flight:
        return
    folder = Path(given)
    if records:
        yield "rollout.record_arrivals would record what rollout.replay_arrivals reads; remove one of them"
    try:
        index = read_index(folder)
    except ValueError as error:
        yield (
            f"rollout.replay_arrivals: {error}; name the folder `arrivals` in the run directory of a run with "
            "rollout.record_arrivals: true"
        )
        return
    sizes = list(rollout.sizes)
    others = [line.get("sizes") for line in index.values() if line.get("sizes") != sizes]
    if others:
        yield (
            f"rollout.replay_arrivals '{folder}' has steps of {others[0]} prompts and samples of each, not of {sizes}; "
            "set rollout.prompts_per_step and samples_per_prompt to those"
        )
    if not index:
        yield f"rollout.replay_arrivals '{folder}' has no step; name the folder of a run that has ended at least one"
        return
    last, steps = max(index), config.run.steps
    if steps is not None and steps > last:
        yield (
            f"rollout.replay_arrivals '{folder}' ends with step {last}, before run.steps {steps}; set run.steps to at "
            "most that"
        )
    gaps = sorted({*range(min(index), min(steps or last, last) + 1)} - index.keys())
    if gaps:
        yield (
            f"rollout.replay_arrivals '{folder}' lacks step {gaps[0]}, which was trained without "
            f"rollout.record_arrivals; set run.steps to {gaps[0] - 1}, or use a different record"
        )
    missing = [step for step in index if not folder_of_step(folder, step).is_dir()]
    if missing:
        yield f"rollout.replay_arrivals '{folder}' has no files of step {missing[0]}; bring the whole folder"
