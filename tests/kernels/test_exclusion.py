"""Rows with excluded tokens, as in sampling below a minimum length, and statistics of rows, compared with float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megappo_kernels.backend import use_backend
from megappo_kernels.lm_head import linear_logprob
from megappo_kernels.losses import PolicyInputs
from megappo_kernels.objectives import PolicyObjective
from megappo_kernels.ppo_head import ppo_head_loss
from megappo_kernels.rows import Exclusion, Scaling, empty_statistics, logprob_and_entropy, merge_parts
from megappo_kernels.softmax import update_statistics
from tests.support.kernels import Head, head, policy_inputs, relative
from tests.support.oracles import kernels as reference

BACKENDS = ("torch", "triton")
VOCAB, ROWS, STOPS = 4999, 24, (1, 2300, 4998)
TEMPERATURE = 0.7


def restricted(kind: str, dtype: torch.dtype, features: int = 24) -> tuple[Head, Exclusion]:
    """Return a case and an exclusion. Every second row excludes three tokens, and one of these tokens has nearly all
    probability. The label of row 0 is an excluded token."""
    case = head(kind, dtype, rows=ROWS, features=features, vocab=VOCAB, padding=3)
    with torch.no_grad():
        case.weight[STOPS[1]] = 3 * case.hidden[2] / case.hidden[2].norm() * 6
    case.labels[torch.isin(case.labels, torch.tensor(STOPS))] = 7
    case.labels[0] = STOPS[0]
    return case, Exclusion(torch.arange(ROWS) % 2 == 0, STOPS)


def expected(exact: Head, exclusion: Exclusion, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of the distributions without the excluded tokens, from float64 logits."""
    logits_TV = (exact.hidden @ exact.weight.T)[:, :VOCAB]
    if softcap is not None:
        logits_TV = softcap * torch.tanh(logits_TV / softcap)
    excluded_TV = torch.zeros(logits_TV.shape, dtype=torch.bool)
    excluded_TV[:, list(STOPS)] = exclusion.rows_T[:, None]
    excluded_TV[0] = False
    logp_TV = (logits_TV / TEMPERATURE).masked_fill(excluded_TV, -torch.inf).log_softmax(-1)
    entropy_T = -(logp_TV.exp() * logp_TV.masked_fill(excluded_TV, 0.0)).sum(-1)
    return logp_TV.gather(1, exact.labels[:, None])[:, 0], entropy_T


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["random", "peaky"])
@pytest.mark.parametrize("softcap", [None, 15.0])
def test_restricted_rows_are_exact(backend: str, kind: str, softcap: float | None) -> None:
    case, exclusion = restricted(kind, torch.float32)
    exact = case.exact()
    options: dict[str, Any] = {"temperature": TEMPERATURE, "softcap": softcap, "valid_vocab": VOCAB}
    up = torch.randn(2, ROWS, generator=torch.Generator().manual_seed(7))
    with use_backend(backend):  # type: ignore[arg-type]
        logprob, entropy = linear_logprob(case.hidden, case.weight, case.labels, exclusion=exclusion, **options)
        (logprob * up[0] + entropy * up[1]).sum().backward()
    true_logprob, true_entropy = expected(exact, exclusion, softcap)
    (true_logprob * up[0] + true_entropy * up[1]).sum().backward()
    torch.testing.assert_close(logprob.double(), true_logprob, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(entropy.double(), true_entropy, rtol=1e-5, atol=1e-4)
    for mine, truth in zip(case.gradients(), exact.gradients(), strict=True):
        assert relative(mine, truth) < 2e-5
    # Without the exclusion, restricted rows differ and other rows are bit-identical.
    with use_backend(backend):  # type: ignore[arg-type]
        plain, _ = linear_logprob(case.hidden, case.weight, case.labels, **options)
    assert torch.equal(plain[1::2], logprob[1::2]) and plain[0] == logprob[0]
    assert float((plain[2::2] - logprob[2::2]).abs().max()) > 0.1


def test_fused_kernel_computes_restricted_rows_separately() -> None:
    case, exclusion = restricted("random", torch.bfloat16, features=64)
    with use_backend("triton"), torch.no_grad():
        logprob, entropy = linear_logprob(
            case.hidden, case.weight, case.labels, temperature=TEMPERATURE, valid_vocab=VOCAB, exclusion=exclusion
        )
    true_logprob, true_entropy = expected(case.exact(), exclusion, None)
    torch.testing.assert_close(logprob.double(), true_logprob, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(entropy.double(), true_entropy, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize("policy_loss", ["clip", "gspo"])
def test_loss_of_restricted_rows_is_exact(backend: str, softcap: float | None, policy_loss: str) -> None:
    """`gspo` uses whole sequences and recomputes the logits of chunks."""
    case, exclusion = restricted("random", torch.float32)
    exact = case.exact()
    true_logprob, true_entropy = expected(exact, exclusion, softcap)
    exact_inputs = policy_inputs(true_logprob, seed=3, imitates=False)
    inputs = {k: v.float() if v.is_floating_point() else v for k, v in exact_inputs.tensors().items()}
    sequences = torch.arange(ROWS) // 6 if policy_loss == "gspo" else None
    objective = PolicyObjective(policy_loss=policy_loss, entropy_coef=0.01)
    with use_backend(backend):  # type: ignore[arg-type]
        mine = ppo_head_loss(
            case.hidden, case.weight, case.labels,
            PolicyInputs(**{**inputs, "sequences": sequences} if sequences is not None else inputs),
            objective=objective, temperature=TEMPERATURE, softcap=softcap, valid_vocab=VOCAB, exclusion=exclusion,
        )  # fmt: skip
    mine.loss.backward()
    counted = exact_inputs.mask & (exact_inputs.weights != 0)
    torch.testing.assert_close(mine.logprob_T[counted].double(), true_logprob[counted], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(mine.entropy_T[counted].double(), true_entropy[counted], rtol=1e-5, atol=1e-4)
    if policy_loss == "clip":
        numbers: dict[str, Any] = {**exact_inputs.tensors(), "entropy_coef": 0.01}
        truth = reference.policy_loss(logprob=true_logprob, entropy=true_entropy, **numbers)
        truth.backward()
        assert abs(float(mine.loss - truth)) < 1e-4 * max(1.0, abs(float(truth)))
        for got, expected_gradient in zip(case.gradients(), exact.gradients(), strict=True):
            assert relative(got, expected_gradient) < 1e-4


def test_vocabulary_parts_merge_exactly() -> None:
    """The parts have distant logits and different sizes, and one part has only padding."""
    g = torch.Generator().manual_seed(0)
    logits = 30 * torch.randn(9, 20, generator=g, dtype=torch.float64)
    labels = torch.randint(0, 20, (9,), generator=g)
    parts = []
    for first, last in ((0, 3), (3, 19), (19, 20), (20, 20)):
        parts.append(empty_statistics(9, logits))
        if last > first:
            update_statistics(
                parts[-1], logits[:, first:last].clone(), labels - first, Scaling(1.0, None), entropy=True, triton=False
            )
    logprob, entropy = logprob_and_entropy(merge_parts(torch.stack(parts)), entropy=True)
    true_logprob, true_entropy = reference.logits_logprob(logits, labels)
    torch.testing.assert_close(logprob, true_logprob)
    torch.testing.assert_close(entropy, true_entropy)


def test_rounding_keeps_probabilities_at_most_one() -> None:
    """If rounding makes the sum of exponentials smaller than 1, the token has probability 1 and no entropy."""
    almost = 1.0 - 2.0**-24
    stats_4T = torch.tensor([[3.0], [almost], [1e-7], [3.0]])
    assert float(torch.log(stats_4T[1])) < 0
    logprob_T, entropy_T = logprob_and_entropy(stats_4T, entropy=True)
    assert (logprob_T.tolist(), entropy_T.tolist()) == ([0.0], [0.0])
