"""The settings of PPO itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from megappo.algo.aggregation import Aggregation
from megappo.algo.estimators import NAMES
from megappo.config.base import (
    Fraction,
    Given,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Settings,
    Text,
    rule_of_one,
)
from megappo.errors import either, show
from megappo.plugins import check_choice, is_import_path
from megappo_kernels.objectives import KLKind
from megappo_kernels.surrogates import BANDS, POLICY_LOSSES

_DEFAULT_TARGET_NATS = {"token": 0.01, "response": 6.0}


class KLInRewardSettings(Settings):
    kind: KLKind = "kl"
    """Estimator of KL(actor || reference) per token."""
    coef: NonNegativeFloat
    """Weight; the starting weight with an adaptive controller."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive` moves the weight towards `target` (Ziegler et al. 2019)."""
    per: Literal["token", "response"] = "token"
    """What the adaptive controller measures: the mean KL per token, or the mean over responses of the KL summed over
    each."""
    target: PositiveFloat | None = None
    """KL in nats the adaptive controller aims at, per token or response as `per` says; null: 0.01 per token, 6 per
    response."""
    horizon: PositiveInt = 10000
    """Samples over which the adaptive controller moves, at least those of a step."""

    @property
    def target_nats(self) -> float:
        """`target`, or the default of the unit."""
        return self.target if self.target is not None else _DEFAULT_TARGET_NATS[self.per]

    def broken_rules(self) -> Iterator[str]:
        if self.controller == "adaptive" and self.coef == 0.0:
            yield "the adaptive controller multiplies coef, so 0 stays 0; set coef above 0, such as 0.001"


class KLInLossSettings(Settings):
    kind: KLKind = "low_var_kl"
    """Estimator of KL(actor || reference) per token."""
    coef: NonNegativeFloat
    """Weight of the term in the policy loss."""


class PenaltySettings(Settings):
    coef: PositiveFloat = 1.0
    """Starting weight of KL(old || new); it stays within 1,024 times this, up and down."""
    target: PositiveFloat = 0.01
    """KL(old || new) per token in nats, after a step's updates, to which the weight is adapted; measuring it takes one
    more forward pass of the actor (Schulman et al. 2017, section 4)."""


class BandSettings(Settings):
    low: Annotated[float, Field(gt=0, le=1)] | None = None
    """Lower edge of the band: ratios from 1 - low on are left alone; `dppo_tv` measures the drop in probability
    instead, `dppo_kl` in nats. 1: no lower edge. Default: 0.8 with `dis` (SAO), 1 with `cispo` (ScaleRL), 3e-4 with
    `gspo` (its paper), 0.2 with `dppo_tv`, 0.05 with `dppo_kl` (DPPO)."""
    high: PositiveFloat | None = None
    """Upper edge of the band: ratios up to 1 + high are left alone; `dppo_tv` measures the rise in probability instead,
    `dppo_kl` in nats. Default: 3 with `dis`, 4 with `cispo`, 4e-4 with `gspo`, 0.2 with `dppo_tv`, 0.05 with `dppo_kl`,
    from the same sources."""
    cap: PositiveFloat | None = None
    """Largest weight of a token with `dppo_tv` and `dppo_kl`; default: 20 (verl)."""


class GateSettings(Settings):
    positive: Annotated[float, Field(gt=0, le=50)] = 1.0
    """Temperature of tokens whose advantage is above 0: the larger, the faster gradients fade as ratios leave 1 (Gao et
    al. 2025, "SAPO")."""
    negative: Annotated[float, Field(gt=0, le=50)] = 1.05
    """Temperature of the other tokens."""


class CorrectionSettings(Settings):
    level: Literal["token", "sequence", "geometric"] = "token"
    """One importance weight per token, or one per response: `sequence`, the product over its tokens, or `geometric`,
    their geometric mean, which does not grow with the length."""
    cap: PositiveFloat = 2.0
    """Largest importance weight; larger ones are truncated to it."""
    reject_above: PositiveFloat | None = None
    """Tokens, or samples with a weight per response, are left out of the loss where the weight is larger."""
    reject_below: PositiveFloat | None = None
    """Tokens, or samples with a weight per response, are left out of the loss where the weight is smaller."""

    def broken_rules(self) -> Iterator[str]:
        if self.reject_above is not None and self.reject_below is not None and self.reject_below >= self.reject_above:
            yield (
                f"reject_below {self.reject_below:g} must be less than reject_above {self.reject_above:g}, or no "
                "weight is kept; lower it"
            )


class JumpSettings(Settings):
    grad_norm_ratio: Annotated[float, Field(gt=1, le=1e9)] | None = 10.0
    """An update is recorded whose gradient norm is more than so many times the median of the role's last 50; null:
    off."""
    kl_nats: PositiveFloat | None = 0.5
    """An actor update is recorded whose minibatch has a KL(old || new) above this, in nats per token; null: off."""


def _is_fraction(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _number_or(form: str, *keys: str) -> BeforeValidator:
    """Validator of a number, which stands for a section with the number in each of `keys`, or such a section."""

    def read(value: Given) -> Given | dict[str, Given]:
        if _is_fraction(value):
            return dict.fromkeys(keys, value)
        if isinstance(value, Mapping | Settings):
            return value
        raise ValueError(f"{show(value)} is neither a number from 0 to 1 nor {form}; write either")

    return BeforeValidator(read)


class ActorLambdaSettings(Settings):
    number: Fraction | None = None
    """Lambda of all samples."""
    length_adaptive: PositiveFloat | None = None
    """Lambda of each sample is 1 - 1 / (this x its tokens), never below 0. A share of exp(-1 / this) of a score reaches
    the first token: 0.51 with the 1.5 of SAO and CompactionRL, 2e-9 with the 0.05 of VAPO."""

    def broken_rules(self) -> Iterator[str]:
        yield from rule_of_one(number=self.number, length_adaptive=self.length_adaptive)


class LambdaSettings(Settings):
    actor: Annotated[ActorLambdaSettings, _number_or("{length_adaptive: 1.5}", "number")] = ActorLambdaSettings(
        number=1.0
    )
    """Lambda of the advantages that the policy is trained with: a number, or `{length_adaptive: 1.5}`."""
    critic: Fraction = 1.0
    """Lambda of the returns that the critic is trained on."""

    @property
    def is_one(self) -> bool:
        """Whether actor and critic have the same lambda."""
        return self.actor.number == self.critic

    @property
    def summary(self) -> str:
        """The lambdas in words, for people."""
        adaptive = self.actor.length_adaptive
        actor = f"{self.actor.number:g}" if adaptive is None else f"1 - 1 / ({adaptive:g} x tokens)"
        return actor if self.is_one else f"{actor}, of the critic {self.critic:g}"


class AlgorithmSettings(Settings):
    estimator: Text = "gae"
    """`gae` (with critic), `grpo`, `rloo` or `reinforce_plus_plus` (without), or one of your own:
    `package.module:function`."""
    estimator_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of an estimator of your own."""
    gamma: Fraction = 1.0
    """Discount per token, or per turn."""
    discount_at: Literal["token", "turn"] = "token"
    """Where gamma and lambda apply: at every token, or only where a turn of an episode ends, so that a whole turn is
    one time step (`gae_timestep_unit` of AReaL)."""
    lam: Annotated[LambdaSettings, _number_or("{actor: 0.95, critic: 1.0}", "actor", "critic")] = LambdaSettings()
    """GAE's lambda: a number, or one for the actor and one for the critic. A score counts lambda^n at a token n tokens
    before it: with 0.95 nothing is left after a thousand tokens."""
    whiten_advantages: bool = True
    """Whiten over the global batch where the estimator allows it."""
    policy_loss: Text = "clip"
    """`clip` (PPO-clip), `penalty` (an adaptive KL penalty against the old policy), `dis` (of SAO: tokens outside a
    band around the engine's own probabilities are left out), `cispo` (ratios as bounded weights), `gspo` (ratios of
    sequences), `sapo` (a soft gate), `dppo_tv` or `dppo_kl` (tokens are left out by their change of probability), or
    one of your own: `package.module:function`."""
    policy_loss_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a policy loss of your own."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Ratios are clipped below at 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """Ratios are clipped above at 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1, le=1e9)] | None = 3.0
    """Lower bound c*A of the objective where A < 0 (Ye et al. 2020); null: off."""
    band: BandSettings | None = None
    """Band within which `policy_loss: dis`, `cispo`, `gspo`, `dppo_tv` and `dppo_kl` leave ratios alone; default: the
    loss's own. `clip` has clip_low and clip_high instead."""
    gate: GateSettings | None = None
    """Settings of `policy_loss: sapo`; default: the paper's."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    positive_nll_coef: NonNegativeFloat = 0.0
    """Weight of the negative log-likelihood of good samples in the policy loss, per response token of good samples in
    the minibatch (VAPO: 0.1)."""
    positive_nll_above: float = Field(default=0.0, ge=-1e9, le=1e9)
    """Samples whose reward is above this are good ones."""
    mask_truncated: bool = False
    """Leave samples that `rollout.max_response_tokens` or `rollout.max_total_tokens` ended out of the losses of actor
    and critic (DAPO's overlong filtering). Samples whose turn `max_turn_tokens` cut, and episodes that `max_turns` or
    `max_calls` ended, stay in the losses."""
    loss_aggregation: Aggregation = "token-mean"
    """How token losses are aggregated to one number, over the global minibatch."""
    kl_in_reward: KLInRewardSettings | None = None
    """KL to the reference subtracted from the token rewards."""
    kl_in_loss: KLInLossSettings | None = None
    """KL to the reference added to the policy loss."""
    penalty: PenaltySettings = PenaltySettings()
    """Settings of `policy_loss: penalty`."""
    target_kl: PositiveFloat | None = None
    """Actor updates of a step end once KL(old || new) of a minibatch passes this (nats per token)."""
    old_logprob: Literal["decoupled", "bypass", "corrected"] = "decoupled"
    """Where old log-probabilities come from: recomputed by the trainer (`decoupled`), the engine's (`bypass`), or
    recomputed with importance weights for the gap between engine and trainer (`corrected`)."""
    correction: CorrectionSettings = CorrectionSettings()
    """Settings of `old_logprob: corrected`."""
    router_replay: bool | None = None
    """In the actor's forward passes and updates, send each token to the experts that the engine sent it to; default:
    where the model has experts and the engine returns them."""
    mismatch_warn_nats: PositiveFloat = 0.05
    """Mean |engine - trainer| logprob per token of the actor's own weights from which a warning is printed."""
    mismatch_stop_nats: PositiveFloat = 1.0
    """Mean |engine - trainer| logprob per token of the actor's own weights from which the run stops."""
    mismatch_every_steps: PositiveInt = 1
    """Log-probabilities of engine and trainer are compared in the first step and in every so many after it. With
    `old_logprob: bypass` nothing else needs the actor's forward pass, which is left out in the other steps."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What follows a non-finite loss or gradient, whose update is never applied: the end of the run (`stop`), or the
    next update (`skip`)."""
    jumps: JumpSettings = JumpSettings()
    """Updates that are written to jumps.jsonl with the samples they were made of."""

    @property
    def band_edges(self) -> tuple[float, float] | None:
        """(low, high) of the policy loss's band, its defaults where none are given; None where it has no band."""
        own, given = BANDS.get(self.policy_loss), self.band or BandSettings()
        if own is None:
            return None
        return (own[0] if given.low is None else given.low, own[1] if given.high is None else given.high)

    def replays_routing(self, experts: int) -> bool:
        """Whether an actor with so many experts replays the engine's routing where the engine returns it."""
        return experts > 0 and self.router_replay is not False

    def compares_in(self, step: int) -> bool:
        """Whether the actor scores what the engine sampled in this step."""
        return (step - 1) % self.mismatch_every_steps == 0

    @field_validator("estimator", "policy_loss")
    @classmethod
    def _is_known(cls, name: str, info: ValidationInfo) -> str:
        if info.field_name == "estimator":
            check_choice(name, NAMES, others={"ppo": "gae"})
        else:
            check_choice(name, POLICY_LOSSES, others={"ppo": "clip"})
        return name

    def broken_rules(self) -> Iterator[str]:
        for key, name in (("estimator", self.estimator), ("policy_loss", self.policy_loss)):
            if getattr(self, f"{key}_options") and not is_import_path(name):
                yield f"{key}_options are for functions of your own, and {key} is '{name}'; remove them"
        yield from self._unused()
        if self.discount_at == "turn" and self.lam.actor.length_adaptive is not None:
            yield "lam.actor.length_adaptive goes by the tokens of a sample, but discount_at is turn; give a number"
        if self.policy_loss == "dis" and self.old_logprob != "bypass":
            yield (
                f"policy_loss is dis, whose ratios are to the engine's own log-probabilities, but old_logprob is "
                f"{self.old_logprob}; set old_logprob: bypass"
            )
        if self.mismatch_every_steps > 1 and self.old_logprob != "bypass":
            yield (
                f"mismatch_every_steps is {self.mismatch_every_steps}, but with old_logprob {self.old_logprob} every "
                "step needs the actor's scores; remove it, or set old_logprob: bypass"
            )

    def _unused(self) -> Iterator[str]:
        """A sentence for each setting that belongs to another policy loss."""
        loss = self.policy_loss
        if self.band is not None and loss not in BANDS:
            instead = {"clip": "set clip_low and clip_high", "sapo": "set gate"}.get(loss, "remove it")
            yield f"band is given, but policy_loss '{loss}' has none; {instead}, or policy_loss to {either(BANDS)}"
        if self.band is not None and self.band.cap is not None and not loss.startswith("dppo_"):
            yield f"band.cap is {self.band.cap:g}, but policy_loss '{loss}' caps no weights; remove it"
        if self.gate is not None and loss != "sapo":
            yield f"gate is given, but policy_loss is '{loss}'; remove it, or set policy_loss: sapo"
