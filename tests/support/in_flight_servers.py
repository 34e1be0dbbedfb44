"""Requests that are in flight on real servers during a weight update or the death of a server."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch

from megappo.engines.protocol import Completion, Engine, GenerateRequest, SamplingParams
from megappo.engines.requests import RequestTracker, TrackedRequest
from megappo.engines.sglang.servers.guard import session_pids
from megappo.engines.stretches import token_versions
from megappo.megatron.placed import announce, place
from megappo.ppo.trainer import Trainer
from megappo.runtime.ranks.objects import all_gather_objects
from megappo.types import Samples

LONG = SamplingParams(temperature=0.8, max_new_tokens=100, stop_token_ids=(1,))
Answers = dict[int, Completion]


def submit(tracker: RequestTracker, requests: Sequence[GenerateRequest]) -> list[TrackedRequest]:
    tracked = [TrackedRequest(request, LONG) for request in requests]
    tracker.submit(tracked)
    return tracked


def complete_answers(engine: Engine, tracked: Sequence[TrackedRequest]) -> Answers:
    """Wait until all answers are complete."""
    deadline = time.monotonic() + 120
    while left := sum(all_gather_objects(sum(not each.future.done() for each in tracked))):
        engine.poll(0.1)
        assert time.monotonic() < deadline, f"{left} answers are missing"
    return {number: each.future.result() for number, each in enumerate(tracked)}


def aborted_by_sync(trainer: Trainer, requests: Sequence[GenerateRequest]) -> dict[str, Any]:
    """Abort the requests of an engine with old weights, transfer the weights of the actor, and complete the answers."""
    engine, tracker = trainer.parts.engine, trainer.parts.requests
    before = engine.version
    for seconds in (0.1, 0.2, 0.4, 0.05):  # until each rank has a partial answer, for servers of any speed
        tracked = submit(tracker, requests)
        time.sleep(seconds)
        tracker.pause("abort")
        cut = [each for each in tracked if not each.future.done()]
        partial = [each for each in cut if each.answer is not None]
        if all(all_gather_objects(bool(partial))):
            break
        for each in cut:
            each.future.cancel()
        tracker.resume()
    engine.poll(0.1)
    late = sum(each.future.done() for each in cut)
    trainer.sync_weights()
    answers = complete_answers(engine, tracked)
    gaps = gaps_by_version(trainer, requests, answers)
    return {
        "answers": len(answers),
        "cut": len(cut),
        "partial": len(partial),
        "late": late,
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
    settings, restarts = engine.settings, engine.usage.restarts
    engine.settings = settings.model_copy(update={"pause": pause})
    for seconds in (0.1, 0.2, 0.05, 0.4, 0.15, 0.3, 0.1, 0.2):  # until each rank has answers from both versions
        for trained in trainer.parts.actor.trained_parameters():
            trained.parameter.data.mul_(1.05)
        before, tracked = engine.version, submit(trainer.parts.requests, requests)
        time.sleep(seconds)
        trainer.parts.requests.pause("keep")
        interrupted = sum(each.answer is not None and each.answer.broken_off for each in tracked)
        engine.update_weights(trainer.parts.weights, before + 1)
        answers = complete_answers(engine, tracked)
        several = sum(len(set(token_versions(answer))) > 1 for answer in answers.values())
        if all(all_gather_objects(several)):
            break
    engine.settings, trainer.weight_version = settings, engine.version
    gaps = gaps_by_version(trainer, requests, answers)
    return {
        "answers": len(answers),
        "several": several,
        "restarts": engine.usage.restarts - restarts,
        "broken_off": interrupted + sum(answer.broken_off for answer in answers.values()),
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
    engine = trainer.parts.engine
    restarts = engine.usage.restarts
    tracked = submit(trainer.parts.requests, requests)
    time.sleep(0.1)
    if trainer.parts.runtime.is_main:
        for pid in session_pids(sessions[0]):
            os.kill(pid, signal.SIGKILL)
    answers = complete_answers(engine, tracked)
    gaps = gaps_by_version(trainer, requests, answers)
    return {"answers": len(answers), "restarts": engine.usage.restarts - restarts, "gap": gaps[engine.version],
            "versions": sorted(gaps), "version": engine.version}  # fmt: skip
