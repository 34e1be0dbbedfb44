"""Requests that are in flight on real servers during a weight update or the death of a server."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megappo.engines.protocol import Completion, GenerateRequest, InFlightEngine, SamplingParams
from megappo.engines.sglang.guard import session_pids
from megappo.engines.stretches import continued, joined, token_versions
from megappo.megatron.placed import announce, place
from megappo.ppo.trainer import Trainer
from megappo.runtime.objects import all_gather_objects
from megappo.types import Samples

LONG = SamplingParams(temperature=0.8, max_new_tokens=100, stop_token_ids=(1,))
Answers = dict[int, Completion]


def complete_answers(engine: InFlightEngine, requests: Sequence[GenerateRequest], answers: Answers) -> None:
    """Collect answers until all are complete. Aborted answers are sent again."""
    deadline = time.monotonic() + 120
    while True:
        for number, answer in engine.finished(0.1).items():
            answers[number] = joined(answers.get(number), answer)
            if answer.broken_off:
                engine.send({number: rest(requests[number], answers[number])}, LONG)
        left = torch.tensor([sum(n not in answers or answers[n].broken_off for n in range(len(requests)))])
        dist.all_reduce(left)
        if not left:
            return
        assert time.monotonic() < deadline, f"{int(left)} answers are missing"


def rest(request: GenerateRequest, answer: Completion) -> GenerateRequest:
    return continued(request, answer if answer.token_ids else None, LONG.max_new_tokens)


def aborted_by_sync(trainer: Trainer, requests: Sequence[GenerateRequest]) -> dict[str, Any]:
    """Abort the requests of an engine with old weights, transfer the weights of the actor, and complete the answers."""
    engine = trainer.parts.engine
    assert isinstance(engine, InFlightEngine)
    before = engine.version
    for seconds in (0.1, 0.2, 0.4, 0.05):  # until each rank has a partial answer, for servers of any speed
        engine.send(dict(enumerate(requests)), LONG)
        time.sleep(seconds)
        answers = engine.abort()
        cut = {n: a for n, a in answers.items() if a.broken_off}
        if all(all_gather_objects(any(answer.token_ids for answer in cut.values()))):
            break
    idle = engine.finished(0.0)
    trainer.sync_weights()
    engine.send({number: rest(requests[number], answer) for number, answer in cut.items()}, LONG)
    complete_answers(engine, requests, answers)
    gaps = gaps_by_version(trainer, requests, answers)
    return {
        "answers": len(answers),
        "cut": len(cut),
        "partial": sum(bool(answer.token_ids) for answer in cut.values()),
        "idle": len(idle),
        "most_tokens": max(len(answer.token_ids) for answer in answers.values()),
        "versions": sorted({version for answer in answers.values() for version in token_versions(answer)}),
        "expected": [before, engine.version],
        "several": sum(len(set(token_versions(answer))) > 1 for answer in answers.values()),
        "gap_of_others": gaps[before],
        "gap_of_the_actors": gaps[engine.version],
    }


def paused_by_sync(trainer: Trainer, requests: Sequence[GenerateRequest], pause: str) -> dict[str, Any]:
    """Keep the requests on the servers while the servers receive new weights of the actor."""
    engine: Any = trainer.parts.engine
    settings, restarts = engine.settings, engine.restarts
    engine.settings = settings.model_copy(update={"pause": pause})
    for seconds in (0.1, 0.2, 0.05, 0.4, 0.15, 0.3, 0.1, 0.2):  # until each rank has answers from both versions
        for trained in trainer.parts.actor.trained_parameters():
            trained.parameter.data.mul_(1.05)
        before, answers = engine.version, Answers()
        engine.send(dict(enumerate(requests)), LONG)
        time.sleep(seconds)
        engine.hold()
        engine.update_weights(trainer.parts.weights, before + 1)
        complete_answers(engine, requests, answers)
        several = sum(len(set(token_versions(answer))) > 1 for answer in answers.values())
        if all(all_gather_objects(several)):
            break
    engine.settings, trainer.weight_version = settings, engine.version
    gaps = gaps_by_version(trainer, requests, answers)
    return {
        "answers": len(answers),
        "several": several,
        "restarts": engine.restarts - restarts,
        "broken_off": sum(answer.broken_off for answer in answers.values()),
        "versions": sorted({version for answer in answers.values() for version in token_versions(answer)}),
        "expected": [before, engine.version],
        "gap_of_others": gaps[before],
        "gap_of_the_actors": gaps[engine.version],
    }


def gaps_by_version(trainer: Trainer, requests: Sequence[GenerateRequest], answers: Answers) -> dict[int, float]:
    """Return the largest difference between log-probabilities of the actor and of the engine for the tokens of each
    version."""
    gaps: dict[int, float] = {}
    first = len(requests) * trainer.parts.runtime.rank
    samples = Samples(
        torch.arange(first, first + len(requests)),
        tuple(torch.tensor(request.token_ids + answers[n].token_ids) for n, request in enumerate(requests)),
        torch.tensor([len(answers[n].token_ids) for n in range(len(requests))]),
    )
    actors_BR = place(trainer.parts.actor, announce(samples, trainer.parts.runtime.device)).forward()
    for n, actors_R in enumerate(actors_BR):
        tokens = zip(actors_R.tolist(), answers[n].logprobs, token_versions(answers[n]), strict=False)
        for actors, engines, version in tokens:
            gaps[version] = max(gaps.get(version, 0.0), abs(actors - engines))
    return gaps


def struck_in_flight(trainer: Trainer, requests: Sequence[GenerateRequest], sessions: list[int]) -> dict[str, Any]:
    """Kill a server while it answers."""
    engine: Any = trainer.parts.engine
    restarts = engine.restarts
    engine.send(dict(enumerate(requests)), LONG)
    time.sleep(0.1)
    if trainer.parts.runtime.is_main:
        for pid in session_pids(sessions[0]):
            os.kill(pid, signal.SIGKILL)
    answers: Answers = {}
    complete_answers(engine, requests, answers)
    gaps = gaps_by_version(trainer, requests, answers)
    return {"answers": len(answers), "restarts": engine.restarts - restarts, "gap": gaps[engine.version],
            "versions": sorted(gaps), "version": engine.version}  # fmt: skip
