"""Policy losses with a band: edges, settings and the output layer. Values and slopes of tokens are in test_tokens."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from megappo.config import ConfigError, load_config
from megappo.config.fields import find_field
from megappo.config.sections.algorithm import AlgorithmSettings
from megappo.ppo.assembly.methods import find_objective
from megappo.ppo.reports.advice import Advisor, advice_text
from megappo_kernels.backend import use_backend
from megappo_kernels.blocks import CHUNK_BYTES
from megappo_kernels.losses import PolicyInputs, ppo_token_loss
from megappo_kernels.metrics import shown
from megappo_kernels.objectives import PolicyObjective
from megappo_kernels.ppo_head import ppo_head_loss
from megappo_kernels.surrogates import POLICY_LOSSES, BuiltinLoss, LossSettings
from tests.support.kernels import head, policy_inputs, relative
from tests.support.oracles import algorithm
from tests.support.oracles import kernels as reference
from tests.support.oracles.policy_losses import CASES
from tests.support.places import BASE, ROOT

LENGTHS = (1, 9, 30, 4)
SEQUENCES = torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))


def losses(name: str, ratios: Tensor, advantages: Tensor, **settings: float) -> tuple[list[float], dict[str, float]]:
    """Return the slopes in the log-probabilities of tokens with these ratios, and the metrics."""
    logprob = torch.full_like(ratios, -2.0).requires_grad_()
    one = torch.ones_like(ratios)
    inputs = PolicyInputs(logprob.detach() - ratios.log(), advantages, one, one > 0, sequences=torch.arange(len(one)))
    out = ppo_token_loss(
        logprob=logprob,
        inputs=inputs,
        objective=PolicyObjective(policy_loss=name, **settings),  # type: ignore[arg-type]
    )
    (slopes,) = torch.autograd.grad(out.loss, logprob)
    return slopes.tolist(), shown([{key: float(x) for key, x in out.metrics.items()}])


@pytest.mark.parametrize("name", ["dis", "cispo", "gspo"])
def test_edges_belong_to_the_band(name: str) -> None:
    """Numbers just outside of the edges do not belong to the band. The rule applies to both signs of the advantage,
    except for a clip."""
    edges = torch.tensor([0.75, 1.5], dtype=torch.float64)
    edges = (torch.full_like(edges, -2.0) - (torch.full_like(edges, -2.0) - edges.log())).exp()  # after rounding
    low, high = 1 - float(edges[0]), float(edges[1]) - 1
    assert (1 - low, 1 + high) == tuple(edges.tolist())
    outside = torch.tensor([edges[0] * (1 - 1e-9), edges[1] * (1 + 1e-9)], dtype=torch.float64)
    ratios = torch.cat([edges, outside])
    advantages = torch.tensor([-2.0, 3.0, -2.0, 3.0], dtype=torch.float64)
    slopes, metrics = losses(name, ratios, advantages, band_low=low, band_high=high)
    edge_slopes = [2 * float(edges[0]), -3 * float(edges[1])]
    beyond = edge_slopes if name == "cispo" else [0.0, 0.0]  # limited to the edge or masked
    assert slopes == pytest.approx(edge_slopes + beyond, rel=1e-9, abs=0)
    assert (metrics["masked_below"], metrics["masked_above"]) == (0.25, 0.25)
    assert metrics["band_position"] == pytest.approx(0.5)
    slopes, _ = losses(name, outside, -advantages[:2], band_low=low, band_high=high)
    if name == "gspo":  # a clip keeps tokens that return to the band
        assert slopes == pytest.approx([-2 * float(outside[0]), 3 * float(outside[1])])
    else:
        assert slopes == pytest.approx([0.0, 0.0] if name == "dis" else [-edge_slopes[0], -edge_slopes[1]])


def test_tokens_are_masked_by_change_of_probability() -> None:
    """An increase of the probability from 0.01 to 0.09 is a ratio of nine, but a difference of only 0.08. The KL
    follows the definition."""
    new = 0.1353352832366127  # e^-2
    ratios = torch.tensor([9.0, 9.0, 0.25, 0.25], dtype=torch.float64)
    old = [new / ratio for ratio in ratios.tolist()]
    tv, kl = (
        new - old[0],
        old[0] * torch.tensor(1 / 9).log() + (1 - old[0]) * torch.tensor((1 - old[0]) / (1 - new)).log(),
    )
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    for name, change in (("dppo_tv", tv), ("dppo_kl", kl)):
        for factor, above in ((1.01, 0.0), (0.99, 0.25)):
            slopes, metrics = losses(name, ratios, advantages, band_low=0.9, band_high=factor * change, band_cap=4.0)
            assert slopes == pytest.approx([-4.0 if not above else 0.0, 4.0, -0.25, 0.25])
            assert metrics["masked_above"] == above and metrics["clipfrac_lower"] == 0
    assert old[2] > 0.5, "a decrease must be masked if the advantage is negative"
    slopes, metrics = losses("dppo_tv", ratios, advantages, band_low=0.4, band_high=0.9)
    assert slopes[2:] == pytest.approx([-0.25, 0.0]) and metrics["masked_below"] == 0.25


def test_probabilities_above_one_have_a_finite_divergence() -> None:
    """Rounding can make the probability of a certain token exceed 1. The divergence is not NaN."""
    certain = torch.tensor([0.0, 1e-7, -1e-9, -30.0], requires_grad=True)
    inputs = PolicyInputs(torch.tensor([1e-7, 0.0, 0.0, -1e-8]), torch.ones(4), torch.ones(4), torch.ones(4) > 0)
    for backend in ("torch", "triton"):
        with use_backend(backend):
            out = ppo_token_loss(logprob=certain, inputs=inputs, objective=PolicyObjective(policy_loss="dppo_kl"))
        assert all(x.isfinite().all() for x in (*out.metrics.values(), *torch.autograd.grad(out.loss, certain)))


def test_token_gspo_equals_sequence_gspo_for_equal_advantages() -> None:
    """The gradient equals the gradient of the clipped ratio of the sequence. All tokens have equal shares."""
    g = torch.Generator().manual_seed(3)
    logprob = (-torch.rand(sum(LENGTHS), generator=g, dtype=torch.float64)).requires_grad_()
    old = logprob.detach() + 0.3 * torch.randn(sum(LENGTHS), generator=g)
    of_sequences = torch.tensor([1.0, -0.5, 2.0, -1.0], dtype=torch.float64)
    weights = 1 / torch.tensor(LENGTHS).double()[SEQUENCES]
    whole = torch.stack([x.mean() for x in (logprob - old).split(LENGTHS)]).exp()
    limited = whole.clamp(0.95, 1.05)
    truth = torch.maximum(-of_sequences * whole, -of_sequences * limited).sum()
    inputs = PolicyInputs(old, of_sequences[SEQUENCES], weights, weights > 0, sequences=SEQUENCES)
    objective = PolicyObjective(policy_loss="gspo", band_low=0.05, band_high=0.05)
    mine = ppo_token_loss(logprob=logprob, inputs=inputs, objective=objective)
    torch.testing.assert_close(mine.loss, truth)
    torch.testing.assert_close(*(torch.autograd.grad(loss, logprob)[0] for loss in (mine.loss, truth)))
    with pytest.raises(ValueError, match="pass sequence numbers as inputs.sequences"):
        ppo_token_loss(logprob=logprob, inputs=PolicyInputs(old, old, weights, weights > 0), objective=objective)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_band_losses_in_the_output_layer(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks split sequences. Some tokens are masked with garbage, and some tokens have no weight."""
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 6 * 150 * 16)
    options: dict[str, Any] = CASES[name][1]
    case = head("random", torch.float32, rows=sum(LENGTHS), features=16, vocab=150)
    exact = case.exact()
    logprob, entropy = reference.linear_logprob(exact.hidden, exact.weight, exact.labels)
    exact_inputs = policy_inputs(logprob, seed=5).tensors()
    exact_inputs["weights"][3::5], exact_inputs["sequences"] = 0.0, SEQUENCES
    narrow = {n: x.float() if x.is_floating_point() else x for n, x in exact_inputs.items()}
    with use_backend(backend):  # type: ignore[arg-type]
        objective = PolicyObjective(policy_loss=name, **options)
        out = ppo_head_loss(case.hidden, case.weight, case.labels, PolicyInputs(**narrow), objective=objective)
    out.loss.backward()
    exact_inputs["mask"] = exact_inputs["mask"] & (exact_inputs["weights"] != 0)
    truth = algorithm.policy_loss(logprob=logprob, entropy=entropy, policy_loss=name, **exact_inputs, **options)  # type: ignore[arg-type]
    truth.loss.backward()
    assert out.loss.item() == pytest.approx(truth.loss.item(), abs=1e-6)
    for mine, true in zip(case.gradients(), exact.gradients(), strict=True):
        assert relative(mine, true) < 1e-5
    for metric in ("masked_below", "masked_above", "token_weight.mean", "token_weight.m2", "band_position"):
        assert out.metrics[metric].item() == pytest.approx(truth.metrics[metric].item(), rel=1e-4, abs=1e-5), metric
    has_band = "band.low" in POLICY_LOSSES[name].settings
    assert not has_band or 0 < float(out.metrics["clipfrac"]) < float(out.metrics["count"])


def test_rank_without_tokens_reports_all_metrics() -> None:
    case = head("random", torch.float32, rows=4, features=8, vocab=40)
    inputs = policy_inputs(torch.zeros(4), seed=0)
    inputs.mask[:] = False
    out = ppo_head_loss(
        case.hidden, case.weight, case.labels, inputs, objective=PolicyObjective(policy_loss="gspo")
    )  # sequences are not needed without tokens
    out.loss.backward()
    assert all(float(x) == 0 for x in out.metrics.values()) and all((g == 0).all() for g in case.gradients())


def test_effective_sample_size() -> None:
    """The size is 1 for equal weights, 0.5 if half of the tokens are masked, and 0 if all tokens are masked."""
    ratios = torch.tensor([1.0, 1.0, 9.0, 9.0], dtype=torch.float64)
    for chosen, size in ((ratios[:2], 1.0), (ratios, 0.5), (ratios[2:], 0.0)):
        _, metrics = losses("dis", chosen, torch.ones_like(chosen), band_low=0.8, band_high=3.0)
        assert metrics["effective_sample_size"] == pytest.approx(size)


def settings(*overrides: str) -> PolicyObjective:
    return find_objective(load_config(BASE, overrides).algorithm, penalty_coef=1.0)


def test_band_has_defaults_for_each_loss() -> None:
    bands = {name: loss.settings for name, loss in POLICY_LOSSES.items() if "band.low" in loss.settings}
    assert set(bands) == {"dis", "cispo", "gspo", "dppo_tv", "dppo_kl"}
    for name, defaults in bands.items():
        bypass = ["algorithm.old_logprob=bypass"] if name == "dis" else []
        loss = settings(f"algorithm.policy_loss={name}", *bypass)
        band = (defaults["band.low"], defaults["band.high"])
        assert (loss.policy_loss, loss.band_low, loss.band_high, loss.band_cap) == (name, *band, 20.0)
        assert settings(f"algorithm.policy_loss={name}", *bypass, "algorithm.band.high=7").band_high == 7.0
    loss = settings("algorithm.policy_loss=dppo_kl", "algorithm.band={low: 0.01, cap: 5}")
    assert (loss.band_low, loss.band_high, loss.band_cap) == (0.01, 0.05, 5.0)
    loss = settings("algorithm.policy_loss=sapo", "algorithm.gate={negative: 2}")
    assert (loss.gate_positive, loss.gate_negative) == (1.0, 2.0)
    loss = settings("algorithm.clip_low=0.1", "algorithm.clip_high=0.3", "algorithm.dual_clip=null")
    assert (loss.clip_low, loss.clip_high, loss.dual_clip) == (0.1, 0.3, None)


def test_every_declared_loss_is_complete() -> None:
    """Each loss has documentation, an oracle, and settings that exist in the configuration and in the kernels."""
    description = " ".join((AlgorithmSettings.model_fields["policy_loss"].description or "").split())
    table = [line for line in (ROOT / "megappo/algo/README.md").read_text().splitlines() if line.startswith("|")]
    for name, loss in POLICY_LOSSES.items():
        assert f"`{name}` ({loss.meaning}; {next(iter(loss.settings))}" in description
        assert any(f"`{name}`" in row.split("|")[2] for row in table), f"{name} has no row in megappo/algo/README.md"
        for key in loss.settings:
            field = find_field(("algorithm", *key.split(".")))
            assert field is not None and field.description, key
    keys = {key.replace(".", "_") for loss in POLICY_LOSSES.values() for key in loss.settings}
    assert keys == {field.name for field in fields(LossSettings)}
    assert set(POLICY_LOSSES) == {"clip", "penalty", *CASES}


def test_declaration_of_a_loss_sets_its_rules_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    formula = POLICY_LOSSES["sapo"].formula
    other = BuiltinLoss(formula, "a test", {"gate.positive": 2.0}, needs_engine=True, ignores_outside=True)
    monkeypatch.setitem(POLICY_LOSSES, "other", other)
    base = {"policy_loss": "other", "old_logprob": "bypass"}
    assert AlgorithmSettings.model_validate(base).loss_settings == {"gate.positive": 2.0}
    assert AlgorithmSettings.model_validate(base | {"gate": {"positive": 3}}).loss_settings == {"gate.positive": 3.0}
    for changes, message in (
        ({"old_logprob": "decoupled"}, "policy_loss is other, which needs ratios to the engine's log-probabilities"),
        ({"band": {}}, "policy_loss 'other' reads gate.positive; remove band, or set policy_loss to dis, cispo"),
        ({"policy_loss": "clip", "gate": {}}, "remove gate, or set policy_loss to sapo or other"),
        ({"policy_loss": "othr"}, "did you mean 'other'"),
    ):
        with pytest.raises(ValueError, match=message):
            AlgorithmSettings.model_validate(base | changes)
    masked = {"actor/masked_below": 0.9, "actor/masked_above": 0.0}
    assert Advisor(AlgorithmSettings.model_validate(base)).observe(1, masked) == [advice_text("masked")]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["policy_loss=dis"], "old_logprob is decoupled; set old_logprob: bypass"),
        (["band.low=0.1"], "band is given, but policy_loss 'clip' reads clip_low, clip_high, dual_clip; remove band"),
        (["policy_loss=sapo", "band.low=0.1"], "reads gate.positive, gate.negative; remove band, or set"),
        (["policy_loss=cispo", "band.cap=3"], "band.cap is given, but policy_loss 'cispo' reads band.low, band.high; "),
        (["gate.positive=2"], "dual_clip; remove gate, or set policy_loss to sapo"),
        (["policy_loss=cispo", "band.low=1.5"], "algorithm.band.low"),
        (["policy_loss=sapo", "gate.positive=51"], "algorithm.gate.positive"),
        (["policy_loss=dpo_tv"], "did you mean 'dppo_tv'"),
    ],
)
def test_incompatible_settings_are_rejected(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings(*(f"algorithm.{text}" for text in overrides))
    assert message in str(error.value)
