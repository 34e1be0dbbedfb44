"""Kernels of the output layer compared with float64: values, gradients and common errors."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import embedding
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megappo_kernels.backend import use_backend
from megappo_kernels.blocks import CHUNK_BYTES
from megappo_kernels.lm_head import linear_logprob, vocabulary_range
from megappo_kernels.logits import logits_logprob
from megappo_kernels.losses import PolicyInputs, ppo_token_loss
from megappo_kernels.objectives import PolicyObjective
from megappo_kernels.ppo_head import ppo_head_loss
from tests.support.kernels import KINDS, Head, Rounding, head, policy_inputs, relative
from tests.support.oracles import kernels as reference
from tests.support.quick import cases

BACKENDS = ("torch", "triton")
# Gradients are returned in their own dtype, and bfloat16 has 8 bits. Triton's interpreter truncates float32 to
# bfloat16, but hardware rounds, so the error doubles. Triton gradients are tested in float32, and log-probabilities in
# both dtypes.
GRADIENT_GATE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}


def upstream(rows: int) -> Tensor:
    return torch.randn(2, rows, generator=torch.Generator().manual_seed(7))


def compare(case: Head, exact: Head, **options: Any) -> None:
    """Check that forward and backward of linear_logprob are within the gates."""
    up, dtype = upstream(len(case.labels)), case.hidden.dtype
    logprob, entropy = linear_logprob(case.hidden, case.weight, case.labels, **options)
    (logprob * up[0] + entropy * up[1]).sum().backward()
    true_logprob, true_entropy = reference.linear_logprob(exact.hidden, exact.weight, exact.labels, **options)
    (true_logprob * up[0] + true_entropy * up[1]).sum().backward()
    rounding = Rounding.of(case, **options)
    assert logprob.dtype == entropy.dtype == torch.float32
    assert (logprob <= 0).all() and (entropy >= 0).all()
    assert ((logprob - true_logprob).abs() <= rounding.logprob_T).all()
    assert ((entropy - true_entropy).abs() <= rounding.entropy_T).all()
    for mine, truth in zip(case.gradients(), exact.gradients(), strict=True):
        assert mine.dtype == dtype
        assert relative(mine, truth) <= max(GRADIENT_GATE[dtype], rounding.worst)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1100, 1511, 18992, 32768])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_is_exact(kind: str, vocab: int, dtype: torch.dtype) -> None:
    case = head(kind, dtype, rows=37, features=40, vocab=vocab, padding=8)
    compare(case, case.exact(), temperature=0.7, valid_vocab=vocab)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1100, 4999])
def test_triton_is_exact(kind: str, vocab: int) -> None:
    case = head(kind, torch.float32, rows=5, features=24, vocab=vocab, padding=3)
    with use_backend("triton"):
        compare(case, case.exact(), temperature=0.7, valid_vocab=vocab)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize(
    ("rows", "features", "vocab"), cases([(5, 24, 1100), (130, 200, 2500), (3, 64, 4999)], quick=[(3, 64, 4999)])
)
def test_fused_triton_is_exact(kind: str, entropy: bool, rows: int, features: int, vocab: int) -> None:
    case = head(kind, torch.bfloat16, rows=rows, features=features, vocab=vocab, padding=5)
    exact = case.exact()
    options: dict[str, Any] = {"temperature": 0.7, "valid_vocab": vocab}
    with use_backend("triton"), torch.no_grad():
        logprob, measured = linear_logprob(case.hidden, case.weight, case.labels, entropy=entropy, **options)
    true_logprob, true_entropy = reference.linear_logprob(exact.hidden, exact.weight, exact.labels, **options)
    rounding = Rounding.of(case, **options)
    assert (logprob <= 0).all() and ((logprob - true_logprob).abs() <= rounding.logprob_T).all()
    assert ((measured - (true_entropy if entropy else 0)).abs() <= rounding.entropy_T).all()


@pytest.mark.waits
@pytest.mark.slow
def test_gates_are_valid_for_other_instruction_sets() -> None:
    """Older machines and machines of other vendors have another order of sums, other exponentials and other matrix
    products."""
    chosen = "head_loss_is_the_loss or (fused_triton and 4999) or (torch_is_exact and 1100)"
    other = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-k", chosen, __file__]
    done = subprocess.run(command, env=os.environ | other, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, "per row"])
def test_temperature_and_softcap(backend: str, softcap: float | None, temperature: float | str) -> None:
    case = head("peaky", torch.float32, rows=9, features=16, vocab=333, padding=2)
    exact = case.exact()
    temperatures = torch.linspace(0.3, 2, 9) if temperature == "per row" else temperature
    with use_backend(backend):  # type: ignore[arg-type]
        compare(case, exact, temperature=temperatures, softcap=softcap, valid_vocab=333)


def test_gradcheck() -> None:
    case = head("random", torch.float64, rows=4, features=6, vocab=10, padding=1)
    labels = case.labels
    assert torch.autograd.gradcheck(
        lambda h, w: linear_logprob(h, w, labels, temperature=0.7, softcap=3.0, valid_vocab=10),
        (case.hidden, case.weight),
    )
    assert torch.autograd.gradcheck(
        lambda x: logits_logprob(x, labels, temperature=0.7, softcap=3.0, valid_vocab=10),
        (torch.randn(4, 11, dtype=torch.float64, requires_grad=True),),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    """Rows are bit-identical for any number and any content of other rows."""
    case = head("random", dtype, rows=600, features=40, vocab=1511)
    hidden, weight, labels = case.hidden.detach().clone(), case.weight.detach(), case.labels
    whole = torch.stack(linear_logprob(hidden, weight, labels))
    again = torch.stack(linear_logprob(hidden, weight, labels))
    assert torch.equal(whole, again)
    for rows in (slice(0, 1), slice(3, 5), slice(100, 117), slice(511, 600)):
        assert torch.equal(torch.stack(linear_logprob(hidden[rows], weight, labels[rows])), whole[:, rows]), rows
    hidden[1::2] = float("nan")
    assert torch.equal(torch.stack(linear_logprob(hidden, weight, labels))[:, ::2], whole[:, ::2])


def test_fused_rows_do_not_depend_on_the_batch() -> None:
    case = head("random", torch.bfloat16, rows=140, features=32, vocab=2300)
    hidden, weight, labels = case.hidden.detach(), case.weight.detach(), case.labels
    with use_backend("triton"):
        whole = torch.stack(linear_logprob(hidden, weight, labels))
        assert torch.equal(torch.stack(linear_logprob(hidden[129:], weight, labels[129:])), whole[:, 129:])


def test_gradients_are_bit_reproducible() -> None:
    gradients = []
    for _ in range(2):
        case = head("random", torch.bfloat16, rows=40, features=24, vocab=1511)
        logprob, entropy = linear_logprob(case.hidden, case.weight, case.labels)
        (logprob + entropy).sum().backward()
        gradients.append(case.gradients())
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["random", "peaky"])
@pytest.mark.parametrize("objective", ["clip", "everything", "penalty"])
def test_head_loss_is_the_loss_of_the_logprobs(backend: str, kind: str, objective: str) -> None:
    settings: dict[str, Any] = {
        "clip": {},
        "everything": {"dual_clip": 3.0, "entropy_coef": 0.01, "kl_coef": 0.1},
        "penalty": {"policy_loss": "penalty", "penalty_coef": 0.5, "kl_coef": 0.1, "kl": "abs"},
    }[objective]  # type: ignore[assignment]
    case = head(kind, torch.float32, rows=23, features=24, vocab=1100, padding=4)
    exact = case.exact()
    options = {"temperature": 0.7, "valid_vocab": 1100}
    true_logprob, true_entropy = reference.linear_logprob(exact.hidden, exact.weight, exact.labels, **options)  # type: ignore[arg-type]
    inputs = policy_inputs(true_logprob, seed=3, imitates=True)
    narrow = PolicyInputs(**{k: v.float() if v.is_floating_point() else v for k, v in inputs.tensors().items()})
    with use_backend(backend):  # type: ignore[arg-type]
        mine = ppo_head_loss(
            case.hidden,
            case.weight,
            case.labels,
            narrow,
            objective=PolicyObjective(**settings),
            **options,  # type: ignore[arg-type]
        )
    (3 * mine.loss).backward()
    truth = reference.policy_loss(logprob=true_logprob, entropy=true_entropy, **inputs.tensors(), **settings)  # type: ignore[arg-type]
    slopes = torch.autograd.grad(3 * truth, (true_logprob, true_entropy), retain_graph=True, allow_unused=True)
    (3 * truth).backward()
    rounding = Rounding.of(case, **options)  # type: ignore[arg-type]
    lost = zip(slopes, (rounding.logprob_T, rounding.entropy_T), strict=True)
    assert abs(3 * (mine.loss - truth)) <= sum((s.abs() * e).sum() for s, e in lost if s is not None) + 1e-6
    for got, expected_gradient in zip(case.gradients(), exact.gradients(), strict=True):
        assert relative(got, expected_gradient) <= max(1e-5, rounding.worst)
    assert (case.gradients()[0][~inputs.mask] == 0).all()
    assert ((mine.logprob_T - true_logprob).abs() <= rounding.logprob_T)[inputs.mask].all()
    assert (mine.logprob_T[~inputs.mask] == 0).all()
    parts = ppo_token_loss(
        logprob=true_logprob, entropy=true_entropy, inputs=inputs, objective=PolicyObjective(**settings)
    )
    for name, value in parts.metrics.items():
        torch.testing.assert_close(mine.metrics[name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["random", "peaky"])
@pytest.mark.parametrize("chunk_bytes", [2**28, 2**17])
def test_bf16_head_loss_accumulates_in_main_grad(kind: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two microbatches accumulate into one float32 gradient, in one chunk or several chunks."""
    monkeypatch.setitem(CHUNK_BYTES, "cpu", chunk_bytes)
    first = head(kind, torch.bfloat16, rows=70, features=48, vocab=1511)
    weight, exact_weight = first.weight, first.weight.detach().double().requires_grad_()
    weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]
    for rows in (70, 41):
        case = head(kind, torch.bfloat16, rows=rows, features=48, vocab=1511)
        exact = case.hidden.detach().double().requires_grad_()
        true_logprob, true_entropy = reference.linear_logprob(exact, exact_weight, case.labels)
        inputs = policy_inputs(true_logprob, seed=rows, imitates=True)
        loss = ppo_head_loss(case.hidden, weight, case.labels, inputs, accumulate_main_grad=True, upstream=0.5).loss
        (0.5 * loss).backward()
        fields: dict[str, Any] = inputs.tensors()
        (0.5 * reference.policy_loss(logprob=true_logprob, entropy=true_entropy, **fields, kl_coef=0.0)).backward()
        assert case.hidden.grad is not None and exact.grad is not None
        assert relative(case.hidden.grad, exact.grad) <= GRADIENT_GATE[torch.bfloat16]
        assert weight.grad_added_to_main_grad is True  # type: ignore[attr-defined]
        weight.grad = None  # Megatron's hook drops the placeholder
    assert exact_weight.grad is not None
    assert relative(weight.main_grad, exact_weight.grad) <= GRADIENT_GATE[torch.bfloat16]  # type: ignore[attr-defined]


def test_main_grad_requires_the_declared_gradient() -> None:
    case = head("random", torch.float32, rows=5, features=8, vocab=50)
    inputs = policy_inputs(torch.zeros(5), seed=0)
    with pytest.raises(ValueError, match="main_grad"):
        ppo_head_loss(case.hidden, case.weight, case.labels, inputs, accumulate_main_grad=True)
    case.weight.main_grad = torch.zeros(case.weight.shape)  # type: ignore[attr-defined]
    for declared in (1.0, 3.0):
        out = ppo_head_loss(case.hidden, case.weight, case.labels, inputs, accumulate_main_grad=True, upstream=declared)
        with pytest.raises(RuntimeError, match=rf"gradient 2\.0, but upstream={declared}"):
            (2 * out.loss).backward()


def test_gradients_are_returned_once() -> None:
    case = head("random", torch.float32, rows=5, features=8, vocab=50)
    out = ppo_head_loss(case.hidden, case.weight, case.labels, policy_inputs(torch.zeros(5), seed=0))
    out.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="were already used"):
        out.loss.backward()


class LargestAllocation(TorchDispatchMode):
    """Dispatch mode that records the bytes of the largest new tensor."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        existing = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in existing:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("is_embedding", [False, True])
def test_backward_into_main_grad_allocates_no_second_weight(is_embedding: bool) -> None:
    """The only large tensor is the gradient of a tied embedding. Megatron's hook adds this gradient to main_grad."""
    case = head("random", torch.float32, rows=5, features=8, vocab=4000)
    weight: Any = case.weight
    weight.main_grad = torch.zeros(weight.shape)
    seen: list[Tensor | None] = []
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: seen.append(weight.grad))  # position of Megatron's hook
    inputs = policy_inputs(torch.zeros(5), 0)
    loss = ppo_head_loss(case.hidden, weight, case.labels, inputs, accumulate_main_grad=True).loss
    if is_embedding:
        weight.zero_out_wgrad = True
        loss = loss + embedding(torch.tensor([7]), weight).sum()
    before = weight.main_grad.clone()
    with LargestAllocation() as largest:
        loss.backward()
    (placeholder,) = seen
    assert placeholder is not None and placeholder.shape == weight.shape
    assert torch.equal(weight.main_grad, before) and before.abs().sum() > 0
    if is_embedding:
        assert torch.equal(placeholder.nonzero()[:, 0].unique(), torch.tensor([7]))
    else:
        assert not placeholder.any() and 0 < largest.bytes < weight.nbytes / 100


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_weight_are_not_read(backend: str) -> None:
    case = head("random", torch.float32, rows=8, features=8, vocab=50)
    with torch.no_grad():
        case.hidden[::2] = float("nan")
    inputs = policy_inputs(torch.zeros(8), seed=0)
    inputs.mask[:], inputs.weights[:] = True, 0.1
    inputs.weights[::2] = 0.0
    for name in ("old_logprob", "ref_logprob"):
        getattr(inputs, name)[:] = -1.0
    inputs.advantages[:] = inputs.importance_weights[:] = 1.0  # type: ignore[index]
    with use_backend(backend):  # type: ignore[arg-type]
        out = ppo_head_loss(case.hidden, case.weight, case.labels, inputs)
    out.loss.backward()
    assert torch.isfinite(out.loss) and float(out.metrics["count"]) == 4
    hidden_grad, weight_grad = case.gradients()
    assert (hidden_grad[::2] == 0).all() and torch.isfinite(weight_grad).all() and weight_grad.abs().sum() > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_rows_masked(backend: str) -> None:
    case = head("random", torch.float32, rows=4, features=8, vocab=50)
    inputs = policy_inputs(torch.zeros(4), seed=0)
    inputs.mask[:] = False
    with use_backend(backend):  # type: ignore[arg-type]
        out = ppo_head_loss(case.hidden, case.weight, case.labels, inputs)
    out.loss.backward()
    assert out.loss.item() == 0.0 and all(x.item() == 0.0 for x in out.metrics.values())
    assert all((g == 0).all() for g in case.gradients())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_without_rows(backend: str, dtype: torch.dtype) -> None:
    """A context parallel rank can have no predicted tokens in a microbatch."""
    hidden, weight = (torch.ones(n, 64, dtype=dtype, requires_grad=True) for n in (0, 300))
    case = Head(hidden, weight, torch.zeros(0, dtype=torch.int64))
    nothing = torch.zeros(0)
    inputs = PolicyInputs(nothing, nothing, nothing, mask=nothing.bool())
    with use_backend(backend), torch.no_grad():  # type: ignore[arg-type]
        logprob, entropy = linear_logprob(case.hidden, case.weight, case.labels)
    assert logprob.shape == entropy.shape == (0,)
    with use_backend(backend):  # type: ignore[arg-type]
        out = ppo_head_loss(case.hidden, case.weight, case.labels, inputs)
        out.loss.backward()
    assert out.loss.item() == out.metrics["count"].item() == 0
    assert case.hidden.grad is not None and case.hidden.grad.shape == (0, 64)
    assert case.weight.grad is not None and not case.weight.grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_a_used_row_reaches_the_loss(backend: str) -> None:
    """The guard against non-finite updates can then detect the NaN."""
    case = head("random", torch.float32, rows=6, features=8, vocab=50)
    with torch.no_grad():
        case.hidden[2] = float("nan")
    inputs = policy_inputs(torch.zeros(6), seed=0)
    inputs.mask[2] = True
    inputs.weights[2], inputs.advantages[2], inputs.old_logprob[2] = 0.1, 1.0, -1.0
    with use_backend(backend):  # type: ignore[arg-type]
        assert torch.isnan(ppo_head_loss(case.hidden, case.weight, case.labels, inputs).loss)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_logits(backend: str, inplace: bool, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    leaf = (3 * torch.randn(11, 1100, generator=g)).to(dtype).requires_grad_()
    labels, up = torch.randint(0, 1090, (11,), generator=g), upstream(11)
    logits = leaf * 1
    before = logits.detach().clone()
    options = {"temperature": 0.7, "softcap": 10.0, "valid_vocab": 1090}
    with use_backend(backend):  # type: ignore[arg-type]
        logprob, entropy = logits_logprob(logits, labels, inplace_backward=inplace, **options)  # type: ignore[arg-type]
    assert torch.equal(logits, before), "forward must not change the logits"
    (logprob * up[0] + entropy * up[1]).sum().backward()
    assert torch.equal(logits, before) != inplace
    exact = leaf.detach().double().requires_grad_()
    true_logprob, true_entropy = reference.logits_logprob(exact, labels, **options)  # type: ignore[arg-type]
    (true_logprob * up[0] + true_entropy * up[1]).sum().backward()
    rounding = Rounding.of_logits(reference.scaled_logits(exact.detach(), **options)[:, :1090], labels)  # type: ignore[arg-type]
    assert ((logprob - true_logprob).abs() <= rounding.logprob_T).all()
    assert ((entropy - true_entropy).abs() <= rounding.entropy_T).all()
    assert leaf.grad is not None and exact.grad is not None
    assert relative(leaf.grad, exact.grad) <= GRADIENT_GATE[dtype]
    assert (leaf.grad[:, 1090:] == 0).all()


def test_overwritten_logits_cannot_be_used_again() -> None:
    logits = torch.randn(3, 20, requires_grad=True) * 1
    logprob, _ = logits_logprob(logits, torch.tensor([1, 2, 3]))
    logprob.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprob.sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_upstream_gradients_can_be_noncontiguous(backend: str) -> None:
    case = head("random", torch.float32, rows=6, features=8, vocab=50)
    with use_backend(backend):  # type: ignore[arg-type]
        logprob, entropy = linear_logprob(case.hidden, case.weight, case.labels)
    torch.stack([logprob, entropy], dim=1).sum(1).mean().backward()
    assert all(torch.isfinite(g).all() for g in case.gradients())


@pytest.mark.parametrize("backend", BACKENDS)
def test_columns_beyond_the_vocabulary_are_ignored(backend: str) -> None:
    """Small weights make all logits nearly 0, like the logit of a missing column."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 24, generator=g), 0.05 * torch.randn(1100, 24, generator=g)
    labels = torch.randint(0, 1100, (9,), generator=g)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = (hidden.to(dtype), weight.to(dtype))
        expected = reference.linear_logprob(inputs[0].double(), inputs[1].double(), labels)
        with use_backend(backend):  # type: ignore[arg-type]
            result = linear_logprob(*inputs, labels)
        gate = Rounding.of(Head(*inputs, labels)).worst
        torch.testing.assert_close(tuple(x.double() for x in result), expected, rtol=0, atol=gate)


def test_forward_does_not_store_the_logits() -> None:
    case = head("random", torch.float32, rows=64, features=16, vocab=60_000)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled, torch.no_grad():
        linear_logprob(case.hidden, case.weight, case.labels)
    largest_bytes = max(event.self_cpu_memory_usage for event in profiled.events())
    assert 0 < largest_bytes <= 4 * 64 * 1024 < 0.02 * 4 * 64 * 60_000


def test_group_of_one_rank_is_none(world_of_one: None) -> None:
    """One rank has the whole vocabulary, so no communication is needed."""
    assert vocabulary_range(40, dist.group.WORLD, 37) == vocabulary_range(40, None, 37) == (None, 0, 37)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"temperature": 0.0}, "temperature is 0.0"), ({"temperature": torch.ones(3)}, r"temperature has shape \(3,\)"),
     ({"softcap": -1.0}, "softcap is -1.0"), ({"valid_vocab": 51}, "valid_vocab is 51"),
     ({"hidden_TH": torch.zeros(4, 9)}, r"hidden has shape \(4, 9\), must be \(4, 8\)"),
     ({"weight_VH": torch.zeros(50, 8).bfloat16()}, "must be one type")],
)  # fmt: skip
def test_invalid_arguments_are_rejected(change: dict[str, object], message: str) -> None:
    arguments = {"hidden_TH": torch.zeros(4, 8), "weight_VH": torch.zeros(50, 8), "labels_T": torch.zeros(4).long()}
    with pytest.raises(ValueError, match=message):
        linear_logprob(**(arguments | change))  # type: ignore[arg-type]
