"""PPO steps that cover each pair of features, compared with the one-process oracle.

The features are defined in `tests/support/features.py`. `--strength 3` covers each triple of features, and so on.
`--light` runs a few steps that cover each single feature.
"""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.families.adapters import target_names
from megappo.models.model_files import read_architecture
from tests.support import scenarios
from tests.support.adapters import write_adapters
from tests.support.features import ADAPTIVE_LAM, FACTORS, NLL_COEF, ROLES, Case, covering, goes_together
from tests.support.models import VOCAB
from tests.support.quick import cases
from tests.support.scenarios import World, run_step
from tests.support.step_checks import check_step, oracle_step

pytestmark = [pytest.mark.slow, pytest.mark.waits]

BUDGET = 40
"""Budget of a microbatch in tokens; the longest sample has 32 tokens."""
CAP, REJECT, REJECTED = 2.0, 1e8, -50.0
BALANCE = 0.05
ADAPTED = ("gemma2", "gemma3_text", "mixtral", "glm4_moe")
LOSSES = {"cispo": scenarios.CISPO, "gspo": scenarios.GSPO}
MODELS = {"": "model", "tied": "model-tied", "experts": "model-experts", "experts-replayed": "model-experts"}
# (prompt tokens, response tokens) of each sample.
LENGTHS: dict[str, list[tuple[int, int]]] = {
    "giant": [(12, 20)] + [(2, 1), (1, 2), (3, 1)] * 3 + [(2, 2), (1, 1)],
    "single": [(12, 1)] + [(12, 17 + i % 3) for i in range(scenarios.SAMPLES - 1)],
    # With CP 2 a sample is split into quarters. 16 tokens have bounds at 4, 8 and 12; the last quarter of 13 and 15
    # tokens is short.
    "edges": [(4, 12), (8, 8), (12, 4), (3, 13), (9, 7), (12, 3), (5, 11), (7, 9), (11, 5), (4, 9), (8, 5), (1, 7)],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        strength = 1 if metafunc.config.getoption("--light") else metafunc.config.getoption("--strength")
        covered = covering(strength, most_ranks=8 if strength > 2 else 4)
        metafunc.parametrize("case", covered, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("conformance"))


def samples_of(case: Case, plain: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the samples of the case. In `rejected`, the correction rejects all samples except three, which are
    rarely in the same minibatch."""
    kind = case["samples"].name
    if kind == "rejected":
        return [{**sample, "engine": -4.0 if i in (0, 5, 7) else REJECTED} for i, sample in enumerate(plain)]
    if kind == "turns":
        return [in_turns(sample) for sample in plain]
    if kind not in LENGTHS:
        return plain
    g = torch.Generator().manual_seed(8)
    return [
        {
            "tokens": torch.randint(1, VOCAB, (prompt + response,), generator=g).tolist(),
            "response": response,
            "score": float(torch.randn((), generator=g)),
        }
        for prompt, response in LENGTHS[kind]
    ]


def in_turns(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample with turns of three tokens and two environment tokens after each turn. The last token of a turn
    has the reward."""
    response = sample["response"]
    rewards = [[0.0, 0.0, 0.1 * (i + 1), None, None][i % 5] for i in range(response)]
    while rewards[-1] is None:  # the last token of a sample is from the model
        rewards[-1] = 0.0
        rewards.pop()
    return {
        **sample,
        "tokens": sample["tokens"][: len(sample["tokens"]) - response + len(rewards)],
        "response": len(rewards),
        "turn_rewards": rewards,
    }


@pytest.mark.versions
def test_step_of_each_case_equals_the_oracle(case: Case, world: World, tmp_path: Path) -> None:
    folder, samples, loss = world.folder(MODELS[case["model"].name]), samples_of(case, world.samples), case["loss"].name
    if case["model"].name == "experts-replayed":
        samples = scenarios.with_routing(samples)
    adapters = adapters_for(folder) if case["weights"].name == "lora" else None
    begins = [] if adapters is None else [f"{role}.start_from={adapters}" for role in ROLES]
    overrides = [*case.overrides(), *scenarios.ONCE, *LOSSES.get(loss, ()), *begins]
    result = run_step(folder, case.ranks, samples, overrides, tmp_path / "out")
    settings = copy.copy(scenarios.ORACLE)
    if loss in ("seq-mean", "gspo"):
        settings.aggregation = "seq-mean-token-mean"
    if loss in LOSSES:
        settings.policy_loss = loss
    if loss == "gspo":
        settings.clip_low = settings.clip_high = scenarios.GSPO_CLIP
    if case["model"].name == "experts":
        settings.actor_balance = settings.critic_balance = BALANCE
    if case["samples"].name == "rejected":
        settings.importance_cap, settings.reject_above = CAP, REJECT
    if case["estimates"].name == "vapo":
        settings.adaptive_lam, settings.critic_lam, settings.nll_coef = ADAPTIVE_LAM, 1.0, NLL_COEF
    expected = oracle_step(folder, samples, settings, result["minibatches"], adapters)
    check_step(result, tmp_path / "out", samples, *expected, base=None if adapters is None else folder)


MINIMUM = ("rollout.min_response_tokens=3", "rollout.stop_token_ids=[5, 9, 70]")
MINIMUM_LAYOUTS = {
    "tp2": ["layout.tensor_parallel=2"],
    "cp2": ["layout.context_parallel=2"],
    "pp2": ["layout.pipeline_parallel=2"],
    "dp2": [],
}


@pytest.mark.parametrize("kind", ["plain", "turns"])
@pytest.mark.parametrize("layout", cases(MINIMUM_LAYOUTS, quick=["tp2"]))
def test_minimum_tokens_use_the_distribution_of_the_engine(
    world: World, tmp_path: Path, layout: str, kind: str
) -> None:
    """Stop tokens are excluded at the first three positions of each response and of each turn. If a stop token is
    sampled at such a position, the distribution of this token includes the stop tokens."""
    folder = world.folder("model")
    samples = [*world.samples] if kind == "plain" else [in_turns(sample) for sample in world.samples]
    samples[3] = {**samples[3], "tokens": [*samples[3]["tokens"]]}
    samples[3]["tokens"][-samples[3]["response"]] = 9
    overrides = [f"{role}.{setting}" for role in ROLES for setting in MINIMUM_LAYOUTS[layout]]
    overrides += [*scenarios.ONCE, *MINIMUM]
    result = run_step(folder, 2, samples, overrides, tmp_path / "out")
    settings = copy.copy(scenarios.ORACLE)
    settings.least_tokens, settings.stop_token_ids = 3, tuple(result["stop_token_ids"])
    assert {5, 9, 70} < set(settings.stop_token_ids)
    expected = oracle_step(folder, samples, settings, result["minibatches"])
    check_step(result, tmp_path / "out", samples, *expected)


def adapters_for(folder: Path) -> Path:
    """Write a PEFT folder with adapters on every matrix next to the folder of the model."""
    out = folder.with_name(f"{folder.name}-adapters")
    return out if out.exists() else write_adapters(out, folder, rank=4, alpha=6, seed=13)


def test_adapters_only_on_experts(world: World, tmp_path: Path) -> None:
    """The actor trains no dense weight."""
    targets = ("gate_proj", "up_proj", "down_proj")
    step_with_adapters(world, tmp_path, "model-experts", targets, ["layout.expert_parallel=2"])


@pytest.mark.parametrize("family", cases(ADAPTED, exhaustive=ADAPTED[1:]))
def test_adapters_of_families_with_special_layers(world: World, tmp_path: Path, family: str) -> None:
    """Adapters of Gemma are before the norms that follow attention and MLP. In GLM, one name selects matrices of
    dense layers, routed experts and shared experts. The layers of the other families are in the steps above."""
    folder = world.folder(f"model-{family}")
    arch = read_architecture(folder)
    experts = ", expert_parallel: 2" if arch.experts else ""
    layout = [f"layout={{tensor_parallel: 2, sequence_parallel: true{experts}}}"]
    step_with_adapters(world, tmp_path, folder.name, target_names(arch), layout)


def step_with_adapters(world: World, tmp_path: Path, model: str, targets: tuple[str, ...], of_roles: list[str]) -> None:
    """Compare a step on two ranks with the oracle."""
    folder = world.folder(model)
    adapters = write_adapters(tmp_path / "adapters", folder, rank=4, alpha=6, seed=14, targets=targets)
    lora = f"lora={{rank: 4, alpha: 6, targets: [{', '.join(targets)}]}}"
    overrides = [f"{role}.{x}" for role in ROLES for x in (lora, f"start_from={adapters}", *of_roles)]
    overrides += ["actor.optimizer.distributed=true", *scenarios.ONCE]
    result = run_step(folder, 2, world.samples, overrides, tmp_path / "out")
    expected = oracle_step(folder, world.samples, copy.copy(scenarios.ORACLE), result["minibatches"], adapters)
    check_step(result, tmp_path / "out", world.samples, *expected, base=folder)


def test_samples_match_the_names_of_their_kinds(world: World) -> None:
    """In `single`, the sample with one response token needs its own microbatch. In `giant`, one sample has at least
    eight times the tokens of any other sample."""
    totals = [prompt + response for prompt, response in LENGTHS["single"]]
    assert totals[0] + min(totals[1:]) > BUDGET and LENGTHS["single"][0][1] == 1
    assert all(len(lengths) == scenarios.SAMPLES for lengths in LENGTHS.values())
    assert max(map(sum, LENGTHS["giant"])) >= 8 * sorted(map(sum, LENGTHS["giant"]))[-2]


def test_cases_cover_each_pair_of_features() -> None:
    """The only exceptions are two pairs that are incompatible."""
    cases = covering(2, most_ranks=4)
    assert len(cases) < 32 and sum(case.ranks for case in cases) < 96
    apart = []
    for first, second in itertools.combinations(FACTORS, 2):
        for a, b in itertools.product(FACTORS[first], FACTORS[second]):
            if not any(case[first] == a and case[second] == b for case in cases):
                apart.append({a.name, b.name})
    assert apart == [{"experts", "tp2"}, {"experts-replayed", "tp2"}]
    assert not goes_together(covering(2, most_ranks=4)[1], most_ranks=1)
