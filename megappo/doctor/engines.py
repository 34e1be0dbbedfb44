"""Checks of the requirements of SGLang servers: shared memory for buckets, addresses and responses."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urlsplit

import torch

from megappo.config import Config
from megappo.doctor.findings import Finding, broken, fine, from_sentence
from megappo.engines.sglang.client import Endpoint, ServerFailure, call
from megappo.engines.sglang.servers import compilers
from megappo.engines.sglang.servers.fleet import KEY_VARIABLE, key_problem
from megappo.engines.sglang.servers.gpus import check_visible
from megappo.engines.sglang.servers.inspection import (
    check_hooks,
    check_lengths,
    check_sampling,
    stack_problem,
    what_it_says,
)
from megappo.errors import RunError
from megappo.network.keys import key_of
from megappo.network.store import listening_problem
from megappo.plan.bytes.shared_memory import SHARED_MEMORY, room_problem, shared_buckets_bytes, socket_problem
from megappo.plan.inputs import Models, make_setup
from megappo.runtime.launchers import Ranks
from megappo.runtime.ranks.nccl import own_stack

NCCL = "nccl"
_REACH_SECONDS = 3.0
_ANSWER_SECONDS = 10.0


def engine_findings(config: Config, models: Models, ranks: Ranks, world_size: int) -> Iterator[Finding]:
    """Yield findings on the servers of a run. Yield nothing for an engine in the trainers, and for custom servers."""
    settings = config.rollout.server_settings
    if not config.rollout.capabilities.separate_processes or not settings.is_built_in:
        return
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
        yield from _address("rollout.servers.host", settings.host)
    if ranks.rank == 0 and settings.sync_address is not None:
        yield from _address("rollout.servers.sync_address", settings.sync_address)


def compiler_finding(environment: Mapping[str, str]) -> Finding:
    """Return a finding on the compilers for kernels. No server can start on a GPU without these compilers."""
    absent = compilers.missing(environment)
    if absent:
        text = f"SGLang compiles kernels when a server starts, but this machine does not have {', '.join(absent)}"
        remedy = "install it (`module load cuda`, or a CUDA devel image), or set CUDA_HOME to the toolkit"
        return broken("compilers", text, remedy)
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
    """Return a finding on a server of `rollout.servers.urls`. The server must be reachable, accept the key, and support
    the settings of the run. `longest_tokens` is the length of the longest prompt and response together. `least_tokens`
    is the minimum length of a response."""
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 80), timeout=_REACH_SECONDS).close()
    except OSError as error:
        text = f"{url} of rollout.servers.urls cannot be reached ({error.strerror or error})"
        return broken("engines", text, "start the server (megappo serve), or fix the address")
    endpoint = Endpoint(0, url.rstrip("/"), key, 0)
    try:
        if problem := key_problem(endpoint, _ANSWER_SECONDS):
            return from_sentence("engines", "broken", problem)
        answer = call(endpoint, "/model_info", timeout_seconds=_ANSWER_SECONDS, method="GET")
    except ServerFailure:
        answer = {}
    if "model_path" not in answer:
        text = f"{url} of rollout.servers.urls is the port of another program: the response is not from SGLang"
        return broken("engines", text, "end that program, or start the server on another port (megappo serve --port)")
    return _fit_finding(endpoint, url, longest_tokens, least_tokens) or fine(
        "engines", f"{url} serves {answer['model_path']}"
    )


def by_nccl() -> bool:
    """Return whether weights are sent over NCCL."""
    return torch.cuda.is_available()


def _fit_finding(endpoint: Endpoint, url: str, longest_tokens: int, least_tokens: int) -> Finding | None:
    """Return a finding if a server and the trainers have different versions or settings, or if the server cannot
    generate the longest response of the run. Otherwise return None."""
    try:
        server_settings = what_it_says(endpoint, _ANSWER_SECONDS)
    except ServerFailure:
        return None  # the server is busy or has an older version
    problem, _ = stack_problem(url, server_settings, by_nccl=by_nccl())
    if problem is not None:
        return from_sentence("engines", "broken", problem)
    try:
        check_lengths(url, server_settings, longest_tokens)
        check_sampling(url, server_settings)
        check_hooks(url, server_settings, has_least_tokens=least_tokens > 0)
    except RunError as error:
        return from_sentence("engines", "broken", error)
    return None


def nccl_finding() -> Finding:
    """Return a finding with the NCCL settings of trainers and own servers. `megappo doctor` compares the findings of
    all machines."""
    return fine(NCCL, f"{own_stack(os.environ).settings}, for trainers and servers")


def differing_settings(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Yield a finding if machines have different NCCL settings for the same group."""
    nccl_findings = [finding for finding in findings if finding.check == NCCL]
    if len(nccl_findings) > 1:
        text = "; ".join(f"{', '.join(f.machines)}: {f.text.partition(', ')[0]}" for f in nccl_findings)
        yield broken(NCCL, f"machines differ ({text})", "export the same values on all machines")


def _address(name: str, address: str) -> Iterator[Finding]:
    problem = listening_problem(address, 0)
    if problem is not None:
        text = f"{name} is {address}, which is not an address of this machine ({problem})"
        yield broken("engines", text, "set it to an address from `ip address`, or remove it")
