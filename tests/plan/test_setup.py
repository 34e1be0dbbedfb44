"""The planner's inputs that follow from the settings, and checks of shared memory before a run starts."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megappo.config import Config, ConfigError, load_config
from megappo.config.grid import Grid
from megappo.plan.bytes.memory import bucket_bytes
from megappo.plan.bytes.rewards import reward_parameters
from megappo.plan.bytes.servers import Servers, find_servers
from megappo.plan.bytes.shared_memory import room_problem, shared_buckets_bytes, socket_problem
from megappo.plan.inputs import Models, RoleSetup, Setup, Workload, make_setup, workload
from megappo.plan.planner import read_models
from tests.support.places import ROOT
from tests.support.plan import arch, with_experts

MIDDLE = ROOT / "tests/support/qwen3_8b_8gpu.yaml"
EMBEDDED = ("rollout.engine=transformers",)
MODELS = Models(arch(), arch(layers=12), arch(hidden_size=41))


def test_workload_of_a_step() -> None:
    """The busiest of seven ranks has eight of 50 prompts, each with three samples."""
    rollout = ["rollout.prompts_per_step=50", "rollout.samples_per_prompt=3", "rollout.max_response_tokens=300"]
    overrides = [*EMBEDDED, *rollout, "rollout.generate_batch_sequences=77", "rollout.sync_bucket_bytes=12345"]
    actual = workload(load_config(MIDDLE, overrides), 7, on_cuda=True)
    expected = Workload(
        world_size=7, batch_sequences=150, prompt_tokens=1024, response_tokens=300, sequences_per_rank=24,
        generate_batch_sequences=77, sync_bucket_bytes=12345, engine_dtype_bytes=2, on_cuda=True, cache_sequences=77,
        cache_tokens=1324, reward_bytes=0.0,
    )  # fmt: skip
    assert actual == expected and actual.sequence_tokens == 1324
    changes: list[tuple[str, int, dict[str, Any]]] = [
        ("evaluation=null", 7, {"cache_sequences": 24}),  # limited by the number of sequences
        ("evaluation.max_response_tokens=299", 7, {}),
        ("evaluation.max_response_tokens=301", 7, {"cache_tokens": 1325}),
        ("rollout.max_total_tokens=1100", 7, {"cache_tokens": 1100}),
        ("rollout.dtype=float32", 7, {"engine_dtype_bytes": 4}),
        ("model.dtype=float32", 7, {"engine_dtype_bytes": 4}),
        ("run.steps=7", 10, {"world_size": 10, "sequences_per_rank": 15}),
    ]
    for change, ranks, fields in changes:
        actual = workload(load_config(MIDDLE, [*overrides, change]), ranks, on_cuda=True)
        assert actual == dataclasses.replace(expected, **fields), change


def test_weights_of_a_reward_model(tmp_path: Path) -> None:
    """The weights are in bfloat16 on a GPU, and in float32 on a CPU."""
    save_file({"score": torch.zeros(3, 5)}, tmp_path / "a.safetensors")
    save_file({"trunk": torch.zeros(7)}, tmp_path / "b.safetensors")
    config = load_config(MIDDLE, [*EMBEDDED, "reward.function=model", f"reward.model_path={tmp_path}"])
    assert [workload(config, 8, on_cuda=cuda).reward_bytes for cuda in (True, False)] == [44, 88]


@pytest.mark.slow
@pytest.mark.waits
def test_weights_of_a_reward_model_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with torch and transformers counts the weights from the configuration of the model."""
    sizes = {"hidden_size": 8, "intermediate_size": 16, "vocab_size": 32, "num_hidden_layers": 1}
    content = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 2, "num_labels": 1, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(content))
    monkeypatch.setattr("megappo.plan.bytes.rewards.cached_folder", lambda name: None)
    monkeypatch.setattr("megappo.plan.bytes.rewards.model_folder", lambda name, **_: tmp_path)
    layer = 4 * 8 * 8 + 3 * 8 * 16 + 2 * 8
    assert reward_parameters("Some/Reward") == 32 * 8 + layer + 8 + 8
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xyzzy"}))
    with pytest.raises(ConfigError, match="does not describe a classification model") as caught:
        reward_parameters("Another/Reward")
    assert len(str(caught.value).splitlines()) == 1


def test_roles() -> None:
    """The reference is on the ranks of the actor. A step updates the critic first, and scores with the critic last."""
    overrides = [*EMBEDDED, "actor.layout={tensor_parallel: 3, pipeline_parallel: 2, virtual_pipeline_chunks: 3}"]
    overrides += [
        "critic.layout={first_rank: 2, ranks: 4}",
        "critic.optimizer.distributed=false",
        "model.dtype=float32",
    ]
    overrides += ["critic.minibatch_sequences=64", "critic.epochs=2", "critic.recompute=full", "actor.recompute=none"]
    overrides += ["critic.microbatch_budget_tokens=5000", "model.pad_vocab_to_multiple_of=1"]
    setup = make_setup(load_config(MIDDLE, overrides), MODELS, 12, on_cuda=True)
    actor = RoleSetup(
        name="actor", arch=MODELS.actor, grid=Grid(range(12), tp=3, pp=2), vpp=3, sequence_parallel=True,
        recompute="none", distributed_optimizer=True, microbatch_budget_tokens=16384, minibatch_sequences=128,
        updates_per_step=4, padded_vocab=102, dtype_bytes=4, reduces_in_backward=True, gathers_in_forward=True,
    )  # fmt: skip
    critic = RoleSetup(
        name="critic", arch=MODELS.critic, grid=Grid(range(2, 6), tp=1, pp=1), vpp=1, sequence_parallel=False,
        recompute="full", distributed_optimizer=False, microbatch_budget_tokens=5000, minibatch_sequences=64,
        updates_per_step=16, padded_vocab=101, dtype_bytes=4, reduces_in_backward=True,
    )  # fmt: skip
    reference = dataclasses.replace(
        actor, name="reference", arch=MODELS.reference, trained=False, updates_per_step=0, recompute="none"
    )
    assert setup == Setup(actor, critic, reference, setup.work)
    assert setup.trained == (critic, actor) and setup.roles == (actor, reference, critic)
    assert critic.is_critic and not actor.is_critic and not reference.is_critic
    plain = ["critic=null", "algorithm.estimator=reinforce_plus_plus", "reference=null", "algorithm.kl_in_reward=null"]
    config = load_config(MIDDLE, [*EMBEDDED, *plain, "actor.layout={tensor_parallel: 3}"])
    alone = make_setup(config, MODELS, 6, on_cuda=True)
    assert (alone.critic, alone.reference, alone.trained, alone.roles) == (None, None, (alone.actor,), (alone.actor,))


def test_servers_of_settings() -> None:
    """Eight GPUs have four servers of two ranks."""
    overrides = ["rollout.servers={tensor_parallel: 2, memory_fraction: 0.25, max_inflight_sequences: 10}"]
    expected = Servers(
        count=4, tensor_parallel=2, colocated=True, shares_machine=False, sleeps=True, ahead=False, static_bytes=25e9,
        max_total_tokens=None, deterministic=False, most_sequences=80, notes_experts=True, sliced=True,
    )  # fmt: skip

    def find(*more: str, on_cuda: bool = True) -> Servers | None:
        return find_servers(load_config(MIDDLE, [*overrides, *more]), 8, on_cuda=on_cuda, device_bytes=100e9)

    assert find() == expected
    assert (expected.ranks, expected.has_own_devices) == (8, False)
    on_cpu = find(on_cuda=False)
    assert on_cpu is not None
    assert on_cpu == dataclasses.replace(
        expected, count=on_cpu.count, shares_machine=True, sleeps=False, static_bytes=0.0, max_total_tokens=65536,
        deterministic=True,
    )  # fmt: skip
    assert find("rollout.servers.sleep=false") == dataclasses.replace(expected, sleeps=False)
    assert find("rollout.servers.max_total_tokens=5000") == dataclasses.replace(expected, max_total_tokens=5000)
    elsewhere = find("rollout.servers.placement=disaggregated", "rollout.servers.count=3")
    apart = dataclasses.replace(expected, count=3, colocated=False, sleeps=False, sliced=False)
    assert elsewhere == apart and elsewhere.has_own_devices
    urls = ("rollout.servers.placement=disaggregated", "rollout.servers.urls=[http://a:1, http://b:1]")
    assert find("rollout.when_stopped=keep") == dataclasses.replace(expected, deterministic=True)
    running = find(*urls, on_cuda=False)
    assert running is not None and not running.shares_machine and running.has_own_devices and running.count == 2
    assert running.reached_from_everywhere and not elsewhere.reached_from_everywhere
    assert find("rollout.servers.verify=false") == dataclasses.replace(expected, sliced=False)
    ahead = find("rollout.ahead=1", "algorithm.old_logprob=corrected")
    assert ahead == dataclasses.replace(expected, ahead=True, sleeps=False)
    assert find_servers(load_config(MIDDLE, EMBEDDED), 8, on_cuda=True, device_bytes=1e9) is None


def test_experts_of_a_role() -> None:
    """Only the actor records routing, with one byte for each expert of a token. More than 256 experts need more
    bytes."""
    models = dataclasses.replace(MODELS, actor=with_experts(), reference=with_experts())

    def roles_of(*overrides: str, models: Models = models) -> list[tuple[int, bool]]:
        config = load_config(MIDDLE, [*overrides, "reference={}", "algorithm.kl_in_loss={coef: 0.1}"])
        setup = make_setup(config, models, 8, on_cuda=True)
        return [(role.routing_bytes, role.balances_experts) for role in setup.roles]

    assert roles_of("actor.router_aux_loss_coef=0.01") == [(3, True), (0, False), (0, False)]
    assert roles_of("algorithm.router_replay=false")[0] == (0, False)
    many = dataclasses.replace(models, actor=with_experts(experts=300))
    assert roles_of(models=many)[0] == (6, False) and roles_of(models=MODELS)[0] == (0, False)


SHARE = """
import torch
torch.multiprocessing.set_sharing_strategy("file_system")
torch.empty(1).share_memory_()
"""


def planned(name: str, *overrides: str, on_cuda: bool = False) -> tuple[Config, Setup]:
    """A shipped configuration on two ranks, and its setup."""
    config = load_config(ROOT / "configs" / f"{name}.yaml", overrides)
    return config, make_setup(config, read_models(config, None).models, 2, on_cuda=on_cuda)


@pytest.mark.parametrize(("local_world_size", "owners"), [(None, 1), (2, 1), (1, 1)])
def test_two_buckets_for_each_owner(monkeypatch: pytest.MonkeyPatch, local_world_size: int | None, owners: int) -> None:
    monkeypatch.chdir(ROOT)
    config, setup = planned("sglang_quickstart")
    needed = shared_buckets_bytes(config, setup, 2, local_world_size)
    assert needed == 2 * owners * bucket_bytes(setup) > 0


def test_ranks_of_one_machine_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config, setup = planned("sglang_quickstart")
    assert shared_buckets_bytes(config, setup, 8, 4) == 8 * bucket_bytes(setup)


def test_runs_without_buckets_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded engine has no buckets. GPUs share memory by CUDA IPC, and other machines receive broadcasts."""
    monkeypatch.chdir(ROOT)
    cases = (planned("quickstart", "rollout.engine=transformers"), planned("sglang_disaggregated"))
    assert [shared_buckets_bytes(config, setup, 2, 2) for config, setup in cases] == [0, 0]
    config, setup = planned("sglang_quickstart", "model.dtype=bfloat16", on_cuda=True)
    assert shared_buckets_bytes(config, setup, 2, 2) == 0


def test_a_folder_without_room(tmp_path: Path) -> None:
    assert room_problem(1e3, tmp_path) is None
    problem = room_problem(1e18, tmp_path)
    assert problem is not None and f"needs 1e+09 GB of {tmp_path} for buckets, and " in problem
    assert problem.endswith(
        "lower rollout.sync_bucket_bytes, or mount a larger tmpfs there (containers: --ipc=host or --shm-size=16g)"
    )
    problem = room_problem(2.5e6, tmp_path / "none")
    assert problem is not None and f"needs 2.5 MB of shared memory, and {tmp_path / 'none'} does not exist" in problem


def test_folder_without_write_access(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    problem = room_problem(1e3, tmp_path)
    assert problem is not None and f"{tmp_path}, which is not writable; mount a larger tmpfs there" in problem


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a path short enough to be extended to any length that the test needs."""
    folder = Path(tempfile.mkdtemp(prefix="m-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def folder_of(length: int, parent: Path) -> Path:
    """A new folder whose path has `length` bytes."""
    folder = parent / ("x" * (length - len(str(parent)) - 1))
    folder.mkdir()
    return folder


@pytest.mark.waits
@pytest.mark.parametrize("variable", ["TMPDIR", "TMP"])
def test_the_longest_folder_of_torch(short_folder: Path, variable: str) -> None:
    """torch shares memory with a temporary folder of 73 bytes, and fails with 74."""
    others = {name: value for name, value in os.environ.items() if name not in {"TMPDIR", "TMP", "TEMP", "TEMPDIR"}}
    for length, works in ((73, True), (74, False)):
        environment = others | {variable: str(folder_of(length, short_folder))}
        shared = subprocess.run([sys.executable, "-c", SHARE], env=environment, capture_output=True, check=False)
        assert (shared.returncode == 0) is works, shared.stderr.decode()[-1000:]
        problem = socket_problem(environment)
        assert (problem is None) is works
    assert problem is not None and "has 74 bytes, and a folder for the sockets" in problem and "at most 73" in problem


def test_unusable_temporary_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert socket_problem({}) is None
    problem = socket_problem({"TMPDIR": "/nonexistent"})
    assert problem is not None and "and TMPDIR=/nonexistent is not one; export TMPDIR=/tmp" in problem
    assert socket_problem({"TMPDIR": "/tmp", "TMP": "/nonexistent"}) is None, "torch reads the first one alone"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    problem = socket_problem({"TEMP": "/tmp"})
    assert problem is not None and "and TEMP=/tmp is not one" in problem
