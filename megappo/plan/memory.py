"""Bytes on every rank: what stays, and what each stage of a step adds for a while."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import lru_cache

from megappo.families.architecture import ArchitectureConfig
from megappo.families.parameters import expert_parameters
from megappo.plan.activations import head_bytes, kept_bytes, routing_bytes, transient_bytes
from megappo.plan.inputs import RoleSetup, Setup, Workload
from megappo.plan.machines import ASSUMED
from megappo.plan.servers import (
    Servers,
    cache_tokens,
    noted_bytes,
    running_sequences,
    server_weights,
    server_workspace,
    token_bytes,
)
from megappo.plan.sizes import largest_of_layer, largest_tensor, model_sizes, state_bytes
from megappo.reshard.slices import copy_ranks


@dataclass(frozen=True)
class RoleMemory:
    """Bytes of a role on one rank."""

    role: str
    stage: int
    """Pipeline stage."""
    parameters: int
    """Number of parameters, in elements."""
    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Activations kept for backward at the peak of an update."""
    head: float
    """Workspace of the output layer in an update."""
    transient: float
    """Workspace of the one layer that runs, in an update."""
    optimizer_step: float
    """Workspace of AdamW's step, when the activations are already freed."""
    forward: float
    """Workspace of a forward pass over all samples."""
    moved: tuple[str, ...] = ()
    """Which of `weights`, `gradients` and `optimizer` leave the device while the role rests."""
    host: float = 0.0
    """Bytes on the host of a GPU, or in a file: what rests there, and the optimizer's part that lives there."""

    @property
    def resident(self) -> float:
        """Bytes of weights, gradients and optimizer state that are on the device when an update begins."""
        return self.weights + self.gradients + self.optimizer

    @property
    def at_rest(self) -> float:
        """Bytes that stay on the device while other roles or the engine run."""
        parts = {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}
        return sum(n_bytes for name, n_bytes in parts.items() if name not in self.moved)

    @property
    def scoring(self) -> float:
        """Bytes that a forward pass over all samples adds to `at_rest`."""
        return self.forward + ("weights" in self.moved) * self.weights

    @property
    def updating(self) -> float:
        """Bytes that an update adds to `at_rest`."""
        return self.update + self.resident - self.at_rest

    @property
    def update(self) -> float:
        """Bytes that an update adds to `resident`."""
        return max(self.activations + self.head + self.transient, self.optimizer_step)


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of the engine on one rank: the whole model where it is embedded, a share of it in a server."""

    weights: float
    kv_cache: float
    workspace: float
    idle: float
    """Bytes while the trainers compute."""
    syncing: float
    """Bytes while it takes new weights."""

    @property
    def total(self) -> float:
        """Bytes while it generates."""
        return self.weights + self.kv_cache + self.workspace


NO_ENGINE = EngineMemory(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class RankMemory:
    """Bytes on ranks that hold the same parts of the models."""

    ranks: tuple[int, ...]
    roles: tuple[RoleMemory, ...]
    engine: EngineMemory
    sync: float
    """Buckets of the weight stream."""
    reward: float
    """Weights of the reward model."""
    stages: dict[str, float]
    """Bytes by stage of the step while it runs, resident bytes included."""
    of_servers: bool = False
    """Whether these are ranks of servers on devices of their own, numbered from 0, instead of trainer ranks."""

    @property
    def peak_stage(self) -> str:
        """The stage that needs most."""
        return max(self.stages, key=lambda name: self.stages[name])

    @property
    def peak(self) -> float:
        """Bytes in that stage."""
        return self.stages[self.peak_stage]


@lru_cache(maxsize=65536)
def role_memory(role: RoleSetup, stage: int, work: Workload) -> RoleMemory:
    """Bytes of a role on one rank of a stage, by Megatron's mixed precision.

    Per parameter in bfloat16: 2 bytes of weight, 4 of gradient (`grad_reduce_in_fp32`), 12 of optimizer state (main
    weight and the two moments of AdamW in float32). In float32: 4, 4 and 8 (the weight is its own main weight). The
    distributed optimizer divides its state, and nothing else, by the data parallel size (Rajbhandari et al. 2020,
    "ZeRO", stage 1); the state of experts is divided by the number of ranks that hold the same experts. A role that is
    not trained has weights only; a role with adapters has gradients and state of the adapters only.

    State on the host holds moments, a main weight and a gradient in float32 per parameter, 16 bytes; without CUDA it
    takes the same memory as the rest. Main weights of a bfloat16 model come from the host for the moment in which they
    are cast to weights.
    """
    count = role.parameters(stage)
    untrained = role.in_forward_pass(work.batch_sequences)
    forward = head_bytes(untrained, stage, work, train=False) + transient_bytes(untrained, stage, work, train=False)
    forward += routing_bytes(untrained, stage, work)
    forward *= role.scored_steps > 0
    weights = 0.0 if role.shares_weights else role.weight_bytes(stage)
    moved = role.offload.parts
    if not role.trained:
        host = weights if moved else 0.0
        return RoleMemory(role.name, stage, count, weights, 0, 0, 0, 0, 0, 0, forward, moved, host)
    stateful, mixed = role.optimizer_parameters(stage), role.dtype_bytes == 2
    on_host, on_device = role.on_host * stateful, (1 - role.on_host) * stateful
    optimizer = (12 if mixed else 8) * on_device + (0.0 if work.on_cuda else 16 * on_host)
    # Torch's AdamW takes the roots of all second moments at once on CUDA; on a CPU one parameter after the other, and
    # none where it is fused, for bfloat16.
    roots = 4.0 * (on_device if work.on_cuda else 0 if mixed else role.largest_weight(stage))
    rests = ("weights" in moved) * weights + ("optimizer" in moved) * optimizer
    return RoleMemory(
        role=role.name,
        stage=stage,
        parameters=count,
        weights=weights,
        gradients=4.0 * role.trained_parameters(stage),
        optimizer=optimizer,
        activations=kept_bytes(role, stage, work),
        head=head_bytes(role, stage, work, train=True),
        transient=transient_bytes(role, stage, work, train=True),
        optimizer_step=max(roots, 4 * on_host if mixed else 0.0),
        forward=forward,
        moved=moved,
        host=rests + (16 * on_host if work.on_cuda else 0.0),
    )


def engine_memory(arch: ArchitectureConfig, work: Workload) -> EngineMemory:
    """Bytes of the embedded engine, which holds a whole model on every rank: weights, the batch's keys and values, and
    a workspace.

    The cache holds 2 layers K e bytes for each token of each sequence. It grows by concatenation, so one layer's cache
    exists twice; with grouped queries one layer's is also repeated for every query head, since a batch of unequal
    prompts has a mask. With latent attention it holds the latents, and keys and values of one layer are expanded from
    them. Prefill's widest layer and the sampler's float32 copies of the last logits never coincide with a full cache,
    but both are small beside it, so their maximum is added.
    """
    e = work.engine_dtype_bytes
    kv_width = max(arch.key_widths)
    q_width = arch.heads * max(map(arch.head_dim_of, arch.attention_layers))
    batch, tokens = work.cache_sequences, work.cache_sequences * work.cache_tokens
    cache = float(arch.cached_width * e * tokens) + batch * state_bytes(arch, e)
    if arch.latent is not None:
        made = arch.heads * (arch.latent.made_dim + arch.head_dim)
        layer_copies = float(e * tokens * (arch.latent.token_width + made))
    else:
        layer_copies = 2.0 * e * tokens * (kv_width + (q_width if q_width > kv_width else 0))
    prefill = e * batch * work.prompt_tokens * (3 * arch.ffn_hidden_size + 2 * arch.hidden_size)
    if arch.extensions.attends_by_products:  # whole score matrices, three in the engine's type and one in float32
        prefill += (3 * e + 4) * batch * arch.heads * work.prompt_tokens**2
    sampler = batch * arch.vocab_size * (e + 3 * 4)
    weights = float(model_sizes(arch)[0] * e)
    idle = 0.0 if work.engine_sleeps else weights
    return EngineMemory(weights, cache, layer_copies + max(prefill, sampler), idle=idle, syncing=weights)


def server_memory(arch: ArchitectureConfig, servers: Servers, work: Workload) -> EngineMemory:
    """Bytes of one rank of a server (`megappo.plan.servers`).

    Beside trainers on a GPU it has a CUDA context of its own. Asleep it keeps nothing but the context; woken for a
    weight sync it holds its weights, and keys and values only after the sync.
    """
    e = work.engine_dtype_bytes
    weights = e * server_weights(arch, servers.tensor_parallel, servers.attention_groups)
    cache = cache_tokens(arch, servers, e) * token_bytes(arch, servers.attention_ranks, e)
    if not work.on_cuda:  # the host's memory also holds the recorded experts of cached tokens
        cache += cache_tokens(arch, servers, e) * noted_bytes(arch, servers)
    mean = work.prompt_tokens + work.response_tokens / 2
    wanted = -(-work.batch_sequences // servers.count)
    running = running_sequences(arch, servers, e, wanted=wanted, mean_tokens=mean)
    context = ASSUMED.cuda_reserve_bytes if servers.colocated and work.on_cuda else 0.0
    workspace = server_workspace(arch, servers, e, running) + context
    idle = context if servers.sleeps else weights + cache + context
    syncing = weights + context if servers.sleeps else weights + cache + context
    return EngineMemory(weights, cache, workspace, idle=idle, syncing=syncing)


def _on_trainers(arch: ArchitectureConfig, work: Workload) -> EngineMemory:
    """The engine's bytes on one of the trainer's ranks. Without CUDA they share the machine with all servers."""
    servers = work.servers
    if not work.has_engine or (servers is not None and servers.beside):
        return NO_ENGINE
    if servers is None:
        return engine_memory(arch, work)
    found = server_memory(arch, servers, work)
    if not servers.shares_machine:
        return found
    share = servers.ranks / work.world_size
    return EngineMemory(*(share * part for part in astuple(found)))


def bucket_bytes(setup: Setup) -> float:
    """Bytes that a rank receives of one bucket of the weight stream, at least the largest tensor. Where it feeds one
    rank of a server it receives only its slice of either."""
    arch, e, parts = setup.actor.arch, setup.actor.dtype_bytes, _parts(setup)
    return max(min(setup.work.sync_bucket_bytes, e * model_sizes(arch)[0] / parts), e * largest_tensor(arch) / parts)


def sync_bytes(setup: Setup) -> float:
    """Bytes of the weight stream on a rank: a bucket, the messages that it is made of, and those that the rank sends.

    Of the c ranks that hold a copy of the model, each receives (c-1)/c of a bucket from the others, and sends them 1/c
    of every different part of a bucket. Whole tensors are one part; slices are as many parts as a server has ranks, or
    as there are other ranks where those are fewer.

    Servers need two buffers, one of which is loaded while the other is filled, and copies of a layer's experts that
    wait to be compared with the engine's, one for each pipeline stage where all stages send in turns.

    With adapters a rank's part of a bucket is merged first: weight, product and sum exist in float32 for one parameter
    at a time.
    """
    if not setup.work.has_engine:
        return 0.0
    servers, grid, size = setup.work.servers, setup.actor.grid, bucket_bytes(setup)
    merging = size + 12.0 * largest_of_layer(setup.actor.arch, grid.tp, 1) if setup.actor.lora is not None else 0.0
    c = copy_ranks(grid)
    messages = (c - 1 + min(_parts(setup), max(1, c - 1))) / c * size
    if servers is None:
        return size + messages + merging
    arch, parts = setup.actor.arch, _parts(setup)
    waiting = setup.actor.dtype_bytes * arch.experts * expert_parameters(arch) / parts * (grid.pp if parts > 1 else 1)
    return 2.0 * size + messages + merging + waiting


def _parts(setup: Setup) -> int:
    """Number of slices that a tensor is cut into, each for other ranks; 1 on a machine that all ranks share, where they
    lie in one place."""
    servers = setup.work.servers
    return servers.tensor_parallel if servers is not None and servers.sliced and not servers.shares_machine else 1


def rank_memory(setup: Setup) -> tuple[RankMemory, ...]:
    """Memory of every rank, ranks that hold the same pipeline stages together, in the order of their first rank."""
    places: dict[tuple[int | None, ...], list[int]] = {}
    for rank in range(setup.work.world_size):
        places.setdefault(tuple(role.grid.stage_of(rank) for role in setup.roles), []).append(rank)
    engine, sync, reward = _on_trainers(setup.actor.arch, setup.work), sync_bytes(setup), setup.work.reward_bytes
    found = []
    for stages, ranks in places.items():
        held = tuple(
            role_memory(role, stage, setup.work)
            for role, stage in zip(setup.roles, stages, strict=True)
            if stage is not None
        )
        found.append(RankMemory(tuple(ranks), held, engine, sync, reward, _stages(held, engine, sync, reward)))
    servers = setup.work.servers
    if servers is not None and servers.beside:
        own, bucket = server_memory(setup.actor.arch, servers, setup.work), bucket_bytes(setup)
        used = {"rollout": own.total, "sync": own.syncing + bucket}
        found.append(RankMemory(tuple(range(servers.ranks)), (), own, bucket, 0.0, used, of_servers=True))
    return tuple(found)


def _stages(roles: tuple[RoleMemory, ...], engine: EngineMemory, sync: float, reward: float) -> dict[str, float]:
    """Bytes during each stage of a step."""
    roles_stay = reward + sum(role.at_rest for role in roles)
    stays = roles_stay + engine.idle
    stages = {"rollout": roles_stay + engine.total}
    stages["forward"] = stays + max((role.scoring for role in roles), default=0.0)
    for role in sorted(roles, key=lambda r: r.role != "critic"):
        if role.gradients:
            stages[f"update_{role.role}"] = stays + role.updating
    stages["sync"] = roles_stay + engine.syncing + sync
    return stages
