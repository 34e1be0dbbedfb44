"""Policy losses with a band: its edges, settings, the output layer; values and slopes of tokens are in test_tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megappo.config import ConfigError, load_config
from megappo.ppo.methods import find_objective
from megappo_kernels.backend import use_backend
from megappo_kernels.blocks import CHUNK_BYTES
from megappo_kernels.losses import PolicyInputs, ppo_token_loss
from megappo_kernels.metrics import shown
from megappo_kernels.objectives import PolicyObjective
from megappo_kernels.ppo_head import ppo_head_loss
from megappo_kernels.surrogates import BANDS
from tests.support.kernels import head, policy_inputs, relative
from tests.support.oracles import algorithm
from tests.support.oracles import kernels as reference
from tests.support.places import BASE

NARROW: dict[str, dict[str, Any]] = {
    "dis": {"band_low": 0.2, "band_high": 0.3},
    "cispo": {"band_low": 0.3, "band_high": 0.2},
    "gspo": {"band_low": 0.1, "band_high": 0.1},
    "sapo": {},
    "dppo_tv": {"band_low": 0.001, "band_high": 0.002, "weight_cap": 1.5},
    "dppo_kl": {"band_low": 5e-5, "band_high": 1e-4},
}
LENGTHS = (1, 9, 30, 4)
SEQUENCES = torch.arange(4).repeat_interleave(torch.tensor(LENGTHS))


def losses(name: str, ratios: Tensor, advantages: Tensor, **settings: float) -> tuple[list[float], dict[str, float]]:
    """Slopes in the log-probabilities of tokens with these ratios, and what is reported of them."""
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
def test_the_edges_belong_to_the_band(name: str) -> None:
    """The numbers next to them on the outside do not; of either sign of the advantage but where a clip is meant."""
    edges = torch.tensor([0.75, 1.5], dtype=torch.float64)
    edges = (torch.full_like(edges, -2.0) - (torch.full_like(edges, -2.0) - edges.log())).exp()  # as they come out
    low, high = 1 - float(edges[0]), float(edges[1]) - 1
    assert (1 - low, 1 + high) == tuple(edges.tolist())
    outside = torch.tensor([edges[0] * (1 - 1e-9), edges[1] * (1 + 1e-9)], dtype=torch.float64)
    ratios = torch.cat([edges, outside])
    advantages = torch.tensor([-2.0, 3.0, -2.0, 3.0], dtype=torch.float64)
    slopes, metrics = losses(name, ratios, advantages, band_low=low, band_high=high)
    kept = [2 * float(edges[0]), -3 * float(edges[1])]
    beyond = kept if name == "cispo" else [0.0, 0.0]  # held at the edge, or left out
    assert slopes == pytest.approx(kept + beyond, rel=1e-9, abs=0)
    assert (metrics["masked_below"], metrics["masked_above"]) == (0.25, 0.25)
    assert metrics["band_position"] == pytest.approx(0.5)
    slopes, _ = losses(name, outside, -advantages[:2], band_low=low, band_high=high)
    if name == "gspo":  # a clip lets go what comes back
        assert slopes == pytest.approx([-2 * float(outside[0]), 3 * float(outside[1])])
    else:
        assert slopes == pytest.approx([0.0, 0.0] if name == "dis" else [-kept[0], -kept[1]])


def test_tokens_are_left_out_by_their_change_of_probability() -> None:
    """Of 1 in 100 to 9 in 100 is nine times as much, but no more than 8 in 100; KL by its definition."""
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
            slopes, metrics = losses(name, ratios, advantages, band_low=0.9, band_high=factor * change, weight_cap=4.0)
            assert slopes == pytest.approx([-4.0 if not above else 0.0, 4.0, -0.25, 0.25])
            assert metrics["masked_above"] == above and metrics["clipfrac_lower"] == 0
    assert old[2] > 0.5, "whose fall is left out where the advantage is negative"
    slopes, metrics = losses("dppo_tv", ratios, advantages, band_low=0.4, band_high=0.9)
    assert slopes[2:] == pytest.approx([-0.25, 0.0]) and metrics["masked_below"] == 0.25


def test_probabilities_of_one_and_above_have_a_divergence() -> None:
    """What rounding leaves of a certain token is no NaN."""
    certain = torch.tensor([0.0, 1e-7, -1e-9, -30.0], requires_grad=True)
    inputs = PolicyInputs(torch.tensor([1e-7, 0.0, 0.0, -1e-8]), torch.ones(4), torch.ones(4), torch.ones(4) > 0)
    for backend in ("torch", "triton"):
        with use_backend(backend):
            out = ppo_token_loss(logprob=certain, inputs=inputs, objective=PolicyObjective(policy_loss="dppo_kl"))
        assert all(x.isfinite().all() for x in (*out.metrics.values(), *torch.autograd.grad(out.loss, certain)))


def test_gspo_of_tokens_is_gspo_where_a_sequences_advantages_are_equal() -> None:
    """Its gradient is that of the sequence's clipped ratio, of which every token has the same share."""
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
@pytest.mark.parametrize("name", NARROW)
def test_the_output_layer(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks cut through sequences; some tokens are masked and hold garbage, some have no weight."""
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 6 * 150 * 16)
    case = head("random", torch.float32, rows=sum(LENGTHS), features=16, vocab=150)
    exact = case.exact()
    logprob, entropy = reference.linear_logprob(exact.hidden, exact.weight, exact.labels)
    given = policy_inputs(logprob, seed=5).tensors()
    given["weights"][3::5], given["sequences"] = 0.0, SEQUENCES
    narrow = {n: x.float() if x.is_floating_point() else x for n, x in given.items()}
    with use_backend(backend):  # type: ignore[arg-type]
        objective = PolicyObjective(policy_loss=name, **NARROW[name])
        out = ppo_head_loss(case.hidden, case.weight, case.labels, PolicyInputs(**narrow), objective=objective)
    out.loss.backward()
    given["mask"] = given["mask"] & (given["weights"] != 0)
    truth = algorithm.policy_loss(logprob=logprob, entropy=entropy, policy_loss=name, **given, **NARROW[name])  # type: ignore[arg-type]
    truth.loss.backward()
    assert out.loss.item() == pytest.approx(truth.loss.item(), abs=1e-6)
    for mine, true in zip(case.gradients(), exact.gradients(), strict=True):
        assert relative(mine, true) < 1e-5
    for metric in ("masked_below", "masked_above", "token_weight.mean", "token_weight.m2", "band_position"):
        assert out.metrics[metric].item() == pytest.approx(truth.metrics[metric].item(), rel=1e-4, abs=1e-5), metric
    assert name == "sapo" or 0 < float(out.metrics["clipfrac"]) < float(out.metrics["count"])


def test_a_rank_without_tokens_reports_what_the_others_do() -> None:
    case = head("random", torch.float32, rows=4, features=8, vocab=40)
    inputs = policy_inputs(torch.zeros(4), seed=0)
    inputs.mask[:] = False
    out = ppo_head_loss(
        case.hidden, case.weight, case.labels, inputs, objective=PolicyObjective(policy_loss="gspo")
    )  # without sequences: nobody asks
    out.loss.backward()
    assert all(float(x) == 0 for x in out.metrics.values()) and all((g == 0).all() for g in case.gradients())


def test_the_effective_sample_size() -> None:
    """1 where all tokens weigh alike, a half where half of them weigh nothing, 0 where all are left out."""
    ratios = torch.tensor([1.0, 1.0, 9.0, 9.0], dtype=torch.float64)
    for chosen, size in ((ratios[:2], 1.0), (ratios, 0.5), (ratios[2:], 0.0)):
        _, metrics = losses("dis", chosen, torch.ones_like(chosen), band_low=0.8, band_high=3.0)
        assert metrics["effective_sample_size"] == pytest.approx(size)


def settings(*overrides: str) -> PolicyObjective:
    return find_objective(load_config(BASE, overrides).algorithm, penalty_coef=1.0)


def test_a_band_is_the_losss_own_or_as_given() -> None:
    for name, (low, high) in BANDS.items():
        bypass = ["algorithm.old_logprob=bypass"] if name == "dis" else []
        found = settings(f"algorithm.policy_loss={name}", *bypass)
        assert (found.policy_loss, found.band_low, found.band_high, found.weight_cap) == (name, low, high, 20.0)
        assert settings(f"algorithm.policy_loss={name}", *bypass, "algorithm.band.high=7").band_high == 7.0
    found = settings("algorithm.policy_loss=dppo_kl", "algorithm.band={low: 0.01, cap: 5}")
    assert (found.band_low, found.band_high, found.weight_cap) == (0.01, 0.05, 5.0)
    found = settings("algorithm.policy_loss=sapo", "algorithm.gate={negative: 2}")
    assert (found.gate_positive, found.gate_negative) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["policy_loss=dis"], "old_logprob is decoupled; set old_logprob: bypass"),
        (["band.low=0.1"], "band is given, but policy_loss 'clip' has no band; set clip_low and clip_high"),
        (["policy_loss=sapo", "band.low=0.1"], "policy_loss 'sapo' has no band; set gate, or policy_loss to dis"),
        (["policy_loss=cispo", "band.cap=3"], "band.cap is 3, but policy_loss 'cispo' caps no weights; remove it"),
        (["gate.positive=2"], "gate is given, but policy_loss is 'clip'; remove it, or set policy_loss: sapo"),
        (["policy_loss=cispo", "band.low=1.5"], "algorithm.band.low"),
        (["policy_loss=sapo", "gate.positive=51"], "algorithm.gate.positive"),
        (["policy_loss=dpo_tv"], "did you mean 'dppo_tv'"),
    ],
)
def test_what_does_not_go_together_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        settings(*(f"algorithm.{text}" for text in overrides))
    assert words in str(error.value)
