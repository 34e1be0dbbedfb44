"""Compare the reported properties of a server with the requirements of the run."""

from __future__ import annotations

import os
from typing import TypedDict, cast

from megappo.engines.sglang.client import Endpoint, call
from megappo.engines.sglang.servers.server import EngineError
from megappo.engines.sglang.servers.server_hooks import HOOKS_LABEL
from megappo.engines.sglang.version import TRIED_VERSION
from megappo.errors import show
from megappo.files.json_values import JSONValue
from megappo.observe.terminal.messages import show_message
from megappo.plan.bytes.cache import PlannedCache
from megappo.runtime.ranks.nccl import group_problem, own_stack, read_labels

_LARGEST_PAGE_TOKENS = 256
"""Maximum page size of keys and values in tokens. SGLang uses only whole pages and may report up to one page less
than planned."""


class ServerInfo(TypedDict, total=False):
    """The server arguments and figures that the run compares."""

    max_total_num_tokens: int | None
    max_req_input_len: int | None
    page_size: int | None
    extra_metric_labels: dict[str, str] | None
    enable_return_routed_experts: bool
    preferred_sampling_params: dict[str, JSONValue] | None
    speculative_algorithm: str | None
    speculative_accept_threshold_single: float
    speculative_accept_threshold_acc: float
    allow_auto_truncate: bool


def what_it_says(endpoint: Endpoint, timeout_seconds: float) -> ServerInfo:
    """Return the effective arguments and the memory of a server (SGLang's `/server_info`). Raises ServerFailure."""
    return cast(ServerInfo, call(endpoint, "/server_info", timeout_seconds=timeout_seconds, method="GET"))


def check_room(name: str, said: ServerInfo, cache: PlannedCache) -> None:
    """Raise EngineError if the cache of a server is too small for the longest sequence. Warn if the cache is smaller
    than planned."""
    held = said.get("max_total_num_tokens")
    if held is None:
        return
    if held < cache.longest_tokens:
        raise EngineError(
            f"{name} has room for the keys and values of {held} tokens, but the longest prompt and response have "
            f"{cache.longest_tokens} tokens; free memory of its GPUs, or reduce the memory of the trainers on these "
            "GPUs"
        )
    if cache.tokens is not None and held < cache.tokens - _LARGEST_PAGE_TOKENS:
        show_message(
            f"{name} has room for the keys and values of {held} tokens instead of the planned {cache.tokens}; less "
            "memory was free at its start"
        )


def check_lengths(name: str, said: ServerInfo, longest_tokens: int) -> None:
    """Raise EngineError if a server would cut the longest prompt and response, or reject their continuation. SGLang
    leaves positions of its context and of its pool free (`spec.FREE_POSITIONS`)."""
    refused = said.get("max_req_input_len")
    if refused is not None and refused < longest_tokens:
        raise EngineError(
            f"{name} rejects inputs of {refused} tokens and more, and the longest prompt and response of the run "
            f"have {longest_tokens} tokens; start the server with `megappo serve` and this configuration, or lower "
            f"rollout.max_response_tokens by {longest_tokens - refused}"
        )
    held, page = said.get("max_total_num_tokens"), said.get("page_size") or 1
    needed = longest_tokens + 2 * page  # a started page of the input, and one page that SGLang keeps free
    if held is not None and held < needed:
        raise EngineError(
            f"{name} has room for the keys and values of {held} tokens in pages of {page}, and needs {needed} "
            f"tokens for the longest prompt and response of {longest_tokens} tokens; raise "
            "rollout.servers.max_total_tokens or memory_fraction"
        )


def stack_problem(name: str, said: ServerInfo, *, by_nccl: bool) -> tuple[str | None, bool]:
    """Return the reason why a broadcast group with a server is impossible, or None, and whether the server reported
    its versions."""
    theirs, ours = read_labels(said.get("extra_metric_labels")), own_stack(os.environ)
    return (None, False) if theirs is None else (group_problem(name, theirs, ours, by_nccl=by_nccl), True)


def check_stack(name: str, said: ServerInfo, *, by_nccl: bool) -> None:
    """Raise EngineError if a broadcast group with a server is impossible. Warn if the server does not report its
    versions."""
    problem, is_known = stack_problem(name, said, by_nccl=by_nccl)
    if problem is not None:
        raise EngineError(problem)
    if not is_known:
        show_message(
            f"{name} does not report its versions of torch and NCCL, because it was not started with `megappo "
            f"serve`; the versions must equal those of the trainers, {own_stack(os.environ).versions}"
        )


def check_routing(name: str, said: ServerInfo, *, wanted: bool) -> None:
    """Raise EngineError if experts of each token are `wanted` and a server does not return the experts."""
    if wanted and not said.get("enable_return_routed_experts"):
        raise EngineError(
            f"{name} does not return the experts of each token; start the server with `megappo serve` and this "
            "configuration (SGLang's --enable-return-routed-experts), or set algorithm.router_replay to false"
        )


def check_hooks(name: str, said: ServerInfo, *, has_least_tokens: bool) -> None:
    """Raise EngineError if responses have a minimum length and a server lacks the hooks of `server_hooks`."""
    labels = said.get("extra_metric_labels") or {}
    if has_least_tokens and not HOOKS_LABEL.items() <= labels.items():
        raise EngineError(
            f"{name} counts rollout.min_response_tokens from 0 again after it retracts a request; start the server "
            f"with `megappo serve`, this configuration and SGLang {TRIED_VERSION}, or set min_response_tokens to 0"
        )


def check_sampling(name: str, said: ServerInfo) -> None:
    """Raise EngineError if a server samples from another distribution than the model, or shortens requests. Report
    sampling parameters of the server, which have no effect because every request sets all parameters."""
    thresholds = (said.get(f"speculative_accept_threshold_{kind}", 1.0) for kind in ("single", "acc"))
    if said.get("speculative_algorithm") and any(threshold != 1.0 for threshold in thresholds):
        raise EngineError(
            f"{name} accepts drafts that the model would not have sampled; start the server without "
            "--speculative-accept-threshold-single and --speculative-accept-threshold-acc"
        )
    if said.get("allow_auto_truncate"):
        raise EngineError(
            f"{name} shortens long prompts and responses without an error; start the server without "
            "--allow-auto-truncate"
        )
    if preferred := said.get("preferred_sampling_params"):
        show_message(
            f"{name} has --preferred-sampling-params {show(preferred)}, which have no effect, because every request "
            "of the run sets all sampling parameters"
        )
