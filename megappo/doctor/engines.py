"""Checks of what SGLang servers need of this machine and of the network: shared memory for buckets, addresses,
answers."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urlsplit

import torch

from megappo.config import Config
from megappo.doctor.findings import Finding, broken, fine, from_sentence
from megappo.engines.sglang import compilers
from megappo.engines.sglang.client import Endpoint, ServerFailure, call
from megappo.engines.sglang.fleet import KEY_VARIABLE, key_problem
from megappo.engines.sglang.gpus import check_visible
from megappo.engines.sglang.inspection import (
    check_hooks,
    check_lengths,
    check_sampling,
    stack_problem,
    what_it_says,
)
from megappo.errors import RunError
from megappo.plan.inputs import Models, make_setup
from megappo.plan.shared_memory import SHARED_MEMORY, room_problem, shared_buckets_bytes, socket_problem
from megappo.runtime.keys import key_of
from megappo.runtime.launchers import Ranks
from megappo.runtime.nccl import own_stack
from megappo.runtime.store import listening_problem

NCCL = "nccl"
_REACH_SECONDS = 3.0
_ANSWER_SECONDS = 10.0


def engine_findings(config: Config, models: Models, ranks: Ranks, world_size: int) -> Iterator[Finding]:
    """Findings on SGLang's servers; none where the settings choose another engine."""
    if not config.rollout.has_servers:
        return
    settings = config.rollout.servers
    if by_nccl():
        yield nccl_finding()
    try:
        check_visible(settings)
    except RunError as error:
        yield from_sentence("engines", "broken", error)
    if torch.cuda.is_available() and not settings.urls:
        yield compiler_finding(os.environ)
    if not torch.cuda.is_available():
        setup = make_setup(config, models, world_size, on_cuda=False)
        yield from bucket_findings(shared_buckets_bytes(config, setup, world_size, ranks.local_world_size), os.environ)
    if settings.urls:
        work = make_setup(config, models, world_size, on_cuda=torch.cuda.is_available()).work
        longest_tokens = min(work.cache_tokens, models.actor.max_position_embeddings)
        for url in settings.urls:
            yield server_finding(url, key_of(KEY_VARIABLE), longest_tokens, config.rollout.min_response_tokens)
    elif settings.host is not None:
        yield from _address("rollout.sglang.host", settings.host)
    if ranks.rank == 0 and settings.sync_address is not None:
        yield from _address("rollout.sglang.sync_address", settings.sync_address)


def compiler_finding(environment: Mapping[str, str]) -> Finding:
    """Whether servers find what they compile kernels with, without which none starts on a GPU."""
    absent = compilers.missing(environment)
    if absent:
        words = f"SGLang compiles kernels when a server starts, and this machine lacks {', '.join(absent)}"
        remedy = "install it (`module load cuda`, or a CUDA image of the devel kind), or name the toolkit in CUDA_HOME"
        return broken("compilers", words, remedy)
    return fine("compilers", f"servers compile kernels with {compilers.toolkit(environment)}")


def bucket_findings(needed_bytes: float, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Findings on shared memory and sockets for buckets of the weight stream. Yields none if `needed_bytes` is 0."""
    if not needed_bytes:
        return
    problems = [problem for problem in (room_problem(needed_bytes), socket_problem(environment)) if problem is not None]
    for problem in problems:
        yield from_sentence("buckets", "broken", problem)
    if not problems:
        yield fine("buckets", f"{SHARED_MEMORY} has room for {needed_bytes / 1e9:.3g} GB of buckets of weights")


def server_finding(url: str, key: str, longest_tokens: int, least_tokens: int) -> Finding:
    """Whether a server of `rollout.sglang.urls` answers, and to this key, and can serve the run. `longest_tokens`: of
    prompt and response together; `least_tokens`: of a response."""
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 80), timeout=_REACH_SECONDS).close()
    except OSError as error:
        words = f"{url} of rollout.sglang.urls cannot be reached ({error.strerror or error})"
        return broken("engines", words, "start it there (megappo serve), or fix the address")
    endpoint = Endpoint(0, url.rstrip("/"), key, 0)
    try:
        if problem := key_problem(endpoint, _ANSWER_SECONDS):
            return from_sentence("engines", "broken", problem)
        answer = call(endpoint, "/model_info", timeout_seconds=_ANSWER_SECONDS, method="GET")
    except ServerFailure:
        answer = {}
    if "model_path" not in answer:
        words = f"{url} of rollout.sglang.urls is a port of another program, which does not answer as SGLang does"
        return broken("engines", words, "end that program, or start the server on another port (megappo serve --port)")
    return _fit_finding(endpoint, url, longest_tokens, least_tokens) or fine(
        "engines", f"{url} serves {answer['model_path']}"
    )


def by_nccl() -> bool:
    """Whether weights would go over NCCL."""
    return torch.cuda.is_available()


def _fit_finding(endpoint: Endpoint, url: str, longest_tokens: int, least_tokens: int) -> Finding | None:
    """A finding if a server and the trainers have different versions or settings, or if the server cannot generate the
    longest response of the run."""
    try:
        said = what_it_says(endpoint, _ANSWER_SECONDS)
    except ServerFailure:
        return None  # it is busy, or older
    problem, _ = stack_problem(url, said, by_nccl=by_nccl())
    if problem is not None:
        return from_sentence("engines", "broken", problem)
    try:
        check_lengths(url, said, longest_tokens)
        check_sampling(url, said)
        check_hooks(url, said, has_least_tokens=least_tokens > 0)
    except RunError as error:
        return from_sentence("engines", "broken", error)
    return None


def nccl_finding() -> Finding:
    """A finding with NCCL's settings for trainers and own servers; the doctor compares it over machines."""
    return fine(NCCL, f"{own_stack(os.environ).settings}, for trainers and servers")


def differing_settings(findings: Sequence[Finding]) -> Iterator[Finding]:
    """A finding where machines would join one group with different settings."""
    found = [finding for finding in findings if finding.check == NCCL]
    if len(found) > 1:
        words = "; ".join(f"{', '.join(f.machines)}: {f.words.partition(', ')[0]}" for f in found)
        yield broken(NCCL, f"machines differ ({words})", "export the same values on all of them")


def _address(name: str, address: str) -> Iterator[Finding]:
    problem = listening_problem(address, 0)
    if problem is not None:
        words = f"{name} is {address}, which is no address of this machine ({problem})"
        yield broken("engines", words, "set it to one that `ip address` lists, or remove it")
