"""Records the training samples of a run with prompts in flight, and replays such a record.

`rollout.record_arrivals` writes `<run directory>/arrivals`. The file `steps.jsonl` has one line of JSON per step. The
files `step-000001/rank-00000.safetensors` contain the responses to the prompts of one rank. The line of a step is
written after its files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from megappo.config.rules.arrivals import INDEX, read_index
from megappo.engines.protocol import Completion
from megappo.engines.stretches import token_versions
from megappo.errors import writing
from megappo.files.json_values import JSONValue
from megappo.observe.saved_samples import folder_of_step
from megappo.ppo.assembly.components import RunComponents
from megappo.ppo.rollout.in_flight_state import KEY, State, read_state, written_state
from megappo.ppo.rollout.sampling import SampleRequests, finish_rollout
from megappo.ppo.rollout.step_samples import Kept, StepSamples
from megappo.ppo.rollout.tickets import Group
from megappo.reshard.writer import save_tensors
from megappo.runtime.process import Runtime
from megappo.runtime.ranks.objects import agreed
from megappo.types import Prompt, Rollouts

FOLDER = "arrivals"


def positions_of(tickets: Sequence[int], runtime: Runtime) -> list[int]:
    """Return the positions of this rank's groups in a round with `rollout.ahead` of 2 or more."""
    return [n for n, ticket in enumerate(tickets) if ticket % runtime.world_size == runtime.rank]


def rollouts_of(
    parts: RunComponents,
    groups: Sequence[Group],
    positions: Iterable[int],
    answers: Mapping[int, Completion],
    *,
    with_versions: bool = True,
) -> Rollouts:
    """Return this rank's samples of a round.

    Args:
        groups: groups of the round in order.
        positions: positions of this rank's groups.
        answers: completions by sample number.
        with_versions: whether to add the weight version of each token.
    """
    samples = parts.config.rollout.samples_per_prompt
    members = list[tuple[int, Prompt, Completion]]()
    for place in positions:
        ticket, prompt = groups[place].ticket, parts.train_prompts[groups[place].prompt]
        members += [(place * samples + i, prompt, answers[ticket * samples + i]) for i in range(samples)]
    wanted = SampleRequests(
        prompts=tuple(prompt for _, prompt, _ in members),
        sample_ids=tuple(sample_id for sample_id, _, _ in members),
        samples_per_prompt=samples,
        requests=(),
        max_total_tokens=parts.config.rollout.max_total_tokens,
    )
    completions = [answer for _, _, answer in members]
    rollouts = finish_rollout(wanted, completions, parts.tokenizer, parts.vocabulary, parts.answerer)
    if not with_versions:
        return rollouts
    versions_BR = torch.zeros(rollouts.response_mask_BR.shape, dtype=torch.int64)
    for versions_R, answer in zip(versions_BR, completions, strict=True):
        versions_R[: len(answer.token_ids)] = torch.tensor(token_versions(answer))
    return replace(rollouts, token_versions_BR=versions_BR)


class ArrivalsRecord:
    """Writes the samples of each step into the run directory. Every rank must call every method."""

    def __init__(self, parts: RunComponents) -> None:
        self._runtime, self._settings = parts.runtime, parts.config.rollout
        self._folder = parts.config.run.path / FOLDER

    def write(self, step: int, state: State, cursor: Mapping[str, JSONValue], metrics: Mapping[str, float]) -> None:
        """Write a step with all its samples. A collective of the world.

        Args:
            step: number of the step.
            state: groups of the step, all finished, with this rank's completions. `returned` contains the untrained
                prompts.
            cursor: state of the data cursor.
            metrics: `RolloutScheduler.metrics` of the step.
        """
        sizes = self._settings.sizes
        folder = folder_of_step(self._folder, step)

        def files() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            save_tensors(written_state(state, sizes), _file(folder, self._runtime.rank))

        agreed(files)
        if self._runtime.is_main:
            rounds: dict[int, list[dict[str, int]]] = {}
            for group, _, number in state.groups:
                told = {"ticket": group.ticket, "prompt": group.prompt, "version": group.version}
                rounds.setdefault(number, []).append(told)
            ranks = self._runtime.world_size
            line = {"step": step, "sizes": sizes, "ranks": ranks, "metrics": dict(metrics), "cursor": dict(cursor)}
            _append(self._folder / INDEX, json.dumps(line | {"rounds": list(rounds.values())}))


class ReplayedArrivals(StepSamples):
    """Replays recorded samples instead of generating with the engine.

    The recorded run may have used any engine and any number of ranks.
    """

    def __init__(self, parts: RunComponents, folder: Path) -> None:
        super().__init__(parts)
        self._folder, self._index = folder, read_index(folder)
        self._params = parts.sampling(parts.config.rollout.max_response_tokens, trained_on=True)
        self._step = 0
        self._state = State([], [], 0, 0, {})
        """State of the last requested step."""
        self._kept = self._state
        """State of the last finished step."""

    def of_step(self, step: int, *, weights_changed: bool) -> Rollouts:
        """Return this rank's samples of a step.

        Raises ValueError on every rank if the record is incomplete or belongs to other data.
        """
        self._parts.stop.check()
        if self._parts.curriculum is not None:
            self._parts.curriculum.before_drawing(step)
        self._step, self._state = step, agreed(lambda: self._read(step))
        self._parts.cursor.load_state_dict(dict(self._index[step]["cursor"]))
        return self.more(step, 0, 0)

    def more(self, step: int, number: int, prompts: int) -> Rollouts:
        """Return this rank's samples of another round. Raises ValueError if the record has no such round."""
        groups = [group for group, _, of_round in self._state.groups if of_round == number]
        if not groups:
            raise ValueError(
                f"round {number + 1} of step {step} is not in {self._folder}, because rewards or "
                "rollout.dynamic_sampling differ from the recorded run; replay with the settings of that run"
            )
        positions = positions_of([group.ticket for group in groups], self._parts.runtime)
        return rollouts_of(self._parts, groups, positions, self._state.answers)

    def _read(self, step: int) -> State:
        if step not in self._index:
            raise ValueError(f"{self._folder} has no step {step}; end the replay before that step by run.steps")
        folder, line, runtime = folder_of_step(self._folder, step), self._index[step], self._parts.runtime
        whole, answers = State([], [], 0, 0, {}), dict[int, Completion]()
        tickets = [told["ticket"] for of_round in line["rounds"] for told in of_round]
        mine = [ticket for ticket in tickets if ticket % runtime.world_size == runtime.rank]
        for rank in sorted({ticket % line["ranks"] for ticket in mine} | {0}):
            path = _file(folder, rank)
            try:
                whole, _ = read_state(load_file(path))
            except (OSError, SafetensorError, KeyError) as error:
                raise ValueError(f"{path} is incomplete ({error}); restore the recorded folder") from error
            if not whole.is_of(self._params):
                raise ValueError(
                    f"{path} was recorded with another rollout.temperature, min_response_tokens or stop tokens; "
                    "replay with the recorded settings"
                )
            if sorted(group.ticket for group, _, _ in whole.groups) != sorted(tickets):
                raise ValueError(f"{path} does not belong to its step in {INDEX}; restore the recorded folder")
            answers |= whole.answers
        return replace(whole, answers=answers)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step from the recorded run."""
        return dict(self._index[self._step]["metrics"])

    def forget(self, step: int) -> None:
        """Keep the state of a finished step for `state_dict`."""
        if step == self._step:
            self._kept = replace(self._state, groups=[], answers={})

    def state_dict(self, step: int) -> Kept:
        """Return the state for a run that continues without the record.

        Such a run sends the drawn, untrained prompts first.
        """
        return {KEY: written_state(self._kept, self._parts.config.rollout.sizes)}

    def load_state_dict(self, kept: Sequence[Kept]) -> None:
        """Restore the results of `state_dict`, or the prompts in flight of a run without a record."""
        states = [read_state(of_rank[KEY])[0] for of_rank in kept if KEY in of_rank]
        if states:
            waiting = [*(group.prompt for group, _, _ in states[0].groups), *states[0].returned]
            self._kept = replace(states[0], groups=[], answers={}, returned=waiting)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.safetensors"


def _append(path: Path, line: str) -> None:
    """Append a line after the last complete line. A killed run may have left a partial line."""
    whole = path.read_bytes() if path.exists() else b""
    with writing(path), path.open("r+b" if whole else "wb") as file:
        file.seek(whole.rfind(b"\n") + 1)
        file.truncate()
        file.write(line.encode() + b"\n")
