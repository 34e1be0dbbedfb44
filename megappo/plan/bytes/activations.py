"""Activation memory: tensors that the forward pass keeps for the backward pass, and workspaces of a pass.

The count follows Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models"
(arXiv:2205.05198), section 4, tensor by tensor. The layers are those of `megappo.megatron`: RMSNorm, grouped queries,
rotary positions, an attention that keeps no score matrix, SwiGLU, packed microbatches of t tokens, and no dropout.

The table lists the bytes per token and layer. e is the number of bytes per element, H the hidden size, Q and K the
widths of queries and of keys, d the head size, F the feed-forward size, and h and g the numbers of heads:

    residual   2 e H            inputs of the two norms, and 4 bytes each for their scale
               2 e H            their outputs, the inputs of the next matrices
    attention  e (Q + 2K)       output of the QKV matrix
               e Q              queries made contiguous for their norm, 4 (h + g) for its scale  [q/k norms]
               e (Q + K)        after rotation
               e (2Q + 2K) + 4h inputs and output of the attention kernel, its log-sum-exp       [not recomputed]
               e Q              input of the output matrix
               2 e K (CP - 1/2) keys and values of other ranks, for each token of this rank     [not recomputed]
    SwiGLU     3 e F            gate and up, product
    norms      2 e H            inputs of norms after attention and MLP, if the model has them
    experts    4 E + 56 k       router: float32 weights, weights of the chosen experts, both permutations
               k e (H + 3 F)    for each of k experts its input, gate and up, weighted product
               k e H            biases of the experts' outputs, if the model has them
               8 E              with a load-balancing loss: float32 shares of tokens, and their factors
    delta net  e (8 Q + 7 V)    linear attention, Q and V the widths of its keys and values, h its value heads: output
               16 V             of its matrices, input and output of the convolution, silu; recurrence's output, float32
               (8 + 4 e) h      decays and strengths
    latents    e (N + R) + 4    latent attention, instead of attention's tensors but the kernel's: inputs of the norms
               e (N + R) + e V  of N latents, with R shared channels of a key; both together; input of the output matrix
    adapters   2 e r n          output of A, before and after its scale, for each of n matrices

Linear attention replaces attention in some layers. A model with linear attention uses the mean of its layers. The
workspace of a chunk of the recurrence exists only while the recurrence runs, because the backward pass recomputes the
workspace.

F is the size of one expert. Routing is assumed to be even: the experts of a rank receive the same number of tokens as
the rank sends. Tensor parallelism divides attention and SwiGLU. Sequence parallelism also divides the residual part
(section 4.2 of the paper). Context parallelism divides the tokens. Attention copies the visible keys and values for
each of the two chunks of a sample on a rank, which makes (CP + 1/2) times the keys and values of the rank's own
tokens. On a CPU, the output of the QKV matrix and the rotated tensors are then not kept in addition.

Selective recomputation drops the tensors of the attention kernel (section 5), of the MLP or of the experts, depending
on `recompute_modules`. The dropped tensors exist again for the layer that runs its backward pass. Full recomputation
keeps only the input of the layer, e H, and all tensors of one layer during its backward pass. Cosine and sine of the
positions, 2 e d, are kept once for all layers that a microbatch passes on a rank. A pipeline stage that does not free
its sent outputs keeps e H more for each microbatch in flight and for the previous one.

Fused attention of Transformer Engine keeps less. A CPU keeps more, because SwiGLU and norms in float32 are several
operations (see `_norm_input` and `per_token` of the blocks). On a CPU, attention of short samples in bfloat16 also
keeps its probabilities (`shares_bytes`).
"""

from __future__ import annotations

from megappo.families.adapters import adapters
from megappo.families.architecture import PRODUCT_ROWS, SHORT_SEGMENT
from megappo.plan.inputs import RoleSetup, Workload
from megappo_kernels.blocks import BLOCK, CHUNK_BYTES


def layer_bytes_per_token(role: RoleSetup, *, recompute: str, fused: bool) -> float:
    """Return the activation bytes that the forward pass keeps per token and layer on one rank. The module docstring
    lists the tensors."""
    arch, e = role.arch, role.dtype_bytes
    rows = role.grid.tp if role.sequence_parallel else 1
    hidden, q, kv = arch.hidden_size, arch.mean_query_width, arch.mean_key_width
    if recompute == "full":
        return e * hidden / rows
    residual = 2.0 * (_norm_input(role, hidden, fused=fused) + e * hidden)
    if arch.extensions.norms_after:  # their outputs are added to the residual and are not kept
        residual += 2.0 * _norm_input(role, hidden, fused=fused)
    attention = float(e * (q + 2 * kv) + e * (q + kv) + e * q)
    dropped = role.recompute_modules if recompute == "selective" else ()
    if arch.latent is not None:
        attention = float(e * arch.heads * arch.latent.value_dim)
        attention += e * (q + 2 * kv) if "core_attn" in dropped else 0
    if "core_attn" not in dropped:
        if role.grid.cp > 1 and not fused and arch.latent is None:  # only the copies of the kernel are kept
            attention = float(e * (2 * q + 2 * kv) if _key_norm_retains_qkv(role) else e * q)
        attention += e * (2 * q + 2 * kv * seen_per_token(role)) + 4 * arch.heads
    attention *= len(arch.attention_layers) / arch.layers
    of_blocks = arch.declaration.per_token(arch, e, fused=fused, without=dropped).activation_bytes
    if role.balances_experts and "moe" not in dropped:
        of_blocks += 8 * arch.experts
    shared = _latent_bytes(role, rows, fused=fused) + 2 * e * adapted_ranks(role)
    return residual / rows + (attention + of_blocks) / role.grid.tp + shared


def _latent_bytes(role: RoleSetup, rows: int, *, fused: bool) -> float:
    """Return the activation bytes per token that latent attention keeps: the inputs of the latents' norms, the key
    that heads share, and the inputs of the matrices of heads. The norms of a token run on one of `rows` ranks. Every
    rank keeps the gathered latents of all tokens."""
    net, e = role.arch.latent, role.dtype_bytes
    if net is None:
        return 0.0
    ranks = [net.rank, *([net.query_rank] if net.query_rank is not None else [])]
    made = sum(_norm_input(role, channels, fused=fused) for channels in ranks) + e * net.rotary_dim
    return made / rows + e * (sum(ranks) + net.rotary_dim)


def shares_bytes(role: RoleSetup, work: Workload) -> float:
    """Return the additional activation bytes per token and layer for attention of short samples in bfloat16 on a CPU.

    This attention keeps its probabilities, e h for each token of the longest sample. Queries, keys and values are
    copies, so the rotated tensors are not kept. The output of the QKV matrix is kept only if a norm of keys
    keeps it as an input. The output and log-sum-exp of the kernel do not exist.

    If the longest sample is above `SHORT_SEGMENT`, a microbatch may contain both kinds of samples. The difference is
    then counted only if it is positive.
    """
    arch, e = role.arch, role.dtype_bytes
    if work.on_cuda or e != 2 or arch.extensions.attends_by_products or role.grid.cp > 1:
        return 0.0
    without = e * (3 * arch.mean_query_width + 3 * arch.mean_key_width) + 4 * arch.heads
    if arch.latent is not None:  # heads keep only the copies in both cases
        without = e * arch.query_width + 4 * arch.heads
    if _key_norm_retains_qkv(role):
        without -= e * (arch.mean_query_width + 2 * arch.mean_key_width)
    most = e * arch.heads * min(work.sequence_tokens, SHORT_SEGMENT)
    difference = (most - without) * len(arch.attention_layers) / arch.layers
    return (max(difference, 0) if work.sequence_tokens > SHORT_SEGMENT else difference) / role.grid.tp


def adapted_ranks(role: RoleSetup) -> int:
    """Return the number of elements between A and B for each token, summed over all adapters of a layer. The layer
    with the most elements counts."""
    lora, routed = role.lora, role.arch.experts_per_token
    if lora is None:
        return 0
    of_layers = dict.fromkeys((0, role.arch.layers - 1), 0)
    for adapter in adapters(role.arch, lora, experts=range(min(1, role.arch.experts))):
        if adapter.base.layer in of_layers:
            times = 1 if adapter.base.expert is None else routed
            of_layers[adapter.base.layer] += len(adapter.a.hf) * lora.rank * times
    return max(of_layers.values())


def seen_per_token(role: RoleSetup) -> float:
    """Return the number of keys that attention keeps for each token of a rank: one, or more under context parallelism
    because keys of other ranks are included."""
    return role.grid.cp + 0.5 if role.grid.cp > 1 else 1.0


def _key_norm_retains_qkv(role: RoleSetup) -> bool:
    """Return whether a norm of keys keeps the output of the QKV matrix as its input on a CPU."""
    family = role.arch.declaration
    return "qk_layernorm" in family.switches(role.arch) and not family.norms_in_float32(role.arch, role.dtype_bytes)


def _norm_input(role: RoleSetup, channels: int, *, fused: bool) -> float:
    """Return the bytes that a norm of `channels` channels keeps per token in addition to its output.

    A fused kernel keeps its input and a float32 scale, as does megappo's norm for bfloat16 on a CPU. Torch's composite
    norm on a CPU computes in float32 and also keeps the normalised input.
    """
    if not role.arch.declaration.norms_in_float32(role.arch, role.dtype_bytes):
        return role.dtype_bytes * channels + 4
    return (1 if fused else 2) * 4 * channels + 4


def passes_in_flight(role: RoleSetup, stage: int, microbatches: int) -> int:
    """Return the number of chunk passes of microbatches that have activations on a rank at the same time.

    With one forward one backward, stage i of p stages keeps min(m, p - i) microbatches. With v interleaved chunks, a
    stage keeps 2 (p - i - 1) + (v - 1) p + 1 passes, and at most all passes (Narayanan et al. 2021, arXiv:2104.04473,
    section 2.2, and Megatron's `num_warmup_microbatches`).
    """
    pp, vpp = role.grid.pp, role.vpp
    if vpp == 1:
        return min(microbatches, pp - stage)
    return min(2 * (pp - stage - 1) + (vpp - 1) * pp + 1, microbatches * vpp)


def layers_in_flight(role: RoleSetup, stage: int, microbatches: int) -> int:
    """Return the number of layers with activations on a rank at the same time. A layer counts once per microbatch in
    flight.

    Each chunk processes p microbatches before the next chunk does. The backward pass runs from the last chunk to the
    first. After the first `passes_in_flight` passes, one pass ends when another pass begins. The layers of these
    passes repeat after p v passes.
    """
    pp, vpp, chunks = role.grid.pp, role.vpp, role.chunks(stage)
    passes = passes_in_flight(role, stage, microbatches)
    layers = most = sum(chunks[n // pp % vpp] for n in range(passes))
    for n in range(passes, min(microbatches * vpp, passes + pp * vpp)):
        layers += chunks[n // pp % vpp] - chunks[vpp - 1 - (n - passes) // pp % vpp]
        most = max(most, layers)
    return most


def activation_bytes(role: RoleSetup, stage: int, work: Workload) -> float:
    """Return the peak activation bytes of a stage in a minibatch."""
    tokens = role.rank_tokens(work.sequence_tokens)
    per_token, unrecomputed = (
        layer_bytes_per_token(role, recompute=recompute, fused=work.on_cuda) for recompute in (role.recompute, "none")
    )
    shares = shares_bytes(role, work)
    unrecomputed += shares
    if role.recompute == "none" or (role.recompute == "selective" and "core_attn" not in role.recompute_modules):
        per_token += shares
    microbatches = role.microbatches(work.sequence_tokens)
    in_flight, passes = (count(role, stage, microbatches) for count in (layers_in_flight, passes_in_flight))
    rotated = role.arch.rotary_channels or role.arch.head_dim
    n_bytes = (in_flight * per_token + passes * 2 * 4 * rotated) * tokens  # cosine and sine are float32
    if not role.frees_outputs:
        # The schedule frees an output when the next output exists. The last chunk of the last stage has a loss instead
        # of an output.
        sent = float(min(passes + 1, microbatches * role.vpp))
        sent *= 1.0 if stage < role.grid.pp - 1 else 1 - 1 / role.vpp
        rows = role.grid.tp if role.sequence_parallel else 1
        n_bytes += sent * role.dtype_bytes * role.arch.hidden_size * tokens / rows
    if role.recompute == "selective" and (role.grid.cp > 1 or {"mlp", "moe"} & set(role.recompute_modules)):
        n_bytes += (unrecomputed - per_token) * tokens
    if role.recompute == "full":
        n_bytes += unrecomputed * tokens
    if stage == role.grid.pp - 1:
        rows = role.grid.tp if role.sequence_parallel else 1
        n_bytes += _norm_input(role, role.arch.hidden_size, fused=work.on_cuda) * tokens / rows
    return n_bytes + routing_bytes(role, stage, work)


def routing_bytes(role: RoleSetup, stage: int, work: Workload) -> float:
    """Return the bytes of the replayed expert routing in the layers of a stage, for all microbatches of a minibatch."""
    tokens = role.replica_sequences * role.grid.padded(work.sequence_tokens) / role.grid.cp
    return role.routing_bytes * role.stage_layers[stage] * tokens


def head_bytes(role: RoleSetup, stage: int, work: Workload, *, train: bool) -> float:
    """Return the workspace of the output layer over the rows of one microbatch, in bytes.

    The language model head in training has the selected rows twice, and their gradient in float32 and in the type of
    the rows. A chunk of float32 logits and its gradient in the type of the weights is limited by a budget of the
    kernel. A placeholder represents the gradient of the weight, which is written directly into the gradient buffer.

    A forward pass has only the rows and a block of logits. The value is an upper bound, because all tokens count as
    rows. The value head has its rows in float32 and their gradient.
    """
    if stage != role.grid.pp - 1:
        return 0.0
    hidden, e = role.arch.hidden_size, role.dtype_bytes
    rows = role.rank_tokens(work.sequence_tokens)
    passes = 2 if train else 1
    if role.is_critic:
        return float(passes * (e + 4) * rows * hidden)
    vocab = role.padded_vocab // role.grid.tp
    device = "cuda" if work.on_cuda else "cpu"
    if not train:
        block_rows, block_columns = BLOCK[device]
        return float(e * rows * hidden + 4 * min(rows, block_rows) * min(vocab, block_columns))
    chunk = min(CHUNK_BYTES[device], (6 if e == 2 else 4) * rows * vocab)
    placeholder = 0.0 if role.lora is not None else float(e) * vocab * hidden
    return (3.0 * e + 4) * rows * hidden + chunk + placeholder


def products_bytes(role: RoleSetup, work: Workload) -> float:
    """Return the workspace in bytes of attention with soft-capped scores or with sinks. This attention runs as plain
    matrix products in float32 over one block of queries.

    The workspace contains the scores, the outputs of tanh (or the scores with sinks) and of softmax, their gradient,
    and queries, keys and values. Adjacent segments are padded to at most twice their tokens.
    """
    if not role.arch.extensions.attends_by_products:
        return 0.0
    tokens, arch = role.rank_tokens(work.sequence_tokens), role.arch
    rows = min(PRODUCT_ROWS, work.sequence_tokens)
    seen = 2 * tokens * seen_per_token(role)
    return 4.0 * (4 * rows * seen * arch.heads + seen * (arch.query_width + 2 * arch.key_width)) / role.grid.tp


def transient_bytes(role: RoleSetup, stage: int, work: Workload, *, train: bool) -> float:
    """Return the workspace of the running layer in bytes, without the kept activations.

    The forward pass has the widest tensors of the layer between two residual streams: gate and up, silu(gate), up and
    the product. The backward pass has the gradients of these tensors, and the gradient of the largest weight before
    the sum with the gradient buffer.

    Sequence parallelism gathers the hidden states of all tokens into a buffer, and context parallelism gathers keys
    and values. Experts have the same tensors for every routed token, the product times the expert's weight in float32,
    and the hidden states in sorted order for sending, receiving and return. The outputs of adapters for gate and up
    exist twice: as parts and concatenated.
    """
    tokens, e = role.rank_tokens(work.sequence_tokens), role.dtype_bytes
    hidden = role.arch.hidden_size
    live = role.arch.declaration.per_token(role.arch, e, fused=work.on_cuda).live_elements
    made = 4 * role.arch.ffn_hidden_size * max(1, role.arch.experts_per_token) if role.lora is not None else 0
    wide = e * tokens * ((live + made) / role.grid.tp + 2 * hidden)
    gathered = float(e * tokens * hidden) if role.sequence_parallel else 0.0
    if role.grid.cp > 1:
        gathered += 2.0 * e * tokens * (role.grid.cp + 1) * max(role.arch.key_widths) / role.grid.tp
    wide = max(wide, products_bytes(role, work))
    return wide + gathered + (e * role.largest_weight(stage) if train else 0)
