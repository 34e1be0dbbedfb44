"""Settings of the models of a run: actor, critic and reference, with their layouts and optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, TypeGuard

from pydantic import BeforeValidator, Field

from megappo.config.base import (
    LARGEST_WORLD,
    Decay,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Ranks,
    Settings,
    SettingValue,
)
from megappo.config.grid import Grid
from megappo.errors import show
from megappo.families.adapters import LoraShape
from megappo.families.declaration import ArchitectureConfig


def _are_different_texts(value: object) -> TypeGuard[list[str]]:
    """Return whether a value is a list of non-empty texts without duplicates."""
    if not isinstance(value, list | tuple) or not all(type(text) is str and text for text in value):
        return False
    return len(set(value)) == len(value)


def _check_pipeline_layers(value: SettingValue) -> SettingValue:
    """Check `pipeline_layers` and raise a single error. A union type would report an error for each of its members."""
    if value in ("auto", "balanced"):
        return value
    if isinstance(value, list | tuple) and value and all(type(n) is int and n > 0 for n in value):
        return value
    raise ValueError(f"{show(value)} must be auto, balanced or a list of positive integers such as [3, 1]")


PipelineLayers = Annotated[
    Literal["auto", "balanced"] | Annotated[tuple[PositiveInt, ...], Field(strict=False)],
    BeforeValidator(_check_pipeline_layers),
]


def _all_or_names(value: SettingValue) -> SettingValue:
    """Check LoRA targets and raise a single error. A union type would report an error for each of its members."""
    if value == "all" or (value and _are_different_texts(value)):
        return value
    raise ValueError(f"{show(value)} must be all, or a list of different names such as [q_proj, v_proj]")


LoraTargets = Annotated[
    Literal["all"] | Annotated[tuple[str, ...], Field(strict=False)],
    BeforeValidator(_all_or_names),
]
RecomputeModules = Annotated[tuple[Literal["core_attn", "mlp", "moe"], ...], Field(strict=False)]
"""Modules of a layer that Megatron can recompute, with Megatron's names. Its module for norms is excluded because that
module needs Transformer Engine."""


class LayoutSettings(Settings):
    """Distribution of a role over ranks. The data parallel size is the number of ranks divided by the other sizes."""

    tensor_parallel: Ranks = 1
    """Number of ranks that share each layer (TP)."""
    context_parallel: Ranks = 1
    """Number of ranks that share the tokens of each sample (CP)."""
    pipeline_parallel: Ranks = 1
    """Number of stages of the layers (PP)."""
    virtual_pipeline_chunks: Ranks = 1
    """Number of layer chunks per stage for the interleaved schedule (VPP). 1: no interleaving."""
    pipeline_layers: PipelineLayers = "auto"
    """Number of layers of each stage. A list such as `[3, 1]` sets the numbers. `balanced` minimizes the work of the
    slowest stage, including the head on the last stage. `auto` uses equal numbers, or `balanced` if equal numbers are
    impossible. With virtual chunks, a list has one entry per chunk in Megatron's order, which is the order of a
    forward pass: the first chunk of every stage, then the second chunk of every stage."""
    expert_parallel: Ranks = 1
    """Number of ranks of a pipeline stage that share the experts of each layer (EP)."""
    sequence_parallel: bool | None = None
    """Whether to shard activations between tensor parallel regions along the sequence (SP). Default: true with
    `tensor_parallel` above 1, which follows Megatron's guides and published runs."""
    first_rank: int = Field(default=0, ge=0, lt=LARGEST_WORLD)
    """First global rank of the role."""
    ranks: Ranks | None = None
    """Number of ranks of the role. Default: all ranks from `first_rank`."""
    deallocate_pipeline_outputs: bool = True
    """Whether to free a pipeline stage's output after the send. The backward pass needs only the autograd graph."""

    @property
    def shards_sequences(self) -> bool:
        """Whether activations between tensor parallel regions are sharded along the sequence."""
        return self.tensor_parallel > 1 if self.sequence_parallel is None else self.sequence_parallel

    def grid(self, world_size: int) -> Grid:
        """Return the ranks of the role in a world of `world_size` ranks.

        The ranks can exceed the world or form incomplete copies. `placement_rules` rejects both.
        """
        count = self.ranks if self.ranks is not None else max(0, world_size - self.first_rank)
        ranks = range(self.first_rank, self.first_rank + count)
        return Grid(ranks, self.tensor_parallel, self.pipeline_parallel, self.expert_parallel, self.context_parallel)


class OptimizerSettings(Settings):
    learning_rate: PositiveFloat
    """Peak learning rate of AdamW."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Learning rate at the end of a decaying schedule."""
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "constant"
    """Learning rate schedule after the warm-up: decay over all updates (`linear`, `cosine`), decay with the inverse
    square root of the update number (`inverse_sqrt`), or linear decay in the last updates (`wsd`: warm-up, stable,
    decay)."""
    decay_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """Share of the last updates of the run in which `wsd` decays."""
    warmup_updates: NonNegativeInt = 0
    """Number of optimizer updates in which the learning rate rises linearly from 0."""
    warmup_ratio: Decay = 0.0
    """Linear warm-up as a share of all updates of the run, rounded down, instead of `warmup_updates`."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay. Biases and norms are exempt."""
    beta1: Decay = 0.9
    """Decay rate of the first moment of AdamW."""
    beta2: Decay = 0.999
    """Decay rate of the second moment of AdamW."""
    eps: PositiveFloat = 1e-8
    """Epsilon of AdamW."""
    clip_grad_norm: NonNegativeFloat = 1.0
    """Maximum global L2 norm of the gradients. Gradients are scaled down to this norm. 0: no clipping."""
    distributed: bool | None = None
    """Whether to shard optimizer state over data and context parallel ranks (Megatron's distributed optimizer).
    Default: true for more than one such rank, which follows Megatron's guides and published runs."""
    on_host: Fraction = 0.0
    """Minimum fraction of the optimizer state that stays in host memory. The state is the moments and, with bfloat16,
    the main weights. The host updates its part, which starts with the largest parameters."""
    overlap_grad_reduce: bool | None = None
    """Whether to reduce gradients over data parallel ranks during the backward pass. Default: true on CUDA."""
    overlap_param_gather: bool | None = None
    """Whether to gather updated weights from other ranks during the next forward pass. Requires `distributed` and
    `overlap_grad_reduce`. Default: true if both are true."""

    def reduces_in_backward(self, *, on_cuda: bool) -> bool:
        """Return whether gradients are reduced over ranks during the backward pass."""
        return on_cuda if self.overlap_grad_reduce is None else self.overlap_grad_reduce

    def shards_state(self, grid: Grid) -> bool:
        """Return whether ranks with equal weights each keep a part of the optimizer state."""
        return grid.copies > 1 if self.distributed is None else self.distributed

    def gathers_in_forward(self, grid: Grid, *, on_cuda: bool) -> bool:
        """Return whether updated weights are gathered during the next forward pass."""
        possible = self.shards_state(grid) and self.reduces_in_backward(on_cuda=on_cuda)
        return possible and self.overlap_param_gather is not False

    def warmup(self, total_updates: int) -> int:
        """Return the number of warm-up updates in a run of `total_updates` updates."""
        return self.warmup_updates or int(self.warmup_ratio * total_updates)

    def decay(self, total_updates: int) -> int:
        """Return the number of last updates in which `wsd` decays."""
        return max(1, round(self.decay_ratio * total_updates))

    def broken_rules(self) -> Iterator[str]:
        if self.overlap_param_gather and self.distributed is False:
            yield (
                "overlap_param_gather is true, but every rank updates all weights if distributed is false; "
                "remove one of them"
            )
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            yield (
                "overlap_param_gather is true, which Megatron supports only with overlap_grad_reduce; "
                "set overlap_grad_reduce to true, or remove overlap_param_gather"
            )
        if self.warmup_updates and self.warmup_ratio:
            yield (
                f"warmup_updates {self.warmup_updates} and warmup_ratio {self.warmup_ratio:g} are both given; keep one"
            )
        if "decay_ratio" in self.model_fields_set and self.schedule != "wsd" and self.decay_ratio != 0.1:
            yield f"decay_ratio belongs to the schedule wsd, but schedule is {self.schedule}; remove decay_ratio"
        if self.min_learning_rate > self.learning_rate:
            yield f"min_learning_rate {self.min_learning_rate} is above learning_rate {self.learning_rate}; lower it"


def _all_or_parts(value: SettingValue) -> SettingValue | dict[str, SettingValue]:
    """Expand `true` or `false` to all parts of a role."""
    return dict.fromkeys(OffloadSettings.model_fields, value) if isinstance(value, bool) else value


class OffloadSettings(Settings):
    """Parts of a role that leave the device while the role is idle. The parts move to pinned host memory, or to a file
    without CUDA. `true` or `false` instead of the section sets all parts."""

    plain_forms: ClassVar[str] = "true or false"

    weights: bool = False
    """Whether to offload the weights. The weights return for forward passes and updates of the role."""
    gradients: bool = False
    """Whether to free the gradient buffers between the updates of one step and the updates of the next step."""
    optimizer: bool = False
    """Whether to offload the moments of Adam and the main weights of a bfloat16 model. The state returns for
    updates."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the offloaded parts."""
        return tuple(name for name, leaves in self if leaves)


Offload = Annotated[OffloadSettings, BeforeValidator(_all_or_parts)]


class LoraSettings(Settings):
    """Low-rank adapters (Hu et al. 2021, "LoRA") that are trained instead of the weights. As in PEFT, an adapter
    adds alpha / rank B A x to a matrix's output for input x. A is initialised as in PEFT, and B is initialised with
    zeros."""

    rank: PositiveInt
    """Number of rows of A and columns of B (PEFT's `r`). Maximum: the smaller side of any adapted matrix."""
    alpha: PositiveFloat
    """Scale of the adapters multiplied by their rank (PEFT's `lora_alpha`)."""
    targets: LoraTargets = "all"
    """Matrices that have adapters: `all`, or a list such as `[q_proj, v_proj]` with the last parts of Hugging Face
    names. In layers of experts, the matrices of every expert have adapters."""
    dropout: NonNegativeFloat = 0.0
    """Dropout of the adapters. Must be 0, because dropout changes the probability of a sample at equal weights."""

    def of(self, arch: ArchitectureConfig) -> LoraShape:
        """Return the adapters of a model with this architecture."""
        return LoraShape.of(arch, self.rank, self.alpha, self.targets)

    def broken_rules(self) -> Iterator[str]:
        if self.dropout:
            yield (
                f"dropout {self.dropout:g} would change the policy between rollout and update; set dropout to 0, "
                "or remove it"
            )


_MINIBATCHES = 4
"""Default of `TrainedRoleSettings.minibatches`."""


class TrainedRoleSettings(Settings):
    """Common settings of actor and critic."""

    layout: LayoutSettings = LayoutSettings()
    """Parallel layout of the role."""
    optimizer: OptimizerSettings
    """AdamW and its schedule."""
    lora: LoraSettings | None = None
    """Adapters that are trained instead of the model's weights, which stay frozen. The value head of a critic is
    trained too. Null: all weights are trained."""
    epochs: PositiveInt = 1
    """Number of passes over the samples of a step."""
    minibatch_sequences: PositiveInt | None = None
    """Number of samples per optimizer update over all data parallel ranks. The number divides the samples of a step.
    Set either this field or `minibatches`."""
    minibatches: PositiveInt | None = None
    """Number of optimizer updates in each pass over the samples of a step. If minibatches cannot have equal sizes, the
    first minibatches have one more sample. Default without `minibatch_sequences`: 4 (verl's example for GSM8K splits
    1,024 samples into updates of 256)."""
    microbatch_budget_tokens: PositiveInt = 8192
    """Maximum number of tokens in a packed microbatch, over all ranks that share the microbatch. The budget must fit
    the longest possible sample, and the default grows for this purpose."""
    router_aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of a load-balancing loss that spreads the tokens of a sample over the experts of a layer (Megatron's
    `seq_aux_loss`). The loss is the mean over samples of the sum over layers. 0: no such loss."""
    start_from: PathText | None = None
    """Initial weights of a new run: another run (`RUN`, `RUN@STEP`, `RUN@best`), a Hugging Face folder, or a
    `torch_dist` checkpoint of Megatron-LM (`FOLDER`, `FOLDER@ITERATION`). With `lora`, adapters for the role's model
    from another run or a PEFT folder. Default: the weights of the role's model. A resumed run does not read this
    source again."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation of parts of each layer (`selective`) or of whole layers (`full`)."""
    offload: Offload = OffloadSettings()
    """Parts that leave the device while the role is idle: `true`, `false`, or each part by name."""
    recompute_modules: RecomputeModules = ("core_attn",)
    """Modules that `selective` recomputes in the backward pass: the attention kernel (`core_attn`, which stores little
    on GPUs), MLPs (`mlp`) or expert layers (`moe`)."""

    def minibatch_count(self, batch_sequences: int) -> int:
        """Return the number of minibatches in a pass, for settings without `minibatch_sequences`."""
        return self.minibatches or min(_MINIBATCHES, batch_sequences)

    def minibatch_sizes(self, batch_sequences: int) -> list[int]:
        """Return the number of samples of each minibatch in a pass over a step's samples, larger minibatches first."""
        if self.minibatch_sequences is not None:
            return [self.minibatch_sequences] * (batch_sequences // self.minibatch_sequences)
        count = self.minibatch_count(batch_sequences)
        return [batch_sequences // count + (n < batch_sequences % count) for n in range(count)]

    def largest_minibatch(self, batch_sequences: int) -> int:
        """Return the number of samples of the largest minibatch.

        The result is `minibatch_sequences` even if a step has fewer samples. The rules reject such settings.
        """
        return self.minibatch_sequences or self.minibatch_sizes(batch_sequences)[0]

    def updates(self, batch_sequences: int) -> int:
        """Return the number of updates in a step."""
        return len(self.minibatch_sizes(batch_sequences)) * self.epochs

    def broken_rules(self) -> Iterator[str]:
        if self.minibatch_sequences is not None and self.minibatches is not None:
            yield (
                f"minibatch_sequences {self.minibatch_sequences} and minibatches {self.minibatches} are both given; "
                "keep one of them"
            )


class ActorOptimizerSettings(OptimizerSettings):
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""


class CriticOptimizerSettings(OptimizerSettings):
    learning_rate: PositiveFloat = 5e-6
    """Peak learning rate of AdamW."""


class ActorSettings(TrainedRoleSettings):
    """Settings of the policy."""

    optimizer: ActorOptimizerSettings = ActorOptimizerSettings()
    """AdamW and its schedule. The default learning rate is 1e-6, as in DAPO, Open-Reasoner-Zero and verl."""


def _one_or_several(value: SettingValue) -> tuple[str, ...]:
    """Check `freeze` and raise a single error. A union type would report an error for each of its members."""
    names = [value] if isinstance(value, str) else value
    if _are_different_texts(names) and len(names) <= _MOST_PATTERNS:
        return tuple(names)
    raise ValueError(
        f"{show(value)} must be attention, embeddings, or a list of at most {_MOST_PATTERNS} different parts and "
        "name patterns such as [attention, 'model.layers.0.mlp.*']"
    )


_MOST_PATTERNS = 100
Freeze = Annotated[tuple[str, ...], Field(strict=False), BeforeValidator(_one_or_several)]


class PretrainingSettings(Settings):
    """Value pretraining (`megappo train --critic-only`): only the critic is trained, on the experience of
    `rollout.load_from`."""

    held_out_samples: PositiveInt | None = None
    """Number of last saved samples that are excluded from training. `critic/held_out_explained_variance` is computed
    on these samples. Default: a tenth of the samples, at most the samples of one step."""


class CriticSettings(TrainedRoleSettings):
    """Settings of the value model. Its trunk has the actor's architecture, and its output layer is a scalar head."""

    optimizer: CriticOptimizerSettings = CriticOptimizerSettings()
    """AdamW and its schedule. The default learning rate is 5e-6, as in Open-Reasoner-Zero."""
    path: PathText | None = None
    """Hugging Face folder of the trunk, and of a scalar head in the format of transformers' classifiers, TRL and
    OpenRLHF. Default: the actor's model."""
    value_head_std: NonNegativeFloat = 0.0
    """Standard deviation of a new value head, if the folder has no head. 0 makes every initial value 0."""
    value_clip: PositiveFloat | None = 0.2
    """Clip range of the value loss around the old values. Null: no clipping."""
    freeze: Freeze = ()
    """Parts of the trunk that are frozen and have no gradient or optimizer state: `attention` (SAO), `embeddings`, or
    a list of these parts and of patterns of Hugging Face names, such as `[attention, 'model.layers.0.mlp.*']`. With
    `lora`, the adapters of these parts are frozen. Default: no parts."""
    warmup_steps: NonNegativeInt = 0
    """Number of first steps that update only the critic (critic warm-up, or value pretraining)."""
    pretraining: PretrainingSettings | None = None
    """Not null: value pretraining on saved experience. The run starts no engine and does not update the actor."""


def _weights_alone(value: SettingValue) -> SettingValue | dict[str, SettingValue]:
    return {"weights": value} if isinstance(value, bool) else value


class ReferenceSettings(Settings):
    """Settings of the frozen policy of the KL terms. The reference has the actor's layout."""

    path: PathText | None = None
    """Hugging Face folder. Default: `model.path`, even if the actor has `start_from`."""
    refresh_every_steps: PositiveInt | None = None
    """Number of steps between copies of the actor's weights to the reference. KL terms then refer to a recent actor.
    Checkpoints contain the copied weights. Null: no copies."""
    share_actor_base: bool = False
    """Whether to use the actor's weights without its adapters (`actor.lora`) instead of a copy of the weights."""
    offload: Annotated[OffloadSettings, BeforeValidator(_weights_alone)] = OffloadSettings()
    """Whether the weights leave the device while the role is idle: `true`, `false`, or `{weights: true}`. The
    reference has no gradients and no optimizer."""

    def broken_rules(self) -> Iterator[str]:
        other = "path" if self.path is not None else "share_actor_base" if self.share_actor_base else ""
        if self.refresh_every_steps is not None and other:
            yield (
                f"refresh_every_steps {self.refresh_every_steps} copies the actor's weights to the reference, but with "
                f"{other} the reference is not a copy of the actor; remove one of them"
            )
        for part in ("gradients", "optimizer"):
            if getattr(self.offload, part):
                yield f"offload.{part} is true, but the reference is not trained and has only weights; remove it"
