"""Inputs of the planner, derived from the settings: the roles and the work of one step."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cached_property

from megappo.config import Config, ConfigError, resolve
from megappo.config.derive import role_numbers
from megappo.config.grid import Grid
from megappo.config.pipeline import chunk_layers, even_layers
from megappo.config.rules.role_spec import RoleSpec
from megappo.config.sections.engine import DEFAULT_ENGINE, DEFAULT_SERVERS, SERVERS
from megappo.config.sections.roles import ActorSettings, CriticSettings, OffloadSettings
from megappo.families.adapters import LoraShape, expert_adapter_parameters
from megappo.families.architecture import expert_number_bytes
from megappo.families.declaration import ArchitectureConfig
from megappo.families.parameters import expert_parameters
from megappo.families.served import Served
from megappo.plan.bytes.elements import FIRST, frozen_elements, largest_adapter, layer_adapters, stage_parameters
from megappo.plan.bytes.rewards import reward_bytes
from megappo.plan.bytes.servers import Servers, find_servers
from megappo.plan.bytes.sizes import DTYPE_BYTES, largest_of_layer

RoleSettings = ActorSettings | CriticSettings


@dataclass(frozen=True)
class Models:
    """Architectures of a run. A critic or reference without its own path has the architecture of the actor."""

    actor: ArchitectureConfig
    critic: ArchitectureConfig
    reference: ArchitectureConfig

    def of(self, name: str) -> ArchitectureConfig:
        """Return the architecture of a role."""
        return {"actor": self.actor, "critic": self.critic, "reference": self.reference}[name]


@dataclass(frozen=True)
class RoleSetup:
    """A role on its layout."""

    name: str
    arch: ArchitectureConfig
    grid: Grid
    vpp: int
    sequence_parallel: bool
    recompute: str
    distributed_optimizer: bool
    microbatch_budget_tokens: int
    minibatch_sequences: int
    updates_per_step: int
    padded_vocab: int
    dtype_bytes: int
    trained: bool = True
    recompute_modules: tuple[str, ...] = ("core_attn",)
    """Modules that selective recomputation recomputes."""
    frees_outputs: bool = True
    """Whether a pipeline stage frees its outputs after sending."""
    reduces_in_backward: bool = False
    """Whether gradients are summed over replicas during the backward pass of the last microbatch."""
    gathers_in_forward: bool = False
    """Whether updated weights are gathered during the first forward pass of the next update."""
    chunk_layers: tuple[int, ...] | None = None
    """Layers of each chunk of the pipeline in the order of the forward pass. With None, layers are split evenly."""
    routing_bytes: int = 0
    """Bytes of a token's routing in one layer if the engine's routing is replayed, otherwise 0."""
    offload: OffloadSettings = field(default_factory=OffloadSettings)
    """Parts of the role that are offloaded between uses."""
    on_host: float = 0.0
    """Fraction of the optimizer state on the host."""
    balances_experts: bool = False
    """Whether the role has a load-balancing loss."""
    lora: LoraShape | None = None
    """Adapters that are trained instead of the weights."""
    freeze: tuple[str, ...] = ()
    """Parts of the model that are not trained; see `families.frozen`."""
    scored_steps: float = 1.0
    """Fraction of the steps in which the role scores the samples."""
    shares_weights: bool = False
    """Whether the role shares the weights of the actor instead of having its own."""
    changes: bool = False
    """Whether the role copies the weights of the actor at an interval of steps instead of being trained. Checkpoints
    then include the weights of the role."""

    @property
    def is_critic(self) -> bool:
        """Whether the output layer is a value head."""
        return self.name == "critic"

    def chunks(self, stage: int) -> tuple[int, ...]:
        """Return the number of layers of each chunk on a rank of a stage."""
        layers = self.chunk_layers or even_layers(self.arch.layers, self.grid.pp * self.vpp)
        return layers[stage :: self.grid.pp]

    @cached_property
    def stage_layers(self) -> tuple[int, ...]:
        """Number of layers of all chunks on a rank of each stage."""
        return tuple(sum(self.chunks(stage)) for stage in range(self.grid.pp))

    def _stage_count(self, layers: Collection[int]) -> tuple[int, ...]:
        """Return how many of the layers with the numbers in `layers` are on each stage."""
        counts = self.chunk_layers or even_layers(self.arch.layers, self.grid.pp * self.vpp)
        ends = itertools.accumulate(counts)
        chunk_counts = [sum(end - n <= layer < end for layer in layers) for n, end in zip(counts, ends, strict=True)]
        return tuple(sum(chunk_counts[stage :: self.grid.pp]) for stage in range(self.grid.pp))

    @cached_property
    def stage_special_layers(self) -> tuple[int, ...]:
        """Number of special layers on a rank of each stage (`ArchitectureConfig.special_layers`)."""
        return self._stage_count(self.arch.special_layers)

    @cached_property
    def _stage_dense_layers(self) -> tuple[int, ...]:
        return self._stage_count(range(self.arch.dense_layers))

    def expert_layers(self, stage: int) -> int:
        """Return the number of layers with experts on a rank of a stage. For a dense model, return the number of all
        layers, because they count as layers with zero experts."""
        return self.stage_layers[stage] - self._stage_dense_layers[stage]

    def in_forward_pass(self, batch_sequences: int) -> RoleSetup:
        """Return the setup of the role for a forward pass over all samples of the step."""
        return replace(self, minibatch_sequences=batch_sequences)

    def microbatch_tokens(self, sequence_tokens: int) -> int:
        """Return the largest number of tokens in a microbatch: the budget, or all samples of a replica if they have
        fewer tokens."""
        return min(self.microbatch_budget_tokens, self.replica_sequences * self.grid.padded(sequence_tokens))

    def rank_tokens(self, sequence_tokens: int) -> int:
        """Return the largest number of tokens of a microbatch on one context parallel rank."""
        return -(-self.microbatch_tokens(sequence_tokens) // self.grid.cp)

    @property
    def replica_sequences(self) -> int:
        """Number of samples of a minibatch on one data parallel replica."""
        return -(-self.minibatch_sequences // self.grid.dp)

    def microbatches(self, sequence_tokens: int) -> int:
        """Return the number of microbatches of a minibatch on one replica. All samples have the maximum length."""
        per_microbatch = max(1, self.microbatch_budget_tokens // self.grid.padded(sequence_tokens))
        count = -(-self.replica_sequences // per_microbatch)
        return -(-count // self.grid.pp) * self.grid.pp if self.vpp > 1 else count

    def parameters(self, stage: int) -> int:
        """Return the number of parameters on one rank of a stage, including adapters."""
        return self._stage_parameters[stage]

    @cached_property
    def _stage_parameters(self) -> tuple[int, ...]:
        layers, special = self.stage_layers, self.stage_special_layers
        shared = stage_parameters(self.arch, self.grid.tp, layers, self.padded_vocab, self.is_critic, special)
        of_adapters = (0 if self.lora is None else self._adapters(stage) for stage in range(self.grid.pp))
        of_experts = map(self.expert_parameters, range(self.grid.pp))
        return tuple(map(sum, zip(shared, of_experts, of_adapters, strict=True)))

    def router_biases(self, stage: int) -> int:
        """Return the number of float32 router biases on one rank of a stage."""
        return self.expert_layers(stage) * self.arch.experts if self.arch.sigmoid_router else 0

    def fixed_parameters(self, stage: int) -> int:
        """Return the number of parameters on one rank of a stage that are never trained: router biases and layer
        scalars."""
        scalars = self.stage_layers[stage] if self.arch.extensions.layer_scalars else 0
        return self.router_biases(stage) + scalars

    def weight_bytes(self, stage: int) -> float:
        """Return the bytes of all parameters on one rank of a stage."""
        biases = self.router_biases(stage)
        return float(self.dtype_bytes * (self.parameters(stage) - biases) + 4 * biases)

    def trained_parameters(self, stage: int) -> int:
        """Return the number of parameters with gradients on one rank of a stage. With adapters, only the adapters and
        the value head of a critic have gradients."""
        if self.lora is None:
            return self.parameters(stage) - self.fixed_parameters(stage) - sum(self._frozen(stage))
        return self._adapters(stage) - sum(self._frozen(stage)) + self._trained_head(stage)

    def _adapters(self, stage: int) -> int:
        assert self.lora is not None
        dense, others = self.stage_special_layers[stage], self.expert_layers(stage)
        first, last = (layer_adapters(self.arch, self.lora, self.grid.tp, n) for n in (0, self.arch.layers - 1))
        return dense * first + others * last + self._expert_adapters(stage)

    def _frozen(self, stage: int) -> tuple[int, int]:
        """Return the number of frozen dense parameters and frozen expert parameters on one rank of a stage. With
        adapters, return the numbers of their adapters."""
        if not self.freeze:
            return 0, 0
        dense, of_expert = frozen_elements(self.arch, self.freeze, self.lora, self.grid.tp, self.padded_vocab)
        layers = [n for n in range(self.arch.layers) if self._stage_count((n,))[stage]]
        ends = dense[FIRST] * (stage == 0) + dense[self.arch.layers] * (stage == self.grid.pp - 1)
        return ends + sum(dense[n] for n in layers), self.experts_per_rank * sum(of_expert[n] for n in layers)

    def _trained_head(self, stage: int) -> int:
        return self.arch.hidden_size + 1 if self.is_critic and stage == self.grid.pp - 1 else 0

    def trained_expert_parameters(self, stage: int) -> int:
        """Return the number of expert parameters with gradients on one rank of a stage."""
        every = self.expert_parameters(stage) if self.lora is None else self._expert_adapters(stage)
        return every - self._frozen(stage)[1]

    def _expert_adapters(self, stage: int) -> int:
        return self.expert_layers(stage) * self.experts_per_rank * expert_adapter_parameters(self.arch, self.lora)

    @property
    def experts_per_rank(self) -> int:
        """Experts of each layer on one rank; 0 for a dense model."""
        return self.arch.experts // self.grid.ep

    def expert_parameters(self, stage: int) -> int:
        """Return the number of expert weights on one rank of a stage."""
        return self.expert_layers(stage) * self.experts_per_rank * expert_parameters(self.arch)

    def optimizer_parameters(self, stage: int) -> float:
        """Return the number of parameters with optimizer state on one rank of a stage."""
        if not self.distributed_optimizer:
            return self.trained_parameters(stage)
        of_experts = self.trained_expert_parameters(stage)
        return (self.trained_parameters(stage) - of_experts) / self.grid.copies + of_experts / self.grid.expert_replicas

    def largest_weight(self, stage: int) -> int:
        """Return the number of elements of the largest trained weight on one rank of a stage."""
        if self.lora is not None:
            return largest_adapter(self.arch, self.lora, self.grid.tp, self.experts_per_rank)
        has_vocabulary = stage == 0 or (stage == self.grid.pp - 1 and not self.is_critic)
        vocabulary = self.padded_vocab // self.grid.tp * self.arch.hidden_size if has_vocabulary else 0
        return max(vocabulary, largest_of_layer(self.arch, self.grid.tp, self.experts_per_rank))


@dataclass(frozen=True)
class Workload:
    """Work of one step."""

    world_size: int
    batch_sequences: int
    prompt_tokens: int
    response_tokens: int
    sequences_per_rank: int
    """Largest number of samples that one rank generates."""
    generate_batch_sequences: int
    sync_bucket_bytes: int
    engine_dtype_bytes: int
    on_cuda: bool
    """Whether ranks compute on GPUs. On GPUs, a norm is one kernel and AdamW updates all parameters at once."""
    cache_sequences: int
    """Largest number of sequences that the engine generates together, including evaluation."""
    cache_tokens: int
    """Number of tokens of the longest of these sequences."""
    reward_bytes: float
    """Bytes of the weights of a reward model on every rank. Without CUDA, the value includes a share of the reward
    servers."""
    servers: Servers | None = None
    """Servers; None with an engine in the trainers."""
    engine_sleeps: bool = False
    """Whether the embedded engine releases the memory of its weights for training between rollouts."""
    has_engine: bool = True
    """Whether samples are generated. Otherwise, saved samples are loaded, and no weights leave the trainer."""
    turns: int = 1
    """Number of turns of an episode. The embedded engine recomputes all earlier tokens in each turn. Servers read
    earlier tokens from their caches."""

    @property
    def sequence_tokens(self) -> int:
        """Number of tokens of the longest prompt and response together."""
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True)
class Setup:
    """Input of the planner for one run."""

    actor: RoleSetup
    critic: RoleSetup | None
    reference: RoleSetup | None
    work: Workload

    @property
    def trained(self) -> tuple[RoleSetup, ...]:
        """Trained roles in the order of their updates."""
        return tuple(role for role in (self.critic, self.actor) if role is not None and role.trained)

    @property
    def roles(self) -> tuple[RoleSetup, ...]:
        """All roles in the order of their forward passes."""
        return tuple(role for role in (self.actor, self.reference, self.critic) if role is not None)


NO_FLOAT32 = "model.dtype is float32, which its GPU kernels do not support"
"""The rmsnorm kernels of sglang-kernel 0.4.5 and 0.4.10 do not support float32. A server exits while it captures CUDA
graphs."""


def make_setup(config: Config, models: Models, world_size: int, *, on_cuda: bool, device_bytes: float = 0.0) -> Setup:
    """Return the planner's input for valid settings. Servers use their share of `device_bytes`.

    Raises ConfigError if the servers cannot run the actor's model, or if the number of servers does not fit.
    """
    rollout = resolve(config, on_cuda=on_cuda).rollout
    if rollout.capabilities.separate_processes:
        kind = rollout.server_settings.kind
        if not rollout.is_custom and (why := unserved(config, models.actor, on_cuda=on_cuda)):
            dtype = "model.dtype to bfloat16, or " if why == NO_FLOAT32 else ""
            raise ConfigError(
                f"rollout.servers.kind is {kind}, but {why}; set {dtype}rollout.engine to {DEFAULT_ENGINE}"
            )
        if (problem := rollout.server_settings.count_problem(world_size, on_cuda=on_cuda)) is not None:
            raise ConfigError(problem)
    actor = trained_role(config, "actor", models, world_size, on_cuda=on_cuda)
    critic = None if config.critic is None else trained_role(config, "critic", models, world_size, on_cuda=on_cuda)
    reference = None if config.reference is None else reference_role(config, actor, models)
    if config.pretrains_critic:  # the actor keeps its weights and computes nothing
        actor, reference = replace(actor, trained=False, updates_per_step=0, scored_steps=0.0), None
    return Setup(actor, critic, reference, workload(config, world_size, on_cuda=on_cuda, device_bytes=device_bytes))


def unserved(config: Config, actor: ArchitectureConfig, *, on_cuda: bool) -> str:
    """Return the reason why built-in servers cannot run the actor's model on a device, or "" if they can run it."""
    if on_cuda and config.model.dtype == "float32":
        return NO_FLOAT32
    why = actor.declaration.unserved(actor, Served(on_cuda, config.max_sequence_tokens))
    return f"{SERVERS[DEFAULT_SERVERS].label}'s {actor.family} {why}" if why else ""


def workload(config: Config, world_size: int, *, on_cuda: bool, device_bytes: float = 0.0) -> Workload:
    """Return the work of one step."""
    rollout, evaluation = config.rollout, config.evaluation
    sequences_per_rank = -(-rollout.prompts_per_step // world_size) * rollout.samples_per_prompt
    longest = max(rollout.max_response_tokens, (evaluation.max_response_tokens or 0) if evaluation else 0)
    batch = rollout.generate_batch_sequences
    return Workload(
        world_size=world_size,
        batch_sequences=rollout.batch_sequences,
        prompt_tokens=config.data.max_prompt_tokens,
        response_tokens=rollout.max_response_tokens,
        sequences_per_rank=sequences_per_rank,
        generate_batch_sequences=batch,
        sync_bucket_bytes=rollout.sync_bucket_bytes,
        engine_dtype_bytes=DTYPE_BYTES[rollout.dtype or config.model.dtype],
        on_cuda=on_cuda,
        # The number of evaluation prompts is unknown until the data is read.
        cache_sequences=batch if evaluation else min(batch, sequences_per_rank),
        cache_tokens=rollout.total_tokens(config.data.max_prompt_tokens, longest),
        reward_bytes=reward_bytes(config.reward, world_size, on_cuda=on_cuda),
        servers=find_servers(config, world_size, on_cuda=on_cuda, device_bytes=device_bytes),
        engine_sleeps=config.offloads,
        has_engine=rollout.load_from is None,
        turns=rollout.episodes.max_turns if rollout.episodes is not None else 1,
    )


def trained_role(
    config: Config,
    name: str,
    models: Models,
    world_size: int,
    *,
    on_cuda: bool,
    settings: RoleSettings | None = None,
) -> RoleSetup:
    """Return the setup of the actor or critic on its layout, with its own settings or with `settings`."""
    arch, settings = models.of(name), settings or config.trained[name]
    numbers = role_numbers(config, RoleSpec(name, settings, arch), world_size, 1)
    return RoleSetup(
        name=name,
        arch=arch,
        grid=numbers.grid,
        vpp=numbers.vpp,
        chunk_layers=chunk_layers(config, name, settings, arch),
        sequence_parallel=settings.layout.shards_sequences,
        recompute=settings.recompute,
        recompute_modules=settings.recompute_modules,
        distributed_optimizer=settings.optimizer.shards_state(numbers.grid),
        frees_outputs=settings.layout.deallocate_pipeline_outputs,
        reduces_in_backward=settings.optimizer.reduces_in_backward(on_cuda=on_cuda),
        gathers_in_forward=settings.optimizer.gathers_in_forward(numbers.grid, on_cuda=on_cuda),
        microbatch_budget_tokens=settings.microbatch_budget_tokens,
        minibatch_sequences=settings.largest_minibatch(config.rollout.batch_sequences),
        updates_per_step=numbers.updates_per_step,
        padded_vocab=numbers.padded_vocab_size,
        dtype_bytes=DTYPE_BYTES[config.model.dtype],
        balances_experts=settings.router_aux_loss_coef > 0,
        lora=None if settings.lora is None else settings.lora.of(arch),
        freeze=settings.freeze if isinstance(settings, CriticSettings) else (),
        routing_bytes=_routing_bytes(arch) if name == "actor" and config.algorithm.replays_routing(arch.experts) else 0,
        offload=settings.offload,
        on_host=settings.optimizer.on_host,
        scored_steps=1 / config.algorithm.mismatch_every_steps if name == "actor" else 1.0,
    )


def _routing_bytes(arch: ArchitectureConfig) -> int:
    return arch.experts_per_token * expert_number_bytes(arch.experts)


def reference_role(config: Config, actor: RoleSetup, models: Models, settings: RoleSettings | None = None) -> RoleSetup:
    """Return the setup of the reference on the actor's layout, with the actor's settings or with `settings`."""
    layers, own = chunk_layers(config, "actor", settings or config.actor, models.reference), config.reference
    assert own is not None
    untrained = replace(actor, trained=False, recompute="none", updates_per_step=0, scored_steps=1.0, lora=None)
    untrained = replace(untrained, name="reference", arch=models.reference, chunk_layers=layers, offload=own.offload)
    untrained = replace(untrained, routing_bytes=0, balances_experts=False, shares_weights=own.share_actor_base)
    return replace(untrained, changes=own.refresh_every_steps is not None)
