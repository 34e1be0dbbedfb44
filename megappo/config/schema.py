"""The settings of a run: one frozen, validated class per section of the YAML file.

Units stand in the names (`_sequences`, `_tokens`, `_seconds`, `_bytes`); every field says what it means. Rules that
need only one section are checked here, rules between sections, the model and the world size in `derive`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from megappo.config.base import Settings
from megappo.config.engine import SGLangSettings

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
TokenIds = Annotated[tuple[NonNegativeInt, ...], Field(strict=False)]  # YAML has lists, strict mode wants tuples
PathFromText = Annotated[Path, Field(strict=False)]


PHASES = (
    "start", "rollout", "reward", "score", "advantages", "update_critic", "update_actor", "sync", "evaluate",
    "checkpoint", "export",
)  # fmt: skip
"""What the watchdog tells apart; each lasts until the next begins."""


class RunSettings(Settings):
    name: str = Field(min_length=1)
    """Name of the experiment; the default run directory is `runs/<name>`."""
    directory: PathFromText | None = None
    """Where everything the run writes goes."""
    steps: PositiveInt
    """PPO steps: each is one rollout and its updates."""
    seed: int = Field(default=0, ge=0)
    """Seed of initialisation, shuffling and sampling."""
    export_final_model: bool = True
    """Write the actor as a Hugging Face folder (`<directory>/final`) at the end."""
    force_resume: bool = False
    """Continue from a checkpoint although settings changed that make it another run."""

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.directory if self.directory is not None else Path("runs") / self.name


class RuntimeSettings(Settings):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where there is one."""
    threads_per_rank: PositiveInt | None = None
    """CPU threads of each rank; default: the machine's cores divided by the ranks on it."""
    collective_timeout_seconds: PositiveInt = 1800
    """A collective that waits longer than this fails."""
    phase_timeout_seconds: PositiveFloat | None = 1500.0
    """A phase of a step that lasts longer ends the run with the stacks of all ranks; null: no watchdog."""
    phase_timeouts_seconds: dict[str, PositiveFloat] = Field(default_factory=dict)
    """The same for single phases, such as {rollout: 3600}."""

    @model_validator(mode="after")
    def _phases_exist(self) -> RuntimeSettings:
        for name in self.phase_timeouts_seconds:
            if name not in PHASES:
                raise ValueError(
                    f"phase_timeouts_seconds has '{name}', which is no phase; they are {', '.join(PHASES)}"
                )
        return self


class ModelSettings(Settings):
    path: str = Field(min_length=1)
    """Hugging Face folder or hub name: config.json, tokenizer and (with `init: pretrained`) safetensors."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` draws the weights from the configuration's `initializer_range` and the run's seed."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; default: `path`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations; bfloat16 keeps float32 main weights in the optimizer."""
    pad_vocab_to_multiple_of: PositiveInt = 1
    """The vocabulary is padded to this multiple (at least to a multiple of the tensor parallel size when 1)."""
    trust_remote_code: bool = False
    """Allow Python code from the model folder to run."""


class LayoutSettings(Settings):
    """How a role is spread over ranks; data parallelism is what is left."""

    tensor_parallel: PositiveInt = 1
    """Ranks that share each layer (TP)."""
    pipeline_parallel: PositiveInt = 1
    """Stages the layers are cut into (PP)."""
    virtual_pipeline_chunks: PositiveInt = 1
    """Chunks of layers per stage for the interleaved schedule (VPP); 1: no interleaving."""
    expert_parallel: PositiveInt = 1
    """Ranks that share out the experts of each layer (EP), among those of a pipeline stage."""
    sequence_parallel: bool = False
    """Shard the activations between tensor parallel regions along the sequence (SP)."""
    first_rank: NonNegativeInt = 0
    """First global rank of this role."""
    ranks: PositiveInt | None = None
    """How many ranks the role stands on; default: all from `first_rank`."""


class OptimizerSettings(Settings):
    learning_rate: PositiveFloat
    """Peak learning rate of AdamW."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Where a decaying schedule ends."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay over all updates of the run."""
    warmup_updates: NonNegativeInt = 0
    """Optimizer updates of linear warm-up from 0."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; biases and norms are exempt."""
    beta1: Decay = 0.9
    """AdamW's first moment decay."""
    beta2: Decay = 0.999
    """AdamW's second moment decay."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    clip_grad_norm: NonNegativeFloat = 1.0
    """Gradients are scaled down to this global L2 norm; 0: no clipping."""
    distributed: bool = False
    """Shard optimizer state over data parallel ranks (Megatron's distributed optimizer)."""

    @model_validator(mode="after")
    def _min_below_peak(self) -> OptimizerSettings:
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate {self.min_learning_rate} is above learning_rate {self.learning_rate}; lower it"
            )
        return self


class TrainedRoleSettings(Settings):
    """What actor and critic have in common."""

    layout: LayoutSettings = LayoutSettings()
    """The role's own parallel layout."""
    optimizer: OptimizerSettings
    """AdamW and its schedule."""
    epochs: PositiveInt = 1
    """Passes over the step's samples."""
    minibatch_sequences: PositiveInt
    """Samples per optimizer update over all data parallel ranks; divides the step's samples."""
    microbatch_budget_tokens: PositiveInt = 8192
    """Most tokens in one packed microbatch; not below the longest possible sample."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation: attention only (`selective`) or whole layers (`full`)."""


class ActorSettings(TrainedRoleSettings):
    """The policy that is trained."""


class CriticSettings(TrainedRoleSettings):
    """The value model: a trunk like the actor's, its output layer a scalar head."""

    path: str | None = None
    """Hugging Face folder of the trunk; default: the actor's model."""
    value_head_std: NonNegativeFloat = 0.0
    """Standard deviation of the new value head; 0 makes every first value 0."""
    value_clip: PositiveFloat | None = 0.2
    """Clip range of the value loss around the old values; null: no clipping."""
    warmup_steps: NonNegativeInt = 0
    """First steps in which only the critic is updated."""


class ReferenceSettings(Settings):
    """The frozen policy of the KL terms; stands on the actor's layout."""

    path: str | None = None
    """Hugging Face folder; default: the actor's starting weights."""


class DataSourceSettings(Settings):
    source: str = Field(min_length=1)
    """`FILE.jsonl`, `FILE.parquet` (verl's schema), `reasoning_gym:TASK`, or `python:package.module:function`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reasoning-gym task or the Python function."""
    prompt_key: str = "prompt"
    """jsonl field with the prompt: a string or a list of chat messages."""
    answer_key: str = "answer"
    """jsonl field with the reference answer handed to the reward."""
    limit: PositiveInt | None = None
    """Use only the first so many records."""


class DataSettings(Settings):
    train: DataSourceSettings
    """Prompts to train on."""
    validation: DataSourceSettings | None = None
    """Prompts of the periodic evaluation."""
    apply_chat_template: bool = True
    """Render prompts with the tokenizer's chat template; false: prompts are plain text."""
    system_prompt: str | None = None
    """System message put before prompts that have none."""
    max_prompt_tokens: PositiveInt
    """Longest prompt after tokenisation."""
    overlong_prompts: Literal["drop", "truncate", "error"] = "drop"
    """What happens to longer ones: counted and dropped, cut at the left, or refused."""
    shuffle: bool = True
    """A new deterministic order each epoch; false: file order."""


class RolloutSettings(Settings):
    engine: Literal["transformers", "sglang"] = "transformers"
    """`transformers`: embedded in every rank. `sglang`: servers that every rank sends its prompts to."""
    ahead: Literal[0, 1] = 0
    """1: generate the next step's responses during a step's updates, one update behind (SGLang only)."""
    prompts_per_step: PositiveInt
    """Prompts in one PPO step over all ranks."""
    samples_per_prompt: PositiveInt = 1
    """Responses drawn for each prompt."""
    max_response_tokens: PositiveInt
    """Longest response."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; every logprob of the run is of the scaled distribution."""
    top_p: Fraction = 1.0
    """Must be 1: truncated sampling biases the ratios."""
    top_k: NonNegativeInt = 0
    """Must be 0: truncated sampling biases the ratios."""
    stop_token_ids: TokenIds = ()
    """Tokens that end a response, besides the model's own end-of-sequence tokens."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of the engine's weights; default: the model's."""
    generate_batch_sequences: PositiveInt = 64
    """Sequences the embedded engine generates together."""
    sync_bucket_bytes: PositiveInt = 256 * 2**20
    """Size of a bucket of the weight stream."""
    sglang: SGLangSettings | None = None
    """Servers of `engine: sglang`; default: one that lives beside the trainers, on GPUs one per rank."""

    @property
    def servers(self) -> SGLangSettings:
        """Settings of the SGLang servers, defaults where none are given."""
        return self.sglang if self.sglang is not None else SGLangSettings()

    def servers_sleep(self, *, on_cuda: bool) -> bool:
        """Whether servers give their memory to the trainers between rollouts: on shared GPUs, where nothing is
        generated meanwhile."""
        return on_cuda and self.servers.placement == "colocated" and self.servers.sleep and not self.ahead

    @model_validator(mode="after")
    def _no_truncated_sampling(self) -> RolloutSettings:
        if self.top_p != 1.0 or self.top_k != 0:
            raise ValueError(
                f"top_p {self.top_p} and top_k {self.top_k} cut the distribution that the ratios are computed of; "
                "set top_p: 1.0 and top_k: 0 and use temperature instead"
            )
        return self


class RewardSettings(Settings):
    function: str = Field(min_length=1)
    """`exact`, `number`, `gsm8k`, `math_verify`, `reasoning_gym`, `model`, or `package.module:function`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    batch: bool = False
    """The Python function takes lists and returns a list, one score per sample."""
    workers: PositiveInt = 1
    """Worker processes per rank."""
    timeout_seconds: PositiveFloat = 10.0
    """Time limit per sample; a worker that exceeds it is killed and replaced."""
    worker_memory_gigabytes: PositiveFloat = 8.0
    """A worker that holds more (GB, 1e9 bytes) after its samples is replaced: a function that leaks costs no run."""
    failure_score: float = 0.0
    """Score of a sample whose reward failed or ran out of time."""
    max_failure_fraction: Fraction = 0.5
    """The run stops when more than this fraction of a step's rewards failed."""
    model_path: str | None = None
    """Folder of the reward model (AutoModelForSequenceClassification) for `function: model`."""

    @model_validator(mode="after")
    def _model_has_path(self) -> RewardSettings:
        if (self.function == "model") != (self.model_path is not None):
            raise ValueError("model_path belongs to function: model; set both or neither")
        return self


KLKind = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]


class KLInRewardSettings(Settings):
    kind: KLKind = "kl"
    """Estimator of KL(actor || reference) per token."""
    coef: NonNegativeFloat
    """Weight; the starting weight with an adaptive controller."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive` moves the weight towards `target` (Ziegler et al. 2019)."""
    target: PositiveFloat = 6.0
    """KL per response in nats the adaptive controller aims at."""
    horizon: PositiveInt = 10000
    """Samples over which the adaptive controller moves."""

    @model_validator(mode="after")
    def _adaptive_can_move(self) -> KLInRewardSettings:
        if self.controller == "adaptive" and self.coef == 0.0:
            raise ValueError("the adaptive controller multiplies coef, so 0 stays 0; set coef above 0, such as 0.001")
        return self


class KLInLossSettings(Settings):
    kind: KLKind = "low_var_kl"
    """Estimator of KL(actor || reference) per token."""
    coef: NonNegativeFloat
    """Weight of the term in the policy loss."""


class PenaltySettings(Settings):
    coef: PositiveFloat = 1.0
    """Starting weight of KL(old || new)."""
    target: PositiveFloat = 0.01
    """KL per token in nats that the weight is adapted to (Schulman et al. 2017, section 4)."""


class CorrectionSettings(Settings):
    level: Literal["token", "sequence"] = "token"
    """One importance weight per token, or one per response."""
    cap: PositiveFloat = 2.0
    """Weights are truncated here."""
    reject_above: PositiveFloat | None = None
    """Samples or tokens with a larger weight are left out of the loss."""


class JumpSettings(Settings):
    grad_norm_ratio: Annotated[float, Field(gt=1)] | None = 10.0
    """An update whose gradient norm is so many times the median of the role's last 50; null: off."""
    kl_nats: PositiveFloat | None = 0.5
    """An actor update whose minibatch has a KL(old || new) above this, in nats per token; null: off."""


class AlgorithmSettings(Settings):
    estimator: str = "gae"
    """`gae` (with critic), `grpo`, `rloo` or `reinforce_plus_plus` (without)."""
    gamma: Fraction = 1.0
    """Discount per token."""
    lam: Fraction = 0.95
    """GAE's lambda."""
    whiten_advantages: bool = True
    """Whiten over the global batch where the estimator allows it."""
    policy_loss: Literal["clip", "penalty"] = "clip"
    """PPO-clip, or PPO with an adaptive KL penalty against the old policy."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Ratios are clipped below at 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """Ratios are clipped above at 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Lower bound c*A of the objective where A < 0 (Ye et al. 2020); null: off."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    loss_aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """How token losses become one number, over the global minibatch."""
    kl_in_reward: KLInRewardSettings | None = None
    """KL to the reference subtracted from the token rewards."""
    kl_in_loss: KLInLossSettings | None = None
    """KL to the reference added to the policy loss."""
    penalty: PenaltySettings = PenaltySettings()
    """Settings of `policy_loss: penalty`."""
    target_kl: PositiveFloat | None = None
    """Actor updates of a step end once KL(old || new) of a minibatch passes this (nats per token)."""
    old_logprob: Literal["decoupled", "bypass", "corrected"] = "decoupled"
    """Recompute with the trainer, take the engine's, or recompute and weight for the gap."""
    correction: CorrectionSettings = CorrectionSettings()
    """Settings of `old_logprob: corrected`."""
    mismatch_warn_nats: PositiveFloat = 0.05
    """Mean |engine - trainer| logprob per token from which a warning is printed."""
    mismatch_stop_nats: PositiveFloat = 1.0
    """The same from which the run stops."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """After a non-finite loss or gradient, whose update is never applied: end the run, or go on."""
    jumps: JumpSettings = JumpSettings()
    """Updates that are written to jumps.jsonl with the samples they were made of."""


class EvaluationSettings(Settings):
    every_steps: PositiveInt
    """Evaluate after every so many steps, and before the first."""
    max_response_tokens: PositiveInt | None = None
    """Longest response; default: the rollout's."""


class CheckpointSettings(Settings):
    """Everything a killed run needs to go on as if nothing had happened, in `<directory>/checkpoints`."""

    every_steps: PositiveInt = 50
    """Write one after every so many steps; one is always written at the end and when the run is told to stop."""
    keep_last: PositiveInt = 2
    """Newest checkpoints to keep; with 1 there is none to fall back to where the newest is damaged."""
    keep_best: str | None = None
    """Also keep the one with the highest value of this metric (a `-` in front: the lowest), such as reward/mean."""
    asynchronous: bool = True
    """Write in the background from a copy in the host's memory while training goes on."""


class LoggingSettings(Settings):
    tensorboard: bool = True
    """Write TensorBoard events to `<directory>/tensorboard`."""
    wandb_project: str | None = None
    """Log to this Weights & Biases project too."""
    console: Literal["auto", "live", "plain", "quiet"] = "auto"
    """`live`: a progress view that is redrawn; `plain`: a line per step; `auto`: live on a terminal."""
    sample_texts: NonNegativeInt = 2
    """Samples per step written to `<directory>/samples.jsonl`."""


class Config(Settings):
    """A whole run."""

    run: RunSettings
    """Name, length, seed."""
    runtime: RuntimeSettings = RuntimeSettings()
    """Device and threads."""
    model: ModelSettings
    """The actor's model."""
    actor: ActorSettings
    """Layout, optimizer and batches of the policy."""
    critic: CriticSettings | None = None
    """The value model; needed by `estimator: gae`."""
    reference: ReferenceSettings | None = None
    """The frozen policy; needed by a KL term."""
    data: DataSettings
    """Prompts."""
    rollout: RolloutSettings
    """Generation."""
    reward: RewardSettings
    """Scoring."""
    algorithm: AlgorithmSettings = AlgorithmSettings()
    """PPO itself."""
    evaluation: EvaluationSettings | None = None
    """Periodic evaluation on `data.validation`."""
    checkpoint: CheckpointSettings | None = CheckpointSettings()
    """What a stopped run continues from; null: nothing."""
    logging: LoggingSettings = LoggingSettings()
    """What is written and shown."""
