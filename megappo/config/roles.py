"""The settings of the models of a run: actor, critic and reference, their layouts and optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, TypeGuard

from pydantic import BeforeValidator, Field

from megappo.config.base import (
    LARGEST_WORLD,
    Decay,
    Fraction,
    Given,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Ranks,
    Settings,
)
from megappo.config.grid import Grid
from megappo.errors import show
from megappo.families.adapters import LoraShape
from megappo.families.architecture import ArchitectureConfig


def _are_different_texts(value: object) -> TypeGuard[list[str]]:
    """Whether a value is a list of texts, none of them empty or twice in it."""
    if not isinstance(value, list | tuple) or not all(type(text) is str and text for text in value):
        return False
    return len(set(value)) == len(value)


def _words_or_counts(value: Given) -> Given:
    """One sentence, where a union would have one for each of its members."""
    if value in ("auto", "balanced"):
        return value
    if isinstance(value, list | tuple) and value and all(type(n) is int and n > 0 for n in value):
        return value
    raise ValueError(f"{show(value)} must be auto, balanced or a list of whole numbers above 0 such as [3, 1]")


PipelineLayers = Annotated[
    Literal["auto", "balanced"] | Annotated[tuple[PositiveInt, ...], Field(strict=False)],
    BeforeValidator(_words_or_counts),
]


def _all_or_names(value: Given) -> Given:
    """One sentence, where a union would have one for each of its members."""
    if value == "all" or (value and _are_different_texts(value)):
        return value
    raise ValueError(f"{show(value)} must be all, or a list of different names such as [q_proj, v_proj]")


LoraTargets = Annotated[
    Literal["all"] | Annotated[tuple[str, ...], Field(strict=False)],
    BeforeValidator(_all_or_names),
]
RecomputeModules = Annotated[tuple[Literal["core_attn", "mlp", "moe"], ...], Field(strict=False)]
"""Parts of a layer that Megatron can recompute, by its names; its module for norms runs with Transformer Engine
only."""


class LayoutSettings(Settings):
    """How a role is spread over ranks; data parallelism uses the ranks that the other sizes leave."""

    tensor_parallel: Ranks = 1
    """Ranks that share each layer (TP)."""
    context_parallel: Ranks = 1
    """Ranks over which the tokens of each sample are spread (CP)."""
    pipeline_parallel: Ranks = 1
    """Stages into which the layers are divided (PP)."""
    virtual_pipeline_chunks: Ranks = 1
    """Chunks of layers per stage for the interleaved schedule (VPP); 1: no interleaving."""
    pipeline_layers: PipelineLayers = "auto"
    """Layers of each stage: a list such as `[3, 1]`, or `balanced`: the largest work of a stage, the head on the last
    one included, is as small as possible; `auto`: equally many, `balanced` where the layers cannot be. With virtual
    chunks a list has one entry for each, in the order in which a token passes them, which is Megatron's: the first
    chunk of every stage, then the second of every stage."""
    expert_parallel: Ranks = 1
    """Ranks of a pipeline stage over which the experts of each layer are spread (EP)."""
    sequence_parallel: bool | None = None
    """Shard the activations between tensor parallel regions along the sequence (SP). Default: where `tensor_parallel`
    is above 1, as Megatron's guides and published runs have it."""
    first_rank: int = Field(default=0, ge=0, lt=LARGEST_WORLD)
    """First global rank of this role."""
    ranks: Ranks | None = None
    """Number of ranks of the role; default: all from `first_rank`."""
    deallocate_pipeline_outputs: bool = True
    """Free a pipeline stage's output once it is sent; backward needs only its autograd graph."""

    @property
    def shards_sequences(self) -> bool:
        """Whether activations between tensor parallel regions are sharded along the sequence."""
        return self.tensor_parallel > 1 if self.sequence_parallel is None else self.sequence_parallel

    def grid(self, world_size: int) -> Grid:
        """Ranks of the role in a world of `world_size`. They may reach beyond the world, or hold no whole copies, which
        `placement_rules` refuses."""
        count = self.ranks if self.ranks is not None else max(0, world_size - self.first_rank)
        ranks = range(self.first_rank, self.first_rank + count)
        return Grid(ranks, self.tensor_parallel, self.pipeline_parallel, self.expert_parallel, self.context_parallel)


class OptimizerSettings(Settings):
    learning_rate: PositiveFloat
    """Peak learning rate of AdamW."""
    min_learning_rate: NonNegativeFloat = 0.0
    """Learning rate at the end of a decaying schedule."""
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = "constant"
    """Decay after the warm-up: over all updates of the run (`linear`, `cosine`), with one over the square root of the
    updates (`inverse_sqrt`), or linearly in the last of them (`wsd`: warm-up, stable, decay)."""
    decay_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """Share of the run's updates, the last ones, in which `wsd` decays."""
    warmup_updates: NonNegativeInt = 0
    """Optimizer updates of linear warm-up from 0."""
    warmup_ratio: Decay = 0.0
    """Linear warm-up as a share of the run's updates, rounded down, in place of `warmup_updates`."""
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
    distributed: bool | None = None
    """Shard optimizer state over data parallel ranks, those of context parallelism among them (Megatron's distributed
    optimizer). Default: where there are several, as Megatron's guides and published runs have it."""
    on_host: Fraction = 0.0
    """At least this fraction of the state (moments, and main weights of a bfloat16 model) lives in the host's memory
    for good and is updated there, the largest parameters first."""
    overlap_grad_reduce: bool | None = None
    """Reduce gradients over data parallel ranks during backward; default: on CUDA."""
    overlap_param_gather: bool | None = None
    """Gather the weights that other ranks updated while the next forward pass begins; needs `distributed` and
    `overlap_grad_reduce`; default: where both are."""

    def reduces_in_backward(self, *, on_cuda: bool) -> bool:
        """Whether gradients are reduced over ranks during backward."""
        return on_cuda if self.overlap_grad_reduce is None else self.overlap_grad_reduce

    def shards_state(self, grid: Grid) -> bool:
        """Whether each of the ranks with equal weights keeps a part of the optimizer's state."""
        return grid.copies > 1 if self.distributed is None else self.distributed

    def gathers_in_forward(self, grid: Grid, *, on_cuda: bool) -> bool:
        """Whether updated weights arrive while the next forward pass begins."""
        possible = self.shards_state(grid) and self.reduces_in_backward(on_cuda=on_cuda)
        return possible and self.overlap_param_gather is not False

    def warmup(self, total_updates: int) -> int:
        """Updates of linear warm-up in a run of so many."""
        return self.warmup_updates or int(self.warmup_ratio * total_updates)

    def decay(self, total_updates: int) -> int:
        """The last updates of so many, in which `wsd` decays."""
        return max(1, round(self.decay_ratio * total_updates))

    def broken_rules(self) -> Iterator[str]:
        if self.overlap_param_gather and self.distributed is False:
            yield (
                "overlap_param_gather is true, but with distributed false every rank updates all weights itself; "
                "remove one of them"
            )
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            yield (
                "overlap_param_gather is true, which Megatron has only together with overlap_grad_reduce; "
                "set overlap_grad_reduce to true, or remove overlap_param_gather"
            )
        if self.warmup_updates and self.warmup_ratio:
            yield (
                f"warmup_updates {self.warmup_updates} and warmup_ratio {self.warmup_ratio:g} are both given; keep one"
            )
        if "decay_ratio" in self.model_fields_set and self.schedule != "wsd" and self.decay_ratio != 0.1:
            yield f"decay_ratio is of the schedule wsd, and schedule is {self.schedule}; remove it"
        if self.min_learning_rate > self.learning_rate:
            yield f"min_learning_rate {self.min_learning_rate} is above learning_rate {self.learning_rate}; lower it"


def _all_or_parts(value: Given) -> Given | dict[str, Given]:
    """`true` and `false` are all parts and none."""
    return dict.fromkeys(OffloadSettings.model_fields, value) if isinstance(value, bool) else value


class OffloadSettings(Settings):
    """Parts of a role that leave the device while it rests, for pinned memory of the host, or for a file where there is
    no CUDA. `true` or `false` in place of the section means all of it or nothing."""

    plain_forms: ClassVar[str] = "true or false"

    weights: bool = False
    """Offload the weights; they come back for the role's forward passes and updates."""
    gradients: bool = False
    """Free the gradient buffers between the role's updates of one step and those of the next."""
    optimizer: bool = False
    """Offload Adam's moments, and the main weights of a bfloat16 model; they come back for the role's updates."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that leave the device."""
        return tuple(name for name, leaves in self if leaves)


Offload = Annotated[OffloadSettings, BeforeValidator(_all_or_parts)]


class LoraSettings(Settings):
    """Low-rank adapters (Hu et al. 2021, "LoRA") that are trained in place of the weights, each as PEFT has it: what
    a matrix makes of its input x gets alpha / rank B A x added, with A drawn as PEFT draws it and B zero at first."""

    rank: PositiveInt
    """Rows of A and columns of B, the `r` of PEFT; at most the smaller side of any of the matrices."""
    alpha: PositiveFloat
    """Scale of the adapters times their rank, the `lora_alpha` of PEFT."""
    targets: LoraTargets = "all"
    """Which matrices of the layers have adapters, by the last part of their names in the Hugging Face model, such as
    `[q_proj, v_proj]`, or `all` of them; of experts, every expert's."""
    dropout: NonNegativeFloat = 0.0
    """Must be 0: dropout would change a sample's probability although the weights are the same."""

    def of(self, arch: ArchitectureConfig) -> LoraShape:
        """The adapters of a model."""
        return LoraShape.of(arch, self.rank, self.alpha, self.targets)

    def broken_rules(self) -> Iterator[str]:
        if self.dropout:
            yield (
                f"dropout {self.dropout:g} would change the policy between its samples and its updates; set it to 0, "
                "or remove it"
            )


_MINIBATCHES = 4
"""Default of `minibatches`; see there."""


class TrainedRoleSettings(Settings):
    """Settings that actor and critic have in common."""

    layout: LayoutSettings = LayoutSettings()
    """The role's own parallel layout."""
    optimizer: OptimizerSettings
    """AdamW and its schedule."""
    lora: LoraSettings | None = None
    """Train adapters of the model in place of its weights, which stay frozen (a critic's value head is trained
    besides); null: train all weights."""
    epochs: PositiveInt = 1
    """Passes over the step's samples."""
    minibatch_sequences: PositiveInt | None = None
    """Samples per optimizer update over all data parallel ranks; divides the step's samples. Or `minibatches` is
    given."""
    minibatches: PositiveInt | None = None
    """Optimizer updates in each pass over the step's samples; where they cannot be equally large, the first ones have a
    sample more. Default: 4 (1,024 samples in updates of 256 in verl's example for GSM8K), where there is no
    `minibatch_sequences`."""
    microbatch_budget_tokens: PositiveInt = 8192
    """Most tokens in one packed microbatch, over all ranks that share it out; not below the longest possible sample,
    for which a default has room."""
    router_aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of a loss that spreads a sample's tokens evenly over the experts of a layer (Megatron's `seq_aux_loss`):
    mean over samples, sum over layers; 0: none."""
    start_from: PathText | None = None
    """Weights to begin a new run with: another run's (`RUN`, `RUN@STEP`, `RUN@best`), a Hugging Face folder's, or those
    of a `torch_dist` checkpoint of Megatron-LM (`FOLDER`, `FOLDER@ITERATION`); default: those of the role's model. With
    `lora` adapters for the role's model: another run's, or a PEFT folder's. A run that continues does not read them
    again."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation: of parts of each layer (`selective`) or of whole layers (`full`)."""
    offload: Offload = OffloadSettings()
    """Parts that leave the device while the role rests: `true`, `false`, or each part by its name."""
    recompute_modules: RecomputeModules = ("core_attn",)
    """Modules that `selective` computes again in backward: the attention kernel (`core_attn`; on GPUs it keeps little),
    MLPs (`mlp`), layers of experts (`moe`)."""

    def minibatch_count(self, batch_sequences: int) -> int:
        """Number of minibatches in a pass, where their size is not given."""
        return self.minibatches or min(_MINIBATCHES, batch_sequences)

    def minibatch_sizes(self, batch_sequences: int) -> list[int]:
        """Samples of each minibatch of a pass over a step's, the larger ones first."""
        if self.minibatch_sequences is not None:
            return [self.minibatch_sequences] * (batch_sequences // self.minibatch_sequences)
        count = self.minibatch_count(batch_sequences)
        return [batch_sequences // count + (n < batch_sequences % count) for n in range(count)]

    def largest_minibatch(self, batch_sequences: int) -> int:
        """Samples of the largest minibatch; `minibatch_sequences` also where a step has fewer samples, which the rules
        refuse."""
        return self.minibatch_sequences or self.minibatch_sizes(batch_sequences)[0]

    def updates(self, batch_sequences: int) -> int:
        """Updates in a step."""
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
    """The policy that is trained."""

    optimizer: ActorOptimizerSettings = ActorOptimizerSettings()
    """AdamW and its schedule; a learning rate of 1e-6 where none is given, as of DAPO, Open-Reasoner-Zero and verl."""


def _one_or_several(value: Given) -> tuple[str, ...]:
    """One sentence, where a union would have one for each of its members."""
    names = [value] if isinstance(value, str) else value
    if _are_different_texts(names) and len(names) <= _MOST_PATTERNS:
        return tuple(names)
    raise ValueError(
        f"{show(value)} must be attention, embeddings, or a list of at most {_MOST_PATTERNS} different words and "
        "patterns of names such as [attention, 'model.layers.0.mlp.*']"
    )


_MOST_PATTERNS = 100
Freeze = Annotated[tuple[str, ...], Field(strict=False), BeforeValidator(_one_or_several)]


class PretrainingSettings(Settings):
    """Value pretraining: the critic alone is trained, on what `rollout.load_from` names (`megappo train
    --critic-only`)."""

    held_out_samples: PositiveInt | None = None
    """Number of saved samples, the last ones, that are not trained on; `critic/held_out_explained_variance` is computed
    on them. Default: a tenth of the samples, at most those of a step."""


class CriticSettings(TrainedRoleSettings):
    """The value model: a trunk like the actor's, its output layer a scalar head."""

    optimizer: CriticOptimizerSettings = CriticOptimizerSettings()
    """AdamW and its schedule; a learning rate of 5e-6 where none is given, as of Open-Reasoner-Zero."""
    path: PathText | None = None
    """Hugging Face folder of the trunk, and of a scalar head as transformers' classifiers, TRL and OpenRLHF write it;
    default: the actor's model."""
    value_head_std: NonNegativeFloat = 0.0
    """Standard deviation of a new value head, where the folder has none; 0 makes every first value 0."""
    value_clip: PositiveFloat | None = 0.2
    """Clip range of the value loss around the old values; null: no clipping."""
    freeze: Freeze = ()
    """Parts of the trunk that are not trained and have neither gradient nor optimizer state: `attention` (SAO),
    `embeddings`, or a list of these and of patterns of Hugging Face names, such as `[attention,
    'model.layers.0.mlp.*']`. With `lora`, the adapters of these parts. Default: none."""
    warmup_steps: NonNegativeInt = 0
    """First steps in which only the critic is updated: critic warm-up, or value pretraining."""
    pretraining: PretrainingSettings | None = None
    """Not null: value pretraining on saved experience, without an engine and without updates of the actor."""


def _weights_alone(value: Given) -> Given | dict[str, Given]:
    return {"weights": value} if isinstance(value, bool) else value


class ReferenceSettings(Settings):
    """The frozen policy of the KL terms; stands on the actor's layout."""

    path: PathText | None = None
    """Hugging Face folder; default: `model.path`, also where the actor has `start_from`."""
    refresh_every_steps: PositiveInt | None = None
    """Replace the reference's weights by the actor's after every so many steps, so that a KL term is measured from a
    recent actor; checkpoints hold them. Null: never."""
    share_actor_base: bool = False
    """Compute with the actor's weights, its adapters (`actor.lora`) switched off, instead of a copy of the weights."""
    offload: Annotated[OffloadSettings, BeforeValidator(_weights_alone)] = OffloadSettings()
    """Whether the weights leave the device while the role rests: `true`, `false`, or `{weights: true}`; it has neither
    gradients nor an optimizer."""

    def broken_rules(self) -> Iterator[str]:
        other = "path" if self.path is not None else "share_actor_base" if self.share_actor_base else ""
        if self.refresh_every_steps is not None and other:
            yield (
                f"refresh_every_steps {self.refresh_every_steps} has the reference take the actor's weights, and with "
                f"{other} it is no copy of the actor; remove one of them"
            )
        for part in ("gradients", "optimizer"):
            if getattr(self.offload, part):
                yield f"offload.{part} is true, but the reference is not trained and has weights alone; remove it"
