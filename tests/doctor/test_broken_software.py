"""The doctor reports missing and wrong packages, and servers that cannot work, with the remedy."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megappo.doctor import software
from megappo.doctor.engines import differing_settings, nccl_finding
from megappo.doctor.findings import merge
from megappo.runtime.ranks.nccl import own_stack
from tests.support import worlds

pytestmark = pytest.mark.usefixtures("nothing_launched")
DISAGGREGATED = "configs/sglang_disaggregated.yaml"
COLOCATED = "configs/sglang_quickstart.yaml"


@pytest.mark.parametrize(
    ("name", "version", "check", "message", "remedy", "arguments"),
    [
        ("sglang", "0.4.1", "generation", "SGLang 0.4.1, but 0.5.23 is required", "pip install 'sglang==0.5.23'", ()),
        (
            "sglang", "0.5.11", "generation", "SGLang 0.5.11, but 0.5.23 is required", "pip install 'sglang==0.5.23'",
            (DISAGGREGATED,),
        ),
        ("transformers", "4.51.0", "transformers", "version 4.51.0, but >=5", "pip install 'transformers>=5", ()),
        ("megatron-core", "0.12.0", "megatron-core", "version 0.12.0", "pip install 'megatron-core>=0.1", ()),
    ],
)  # fmt: skip
def test_wrong_version_of_a_package(
    name: str, version: str, check: str, message: str, remedy: str, arguments: tuple[str, ...], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, expect: Callable[..., None],
) -> None:  # fmt: skip
    worlds.fake_package(tmp_path, name.replace("-", "_"), version)
    monkeypatch.syspath_prepend(tmp_path)
    expect(check, "broken", message, remedy, *arguments)


@pytest.mark.slow
@pytest.mark.waits
def test_other_apex(tmp_path: Path) -> None:
    path = worlds.fake_package(tmp_path, "apex", "0.9.10")
    done = worlds.megappo("doctor", PYTHONPATH=path, CUDA_HOME=str(tmp_path))
    assert (
        "slow    apex             version 0.9.10 is a different project with the same name; pip uninstall apex"
        in done.stdout
    ), done.stderr
    assert done.stderr == "", "imports print no warnings"


def without_package(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    real = software.installed_version
    monkeypatch.setattr(software, "installed_version", lambda name: None if name == missing else real(name))


def test_missing_reward_package(monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]) -> None:
    without_package(monkeypatch, "math-verify")
    message = "math-verify is not installed; pip install '.[tasks]' in megappo's repository"
    refused(message, *worlds.DRY, "reward.function=math_verify")


# SGLang and its servers


@pytest.fixture
def sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the required version of SGLang."""
    worlds.fake_package(tmp_path / "packages", "sglang", "0.5.23")
    monkeypatch.syspath_prepend(tmp_path / "packages")


def test_missing_sglang(monkeypatch: pytest.MonkeyPatch, expect: Callable[..., None]) -> None:
    without_package(monkeypatch, "sglang")
    message, remedy = (
        "rollout.servers.kind is sglang, which is not installed",
        "pip install '.[sglang]' in megappo's repository",
    )
    expect("generation", "broken", message, remedy, DISAGGREGATED)


@pytest.mark.usefixtures("sglang")
def test_no_room_for_buckets(
    monkeypatch: pytest.MonkeyPatch, expect: Callable[..., None], findings: Callable[..., Any]
) -> None:
    """Handles of buckets are sent to the servers. Broadcasts use the memory of a rank."""
    expect("buckets", "fine", "/dev/shm has room for 0.001 GB of buckets of weights", "", COLOCATED)
    with monkeypatch.context() as patch:
        patch.setattr("megappo.plan.bytes.shared_memory.bucket_bytes", lambda setup: 1e15)
        message, remedy = "needs 2e+06 GB of /dev/shm for buckets", "lower rollout.sync_bucket_bytes"
        expect("buckets", "broken", message, remedy, COLOCATED)
    with monkeypatch.context() as patch:
        patch.setenv("TMPDIR", "/tmp/" + 80 * "x")
        message, remedy = "needs a writable folder for the sockets", "export TMPDIR=/tmp"
        expect("buckets", "broken", message, remedy, COLOCATED)
    results = findings(DISAGGREGATED)
    assert results["generation"]["code"] == "0" and "buckets" not in results


def elsewhere(port: int) -> tuple[str, ...]:
    """Return the settings of a run with a server at this port."""
    return (DISAGGREGATED, f"rollout.servers.urls=['http://127.0.0.1:{port}']")


@pytest.mark.waits
@pytest.mark.usefixtures("sglang")
def test_unreachable_server(expect: Callable[..., None]) -> None:
    message = "of rollout.servers.urls cannot be reached (Connection refused)"
    expect("engines", "broken", message, "megappo serve", *elsewhere(worlds.closed_port()))


@pytest.mark.waits
@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(
    ("status", "key", "state", "message", "remedy"),
    [
        (404, "", "broken", "is the port of another program", "megappo serve --port"),
        (401, "k", "broken", "rejects the key in MEGAPPO_SGLANG_API_KEY", "to the key of the server"),
        (401, "", "broken", "requires a key, and MEGAPPO_SGLANG_API_KEY is empty", "export the key"),
        (200, "k", "broken", "accepts any key, so the server was started", "start the server with `megappo serve`"),
        (200, "", "fine", "serves /models/a", ""),
    ],
)
def test_wrong_programs_at_the_port_of_a_server(
    status: int, key: str, state: str, message: str, remedy: str, monkeypatch: pytest.MonkeyPatch,
    expect: Callable[..., None],
) -> None:  # fmt: skip
    monkeypatch.setenv("MEGAPPO_SGLANG_API_KEY", key)
    with worlds.answering(status, {"model_path": "/models/a"} if status == 200 else {}) as port:
        expect("engines", state, message, remedy, *elsewhere(port))


@pytest.mark.waits
@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(
    ("on_cuda", "changes", "message", "remedy"),
    [
        (False, {}, "serves /models/a", ""),
        (True, {}, "serves /models/a", ""),
        (False, {"torch": "1.2.3"}, "has torch 1.2.3 and ", "install the same versions"),
        (False, {"nccl": "2.1"}, "serves /models/a", ""),  # NCCL is not used
        (True, {"nccl": "2.1"}, " and NCCL 2.1, the trainers have torch ", "install the same versions"),
        (
            True, {"nvls": "1"}, "NCCL_NVLS_ENABLE=1, the trainers with NCCL_CUMEM_ENABLE=0 and NCCL_NVLS_ENABLE=0",
            "export",
        ),
    ],
)  # fmt: skip
def test_server_without_a_common_process_group(
    monkeypatch: pytest.MonkeyPatch, expect: Callable[..., None], on_cuda: bool, changes: dict[str, str], message: str,
    remedy: str,
) -> None:  # fmt: skip
    stack = replace(own_stack(os.environ), **changes)
    monkeypatch.setattr("megappo.doctor.engines.by_nccl", lambda: on_cuda)
    with worlds.answering(200, {"model_path": "/models/a", "extra_metric_labels": stack.labels()}) as port:
        expect("engines", "broken" if remedy else "fine", message, remedy, *elsewhere(port))


@pytest.mark.waits
@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(
    ("server_info", "overrides", "message", "remedy"),
    [
        ({"max_req_input_len": 10}, (), "rejects inputs of 10 tokens and more", "by 1"),
        ({"max_req_input_len": 11}, (), "", ""),
        ({"allow_auto_truncate": True}, (), "shortens long prompts", "start the server without --allow-auto-truncate"),
        ({}, ("rollout.min_response_tokens=2",), "counts rollout.min_response_tokens from 0", "start the server with"),
        (
            {"speculative_algorithm": "NGRAM", "speculative_accept_threshold_acc": 0.5}, (), "accepts drafts",
            "without --speculative-accept-threshold-single",
        ),
    ],
)  # fmt: skip
def test_external_server_with_incompatible_limits(
    expect: Callable[..., None], server_info: dict[str, Any], overrides: tuple[str, ...], message: str, remedy: str
) -> None:
    """Prompts have 8 tokens, and responses have 3."""
    state = "broken" if remedy else "fine"
    with worlds.answering(200, {"model_path": "/models/a", **server_info}) as port:
        expect("engines", state, message or "serves /models/a", remedy, *elsewhere(port), *overrides)


def test_machines_with_different_settings_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = nccl_finding()
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    theirs = nccl_finding()
    assert list(differing_settings(merge([("a", [ours]), ("b", [ours])]))) == []
    (finding,) = differing_settings(merge([("a", [ours]), ("b", [theirs]), ("c", [ours])]))
    assert finding.state == "broken" and finding.remedy == "export the same values on all machines"
    assert "a, c: NCCL_CUMEM_ENABLE=0 and NCCL_NVLS_ENABLE=0; b: NCCL_CUMEM_ENABLE=0 and NCCL_NVLS_EN" in finding.text


@pytest.mark.waits
@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize("name", ["host", "sync_address"])
def test_address_of_another_machine(name: str, expect: Callable[..., None]) -> None:
    message = f"rollout.servers.{name} is 192.0.2.1, which is not an address of"
    expect("engines", "broken", message, "remove it", DISAGGREGATED, f"rollout.servers.{name}=192.0.2.1")


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("memory_fraction: 0.2", "memory_fraction 0.2 gives a server 16.0 GB of each device"),
        ("max_total_tokens: 100", "max_total_tokens 100 is below the longest prompt and response"),
    ],
)
def test_no_room_in_a_server(setting: str, message: str, refused: Callable[..., str]) -> None:
    refused(message, "plan", worlds.BIG, "--gpus", "8", f"rollout.servers={{{setting}}}")
