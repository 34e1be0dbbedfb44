"""Policy losses and estimators of one's own: what they compute, and the sentence for what cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megappo.algo.estimators import Estimator, builtin
from megappo.config import Config, ConfigError, load_config
from megappo.megatron.heads import LogprobHead, PolicyTarget
from megappo.megatron.schedule import PackedBatch, PlacedSample, pack_samples
from megappo.ppo.methods import check_methods, find_estimator, find_objective
from megappo.ppo.updates import LossWeights, PolicyTask
from megappo_kernels.backend import use_backend
from megappo_kernels.blocks import CHUNK_BYTES
from megappo_kernels.losses import PolicyInputs, ppo_token_loss
from megappo_kernels.objectives import POLICY_METRICS, PolicyObjective
from megappo_kernels.ppo_head import ppo_head_loss
from tests.examples.cispo import cispo
from tests.examples.dr_grpo import dr_grpo
from tests.examples.gspo import gspo
from tests.support.kernels import head, policy_inputs, relative
from tests.support.oracles import kernels as reference

ME = "tests.ppo.test_own_methods"
OF_BANDS = {"masked_below", "masked_above", "band_position", "token_weight", "effective_sample_size"}
"""Metrics of losses that are built in."""
LENGTHS = (7, 1, 12, 4, 16)
SEQUENCES = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))


def clip_again(*, log_ratio: Tensor, advantages: Tensor, dual: float) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO-clip as a user would write it."""
    ratio = log_ratio.exp()
    clipped = -advantages * ratio.clamp(0.8, 1.2)
    loss = torch.maximum(-advantages * ratio, clipped)
    bounded = torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss)
    return bounded, {"clipfrac": clipped > -advantages * ratio, "clipfrac_lower": bounded < loss}


def greedy(*, logprob: Tensor, entropy: Tensor, **others: Any) -> Tensor:
    """Uses the entropy, and is given everything else too."""
    assert set(others) == {"old_logprob", "log_ratio", "advantages", "ref_logprob", "sequence_mean"}
    return -logprob * entropy


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_loss_of_ones_own_is_the_one_that_is_built_in(backend: str) -> None:
    """Slopes by autograd are those by hand, with everything that stands around a policy loss."""
    g = torch.Generator().manual_seed(1)
    dtype, tolerance = (torch.float64, 1e-9) if backend == "torch" else (torch.float32, 1e-5)
    leaves = [(torch.rand(5, 37, generator=g) - 2).to(dtype).requires_grad_() for _ in range(2)]
    inputs = policy_inputs(leaves[0], seed=2)
    around: dict[str, Any] = {"entropy_coef": 0.01, "kl_coef": 0.2}
    found = []
    with use_backend(backend):  # type: ignore[arg-type]
        for policy_loss in ("clip", partial(clip_again, dual=3.0)):
            objective = PolicyObjective(policy_loss=policy_loss, dual_clip=3.0, **around)
            out = ppo_token_loss(logprob=leaves[0], entropy=leaves[1], inputs=inputs, objective=objective)
            found.append((out, torch.autograd.grad(out.loss, leaves)))
    (built_in, slopes), (own, own_slopes) = found
    torch.testing.assert_close(own_slopes, slopes, rtol=tolerance, atol=tolerance)
    known = {name: x for name, x in built_in.metrics.items() if name.partition(".")[0] not in OF_BANDS}
    torch.testing.assert_close(dict(own.metrics), known, rtol=tolerance, atol=tolerance)


def by_definition(name: str, logprob: Tensor, inputs: PolicyInputs) -> Tensor:
    """CISPO and GSPO sequence by sequence."""
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
def test_the_output_layer_with_an_example(
    name: str, chunk_bytes: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks cut through sequences; some tokens are masked, some have no weight."""
    monkeypatch.setitem(CHUNK_BYTES, "cpu", chunk_bytes)
    case = head("random", torch.float32, rows=sum(LENGTHS), features=16, vocab=150)
    exact = case.exact()
    logprob, _ = reference.linear_logprob(exact.hidden, exact.weight, exact.labels)
    given = policy_inputs(logprob, seed=5).tensors()
    del given["importance_weights"], given["ref_logprob"]
    given["weights"][3::5] = 0.0
    inputs = PolicyInputs(**given)
    by_definition(name, logprob, inputs).backward()
    narrow = {n: x.float() if x.is_floating_point() else x for n, x in given.items()}
    loss: Callable[..., Any] = cispo if name == "cispo" else partial(gspo, low=0.1, high=0.1)
    with use_backend(backend):  # type: ignore[arg-type]
        out = ppo_head_loss(
            case.hidden,
            case.weight,
            case.labels,
            PolicyInputs(**narrow, sequences=SEQUENCES),
            objective=PolicyObjective(policy_loss=loss),
        )
    out.loss.backward()
    assert out.loss.item() == pytest.approx(by_definition(name, logprob, inputs).item(), abs=1e-6)
    for mine, truth in zip(case.gradients(), exact.gradients(), strict=True):
        assert relative(mine, truth) < 1e-5
    assert 0 < float(out.metrics["clipfrac"]) < float(out.metrics["count"])
    assert set(out.metrics) == {*POLICY_METRICS, "count"} - OF_BANDS | ({"sequence_ratio"} if name == "gspo" else set())


def test_the_entropy_can_be_part_of_a_loss() -> None:
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


class Asked(LogprobHead):
    """Stands in the place of an output layer."""

    target: PolicyTarget | None = None

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def expect(self, batch: PackedBatch, target: PolicyTarget | None = None) -> None:
        self.target = target


def sequences_told(policy_loss: Any) -> Tensor | None:
    """What an update says of whose tokens a microbatch has: 2 of its first sample, 3 of its second."""
    fields = ("mask", "old_logprob", "advantages")
    samples = [PlacedSample(i, torch.ones(4), n, dict.fromkeys(fields, torch.ones(n))) for i, n in ((4, 2), (7, 3))]
    batch = pack_samples(samples, torch.device("cpu"))
    asked, weights = Asked(), LossWeights("token-mean", tokens=5, sequences=2, norm_tokens=8)
    PolicyTask(PolicyObjective(policy_loss=policy_loss), weights).expect(asked, batch)
    assert asked.target is not None
    return asked.target.inputs.sequences


def test_sequences_are_told_to_those_who_ask() -> None:
    assert sequences_told("clip") is None and sequences_told("dis") is None and sequences_told(cispo) is None
    for loss in (gspo, "gspo"):
        told = sequences_told(loss)
        assert told is not None and told.tolist() == [0, 0, 1, 1, 1]


def test_metrics_of_no_token_have_their_names() -> None:
    """So that ranks and microbatches without a token that counts report what the others do."""
    case = head("random", torch.float32, rows=4, features=8, vocab=40)
    inputs = policy_inputs(torch.zeros(4), seed=0)
    inputs.mask[:] = False
    out = ppo_head_loss(
        case.hidden, case.weight, case.labels, inputs, objective=PolicyObjective(policy_loss=gspo)
    )  # without sequences: nobody asks
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
    (
        (f"algorithm.policy_loss={ME}:unknown",),
        ["cannot be called with (logprob=)", "'reward'; it may take logprob, old_"],
    ),
    (
        ("algorithm.policy_loss=tests.examples.cispo:cispo", "algorithm.policy_loss_options={hihg: 1}"),
        ["cannot be called with", "hihg=", "algorithm.policy_loss_options"],
    ),
    ((f"algorithm.policy_loss={ME}:no_tensor",), ["algorithm.policy_loss", "returned str", "number per token"]),
    ((f"algorithm.policy_loss={ME}:a_sum",), ["returned shape (), must be a number per token, (4,)"]),
    ((f"algorithm.policy_loss={ME}:constant",), ["does not depend on the policy"]),
    ((f"algorithm.policy_loss={ME}:odd_metrics",), ["not tensors of shape (4,)"]),
    ((f"algorithm.policy_loss={ME}:misspelt",), ["algorithm.policy_loss", ": it failed (KeyError: 'los'); fix it"]),
    ((*NO_CRITIC, f"algorithm.estimator={ME}:of_other_shapes"), ["algorithm.estimator", ": it failed (RuntimeError: "]),
    ((*NO_CRITIC, f"algorithm.estimator={ME}:of_no_function"), ["TypeError: 'Tensor' object is not callable); fix"]),
    ((*NO_CRITIC, f"algorithm.estimator={ME}:one_tensor"), ["returned Tensor, must be (advantages, returns)"]),
    (
        (*NO_CRITIC, f"algorithm.estimator={ME}:divides_by_0"),
        ["algorithm.estimator", "it returned advantages or returns that are not finite", "correct the function"],
    ),
    ((f"algorithm.policy_loss={ME}:log_of_0",), ["algorithm.policy_loss", "it returned a loss or slopes that are not"]),
    (
        (f"algorithm.policy_loss={ME}:steep_root",),
        ["algorithm.policy_loss", "it returned a loss or slopes that are not"],
    ),
    ((*NO_CRITIC, f"algorithm.estimator={ME}:three"), ["returned tuple, must be (advantages, returns)"]),
    ((*NO_CRITIC, f"algorithm.estimator={ME}:scores"), ["advantages has shape (2,), must be the mask's (2, 3)"]),
    ((*NO_CRITIC, f"algorithm.estimator={ME}:sums"), ["returns has shape (2,), must be the mask's (2, 3)"]),
    ((*NO_CRITIC, f"algorithm.estimator={ME}:with_critic"), ["needs a critic", "add the section critic"]),
    ((f"algorithm.estimator={ME}:of_groups",), ["critic is given but", "has none", "critic=null"]),
    (
        (*NO_CRITIC, f"algorithm.estimator={ME}:of_groups", "rollout.samples_per_prompt=1"),
        ["compares the samples of a prompt", "set at least 2"],
    ),
    (
        (*NO_CRITIC, f"algorithm.estimator={ME}:of_groups", "algorithm.estimator_options={scale: 2}"),
        ["cannot be called with", "scale=", "algorithm.estimator_options"],
    ),
]


@pytest.mark.parametrize(("overrides", "words"), UNUSABLE, ids=lambda v: v[-1] if isinstance(v, tuple) else "")
def test_what_cannot_be_used_gets_a_sentence(overrides: tuple[str, ...], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        check_methods(config(*overrides))
    sentence = str(caught.value)
    assert "\n" not in sentence and all(word in sentence for word in words), sentence


def test_options_are_for_functions_of_ones_own() -> None:
    with pytest.raises(ConfigError, match="policy_loss_options are for custom functions, but policy_loss is 'clip'"):
        config("algorithm.policy_loss_options={high: 1}")
    with pytest.raises(ConfigError, match="estimator_options are for"):
        config("algorithm.estimator_options={high: 1}")
    with pytest.raises(
        ConfigError, match="'clop' is none of clip, penalty, .*, path/to/file.py:name or package.module:name; did"
    ):
        config("algorithm.policy_loss=clop")


def test_what_can_be_used_is_found_with_its_options() -> None:
    chosen = config(
        f"algorithm.estimator={ME}:with_critic",
        "algorithm.estimator_options={half: 0.5}",
        "algorithm.policy_loss=tests.examples.gspo:gspo",
        "algorithm.policy_loss_options={low: 0.1, high: 0.2}",
        "algorithm.entropy_coef=0.25",
    )
    check_methods(chosen)
    estimator, objective = find_estimator(chosen.algorithm), find_objective(chosen.algorithm, 0.0)
    mask = torch.ones(1, 2, dtype=torch.bool)
    given: dict[str, Any] = {"rewards": torch.ones(1, 2), "values": torch.zeros(1, 2), "mask": mask}
    advantages, returns = estimator(**given, group_ids=torch.zeros(1), gamma=1.0, lam=1.0)
    assert advantages.tolist() == [[0.5, 0.5]] and returns.tolist() == [[1, 1]]
    assert estimator.needs_critic and estimator.whitens and not estimator.compares_samples
    assert objective.sees_sequences and objective.entropy_coef == 0.25
    assert callable(objective.policy_loss)
    loss, more = objective.policy_loss(
        log_ratio=torch.tensor([1.0]), advantages=torch.tensor([2.0]), sequence_mean=lambda x: x
    )
    assert loss.item() == pytest.approx(-2.4) and more["clipfrac"].item()


def test_settings_reach_the_objective_by_their_names() -> None:
    algorithm = config("algorithm.clip_low=0.1", "algorithm.kl_in_loss={coef: 0.3, kind: k2}").algorithm
    found = find_objective(algorithm, 0.7)
    assert (found.policy_loss, found.clip_low, found.clip_high, found.dual_clip) == ("clip", 0.1, 0.2, 3.0)
    assert (found.kl, found.kl_coef, found.penalty_coef, found.entropy_coef) == ("k2", 0.3, 0.7, 0.0)


def test_an_estimator_of_ones_own_is_dr_grpo() -> None:
    """The advantages of RLOO are n / (n - 1) times as large."""
    g = torch.Generator().manual_seed(0)
    mask = torch.arange(5) < torch.tensor([[5], [1], [3], [2]])
    given: dict[str, Any] = {"rewards": torch.randn(4, 5, generator=g), "values": None, "mask": mask}
    given |= {"group_ids": torch.tensor([0, 0, 0, 1]), "gamma": 1.0, "lam": 1.0}
    own = Estimator("tests.examples.dr_grpo:dr_grpo", dr_grpo, {"scale": 1.5})
    assert own.compares_samples and not own.whitens and not own.takes_values
    found, wanted = own(**given)[0], builtin("rloo")(**given)[0]
    torch.testing.assert_close(found[:3], wanted[:3])
    assert (found[3] == 0).all()
