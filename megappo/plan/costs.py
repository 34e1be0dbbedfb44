"""FLOPs, bytes moved and seconds of each stage of a step.

The time of a stage is the largest of its arithmetic time, memory time and host time for kernel launches (Williams et
al. 2009, the roofline model), or their sum on a measured CPU, which does not overlap them. Communication time is
added. Only gradient sums and weight gathers over replicas overlap with kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megappo.families.declaration import ArchitectureConfig
from megappo.families.flops import adapter_flops, forward_flops, recurrence_flops, update_flops
from megappo.plan.bytes.servers import Servers, running_sequences, server_weights, token_bytes
from megappo.plan.bytes.sizes import generation_flops_of_pair, model_sizes, state_bytes
from megappo.plan.hardware.machines import ASSUMED, Machine
from megappo.plan.inputs import RoleSetup, Setup, Workload
from megappo.plan.sync import sync_traffic

_LAUNCHES_OF_EXPERTS, _LAUNCHES_OF_REPLAY = 1.2, 0.3
"""Kernel launches that routing and its replay add to a layer with experts, in units of the launches of a dense layer.
The forward and backward pass of a dense layer launch 41 kernels if its norms, rope and SwiGLU are one kernel each.
Routing adds 50 kernels and replay adds 12 kernels for any number of experts."""
_TRAINING_PASSES = {"none": 3, "selective": 3, "full": 4}
"""Cost of a microbatch in an update, in forward passes, by recomputation mode. The backward pass counts as two."""
_PASSES_OVER_VOCABULARY, _PASSES_OVER_VOCABULARY_MEASURED, _WEIGHT_READS_MEASURED = 8, 36, 2
"""Cost of sampling in the embedded engine. The first two constants are the passes over the float32 scores of the
vocabulary for each sampled token. On a measured CPU, the unit is a copy, which is faster than the exponentials and
sums of sampling. The third constant is the number of times that a measured CPU reads each weight, because products
with few rows read weights at half the speed of a copy."""
_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_OF_A_REPLICA = 40_000_000, 1_000_000
"""Default `bucket_size` of `DistributedDataParallel` in Megatron-Core 0.16.1 and 0.19.2, in elements: max(40,000,000,
1,000,000 x data parallel size)."""


@dataclass(frozen=True)
class StageCost:
    """One stage of a step."""

    name: str
    flops: float
    """FLOPs of all ranks together, including recomputation."""
    memory_bytes: float
    """Bytes of device memory that the busiest rank reads and writes."""
    link_bytes: float
    """Bytes that the busiest rank sends."""
    seconds: float
    bound_by: str
    """Largest part of the seconds: `compute`, `memory`, `launches`, `links`, `host` or `waking`."""
    hidden_seconds: float = 0.0
    """Seconds of communication that overlap with kernels. `seconds` does not include them."""
    host_bytes: float = 0.0
    """Bytes moved between the device and the host of the busiest rank."""


class _StageWork:
    """Sum of the work of a stage on its busiest rank."""

    def __init__(self, machine: Machine, dtype_bytes: int, compute_share: float | None = None) -> None:
        self.machine = machine
        self.flops = self.memory_bytes = self.link_bytes = self.hidden_seconds = self.host_bytes = 0.0
        self._compute_rate = machine.flops(dtype_bytes) * (compute_share or machine.compute_share)
        self._seconds = dict.fromkeys(("compute", "memory", "launches", "links", "host", "waking"), 0.0)

    def run(
        self, *, flops: float, memory_bytes: float, layers: float, times: float = 1.0, in_trainer: bool = False
    ) -> float:
        """Count the kernels of `layers` forward passes of a layer, repeated `times` times. `flops` and `memory_bytes`
        are per rank and repetition. Return the seconds of one repetition."""
        machine = self.machine
        launch = machine.trainer_launch_seconds_per_layer if in_trainer else machine.launch_seconds_per_layer
        bounds = {
            "compute": flops / self._compute_rate,
            "memory": memory_bytes / (machine.memory_bandwidth * machine.bandwidth_share),
            "launches": layers * launch,
        }
        self.memory_bytes += times * memory_bytes
        slowest = max(bounds, key=lambda name: bounds[name])
        counted = tuple(bounds) if machine.is_measured else (slowest,)
        for name in counted:
            self._seconds[name] += times * bounds[name]
        return sum(bounds[name] for name in counted)

    def send(self, n_bytes: float, *, inside_node: bool, times: float = 1.0, kernel_seconds: float = 0.0) -> None:
        """Count bytes that a rank sends, repeated `times` times. In each repetition, `kernel_seconds` of kernels can
        hide a part of the transfer."""
        machine = self.machine
        bandwidth = machine.intra_node_bandwidth if inside_node else machine.inter_node_bandwidth
        seconds = n_bytes / (bandwidth * ASSUMED.link_share)
        hidden = min(seconds, kernel_seconds)
        self._seconds["links"] += times * (seconds - hidden)
        self.hidden_seconds += times * hidden
        self.link_bytes += times * n_bytes

    def move(self, n_bytes: float, *, step_bytes: float = 0.0) -> None:
        """Count `n_bytes` moved to or from host memory, and `step_bytes` of host traffic of an optimizer step."""
        self.host_bytes += n_bytes
        self._seconds["host"] += n_bytes / (self.machine.host_bandwidth * ASSUMED.link_share)
        self._seconds["host"] += step_bytes / ASSUMED.host_memory_bandwidth

    def wait(self, seconds: float) -> None:
        """Count the latency of small messages."""
        self._seconds["links"] += seconds

    def wake(self) -> None:
        """Count the time in which trainers release memory and sleeping servers wake up."""
        self._seconds["waking"] += ASSUMED.waking_seconds

    def cost(self, name: str) -> StageCost:
        """Return the counted work as the cost of the stage `name`."""
        seconds = self._seconds
        bound_by = max(seconds, key=lambda part: seconds[part])
        total, hidden = sum(seconds.values()), self.hidden_seconds
        return StageCost(name, self.flops, self.memory_bytes, self.link_bytes, total, bound_by, hidden, self.host_bytes)


def step_seconds(stages: Sequence[StageCost], servers: Servers | None) -> float:
    """Return the seconds of a step. Stages run one after the other. The rollout overlaps with all other stages if
    servers have separate devices and `rollout.ahead` is set."""
    seconds = {stage.name: stage.seconds for stage in stages}
    if servers is None or not (servers.ahead and servers.has_own_devices):
        return math.fsum(seconds.values())
    rollout = seconds.pop("rollout")
    return max(rollout, math.fsum(seconds.values()))


def step_costs(setup: Setup, machine: Machine) -> tuple[StageCost, ...]:
    """Return the stages of one step in their order, with samples of the maximum length, without rewards and
    advantages."""
    costs = [rollout_cost(setup.actor.arch, setup.work, machine), forward_cost(setup.roles, setup.work, machine)]
    costs += [update_cost(role, setup.work, machine) for role in setup.trained]
    return (*costs, sync_cost(setup, machine))


def forward_cost(roles: Sequence[RoleSetup], work: Workload, machine: Machine) -> StageCost:
    """Return the cost of the forward passes over all samples, one role after the other. Offloaded weights are loaded
    first.

    Samples are sent to their replica first. Only their routing takes noticeable time. A replica receives the routing
    of its samples for the forward pass, and in each epoch, because minibatches of each epoch contain other samples.
    """
    spent = _StageWork(machine, roles[0].dtype_bytes)
    for role in roles:
        if not role.scored_steps:
            continue
        spent.move(_resting_weights(role))
        untrained = role.in_forward_pass(work.batch_sequences)
        _pipeline(spent, untrained, work, train=False, times=role.scored_steps)
        epochs = role.updates_per_step * role.minibatch_sequences / work.batch_sequences if role.grid.dp > 1 else 0
        of_layer = role.routing_bytes * untrained.replica_sequences * work.sequence_tokens
        inside = machine.same_node(0, work.world_size - 1)
        spent.send((1 + epochs) * max(role.stage_layers) * of_layer if work.world_size > 1 else 0, inside_node=inside)
    return spent.cost("forward")


def update_cost(role: RoleSetup, work: Workload, machine: Machine) -> StageCost:
    """Return the cost of all updates of a role in a step: pipelines, gradient reduction and AdamW.

    AdamW reads the gradient, main weight and moments, and writes the main weight, moments and weight. Offloaded state
    moves to the device and back once per step. For parameters on the host, every update sends the gradients to the
    host and the main weights to the device.
    """
    spent = _StageWork(machine, role.dtype_bytes)
    updates = role.updates_per_step
    microbatch_seconds = _pipeline(spent, role, work, train=True, times=updates)
    _between_replicas(spent, role, microbatch_seconds if machine.is_cuda else 0.0)
    shard = max(role.optimizer_parameters(stage) for stage in range(role.grid.pp))
    on_host = role.on_host * shard if machine.is_cuda else 0.0
    spent.run(flops=0.0, memory_bytes=(shard - on_host) * (4 + 2 * 12 + role.dtype_bytes), layers=0, times=updates)
    spent.move(updates * on_host * (4 + 4), step_bytes=updates * on_host * (4 + 2 * 12))
    resting = (shard - on_host) * (12 if role.dtype_bytes == 2 else 8) if role.offload.optimizer else 0.0
    spent.move(2 * (resting + _resting_weights(role)))
    return spent.cost(f"update_{role.name}")


def _resting_weights(role: RoleSetup) -> float:
    """Return the bytes of a rank's weights if they are offloaded, otherwise 0."""
    weights = max(role.parameters(stage) for stage in range(role.grid.pp)) * role.dtype_bytes
    return float(weights) if role.offload.weights else 0.0


def _between_replicas(spent: _StageWork, role: RoleSetup, microbatch_seconds: float) -> None:
    """Count the communication between replicas in all updates of a step.

    Ranks with the same weights (data and context parallel ranks) all-reduce float32 gradients. A ring moves 2 (d-1)/d
    of their bytes. The distributed optimizer uses a reduce-scatter of gradients and an all-gather of weights instead.

    With overlap, the sums run during the backward pass of the last microbatch of an update. The gathers of all updates
    except the last run during the next forward pass. Communication proceeds bucket by bucket. The bucket of the first
    layers is not hidden, because its gradients are computed last and its weights are used first. On a CPU,
    communication and kernels share the cores, so no communication is hidden.
    """
    reduced = max(_replicated(role, stage) for stage in range(role.grid.pp))
    inside = spent.machine.same_node(role.grid.ranks[0], role.grid.ranks[-1])
    first = first_bucket_share(role)

    def send(n_bytes: float, times: int, kernel_seconds: float) -> None:
        spent.send(first * n_bytes, inside_node=inside, times=times)
        spent.send((1 - first) * n_bytes, inside_node=inside, times=times, kernel_seconds=(1 - first) * kernel_seconds)

    updates, forward = role.updates_per_step, microbatch_seconds / _TRAINING_PASSES[role.recompute]
    backward = microbatch_seconds - forward
    summed_bytes = 4 if role.distributed_optimizer else 8
    send(reduced * summed_bytes, updates, backward if role.reduces_in_backward else 0.0)
    if role.distributed_optimizer:
        send(reduced * role.dtype_bytes, updates - 1, forward if role.gathers_in_forward else 0.0)
        send(reduced * role.dtype_bytes, 1, 0.0)


def _replicated(role: RoleSetup, stage: int) -> float:
    """Return the number of parameters that a rank of a stage sends in a reduce-scatter or an all-gather."""
    of_experts, d, copies = role.trained_expert_parameters(stage), role.grid.copies, role.grid.expert_replicas
    return (d - 1) / d * (role.trained_parameters(stage) - of_experts) + (copies - 1) / copies * of_experts


def first_bucket_share(role: RoleSetup) -> float:
    """Return the share of the first stage's parameters in the bucket of its first layers.

    `DistributedDataParallel` of Megatron-Core fills buckets from the last layer to the first. A bucket has at least 40
    million elements, or one million for each replica. The embedding is the last parameter and is never split.
    """
    embedding = 0 if role.lora is not None else role.padded_vocab // role.grid.tp * role.arch.hidden_size
    bucket = max(_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_OF_A_REPLICA * role.grid.copies)
    return min(1.0, max(bucket, embedding) / role.trained_parameters(0))


def _pipeline(spent: _StageWork, role: RoleSetup, work: Workload, *, train: bool, times: float) -> float:
    """Count the microbatches of a pipeline, repeated `times` times. Return the seconds of one microbatch's kernels on
    one rank.

    A pipeline of m microbatches, p stages and v chunks takes m + (p-1)/v times the slowest stage (Narayanan et al.
    2021, section 2.2).
    """
    arch, e = role.arch, role.dtype_bytes
    microbatches = role.microbatches(work.sequence_tokens)
    tokens = role.replica_sequences * work.sequence_tokens / (microbatches * role.grid.cp)
    rows = tokens * work.response_tokens / work.sequence_tokens
    layer_flops, head_flops = _pass_flops(role, work, train=train)
    stage_flops = [n * tokens * layer_flops for n in role.stage_layers]
    stage_flops[-1] += rows * head_flops
    layers = max(role.stage_layers)
    slots = times * (microbatches + (role.grid.pp - 1) / role.vpp)
    weights = max(role.parameters(stage) for stage in range(role.grid.pp))
    gradients = max(role.trained_parameters(stage) for stage in range(role.grid.pp))
    of_blocks = arch.declaration.per_token(arch, e, fused=work.on_cuda)
    widths = 8 * arch.hidden_size + 6 * arch.mean_query_width + of_blocks.moved_elements
    activation_bytes = 2.0 * e * tokens * layers * widths / role.grid.tp
    passes = _TRAINING_PASSES[role.recompute] if train else 1
    seconds = spent.run(
        flops=max(stage_flops) / role.grid.tp,
        memory_bytes=passes * (weights * e + activation_bytes) + (8 * gradients if train else 0),
        layers=layers * passes * _launches(role),
        times=slots,
        in_trainer=True,
    )
    samples = times * role.replica_sequences * work.sequence_tokens * role.grid.dp
    response_share = work.response_tokens / work.sequence_tokens
    spent.flops += samples * (arch.layers * layer_flops + response_share * head_flops)
    _layer_communication(spent, role, tokens, passes=passes, slots=slots)
    return seconds


def _launches(role: RoleSetup) -> float:
    """Return the kernel launches of a layer in units of the launches of a dense layer."""
    return 1 + (_LAUNCHES_OF_EXPERTS if role.arch.experts else 0) + (_LAUNCHES_OF_REPLAY if role.routing_bytes else 0)


def _pass_flops(role: RoleSetup, work: Workload, *, train: bool) -> tuple[float, float]:
    """Return the FLOPs per token in one layer and per response token in the head, for an update or a forward pass."""
    if not train:
        layer, _, head = forward_flops(role.arch, work.sequence_tokens, is_critic=role.is_critic)
        return layer + adapter_flops(role.arch, role.lora), head
    return update_flops(
        role.arch,
        work.sequence_tokens,
        is_critic=role.is_critic,
        recompute=role.recompute,
        recompute_modules=role.recompute_modules,
        lora=role.lora,
    )


def _layer_communication(spent: _StageWork, role: RoleSetup, tokens: float, *, passes: int, slots: float) -> None:
    """Count the communication inside layers and between stages.

    Tensor parallelism all-reduces two hidden states per layer in the forward pass and two in the backward pass
    (Shoeybi et al. 2019). The gathers and scatters of sequence parallelism send the same number of bytes, and the
    backward pass adds a gather per matrix. A stage sends hidden states to the next stage and receives their gradient.
    Expert parallelism sends routed tokens to their experts and the results back, over the network if the expert is on
    another node. Context parallelism gathers keys and values per layer and forward pass, and scatters their gradients.
    """
    hidden_bytes = role.dtype_bytes * tokens * role.arch.hidden_size
    # Number of layer computations with collectives: forward only, forward and backward, or both plus the second
    # forward pass of full recomputation.
    one_way = {1: 1, 3: 2, 4: 3}[passes]
    collectives = 2.0 * one_way + (1.0 if role.sequence_parallel and passes > 1 else 0.0)
    ring = 2 * (role.grid.tp - 1) / role.grid.tp
    first = role.grid.ranks[0]
    spent.send(
        max(role.stage_layers) * collectives * ring * hidden_bytes,
        inside_node=spent.machine.same_node(first, first + role.grid.tp - 1),
        times=slots,
    )
    if role.grid.cp > 1:
        others = (role.grid.cp - 1) * tokens * 2 * role.dtype_bytes * role.arch.mean_key_width / role.grid.tp
        again = passes == 3 and role.recompute == "selective" and "core_attn" in role.recompute_modules
        inside = spent.machine.same_node(first, first + role.grid.cp * role.grid.tp - 1)
        spent.send(max(role.stage_layers) * (one_way + again) * others, inside_node=inside, times=slots)
    if role.grid.ep > 1:
        owners = [role.grid.expert_owner(0, share) for share in range(role.grid.ep)]
        near = sum(spent.machine.same_node(first, owner) for owner in owners)
        to_each = role.arch.experts_per_token * hidden_bytes / role.grid.tp / role.grid.ep
        for others, inside in ((near - 1, True), (role.grid.ep - near, False)):
            n_bytes = max(role.stage_layers) * 2 * one_way * others * to_each
            spent.send(n_bytes, inside_node=inside, times=slots)
    if role.grid.pp > 1:
        shared = role.grid.tp if role.sequence_parallel else 1
        inside = spent.machine.same_node(first, first + role.grid.model_ranks - 1)
        spent.send((2 if passes > 1 else 1) * hidden_bytes / shared, inside_node=inside, times=slots)


def rollout_cost(arch: ArchitectureConfig, work: Workload, machine: Machine) -> StageCost:
    """Return the cost of the rollout on servers or with the embedded engine, in which each rank generates its prompts
    in batches.

    A decoding step reads all weights once. The cache of each sequence is read for attention, and read and written to
    append by concatenation. Grouped queries also repeat it for every query head (a read, a write and a read of the
    copy).
    """
    if not work.has_engine:
        return _StageWork(machine, work.engine_dtype_bytes).cost("rollout")
    if work.servers is not None:
        return _served_rollout(arch, work.servers, work, machine)
    e = work.engine_dtype_bytes
    spent = _StageWork(machine, e, machine.decode_share)
    total, _, _ = model_sizes(arch)
    reads, passes, between = 1, _PASSES_OVER_VOCABULARY, 0
    if machine.is_measured:
        reads, passes = _WEIGHT_READS_MEASURED, _PASSES_OVER_VOCABULARY_MEASURED
        between = ASSUMED.measured_layers_between_tokens
    kv_bytes = float(e * arch.cached_width)
    groups = arch.heads // arch.kv_heads
    traffic = kv_bytes * (3 if groups == 1 else 3 + 2 * groups)
    if arch.latent is not None:  # expanded keys and values are written and read, and keys are concatenated
        traffic += 2.0 * e * arch.layers * arch.heads * (arch.latent.made_dim + arch.head_dim)
    _, of_token, context = _generation_flops(arch, work)
    turns = [work.prompt_tokens + work.response_tokens * turn // work.turns for turn in range(work.turns)]
    remaining = work.sequences_per_rank
    while remaining > 0:
        batch = min(work.generate_batch_sequences, remaining)
        same = remaining // batch
        prefills, step = [batch * _prefill_flops(arch, before) for before in turns], batch * of_token
        for prefill in prefills:  # the embedded engine keeps no cache between turns
            spent.run(flops=prefill, memory_bytes=e * total, layers=arch.layers, times=same)
        of_sequence = context * traffic + 2 * state_bytes(arch, e) + passes * 4 * arch.vocab_size
        step_bytes = reads * e * total + batch * of_sequence
        layers, times = arch.layers + between, same * work.response_tokens
        spent.run(flops=step, memory_bytes=step_bytes, layers=layers, times=times)
        spent.flops += same * (sum(prefills) + work.response_tokens * step) * work.world_size
        remaining -= same * batch
    return spent.cost("rollout")


def _generation_flops(arch: ArchitectureConfig, work: Workload) -> tuple[float, float, float]:
    """Return three numbers for one sequence: the FLOPs of the prompt, the FLOPs of a response token halfway through
    the response, and the number of tokens before that token."""
    _, trunk, head = model_sizes(arch)
    attention = generation_flops_of_pair(arch, served=work.servers is not None)
    context = work.prompt_tokens + work.response_tokens / 2
    of_prompt = _prefill_flops(arch, work.prompt_tokens)
    return of_prompt, 2.0 * (trunk + head) + attention * context + recurrence_flops(arch), context


def _prefill_flops(arch: ArchitectureConfig, tokens: int) -> float:
    """Return the FLOPs to prefill `tokens` tokens of one sequence before generation."""
    _, trunk, head = model_sizes(arch)
    attention = 4.0 * len(arch.attention_layers) * arch.heads * arch.multiplied_head_dim * tokens
    return tokens * (2.0 * trunk + attention + recurrence_flops(arch)) + 2.0 * head


def _served_rollout(arch: ArchitectureConfig, servers: Servers, work: Workload, machine: Machine) -> StageCost:
    """Return the cost of the rollout on servers. A server decodes all sequences for which its cache has room, and
    starts the next sequence when one ends. S sequences of R tokens therefore take S R / running decoding steps.

    A step reads the weights and the keys and values of the running sequences, and writes float32 logits. On a GPU, a
    step is a CUDA graph without host time per layer. Tensor parallelism adds two all-reduces per layer without
    overlap. They move 2 (t-1)/t of the hidden states and take at least `small_all_reduce_seconds`, or
    `small_all_reduce_between_nodes_seconds` if a server spans several nodes. Deterministic inference multiplies the
    seconds on GPUs by `deterministic_slowdown`.
    """
    e, tp = work.engine_dtype_bytes, servers.tensor_parallel
    spent = _StageWork(_server_machine(machine, servers, work), e)
    of_prompt, of_token, context = _generation_flops(arch, work)
    sequences = work.batch_sequences / servers.count
    running = running_sequences(arch, servers, e, requested=math.ceil(sequences), mean_tokens=context)
    steps = sequences * work.response_tokens / running
    prefill, step = sequences * of_prompt, running * of_token
    weights = e * server_weights(arch, tp, servers.attention_groups)
    layers = 0 if work.on_cuda else arch.layers
    spent.run(flops=prefill / tp, memory_bytes=weights, layers=layers)
    cache = running / servers.attention_groups * context * token_bytes(arch, servers.attention_ranks, e)
    spent.run(
        flops=step / tp, memory_bytes=weights + cache + 8.0 * running * arch.vocab_size, layers=layers, times=steps
    )
    spent.flops += servers.count * (prefill + steps * step)
    if tp > 1:
        ring = 2 * (tp - 1) / tp * e * arch.hidden_size
        inside = servers.nodes == 1
        wait = ASSUMED.small_all_reduce_seconds if inside else ASSUMED.small_all_reduce_between_nodes_seconds
        spent.send(2 * arch.layers * ring * running, inside_node=inside, times=steps)
        spent.send(2 * arch.layers * ring * sequences * work.prompt_tokens, inside_node=inside)
        spent.wait(steps * 2 * arch.layers * wait)
    cost = spent.cost("rollout")
    slowdown = ASSUMED.deterministic_slowdown if servers.deterministic and work.on_cuda else 1.0
    return replace(cost, seconds=slowdown * cost.seconds)


def _server_machine(machine: Machine, servers: Servers, work: Workload) -> Machine:
    """Return the machine of one server rank: a GPU or a part of a CPU machine. `machine` is a trainer rank's part."""
    if not machine.shared_by_ranks:
        return machine
    return machine.per_rank(1) if not servers.shares_machine else machine.scaled(work.world_size / servers.ranks)


def sync_cost(setup: Setup, machine: Machine) -> StageCost:
    """Return the cost of the weight sync. Every rank that feeds an engine receives its missing weights and assembles
    tensors. The rank then copies the tensors into the embedded engine. Servers load one bucket while the next bucket
    is assembled, so the slower of the two determines the time.

    If servers share the devices, each server rank copies its part from the memory of a trainer, which is never slower
    than assembling. Servers on other devices receive the whole model, and a rank broadcasts its stage to one server
    after the other. Sleeping servers first allocate their memory again. Verification is not included.
    """
    actor, servers = setup.actor, setup.work.servers
    if not setup.work.has_engine:
        return _StageWork(machine, actor.dtype_bytes).cost("sync")
    traffic = sync_traffic(setup, machine.devices_per_node)
    gather, load = _StageWork(machine, actor.dtype_bytes), _StageWork(machine, actor.dtype_bytes)
    gather.move(_resting_weights(actor))
    gather.send(traffic.received, inside_node=machine.same_node(0, setup.work.world_size - 1))
    gather.run(flops=0.0, memory_bytes=(6 if servers is None else 4) * traffic.made, layers=0)
    if servers is not None and not servers.colocated:
        n_bytes = float(model_sizes(actor.arch)[0] * actor.dtype_bytes)
        load.send(max(n_bytes, traffic.broadcast), inside_node=servers.shares_machine)
    if servers is not None and servers.sleeps:
        gather.wake()
    return max(gather.cost("sync"), load.cost("sync"), key=lambda cost: cost.seconds)
