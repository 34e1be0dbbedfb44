"""Memory of every rank in bytes: resident memory, and the temporary memory of each stage of a step."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import lru_cache

from megappo.families.declaration import ArchitectureConfig
from megappo.families.parameters import expert_parameters
from megappo.plan.bytes.activations import activation_bytes, head_bytes, routing_bytes, transient_bytes
from megappo.plan.bytes.servers import (
    Servers,
    cache_tokens,
    noted_bytes,
    running_sequences,
    server_weights,
    server_workspace,
    token_bytes,
)
from megappo.plan.bytes.sizes import largest_of_layer, largest_tensor, model_sizes, state_bytes
from megappo.plan.hardware.machines import ASSUMED
from megappo.plan.inputs import RoleSetup, Setup, Workload
from megappo.reshard.slices import copy_ranks


@dataclass(frozen=True)
class RoleMemory:
    """Memory of a role on one rank in bytes."""

    role: str
    stage: int
    """Pipeline stage."""
    parameters: int
    """Number of parameters."""
    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Activations kept for backward at the peak of an update."""
    head: float
    """Workspace of the output layer in an update."""
    transient: float
    """Workspace of the running layer in an update."""
    optimizer_step: float
    """Workspace of AdamW's step, after the activations are freed."""
    forward: float
    """Workspace of a forward pass over all samples."""
    moved: tuple[str, ...] = ()
    """Parts among `weights`, `gradients` and `optimizer` that are offloaded between uses of the role."""
    host: float = 0.0
    """Bytes in host memory or in a file: the offloaded parts, and the part of the optimizer on the host."""

    @property
    def resident(self) -> float:
        """Bytes of weights, gradients and optimizer state on the device at the start of an update."""
        return self.weights + self.gradients + self.optimizer

    @property
    def at_rest(self) -> float:
        """Bytes on the device while other roles or the engine run."""
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
    """Memory of the engine on one rank in bytes. The embedded engine has the whole model on each rank, and a server
    has a share of the model."""

    weights: float
    kv_cache: float
    workspace: float
    idle: float
    """Bytes during forward passes and updates of the trainers."""
    syncing: float
    """Bytes during a weight sync."""

    @property
    def total(self) -> float:
        """Bytes during generation."""
        return self.weights + self.kv_cache + self.workspace


NO_ENGINE = EngineMemory(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class RankMemory:
    """Memory of ranks with the same parts of the models, in bytes."""

    ranks: tuple[int, ...]
    roles: tuple[RoleMemory, ...]
    engine: EngineMemory
    sync: float
    """Bytes of the buckets of the weight stream."""
    reward: float
    """Bytes of the weights of the reward model."""
    stages: dict[str, float]
    """Bytes during each stage of the step, including resident bytes."""
    of_servers: bool = False
    """Whether the ranks are ranks of servers on separate devices, numbered from 0, instead of trainer ranks."""

    @property
    def peak_stage(self) -> str:
        """Name of the stage with the highest memory."""
        return max(self.stages, key=lambda name: self.stages[name])

    @property
    def peak(self) -> float:
        """Bytes in the stage with the highest memory."""
        return self.stages[self.peak_stage]


@lru_cache(maxsize=65536)
def role_memory(role: RoleSetup, stage: int, work: Workload) -> RoleMemory:
    """Return the memory of a role on one rank of a stage with Megatron's mixed precision.

    A bfloat16 parameter takes 2 bytes of weight, 4 bytes of gradient (`grad_reduce_in_fp32`), and 12 bytes of
    optimizer state (main weight and two moments of AdamW in float32). A float32 parameter takes 4, 4 and 8 bytes,
    because the weight is its own main weight.

    The distributed optimizer divides only its state by the data parallel size (Rajbhandari et al. 2020, "ZeRO", stage
    1). The state of experts is divided by the number of ranks with the same experts. A role that is not trained has
    only weights. A role with adapters has gradients and state only for the adapters.

    State on the host takes 16 bytes per parameter: two moments, a main weight and a gradient in float32. Without CUDA,
    host memory and device memory are the same memory. Main weights of a bfloat16 model are copied from the host
    briefly for the cast to weights.
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
    # On CUDA, AdamW of torch computes the roots of all second moments at once. On a CPU, AdamW computes the roots for
    # one parameter after the other. A fused AdamW for bfloat16 stores no roots.
    roots = 4.0 * (on_device if work.on_cuda else 0 if mixed else role.largest_weight(stage))
    rests = ("weights" in moved) * weights + ("optimizer" in moved) * optimizer
    return RoleMemory(
        role=role.name,
        stage=stage,
        parameters=count,
        weights=weights,
        gradients=4.0 * role.trained_parameters(stage),
        optimizer=optimizer,
        activations=activation_bytes(role, stage, work),
        head=head_bytes(role, stage, work, train=True),
        transient=transient_bytes(role, stage, work, train=True),
        optimizer_step=max(roots, 4 * on_host if mixed else 0.0),
        forward=forward,
        moved=moved,
        host=rests + (16 * on_host if work.on_cuda else 0.0),
    )


def engine_memory(arch: ArchitectureConfig, work: Workload) -> EngineMemory:
    """Return the memory of the embedded engine, which has a whole model on every rank: weights, keys and values of the
    batch, and a workspace.

    The cache takes 2 layers K e bytes for each token of each sequence. The cache grows by concatenation, so the cache
    of one layer exists twice. With grouped queries, the cache of one layer is also repeated for every query head,
    because a batch of unequal prompts has a mask. With latent attention, the cache contains the latents, and the keys
    and values of one layer are expanded from the latents.

    The widest layer of prefill and the float32 logits of the sampler do not exist at the same time as a full cache.
    Both are small compared with the cache, so their maximum is added.
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
    if arch.extensions.attends_by_products:  # score matrices: three in the engine's type, one in float32
        prefill += (3 * e + 4) * batch * arch.heads * work.prompt_tokens**2
    sampler = batch * arch.vocab_size * (e + 3 * 4)
    weights = float(model_sizes(arch)[0] * e)
    idle = 0.0 if work.engine_sleeps else weights
    return EngineMemory(weights, cache, layer_copies + max(prefill, sampler), idle=idle, syncing=weights)


def server_memory(arch: ArchitectureConfig, servers: Servers, work: Workload) -> EngineMemory:
    """Return the memory of one rank of a server (`megappo.plan.bytes.servers`).

    A server that shares a GPU with trainers has a separate CUDA context. A sleeping server keeps only the context.
    During a weight sync, a server has its weights, and allocates keys and values only after the sync.
    """
    e = work.engine_dtype_bytes
    weights = e * server_weights(arch, servers.tensor_parallel, servers.attention_groups)
    cache = cache_tokens(arch, servers, e) * token_bytes(arch, servers.attention_ranks, e)
    if not work.on_cuda:  # host memory also has the recorded experts of cached tokens
        cache += cache_tokens(arch, servers, e) * noted_bytes(arch, servers)
    mean = work.prompt_tokens + work.response_tokens / 2
    requested = -(-work.batch_sequences // servers.count)
    running = running_sequences(arch, servers, e, requested=requested, mean_tokens=mean)
    context = ASSUMED.cuda_reserve_bytes if servers.colocated and work.on_cuda else 0.0
    workspace = server_workspace(arch, servers, e, running) + context
    idle = context if servers.sleeps else weights + cache + context
    syncing = weights + context if servers.sleeps else weights + cache + context
    return EngineMemory(weights, cache, workspace, idle=idle, syncing=syncing)


def _on_trainers(arch: ArchitectureConfig, work: Workload) -> EngineMemory:
    """Return the memory of the engine on one trainer rank. Without CUDA, the trainer ranks share the machine with all
    servers."""
    servers = work.servers
    if not work.has_engine or (servers is not None and servers.has_own_devices):
        return NO_ENGINE
    if servers is None:
        return engine_memory(arch, work)
    memory = server_memory(arch, servers, work)
    if not servers.shares_machine:
        return memory
    share = servers.ranks / work.world_size
    return EngineMemory(*(share * part for part in astuple(memory)))


def bucket_bytes(setup: Setup) -> float:
    """Return the bytes that a rank receives of one bucket of the weight stream. A bucket has at least the size of the
    largest tensor. A rank that feeds one rank of a server receives only its slice."""
    arch, e, parts = setup.actor.arch, setup.actor.dtype_bytes, _parts(setup)
    return max(min(setup.work.sync_bucket_bytes, e * model_sizes(arch)[0] / parts), e * largest_tensor(arch) / parts)


def sync_bytes(setup: Setup) -> float:
    """Return the bytes of the weight stream on a rank: a bucket, the received messages for the bucket, and the sent
    messages.

    Each of the c ranks with a copy of the model receives (c-1)/c of a bucket from the others, and sends 1/c of every
    different part of a bucket. Whole tensors are one part. The number of slices is the number of ranks of a server,
    but at most the number of other ranks.

    Servers need two buffers, because one buffer is loaded while the other is filled. Servers also need copies of a
    layer's experts for the comparison with the experts of the engine. There is one copy for each pipeline stage if all
    stages send in turns.

    With adapters, the part of a bucket on a rank is merged first. The weight, the product and the sum exist in float32
    for one parameter at a time.
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
    """Return the number of slices of a tensor that go to different ranks. Return 1 on a machine that all ranks share,
    because the slices are in shared memory."""
    servers = setup.work.servers
    return servers.tensor_parallel if servers is not None and servers.sliced and not servers.shares_machine else 1


def rank_memory(setup: Setup) -> tuple[RankMemory, ...]:
    """Return the memory of every rank. Ranks with the same pipeline stages are grouped, in the order of their first
    rank."""
    places: dict[tuple[int | None, ...], list[int]] = {}
    for rank in range(setup.work.world_size):
        places.setdefault(tuple(role.grid.stage_of(rank) for role in setup.roles), []).append(rank)
    engine, sync, reward = _on_trainers(setup.actor.arch, setup.work), sync_bytes(setup), setup.work.reward_bytes
    memories = []
    for stages, ranks in places.items():
        parts = tuple(
            role_memory(role, stage, setup.work)
            for role, stage in zip(setup.roles, stages, strict=True)
            if stage is not None
        )
        memories.append(RankMemory(tuple(ranks), parts, engine, sync, reward, _stages(parts, engine, sync, reward)))
    servers = setup.work.servers
    if servers is not None and servers.has_own_devices:
        own, bucket = server_memory(setup.actor.arch, servers, setup.work), bucket_bytes(setup)
        used = {"rollout": own.total, "sync": own.syncing + bucket}
        memories.append(RankMemory(tuple(range(servers.ranks)), (), own, bucket, 0.0, used, of_servers=True))
    return tuple(memories)


def _stages(roles: tuple[RoleMemory, ...], engine: EngineMemory, sync: float, reward: float) -> dict[str, float]:
    """Return the bytes during each stage of a step."""
    roles_stay = reward + sum(role.at_rest for role in roles)
    stays = roles_stay + engine.idle
    stages = {"rollout": roles_stay + engine.total}
    stages["forward"] = stays + max((role.scoring for role in roles), default=0.0)
    for role in sorted(roles, key=lambda r: r.role != "critic"):
        if role.gradients:
            stages[f"update_{role.role}"] = stays + role.updating
    stages["sync"] = roles_stay + engine.syncing + sync
    return stages
