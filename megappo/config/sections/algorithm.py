"""Settings of the PPO algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from megappo.algo.aggregation import Aggregation
from megappo.algo.estimators import NAMES
from megappo.config.base import (
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Settings,
    SettingValue,
    Text,
    rule_of_one,
)
from megappo.errors import either, show
from megappo.plugins import check_choice, is_import_path
from megappo_kernels.objectives import KLKind
from megappo_kernels.surrogates import POLICY_LOSSES, LossSettings

_DEFAULT_TARGET_NATS = {"token": 0.01, "response": 6.0}


class KLInRewardSettings(Settings):
    kind: KLKind = "kl"
    """Estimator of KL(actor || reference) per token."""
    coef: NonNegativeFloat
    """Weight of the KL term. An adaptive controller starts with this weight."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """Controller of the weight. `adaptive` moves the weight towards `target` (Ziegler et al. 2019)."""
    per: Literal["token", "response"] = "token"
    """Measure of the adaptive controller: mean KL per token, or mean over responses of the KL sum of a response."""
    target: PositiveFloat | None = None
    """Target KL of the adaptive controller in nats, in the unit `per`. Null: 0.01 per token, 6 per response."""
    horizon: PositiveInt = 10000
    """Number of samples over which the adaptive controller moves the weight, at least the samples of a step."""

    @property
    def target_nats(self) -> float:
        """Value of `target`, or the default for the unit `per`."""
        return self.target if self.target is not None else _DEFAULT_TARGET_NATS[self.per]

    def broken_rules(self) -> Iterator[str]:
        if self.controller == "adaptive" and self.coef == 0.0:
            yield "the adaptive controller multiplies coef, so coef stays 0; set coef above 0, such as 0.001"


class KLInLossSettings(Settings):
    kind: KLKind = "low_var_kl"
    """Estimator of KL(actor || reference) per token."""
    coef: NonNegativeFloat
    """Weight of the term in the policy loss."""


class PenaltySettings(Settings):
    coef: PositiveFloat = 1.0
    """Initial weight of KL(old || new). The weight stays within a factor of 1,024 above and below this value."""
    target: PositiveFloat = 0.01
    """Target of KL(old || new) in nats per token after the updates of a step. The weight adapts to this target. The
    measurement takes one more forward pass of the actor (Schulman et al. 2017, section 4)."""


class BandSettings(Settings):
    low: Annotated[float, Field(gt=0, le=1)] | None = None
    """Lower edge of the band. Ratios of at least 1 - low are unchanged. `dppo_tv` measures the drop in probability
    instead, `dppo_kl` measures nats. 1: no lower edge. Default: the edge of the policy loss."""
    high: PositiveFloat | None = None
    """Upper edge of the band. Ratios of at most 1 + high are unchanged. `dppo_tv` measures the rise in probability
    instead, `dppo_kl` measures nats. Default: the edge of the policy loss."""
    cap: PositiveFloat | None = None
    """Maximum weight of a token with `dppo_tv` and `dppo_kl`. Default: 20 (verl)."""


class GateSettings(Settings):
    positive: Annotated[float, Field(gt=0, le=50)] = LossSettings.gate_positive
    """Temperature of tokens with an advantage above 0. Gradients fade faster with a higher temperature when ratios
    leave 1 (Gao et al. 2025, "SAPO")."""
    negative: Annotated[float, Field(gt=0, le=50)] = LossSettings.gate_negative
    """Temperature of the other tokens."""


class CorrectionSettings(Settings):
    level: Literal["token", "sequence", "geometric"] = "token"
    """Unit of importance weights. `token`: one weight per token. `sequence`: one weight per response, the product over
    its tokens. `geometric`: one weight per response, the geometric mean, which does not grow with the length."""
    cap: PositiveFloat = 2.0
    """Maximum importance weight. Larger weights are truncated."""
    reject_above: PositiveFloat | None = None
    """Upper limit of importance weights. Tokens, or samples with one weight per response, are excluded above the
    limit."""
    reject_below: PositiveFloat | None = None
    """Lower limit of importance weights. Tokens, or samples with one weight per response, are excluded below the
    limit."""

    def broken_rules(self) -> Iterator[str]:
        if self.reject_above is not None and self.reject_below is not None and self.reject_below >= self.reject_above:
            yield (
                f"reject_below {self.reject_below:g} must be less than reject_above {self.reject_above:g}; lower "
                "reject_below"
            )


class JumpSettings(Settings):
    grad_norm_ratio: Annotated[float, Field(gt=1, le=1e9)] | None = 10.0
    """Ratio of an update's gradient norm to the median of the last 50 norms of the role. Updates above the ratio are
    recorded if their norm is also above the 50 norms and `optimizer.clip_grad_norm`. Null: off."""
    kl_nats: PositiveFloat | None = 0.5
    """Limit of KL(old || new) of a minibatch in nats per token, above which an actor update is recorded. Null: off."""


def _is_fraction(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _number_or(form: str, *keys: str) -> BeforeValidator:
    """Return a validator of a number or a section. A number expands to a section with the number in each of `keys`."""

    def read(value: SettingValue) -> SettingValue | dict[str, SettingValue]:
        if _is_fraction(value):
            return dict.fromkeys(keys, value)
        if isinstance(value, Mapping | Settings):
            return value
        raise ValueError(f"{show(value)} is neither a number from 0 to 1 nor {form}; write one of these forms")

    return BeforeValidator(read)


class ActorLambdaSettings(Settings):
    number: Fraction | None = None
    """Lambda of all samples."""
    length_adaptive: PositiveFloat | None = None
    """Factor of a lambda that depends on the length of a sample: 1 - 1 / (this factor x tokens), at least 0. The share
    of a score that reaches the first token is exp(-1 / this factor): 0.51 with 1.5 (SAO, CompactionRL), 2e-9 with 0.05
    (VAPO)."""

    def broken_rules(self) -> Iterator[str]:
        yield from rule_of_one(number=self.number, length_adaptive=self.length_adaptive)


class LambdaSettings(Settings):
    actor: Annotated[ActorLambdaSettings, _number_or("{length_adaptive: 1.5}", "number")] = ActorLambdaSettings(
        number=1.0
    )
    """Lambda of the policy's advantages: a number, or `{length_adaptive: 1.5}`."""
    critic: Fraction = 1.0
    """Lambda of the critic's returns."""

    @property
    def is_one(self) -> bool:
        """Whether actor and critic have the same lambda."""
        return self.actor.number == self.critic

    @property
    def summary(self) -> str:
        """Readable text of both lambdas."""
        adaptive = self.actor.length_adaptive
        actor = f"{self.actor.number:g}" if adaptive is None else f"1 - 1 / ({adaptive:g} x tokens)"
        return actor if self.is_one else f"{actor}, of the critic {self.critic:g}"


def _described_losses() -> str:
    """Return the built-in policy losses with their settings, and the defaults that differ between losses."""
    texts = []
    for name, loss in POLICY_LOSSES.items():
        keys = (key if default is None else f"{key} {default:g}" for key, default in loss.settings.items())
        texts.append(f"`{name}` ({loss.meaning}; {', '.join(keys)})")
    return ", ".join(texts)


class AlgorithmSettings(Settings):
    estimator: Text = "gae"
    """Advantage estimator: `gae` (with a critic), `grpo`, `rloo`, `reinforce_plus_plus` (without a critic), or a
    custom estimator (`file.py:function` or `package.module:function`)."""
    estimator_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a custom estimator."""
    gamma: Fraction = 1.0
    """Discount per token, or per turn (`discount_at`)."""
    discount_at: Literal["token", "turn"] = "token"
    """Positions at which gamma and lambda apply. `token`: every token. `turn`: only ends of turns of an episode, so
    that a whole turn is one time step (`gae_timestep_unit` of AReaL)."""
    lam: Annotated[LambdaSettings, _number_or("{actor: 0.95, critic: 1.0}", "actor", "critic")] = LambdaSettings()
    """Lambda of GAE: one number, or separate numbers for actor and critic. The weight of a score at a token n tokens
    earlier is lambda^n. With 0.95, the weight is almost zero after a thousand tokens."""
    whiten_advantages: bool = True
    """Whether to whiten advantages over the global batch, if the estimator allows whitening."""
    policy_loss: Text = Field(
        default="clip",
        description=f"Policy loss. Choices with their settings in this section: {_described_losses()}, or a custom "
        "loss (`file.py:function` or `package.module:function`).",
    )
    policy_loss_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a custom policy loss."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = LossSettings.clip_low
    """Lower clip range. Ratios are clipped to at least 1 - clip_low."""
    clip_high: PositiveFloat = LossSettings.clip_high
    """Upper clip range. Ratios are clipped to at most 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1, le=1e9)] | None = 3.0
    """Factor c of the lower bound c*A of the objective for A < 0 (Ye et al. 2020). Null: off."""
    band: BandSettings | None = None
    """Band in which a policy loss does not change ratios. Default: the band of the loss (see `policy_loss`). `clip` has
    clip_low and clip_high instead."""
    gate: GateSettings | None = None
    """Settings of `policy_loss: sapo`. Default: the values of the paper."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    positive_nll_coef: NonNegativeFloat = 0.0
    """Weight of the negative log-likelihood of good samples in the policy loss (VAPO: 0.1). The term is a mean over
    response tokens of good samples in the minibatch."""
    positive_nll_above: float = Field(default=0.0, ge=-1e9, le=1e9)
    """Reward threshold. Samples with a higher reward are good samples."""
    mask_truncated: bool = False
    """Whether to exclude samples from the losses of actor and critic if `rollout.max_response_tokens` or
    `rollout.max_total_tokens` ended the sample (DAPO's overlong filtering). Samples with a turn cut by
    `max_turn_tokens`, and episodes ended by `max_turns` or `max_calls`, remain in the losses."""
    loss_aggregation: Aggregation = "token-mean"
    """Aggregation of token losses to one number over the global minibatch."""
    kl_in_reward: KLInRewardSettings | None = None
    """KL to the reference, subtracted from token rewards."""
    kl_in_loss: KLInLossSettings | None = None
    """KL to the reference, added to the policy loss."""
    penalty: PenaltySettings = PenaltySettings()
    """Settings of `policy_loss: penalty`."""
    target_kl: PositiveFloat | None = None
    """Limit of KL(old || new) of a minibatch in nats per token. The actor updates of a step end above this limit."""
    old_logprob: Literal["decoupled", "bypass", "corrected"] = "decoupled"
    """Source of old log-probabilities: recomputation by the trainer (`decoupled`), the engine (`bypass`), or
    recomputation with importance weights for the gap between engine and trainer (`corrected`)."""
    correction: CorrectionSettings = CorrectionSettings()
    """Settings of `old_logprob: corrected`."""
    router_replay: bool | None = None
    """Whether the actor sends each token to the experts that the engine selected, in forward passes and updates.
    Default: true if the model has experts and the engine returns its selection."""
    mismatch_warn_nats: PositiveFloat = 0.05
    """Limit of the mean |engine - trainer| logprob per token of the actor's weights. A warning is printed above the
    limit."""
    mismatch_stop_nats: PositiveFloat = 1.0
    """Limit of the mean |engine - trainer| logprob per token of the actor's weights. The run stops above the limit."""
    mismatch_every_steps: PositiveInt = 1
    """Number of steps between comparisons of engine and trainer log-probabilities, starting with the first step. With
    `old_logprob: bypass`, only comparisons need the forward pass of the actor. Other steps skip it."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Reaction to a non-finite loss or gradient. `stop` ends the run, and `skip` continues with the next update. The
    non-finite update is never applied."""
    jumps: JumpSettings = JumpSettings()
    """Limits above which an update and its samples are recorded in jumps.jsonl."""

    @property
    def loss_settings(self) -> dict[str, Any]:
        """Settings that a built-in policy loss reads, by their keys in this section. Settings without a value have the
        default of the loss, or are missing if only `LossSettings` has a default."""
        loss = POLICY_LOSSES.get(self.policy_loss)
        defaults = loss.settings if loss is not None else {}
        settings = {key: value for key in defaults if (value := getattr(*self._place(key), None)) is not None}
        return {key: value for key, value in {**defaults, **settings}.items() if value is not None}

    def _place(self, key: str) -> tuple[Settings | None, str]:
        """Return the section that contains the setting at a key, or None if the section is null, and the name in the
        section."""
        section, _, name = key.rpartition(".")
        return getattr(self, section) if section else self, name

    def replays_routing(self, experts: int) -> bool:
        """Return whether an actor with `experts` experts replays the routing that the engine returns."""
        return experts > 0 and self.router_replay is not False

    def compares_in(self, step: int) -> bool:
        """Return whether the actor scores the engine's samples in this step."""
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
                yield f"{key}_options are for custom functions, but {key} is '{name}'; remove {key}_options"
        yield from self._unused()
        if self.discount_at == "turn" and self.lam.actor.length_adaptive is not None:
            yield "lam.actor.length_adaptive depends on the tokens of a sample, but discount_at is turn; give a number"
        loss = POLICY_LOSSES.get(self.policy_loss)
        if loss is not None and loss.needs_engine and self.old_logprob != "bypass":
            yield (
                f"policy_loss is {self.policy_loss}, which needs ratios to the engine's log-probabilities, but "
                f"old_logprob is {self.old_logprob}; set old_logprob: bypass"
            )
        if self.mismatch_every_steps > 1 and self.old_logprob != "bypass":
            yield (
                f"mismatch_every_steps is {self.mismatch_every_steps}, but with old_logprob {self.old_logprob} every "
                "step needs the actor's scores; remove mismatch_every_steps, or set old_logprob: bypass"
            )

    def _unused(self) -> Iterator[str]:
        """Yield a sentence for each setting that only other policy losses read. Settings with a default do not count,
        because every run has them. If the loss reads nothing in a section, the sentence names the section."""
        loss = POLICY_LOSSES.get(self.policy_loss)
        own = ["policy_loss_options"] if loss is None else list(loss.settings)
        for key in dict.fromkeys(key for other in POLICY_LOSSES.values() for key in other.settings):
            section = key.partition(".")[0]
            unused = key if any(other.startswith(f"{section}.") for other in own) else section
            owner, name = self._place(unused)
            has_default = owner is None or type(owner).model_fields[name].default is not None
            if key not in own and not has_default and getattr(owner, name) is not None:
                readers = either(name for name, other in POLICY_LOSSES.items() if key in other.settings)
                yield (
                    f"{unused} is given, but policy_loss '{self.policy_loss}' reads {', '.join(own)}; remove {unused}, "
                    f"or set policy_loss to {readers}"
                )
