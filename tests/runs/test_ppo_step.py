"""One PPO step on special layouts, compared with a one-process oracle in every number and every updated weight.

Combinations of features are in test_conformance.py.

The steps cover epochs, minibatches, microbatches, KL in reward and in loss, dual clip, value clip, entropy, weight
decay, gradient clipping and temperature. Padding is NaN.
"""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support import scenarios
from tests.support.models import stored_parameters
from tests.support.oracle import ValueModel
from tests.support.places import ROOT
from tests.support.quick import cases
from tests.support.scenarios import World
from tests.support.step_checks import check_step, oracle_step, relative_error

pytestmark = [pytest.mark.slow, pytest.mark.waits]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("ppo"))


def oracle(world: World, name: str) -> tuple[dict[str, Any], Any, ValueModel | None]:
    """Compute the same step in one process, with the minibatches of the run."""
    settings = copy.copy(scenarios.ORACLE)
    if "seq-mean" in name or "gspo" in name:
        settings.aggregation = "seq-mean-token-mean"
    if name in scenarios.OF_USERS:
        settings.policy_loss = name.split("-")[0]
    if name == "gspo-tp2":
        settings.clip_low = settings.clip_high = scenarios.GSPO_CLIP
    if name in scenarios.BUILT_IN:
        settings.policy_loss, settings.band = name.split("-")[0], scenarios.BUILT_IN[name][0]
        settings.is_bypassed, settings.aggregation = name.startswith("dis"), "token-mean"
    if name in scenarios.WITHOUT_CRITIC:
        settings.estimator = name.rpartition("-")[0]
    if "balanced" in name:
        settings.actor_balance, settings.critic_balance = scenarios.BALANCE["actor"], scenarios.BALANCE["critic"]
    frozen = scenarios.FROZEN[name][0] if name in scenarios.FROZEN else None
    minibatches = world.result(name)["minibatches"]
    return oracle_step(world.folder(name), world.samples_of(name), settings, minibatches, frozen=frozen)


@pytest.mark.parametrize(
    "name", cases(itertools.chain(*scenarios.WITH_ORACLE.values()), quick=("tp2", "pp2"), exhaustive=scenarios.LARGE)
)
def test_step_equals_the_oracle(world: World, name: str) -> None:
    check_step(world.result(name), world.out(name), world.samples_of(name), *oracle(world, name))


def test_context_parallel_bfloat16_is_as_accurate_as_one_rank(world: World) -> None:
    """Samples that are split across context ranks have rounding errors similar to those of whole samples."""
    errors = {}
    for name in scenarios.ROUNDED:
        result, (measured, actor, _) = world.result(name), oracle(world, name)
        errors_of_key = {}
        for key in ("old_logprob", "values", "advantages"):
            mine = torch.cat([torch.tensor(result["samples"][str(i)][key]) for i in range(scenarios.SAMPLES)])
            errors_of_key[key] = relative_error(mine, torch.cat(measured[key]))
        trained, exact = load_file(world.out(name) / "actor.safetensors"), dict(stored_parameters(actor))
        errors_of_key["weights"] = relative_error(
            *(torch.cat([tensors[key].detach().flatten() for key in exact]) for tensors in (trained, exact))
        )
        errors[name] = errors_of_key
    whole, shared = errors.values()
    assert all(0 < whole[key] < 0.05 and shared[key] < 1.5 * whole[key] for key in whole), errors


@pytest.mark.parametrize("name", ["tp2", "dp2-distributed"])
def test_offload_is_bitwise_exact(world: World, name: str) -> None:
    results = [world.result(scenario) for scenario in (name, f"{name}-offload")]
    metrics = [
        {key: value for key, value in result["metrics"].items() if not key.startswith(("time/", "memory/"))}
        for result in results
    ]
    assert metrics[0] == metrics[1] and results[0]["samples"] == results[1]["samples"]
    for role in ("actor", "critic"):
        files = [world.out(scenario) / f"{role}.safetensors" for scenario in (name, f"{name}-offload")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_main_weights_on_the_host(world: World) -> None:
    """The model has bfloat16 weights. AdamW is fused on device and host and rounds equally."""
    on_device, on_host = (world.out(world.ran(name)) for name in ("one-bfloat16", "one-bfloat16-on-host"))
    for role in ("actor", "critic"):
        assert (on_device / f"{role}.safetensors").read_bytes() == (on_host / f"{role}.safetensors").read_bytes()


def test_readme_names_existing_scenarios() -> None:
    """The table of the README assigns each layout to its tests."""
    text = (ROOT / "megappo/megatron/README.md").read_text()
    table = text.partition("| layout | cases |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`([^`]+)`", table))
    assert len(named) > 15 and named <= {name for of_size in scenarios.SCENARIOS.values() for name in of_size}


def test_clipping_is_active_in_the_scenarios(world: World) -> None:
    """Clip, dual clip and value clip are active in this scenario, so the comparisons with the oracle cover them."""
    metrics = world.result("one")["metrics"]
    assert metrics["actor/clipfrac"] > 0.05
    assert metrics["actor/clipfrac_lower"] > 0
    assert metrics["critic/clipfrac"] > 0.05
    assert metrics["actor/grad_norm"] > scenarios.ORACLE.clip_grad_norm
    assert metrics["kl/mean"] != 0


def test_performance_settings_reach_megatron(world: World) -> None:
    """The scenarios use the features in their names."""
    built = world.result("dp2-overlap")["built"]
    assert built["actor"] == {"reduces": True, "gathers": True, "modules": ["core_attn"], "frees": True}
    assert built["critic"] == {"reduces": True, "gathers": False, "modules": ["core_attn"], "frees": True}
    built = world.result("pp2-recompute-parts")["built"]
    assert built["actor"] == {"reduces": False, "gathers": False, "modules": ["core_attn", "mlp"], "frees": False}


@pytest.mark.parametrize("name", ["cispo-tp2", "gspo-tp2"])
def test_losses_of_users_are_clipped(world: World, name: str) -> None:
    """Several microbatches contain several samples each, as in the other scenarios."""
    metrics = world.result(name)["metrics"]
    assert 0.05 < metrics["actor/clipfrac"] < 0.95 and metrics["actor/clipfrac_lower"] == 0
    assert ("actor/sequence_ratio" in metrics) == (name == "gspo-tp2")


@pytest.mark.parametrize("name", scenarios.FROZEN)
def test_frozen_parts_of_a_critic_are_unchanged(world: World, name: str) -> None:
    """Frozen weights of the critic are bitwise equal after the updates. All other weights of both roles change."""
    result = world.result(name)
    assert result["metrics"]["critic/updates"] == 2
    start = dict(stored_parameters(AutoModelForCausalLM.from_pretrained(world.folder(name), dtype=torch.float32)))
    trained = {role: load_file(world.out(name) / f"{role}.safetensors") for role in ("actor", "critic")}
    pattern, frozen_tensors = scenarios.FROZEN[name][0], 0
    for key, tensor in start.items():
        if key not in trained["critic"]:
            continue  # the output layer, which critics do not have
        is_frozen = re.search(pattern, key) is not None
        assert torch.equal(trained["critic"][key], tensor) == is_frozen, key
        assert not torch.equal(trained["actor"][key], tensor), key
        frozen_tensors += is_frozen
    assert frozen_tensors > 0


@pytest.mark.parametrize("name", scenarios.BUILT_IN)
def test_losses_have_tokens_inside_and_outside_the_band(world: World, name: str) -> None:
    metrics = world.result(name)["metrics"]
    outside = metrics["actor/masked_below"], metrics["actor/masked_above"]
    assert all(share > 0.02 for share in outside) or name == "sapo-pp2", outside
    assert sum(outside) == pytest.approx(metrics["actor/clipfrac"], abs=1e-9) and sum(outside) < 0.95
    assert 0 < metrics["actor/band_position"] < 1 and 0 < metrics["actor/effective_sample_size"] < 1


@pytest.mark.parametrize("name", scenarios.FIRST_UPDATE)
def test_the_first_update_starts_at_ratio_one(world: World, name: str) -> None:
    """The ratio is exactly one if the update uses the microbatches of scoring, otherwise one within rounding."""
    metrics = world.result(name)["metrics"]
    if name.startswith("same"):
        assert metrics["actor/ratio_max"] == metrics["actor/ratio"] == 1
        assert metrics["actor/ppo_kl"] == metrics["actor/clipfrac"] == 0
    else:
        assert metrics["actor/ratio_max"] == pytest.approx(1, abs=1e-5)
        assert metrics["actor/ratio"] == pytest.approx(1, abs=1e-6)
        assert abs(metrics["actor/ppo_kl"]) < 1e-6


@pytest.mark.parametrize("name", scenarios.NON_FINITE)
def test_nonfinite_update_does_not_change_the_weights(world: World, name: str) -> None:
    result = world.result(name)
    start = dict(AutoModelForCausalLM.from_pretrained(world.folder(name), dtype=torch.float32).named_parameters())
    trained = load_file(world.out(name) / "actor.safetensors")
    assert all(torch.equal(trained[n], p) for n, p in start.items())
    if name == "nonfinite-stop":
        assert "the critic's loss or gradient is not finite; its weights did not change" in result["stopped"]
        assert "actor/updates" not in result["metrics"]
    else:
        assert result["stopped"] == ""
        # Whitening spreads the infinity to all advantages. The other minibatch of the critic in each epoch is finite.
        for role, refused in (("actor", 4), ("critic", 2)):
            assert result["metrics"][f"{role}/updates"] == 4 - refused
            assert result["metrics"][f"{role}/skipped_updates"] == refused
