"""One PPO step in one process, written from the papers, with transformers models, torch autograd and AdamW of torch.

The file does not import megappo. Each sample is processed separately without padding, and every formula is written out.
Global quantities (whitening, loss normalisation, clipping) are computed over all samples at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.oracles.policy_losses import surrogate


@dataclass
class Sample:
    """A finished response and its score."""

    tokens: Tensor
    response: int
    score: float
    engine: float
    """Log-probability of the engine for every token of the response."""
    routing: Tensor | None = None
    """(tokens - 1, layers, chosen) experts for the actor. Negative values select the experts of the actor."""
    group: int = 0
    """The prompt of the sample, for estimators that compare the samples of a prompt."""
    turn_rewards: list[float | None] | None = None
    """For episodes, the reward of each response token. The value of environment tokens is None."""

    @property
    def own(self) -> Tensor:
        """Return the positions of the response tokens from the model, relative to the start of the response."""
        if self.turn_rewards is None:
            return torch.arange(self.response)
        return torch.tensor([i for i, reward in enumerate(self.turn_rewards) if reward is not None])

    @property
    def counted(self) -> int:
        return len(self.own)

    def rewards(self) -> Tensor:
        """Return the reward of each token of the model. The reward of a turn is at its last token, and the score is
        added to the last token of the response."""
        token_rewards = [0.0] * self.response if self.turn_rewards is None else self.turn_rewards
        rewards = torch.tensor([reward for reward in token_rewards if reward is not None], device=self.tokens.device)
        rewards[-1] += self.score
        return rewards


@dataclass
class Routed:
    """Output of the router of a layer for the tokens of a sample."""

    scores: Tensor
    own: Tensor
    """(tokens, chosen) experts that the router selects."""
    taken: Tensor
    of_sigmoids: bool

    def unevenness(self) -> Tensor:
        """Return the load-balancing loss without its coefficient (DeepSeek-V3, 2024, eq. 17 to 20)."""
        tokens, experts = self.scores.shape
        fractions = torch.stack([(self.taken == e).sum() * experts / self.taken.numel() for e in range(experts)])
        if self.of_sigmoids:
            sigmoids = self.scores.sigmoid()
            shares = (sigmoids / sigmoids.sum(-1, keepdim=True)).sum(0) / tokens
        else:
            shares = self.scores.softmax(-1).sum(0) / tokens
        return (fractions * shares).sum()


@contextmanager
def routed(trunk: Any, routing: Tensor | None) -> Iterator[list[Routed]]:
    """Route the tokens of a sample according to `routing` in all layers of a model. The weights are the softmax of
    the scores of these experts, or normalized sigmoids as in GLM-4.5. Yield the outputs of the routers."""
    outputs: list[Routed] = []

    def route(
        number: int, router: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores, _, experts = output
        taken = experts.clone()
        if routing is not None:
            forced = routing[:, number]
            taken[:-1] = torch.where(forced < 0, experts[:-1], forced)
        of_sigmoids = hasattr(router, "e_score_correction_bias")
        outputs.append(Routed(scores, experts, taken, of_sigmoids))
        if of_sigmoids:
            weights = scores.sigmoid().gather(1, taken)
            return scores, weights / weights.sum(-1, keepdim=True) * router.routed_scaling_factor, taken
        return scores, scores.gather(1, taken).softmax(-1), taken

    hooks = [
        getattr(layer.mlp, name).register_forward_hook(partial(route, number))
        for number, layer in enumerate(trunk.layers)
        for name in ("gate", "router")
        if hasattr(layer.mlp, name)
    ]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


class ValueModel(nn.Module):
    """A transformers trunk with a scalar head."""

    def __init__(self, causal_lm: Any, head: nn.Linear) -> None:
        super().__init__()
        self.trunk = causal_lm.model
        self.head = head

    def forward(self, sample: Sample) -> Tensor:
        hidden = self.trunk(input_ids=sample.tokens[None]).last_hidden_state[0]
        return self.head(hidden)[-sample.response - 1 : -1, 0][sample.own]


def changed_routing(model: Any, samples: list[Sample]) -> float:
    """Return the share of tokens and layers with given routing in which the model would select other experts."""
    known = changed = 0
    for sample in samples:
        assert sample.routing is not None
        with torch.no_grad(), routed(model.model, sample.routing) as outputs:
            model(input_ids=sample.tokens[None])
        known_experts = sample.routing.sort(-1).values
        has_experts = known_experts[..., 0] >= 0
        differs = (torch.stack([layer.own for layer in outputs], dim=1)[:-1].sort(-1).values != known_experts).any(-1)
        known, changed = known + int(has_experts.sum()), changed + int((differs & has_experts).sum())
    return changed / known


def policy_outputs(model: Any, sample: Sample, settings: Settings) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy of each response token. The first positions of a turn exclude stop tokens."""
    own, labels = sample.own, sample.tokens[-sample.response :][sample.own]
    logits = model(input_ids=sample.tokens[None]).logits[0, -sample.response - 1 : -1][own] / settings.temperature
    excluded = torch.zeros(logits.shape, dtype=torch.bool)
    for place, (position, label) in enumerate(zip(own.tolist(), labels.tolist(), strict=True)):
        before = 0
        while before < place and own[place - before - 1] == position - before - 1:
            before += 1
        if before < settings.least_tokens and label not in settings.stop_token_ids:
            excluded[place, list(settings.stop_token_ids)] = True
    logp = logits.masked_fill(excluded, -math.inf).log_softmax(-1)
    entropy = -(logp.exp() * logp.masked_fill(excluded, 0.0)).sum(-1)
    return logp.gather(1, labels[:, None])[:, 0], entropy


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """Compute the recursion of generalised advantage estimation, Schulman et al. 2016, eq. 16."""
    advantages = torch.zeros_like(rewards)
    following = carried = torch.zeros(())
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * following - values[t]
        carried = delta + gamma * lam * carried
        advantages[t], following = carried, values[t]
    return advantages


@dataclass
class Settings:
    """The settings of the step. All features are active."""

    temperature: float
    gamma: float
    lam: float
    kl_reward_coef: float
    kl_loss_coef: float
    clip_low: float
    clip_high: float
    dual_clip: float
    value_clip: float
    entropy_coef: float
    aggregation: str
    clip_grad_norm: float
    actor_lr: float
    critic_lr: float
    weight_decay: float
    adam_eps: float
    estimator: str = "gae"
    """`grpo`, `rloo` or `reinforce_plus_plus` have no critic."""
    policy_loss: str = "clip"
    band: dict[str, float] | None = None
    """Settings of a loss in `policy_losses`; None for the losses of this file."""
    is_bypassed: bool = False
    """Whether the log-probabilities of the engine are the old log-probabilities."""
    importance_cap: float | None = None
    """Cap of the importance weights between trainer and engine. None disables the weights."""
    reject_above: float = math.inf
    """Samples with an importance weight above this value are excluded from the policy loss."""
    adaptive_lam: float | None = None
    """If this value is not None, the lambda of a sample is 1 - 1 / (value x its tokens) instead of `lam`."""
    critic_lam: float | None = None
    """Lambda of the returns, if it differs from the lambda of the advantages."""
    nll_coef: float = 0.0
    """Weight of the negative log-likelihood of samples whose rewards sum to more than 0."""
    least_tokens: int = 0
    """Number of tokens at the start of a turn without sampled stop tokens."""
    stop_token_ids: tuple[int, ...] = ()
    actor_balance: float = 0.0
    critic_balance: float = 0.0


def _optimizer(model: nn.Module, lr: float, settings: Settings) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    # gpt-oss stores the biases of experts in parameters with two dimensions.
    biases = {id(p) for name, p in model.named_parameters() if name.endswith("bias")}
    spared = [p for p in trained if p.dim() <= 1 or id(p) in biases]
    decayed = [p for p in trained if p.dim() > 1 and id(p) not in biases]
    # Megatron also applies weight decay to a value head with one row, because the head is a matrix.
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": spared, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=settings.adam_eps)
    _note_paths(optimizer, trained)
    return optimizer


def _note_paths(optimizer: torch.optim.Optimizer, trained: list[nn.Parameter]) -> None:
    """Store the total length of the updates of each parameter in its attribute `path`."""
    before: list[Tensor] = []
    for parameter in trained:
        parameter.path = 0.0  # type: ignore[attr-defined]

    def begin(*_: Any) -> None:
        before[:] = [parameter.detach().clone() for parameter in trained]

    def end(*_: Any) -> None:
        for parameter, old in zip(trained, before, strict=True):
            parameter.path += float((parameter.detach() - old).norm())  # type: ignore[attr-defined]

    optimizer.register_step_pre_hook(begin)
    optimizer.register_step_post_hook(end)


def _weights(samples: list[Sample], aggregation: str) -> list[float]:
    """Return the weight of each token in the loss of the minibatch, for each sample."""
    if aggregation == "token-mean":
        return [1 / sum(s.counted for s in samples)] * len(samples)
    if aggregation == "seq-mean-token-mean":
        return [1 / (len(samples) * s.counted) for s in samples]
    assert aggregation == "seq-mean-token-sum"
    return [1 / len(samples)] * len(samples)


def advantages_without_critic(rewards: list[Tensor], groups: list[int], settings: Settings) -> list[Tensor]:
    """Return the advantages of the tokens of each sample, before whitening.

    GRPO: Shao et al. 2024, "DeepSeekMath", section 4.1, with the unbiased standard deviation. RLOO: Ahmadian et al.
    2024, "Back to Basics", eq. 3. REINFORCE++: Hu 2025, the discounted sum of the following rewards.
    """
    if settings.estimator == "reinforce_plus_plus":
        return [
            torch.stack(
                [sum(settings.gamma**k * r for k, r in enumerate(of_sample[t:])) for t in range(len(of_sample))]
            )
            for of_sample in rewards
        ]
    scores = torch.stack([of_sample.sum() for of_sample in rewards])
    advantages = []
    for i, of_sample in enumerate(rewards):
        own = [j for j, group in enumerate(groups) if group == groups[i]]
        others = [j for j in own if j != i]
        if settings.estimator == "grpo":
            advantage = (scores[i] - scores[own].mean()) / (scores[own].std() + 1e-6)
        else:
            assert settings.estimator == "rloo"
            advantage = scores[i] - scores[others].mean()
        advantages.append(advantage.expand(len(of_sample)))
    return advantages


def ppo_step(
    actor: Any, reference: Any, critic: ValueModel | None, samples: list[Sample], settings: Settings,
    actor_minibatches: list[list[int]], critic_minibatches: list[list[int]],
) -> dict[str, Any]:  # fmt: skip
    """Run the step in place and return the measured numbers of each update. `critic` is None if the estimator has no
    critic."""
    with torch.no_grad():
        old = []
        for s in samples:
            with routed(actor.model, s.routing):
                scored = policy_outputs(actor, s, settings)[0]
                old.append(torch.full_like(scored, s.engine) if settings.is_bypassed else scored)
        ref = [policy_outputs(reference, s, settings)[0] for s in samples]
        values = [] if critic is None else [critic(s) for s in samples]
    rewards = [s.rewards() - settings.kl_reward_coef * (o - r) for s, o, r in zip(samples, old, ref, strict=True)]
    advantages, returns, returns_to_go = [], [], []
    if critic is None:
        advantages = returns = advantages_without_critic(rewards, [s.group for s in samples], settings)
    for s, r, v in zip(samples, rewards, values, strict=False):  # without a critic there are no values
        lam = settings.lam
        if settings.adaptive_lam is not None:  # Yue et al. 2025, "VAPO"
            lam = max(0.0, 1 - 1 / (settings.adaptive_lam * s.counted))
        advantages.append(gae(r, v, settings.gamma, lam))
        returns.append(gae(r, v, settings.gamma, lam if settings.critic_lam is None else settings.critic_lam) + v)
        returns_to_go.append(gae(r, torch.zeros_like(v), settings.gamma, 1.0))
    every = torch.cat(advantages)
    if settings.estimator in ("gae", "reinforce_plus_plus"):
        advantages = [(a - every.mean()) / torch.sqrt(every.var(unbiased=False) + 1e-8) for a in advantages]

    measured: dict[str, Any] = {"old_logprob": old, "advantages": advantages, "raw_advantages": every, "actor": []}
    if critic is not None:
        measured |= {"values": values, "returns": returns, "returns_to_go": returns_to_go, "critic": []}
        optimizer = _optimizer(critic, settings.critic_lr, settings)
        for minibatch in critic_minibatches:
            measured["critic"].append(_critic_update(critic, optimizer, samples, minibatch, values, returns, settings))
    optimizer = _optimizer(actor, settings.actor_lr, settings)
    importance = _importance(samples, old, settings)
    for minibatch in actor_minibatches:
        if any(importance[i] is not None for i in minibatch):
            measured["actor"].append(
                _actor_update(actor, optimizer, samples, minibatch, old, ref, advantages, importance, settings)
            )
    return measured


def _importance(samples: list[Sample], old: list[Tensor], settings: Settings) -> list[float | None]:
    """Return the importance weight of each sample, or None for a rejected sample (Yao et al. 2025, whole samples)."""
    if settings.importance_cap is None:
        return [1.0] * len(samples)
    weights: list[float | None] = []
    for s, o in zip(samples, old, strict=True):
        ratio = math.exp(max(-20.0, min(20.0, float((o - s.engine).sum()))))
        weights.append(None if ratio > settings.reject_above else min(ratio, settings.importance_cap))
    return weights


def _balancing(uneven: list[Tensor], weight: float, minibatch: list[int]) -> Tensor:
    """Return the sum over layers of the mean over samples."""
    return weight * torch.stack(uneven).sum() / len(minibatch) if weight else torch.zeros(())


def _shown(uneven: list[Tensor], weight: float) -> dict[str, float]:
    """Return the mean over layers and samples as a metric, if the loss has a weight."""
    return {"router_aux_loss": torch.stack(uneven).mean().item()} if weight else {}


def _critic_update(critic, optimizer, samples, minibatch, values, returns, settings):  # type: ignore[no-untyped-def]
    weights = _weights([samples[i] for i in minibatch], settings.aggregation)
    optimizer.zero_grad()
    loss, clipped, count, uneven = torch.zeros(()), 0, 0, list[Tensor]()
    for i, weight in zip(minibatch, weights, strict=True):
        with routed(critic.trunk, None) as outputs:
            v = critic(samples[i])
        uneven = [*uneven, *(layer.unevenness() for layer in outputs)]
        near = values[i] + (v - values[i]).clamp(-settings.value_clip, settings.value_clip)
        plain, other = (v - returns[i]) ** 2, (near - returns[i]) ** 2
        loss = loss + weight * 0.5 * torch.maximum(plain, other).sum()
        clipped += int((other > plain).sum())
        count += samples[i].counted
    (loss + _balancing(uneven, settings.critic_balance, minibatch)).backward()
    norm = nn.utils.clip_grad_norm_(critic.parameters(), settings.clip_grad_norm)
    optimizer.step()
    return {
        "loss": loss.item(), "grad_norm": norm.item(), "clipfrac": clipped / count, "count": count,
        **_shown(uneven, settings.critic_balance),
    }  # fmt: skip


def _log_ratio(logp: Tensor, old: Tensor) -> Tensor:
    """Return the log-ratio, clamped to +-20. Beyond the limit, the gradient is zero."""
    return (logp - old).clamp(-20, 20)


def _surrogate(logp: Tensor, old: Tensor, A: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Return the loss of each token of a sequence, and a mask of the clipped tokens."""
    if settings.band is not None:
        one = torch.zeros(len(logp), dtype=torch.int64)
        loss, below, above, _, _ = surrogate(settings.policy_loss, logp, old, A, one == 0, one, **settings.band)
        return loss, below | above
    ratio = torch.exp(_log_ratio(logp, old))
    if settings.policy_loss == "cispo":
        return -ratio.detach().clamp(max=1 + settings.clip_high) * A * logp, ratio > 1 + settings.clip_high
    if settings.policy_loss == "gspo":
        ratio = torch.exp((logp - old).sum() / len(logp)).expand(len(logp))
    plain = -A * ratio
    clipped = -A * ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    objective = torch.maximum(plain, clipped)
    if settings.policy_loss == "clip":
        objective = torch.where(A < 0, torch.minimum(objective, -A * settings.dual_clip), objective)
    return objective, clipped > plain


def _actor_update(actor, optimizer, samples, minibatch, old, ref, advantages, importance, settings):  # type: ignore[no-untyped-def]
    used = [i for i in minibatch if importance[i] is not None]
    weights = dict(zip(used, _weights([samples[i] for i in used], settings.aggregation), strict=True))
    good = [i for i in used if float(samples[i].rewards().sum()) > 0]
    of_good = settings.nll_coef / max(1, sum(samples[i].counted for i in good))
    optimizer.zero_grad()
    loss, count, uneven = torch.zeros(()), 0, list[Tensor]()
    sums = dict.fromkeys(("clipfrac", "ppo_kl", "entropy"), 0.0)
    for i in minibatch:
        with routed(actor.model, samples[i].routing) as outputs:
            logp, entropy = policy_outputs(actor, samples[i], settings)
        uneven = [*uneven, *(layer.unevenness() for layer in outputs)]
        if i not in weights:
            continue
        A = advantages[i]
        objective, is_clipped = _surrogate(logp, old[i], A, settings)
        gap = ref[i] - logp
        k3 = (torch.exp(gap) - gap - 1).clamp(-10, 10)
        total = importance[i] * objective - settings.entropy_coef * entropy + settings.kl_loss_coef * k3
        loss = loss + weights[i] * total.sum() - of_good * logp.sum() * (i in good)
        count += samples[i].counted
        sums["clipfrac"] += float(is_clipped.sum())
        sums["ppo_kl"] -= float(_log_ratio(logp, old[i]).detach().sum())
        sums["entropy"] += float(entropy.detach().sum())
    (loss + _balancing(uneven, settings.actor_balance, minibatch)).backward()
    norm = nn.utils.clip_grad_norm_(actor.parameters(), settings.clip_grad_norm)
    optimizer.step()
    means = {k: v / count for k, v in sums.items()}
    shown = _shown(uneven, settings.actor_balance)
    return {"loss": loss.item(), "grad_norm": norm.item(), "count": count, **means, **shown}
