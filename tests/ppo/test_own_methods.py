"""Tests of custom policy losses and estimators: their results, and the errors of unusable functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megappo.algo.estimators import Estimator, builtin
from megappo.config import Config, ConfigError, load_config
from megappo.megatron.heads import LogprobHead
from megappo.megatron.schedule import PackedBatch, PlacedSample, pack_samples
from megappo.plugins import load_function
from megappo.ppo.assembly.methods import check_methods, find_estimator, find_objective
from megappo.ppo.updates import LossWeights, PolicyTask
from megappo_kernels.backend import use_backend
from megappo_kernels.blocks import CHUNK_BYTES
from megappo_kernels.losses import PolicyInputs, ppo_token_loss
from megappo_kernels.objectives import POLICY_METRICS, PolicyObjective
from megappo_kernels.ppo_head import ppo_head_loss
from tests.support.kernels import head, policy_inputs, relative
from tests.support.oracles import kernels as reference

ME = "tests.ppo.test_own_methods"
cispo = load_function("configs/examples/05_own_loss/cispo.py:cispo", "algorithm.policy_loss")
gspo = load_function("configs/examples/06_sequence_loss/gspo.py:gspo", "algorithm.policy_loss")
dr_grpo = load_function("configs/examples/04_own_estimator/dr_grpo.py:dr_grpo", "algorithm.estimator")
OF_BANDS = {"masked_below", "masked_above", "band_position", "token_weight", "effective_sample_size"}
"""Metrics that only built-in losses report."""
LENGTHS = (7, 1, 12, 4, 16)
SEQUENCES = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))


def clip_again(*, log_ratio: Tensor, advantages: Tensor, dual: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO-clip in the form of a custom loss."""
    ratio = log_ratio.exp()
    clipped = -advantages * ratio.clamp(0.8, 1.2)
    loss = torch.maximum(-advantages * ratio, clipped)
    bounded = torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss)
    return bounded, {"clipfrac": clipped > -advantages * ratio, "clipfrac_lower": bounded < loss}


def greedy(*, logprob: Tensor, entropy: Tensor, **others: Any) -> Tensor:
    """Use the entropy. Receive all other inputs as keyword arguments."""
    assert set(others) == {"old_logprob", "log_ratio", "advantages", "ref_logprob", "sequence_mean"}
    return -logprob * entropy


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_custom_clip_loss_equals_builtin(backend: str) -> None:
    """Gradients from autograd equal the analytic gradients, including the entropy and KL terms."""
    g = torch.Generator().manual_seed(1)
    dtype, tolerance = (torch.float64, 1e-9) if backend == "torch" else (torch.float32, 1e-5)
    leaves = [(torch.rand(5, 37, generator=g) - 2).to(dtype).requires_grad_() for _ in range(2)]
    inputs = policy_inputs(leaves[0], seed=2)
    around: dict[str, Any] = {"entropy_coef": 0.01, "kl_coef": 0.2}
    results = []
    with use_backend(backend):  # type: ignore[arg-type]
        for policy_loss in ("clip", partial(clip_again, dual=3.0)):
            objective = PolicyObjective(policy_loss=policy_loss, dual_clip=3.0, **around)
            out = ppo_token_loss(logprob=leaves[0], entropy=leaves[1], inputs=inputs, objective=objective)
            results.append((out, torch.autograd.grad(out.loss, leaves)))
    (built_in, slopes), (own, own_slopes) = results
    torch.testing.assert_close(own_slopes, slopes, rtol=tolerance, atol=tolerance)
    known = {name: x for name, x in built_in.metrics.items() if name.partition(".")[0] not in OF_BANDS}
    torch.testing.assert_close(dict(own.metrics), known, rtol=tolerance, atol=tolerance)


def by_definition(name: str, logprob: Tensor, inputs: PolicyInputs) -> Tensor:
    """Compute CISPO and GSPO sequence by sequence."""
    loss = logprob.new_zeros(())
    for sequence in range(len(LENGTHS)):
        rows = inputs.mask & (sequence == SEQUENCES) & (inputs.weights != 0)
        new, old, A, w = logprob[rows], inputs.old_logprob[rows], inputs.advantages[rows], inputs.weights[rows]
        if name == "cispo":
            loss = loss - (w * (new - old).detach().exp().clamp(max=1.28) * A * new).sum()
        elif rows.any():
            s = (new - old).mean().exp()
            loss = loss + (w * torch.maximum(-A * s, -A * s.clamp(0.9, 1.1))).sum()
    return loss


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("chunk_bytes", [2**28, 2**13], ids=["one chunk", "many chunks"])
@pytest.mark.parametrize("name", ["cispo", "gspo"])
def test_chunked_output_layer_matches_definition(
    name: str, chunk_bytes: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks split sequences. Some tokens are masked, and some have weight zero."""
    monkeypatch.setitem(CHUNK_BYTES, "cpu", chunk_bytes)
    case = head("random", torch.float32, rows=sum(LENGTHS), features=16, vocab=150)
    exact = case.exact()
    logprob, _ = reference.linear_logprob(exact.hidden, exact.weight, exact.labels)
    fields = policy_inputs(logprob, seed=5).tensors()
    del fields["importance_weights"], fields["ref_logprob"]
    fields["weights"][3::5] = 0.0
    inputs = PolicyInputs(**fields)
    by_definition(name, logprob, inputs).backward()
    narrow = {n: x.float() if x.is_floating_point() else x for n, x in fields.items()}
    loss: Callable[..., Any] = cispo if name == "cispo" else partial(gspo, low=0.1, high=0.1)
    with use_backend(backend):  # type: ignore[arg-type]
        out = ppo_head_loss(
            case.hidden, case.weight, case.labels, PolicyInputs(**narrow, sequences=SEQUENCES),
            objective=PolicyObjective(policy_loss=loss),
        )  # fmt: skip
    out.loss.backward()
    assert out.loss.item() == pytest.approx(by_definition(name, logprob, inputs).item(), abs=1e-6)
    for gradient, exact_gradient in zip(case.gradients(), exact.gradients(), strict=True):
        assert relative(gradient, exact_gradient) < 1e-5
    assert 0 < float(out.metrics["clipfrac"]) < float(out.metrics["count"])
    assert set(out.metrics) == {*POLICY_METRICS, "count"} - OF_BANDS | ({"sequence_ratio"} if name == "gspo" else set())


def test_custom_loss_can_use_the_entropy() -> None:
    case = head("random", torch.float32, rows=9, features=8, vocab=40)
    exact = case.exact()
    logprob, entropy = reference.linear_logprob(exact.hidden, exact.weight, exact.labels)
    inputs = policy_inputs(logprob, seed=5)
    inputs.mask[:], inputs.weights[:], inputs.importance_weights[:] = True, 0.5, 2.0  # type: ignore[index]
    inputs.old_logprob[:], inputs.advantages[:], inputs.ref_logprob[:] = -1.0, 1.0, -1.0  # type: ignore[index]
    (-logprob * entropy).sum().backward()
    narrow = {n: x.float() if x.is_floating_point() else x for n, x in inputs.tensors().items()}
    objective = PolicyObjective(policy_loss=greedy)
    ppo_head_loss(case.hidden, case.weight, case.labels, PolicyInputs(**narrow), objective=objective).loss.backward()
    for mine, truth in zip(case.gradients(), exact.gradients(), strict=True):
        assert relative(mine, truth) < 1e-5


class RecordingHead(LogprobHead):
    """Records the inputs of the loss in an output layer."""

    inputs: PolicyInputs | None = None

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, hidden: Tensor, batch: PackedBatch, inputs: Any = None, objective: Any = None) -> Any:
        self.inputs = inputs
        return hidden.sum(), {}


def sequences_of_update(policy_loss: Any) -> Tensor | None:
    """Return the sequence indices of a microbatch with 2 tokens of its first sample and 3 of its second."""
    fields = ("mask", "old_logprob", "advantages")
    samples = [PlacedSample(i, torch.ones(4), n, dict.fromkeys(fields, torch.ones(n))) for i, n in ((4, 2), (7, 3))]
    batch = pack_samples(samples, torch.device("cpu"))
    head_stub, weights = RecordingHead(), LossWeights("token-mean", tokens=5, sequences=2, norm_tokens=8)
    PolicyTask(PolicyObjective(policy_loss=policy_loss), weights)(head_stub, torch.zeros(8, 1, 4), batch)
    assert head_stub.inputs is not None
    return head_stub.inputs.sequences


def test_sequences_are_passed_only_on_demand() -> None:
    assert (
        sequences_of_update("clip") is None
        and sequences_of_update("dis") is None
        and sequences_of_update(cispo) is None
    )
    for loss in (gspo, "gspo"):
        sequences = sequences_of_update(loss)
        assert sequences is not None and sequences.tolist() == [0, 0, 1, 1, 1]


def test_metrics_without_tokens_keep_their_names() -> None:
    """Ranks and microbatches without trained tokens report the same metrics as all others."""
    case = head("random", torch.float32, rows=4, features=8, vocab=40)
    inputs = policy_inputs(torch.zeros(4), seed=0)
    inputs.mask[:] = False
    out = ppo_head_loss(
        case.hidden, case.weight, case.labels, inputs, objective=PolicyObjective(policy_loss=gspo)
    )  # without sequences, which are not needed here
    out.loss.backward()
    assert {"sequence_ratio", "clipfrac", "count", "loss"} <= set(out.metrics)
    assert all(float(x) == 0 for x in out.metrics.values())
    assert all((g == 0).all() for g in case.gradients())


def config(*overrides: str) -> Config:
    return load_config("tests/support/config_base.yaml", overrides)


def no_tensor(*, logprob: Tensor) -> str:
    return "loss"


def a_sum(*, logprob: Tensor) -> Tensor:
    return logprob.sum()


def constant(*, old_logprob: Tensor) -> Tensor:
    return old_logprob.clone()


def odd_metrics(*, logprob: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprob, {"mean": logprob.mean()}


def misspelt(*, logprob: Tensor) -> Tensor:
    return {"loss": -logprob}["los"]


def refuses(*, logprob: Tensor) -> Tensor:
    raise ValueError("oops")


def of_other_shapes(*, rewards: Tensor) -> tuple[Tensor, Tensor]:
    return rewards @ rewards, rewards


def of_no_function(*, rewards: Tensor) -> tuple[Tensor, Tensor]:
    return rewards, rewards("return")  # type: ignore[operator]


def unknown(*, logprob: Tensor, reward: Tensor) -> Tensor:
    return logprob


def one_tensor(*, rewards: Tensor) -> Tensor:
    return rewards


def divides_by_0(*, rewards: Tensor) -> tuple[Tensor, Tensor]:
    return rewards / 0, rewards


def log_of_0(*, logprob: Tensor) -> Tensor:
    return logprob + torch.zeros_like(logprob).log()


def steep_root(*, logprob: Tensor) -> Tensor:
    return (logprob - logprob.detach()).sqrt()


def three(*, rewards: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return rewards, rewards, rewards


def scores(*, rewards: Tensor) -> tuple[Tensor, Tensor]:
    return rewards.sum(-1), rewards


def sums(*, rewards: Tensor) -> tuple[Tensor, Tensor]:
    return rewards, rewards.sum(-1)


def with_critic(*, rewards: Tensor, values: Tensor, half: float = 1.0) -> tuple[Tensor, Tensor]:
    return half * (rewards - values), rewards


def of_groups(*, rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    return rewards, rewards


NO_CRITIC = ("critic=null",)
UNUSABLE: list[tuple[tuple[str, ...], list[str]]] = [
    (("algorithm.policy_loss=no_such_package:loss",), ["'no_such_package' cannot be imported", "set PYTHONPATH"]),
    ((f"algorithm.policy_loss={ME}:a_summ",), ["has no function 'a_summ'", f"did you mean '{ME}:a_sum'"]),
    ((f"algorithm.policy_loss={ME}:unknown",),
     ["cannot be called with (logprob=)", "'reward'; it may take logprob, old_"]),
    (
        ("algorithm.policy_loss=configs/examples/05_own_loss/cispo.py:cispo",
         "algorithm.policy_loss_options={hihg: 1}"),
        ["cannot be called with", "hihg=", "algorithm.policy_loss_options"],
    ),
    ((f"algorithm.policy_loss={ME}:no_tensor",), ["algorithm.policy_loss", "returned str", "number per token"]),
    ((f"algorithm.policy_loss={ME}:a_sum",), ["returned shape (), must be a number per token, (4,)"]),
    ((f"algorithm.policy_loss={ME}:constant",), ["does not depend on the policy"]),
    ((f"algorithm.policy_loss={ME}:odd_metrics",), ["not tensors of shape (4,)"]),
    ((f"algorithm.policy_loss={ME}:misspelt",),
     ["algorithm.policy_loss", ": it failed (KeyError: 'los' (", "test_own_methods.py:", ")); fix it"]),
    ((f"algorithm.policy_loss={ME}:refuses",),
     [": it failed (ValueError: oops (", "test_own_methods.py:", ")); fix it"]),
    ((*NO_CRITIC, f"algorithm.estimator={ME}:of_other_shapes"), ["algorithm.estimator", ": it failed (RuntimeError: "]),
    ((*NO_CRITIC, f"algorithm.estimator={ME}:of_no_function"),
     ["TypeError: 'Tensor' object is not callable (", ")); fix it"]),
    ((*NO_CRITIC, f"algorithm.estimator={ME}:one_tensor"), ["returned Tensor, must be (advantages, returns)"]),
    ((*NO_CRITIC, f"algorithm.estimator={ME}:divides_by_0"),
     ["algorithm.estimator", "it returned advantages or returns that are not finite", "correct the function"]),
    ((f"algorithm.policy_loss={ME}:log_of_0",), ["algorithm.policy_loss", "it returned a loss or slopes that are not"]),
    ((f"algorithm.policy_loss={ME}:steep_root",),
     ["algorithm.policy_loss", "it returned a loss or slopes that are not"]),
    ((*NO_CRITIC, f"algorithm.estimator={ME}:three"), ["returned tuple, must be (advantages, returns)"]),
    ((*NO_CRITIC, f"algorithm.estimator={ME}:scores"), ["advantages has shape (2,), must be the mask's (2, 3)"]),
    ((*NO_CRITIC, f"algorithm.estimator={ME}:sums"), ["returns has shape (2,), must be the mask's (2, 3)"]),
    ((*NO_CRITIC, f"algorithm.estimator={ME}:with_critic"), ["needs a critic", "add the section critic"]),
    ((f"algorithm.estimator={ME}:of_groups",), ["critic is given but", "has none", "critic=null", "argument values"]),
    ((*NO_CRITIC, f"algorithm.estimator={ME}:of_groups", "rollout.samples_per_prompt=1"),
     ["compares the samples of a prompt", "set at least 2"]),
    ((*NO_CRITIC, f"algorithm.estimator={ME}:of_groups", "algorithm.estimator_options={scale: 2}"),
     ["cannot be called with", "scale=", "algorithm.estimator_options"]),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "fragments"), UNUSABLE, ids=lambda v: v[-1] if isinstance(v, tuple) else "")
def test_unusable_functions_are_reported_in_one_sentence(overrides: tuple[str, ...], fragments: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        check_methods(config(*overrides))
    sentence = str(caught.value)
    assert "\n" not in sentence and all(word in sentence for word in fragments), sentence


def test_options_require_custom_functions() -> None:
    with pytest.raises(ConfigError, match="policy_loss_options are for custom functions, but policy_loss is 'clip'"):
        config("algorithm.policy_loss_options={high: 1}")
    with pytest.raises(ConfigError, match="estimator_options are for"):
        config("algorithm.estimator_options={high: 1}")
    message = "'clop' is none of clip, penalty, .*, path/to/file.py:name or package.module:name; did"
    with pytest.raises(ConfigError, match=message):
        config("algorithm.policy_loss=clop")


def test_custom_functions_are_loaded_with_options() -> None:
    chosen = config(
        f"algorithm.estimator={ME}:with_critic",
        "algorithm.estimator_options={half: 0.5}",
        "algorithm.policy_loss=configs/examples/06_sequence_loss/gspo.py:gspo",
        "algorithm.policy_loss_options={low: 0.1, high: 0.2}",
        "algorithm.entropy_coef=0.25",
    )
    check_methods(chosen)
    estimator, objective = find_estimator(chosen.algorithm), find_objective(chosen.algorithm, 0.0)
    mask = torch.ones(1, 2, dtype=torch.bool)
    inputs: dict[str, Any] = {"rewards": torch.ones(1, 2), "values": torch.zeros(1, 2), "mask": mask}
    advantages, returns = estimator(**inputs, group_ids=torch.zeros(1), gamma=1.0, lam=1.0)
    assert advantages.tolist() == [[0.5, 0.5]] and returns.tolist() == [[1, 1]]
    assert estimator.needs_critic and estimator.whitens and not estimator.compares_samples
    assert objective.sees_sequences and objective.entropy_coef == 0.25
    assert callable(objective.policy_loss)
    loss, more = objective.policy_loss(
        log_ratio=torch.tensor([1.0]), advantages=torch.tensor([2.0]), sequence_mean=lambda x: x
    )
    assert loss.item() == pytest.approx(-2.4) and more["clipfrac"].item()


def test_objective_gets_settings_by_name() -> None:
    algorithm = config("algorithm.clip_low=0.1", "algorithm.kl_in_loss={coef: 0.3, kind: k2}").algorithm
    objective = find_objective(algorithm, 0.7)
    assert (objective.policy_loss, objective.clip_low, objective.clip_high, objective.dual_clip) == (
        "clip", 0.1, 0.2, 3.0,
    )  # fmt: skip
    assert (objective.kl, objective.kl_coef, objective.penalty_coef, objective.entropy_coef) == ("k2", 0.3, 0.7, 0.0)


def test_custom_dr_grpo_estimator_matches_rloo() -> None:
    """The advantages of RLOO are n / (n - 1) times as large."""
    g = torch.Generator().manual_seed(0)
    mask = torch.arange(5) < torch.tensor([[5], [1], [3], [2]])
    inputs: dict[str, Any] = {"rewards": torch.randn(4, 5, generator=g), "values": None, "mask": mask}
    inputs |= {"group_ids": torch.tensor([0, 0, 0, 1]), "gamma": 1.0, "lam": 1.0}
    own = Estimator("configs/examples/04_own_estimator/dr_grpo.py:dr_grpo", dr_grpo, {"scale": 1.5})
    assert own.compares_samples and not own.whitens and not own.takes_values
    advantages, expected = own(**inputs)[0], builtin("rloo")(**inputs)[0]
    torch.testing.assert_close(advantages[:3], expected[:3])
    assert (advantages[3] == 0).all()
