"""Exchange checkpoints between plain models of Megatron-Core and models of megappo; see test_torch_dist.py.

Usage (under torchrun): torch_dist_worker.py CASES.json FOUND.json
"""

from __future__ import annotations

import queue
import zlib
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import silu

from megappo.checkpoint.torch_dist.writer import write_torch_dist
from megappo.config.grid import Grid
from megappo.families.architecture import padded_vocab_size
from megappo.families.declaration import ArchitectureConfig
from megappo.megatron.build import BuildOptions, RoleModel, build_model
from megappo.megatron.layout import Cut, Layout, make_layouts
from megappo.megatron.patches.all_devices import fix_router
from megappo.models.model_files import read_architecture
from megappo.ppo.assembly.origins import open_origin
from megappo.reshard.sources import SafetensorsSource
from megappo.runtime.process import Runtime
from tests.support.workers import answer
from tests.support.workers.model_worker import expected, forward, sequences

VALUE_HEAD_STD = 0.5


@dataclass(frozen=True)
class Plain:
    """A model with layers and groups of Megatron-Core, and its parallel sizes."""

    model: GPTModel
    tp: int
    pp: int

    def logits(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return (T, V) logits and (T, H) hidden states before the output layer on every rank."""
        hidden: list[Tensor] = []
        hook = self.model.decoder.register_forward_hook(lambda _module, _inputs, output: hidden.append(output))
        positions = torch.arange(len(tokens))[None]
        mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)[None, None]
        with torch.no_grad():
            if self.pp > 1 and dist.get_rank() == 1:
                received = torch.empty(len(tokens), 1, self.model.config.hidden_size)
                dist.recv(received, 0)
                self.model.set_input_tensor(received)
            output = self.model(tokens[None], positions, mask)
            if self.pp > 1 and dist.get_rank() == 0:
                dist.send(output.contiguous(), 1)
        hook.remove()
        if self.pp > 1:
            rows = len(tokens)
            on_last = dist.get_rank() == 1
            output = output.contiguous() if on_last else torch.empty(1, rows, self.model.vocab_size)
            hidden = [hidden[0].contiguous() if on_last else torch.empty(rows, 1, self.model.config.hidden_size)]
            for tensor in (output, hidden[0]):
                dist.broadcast(tensor, 1)
        return output[0], hidden[0][:, 0]

    def logprobs(self, tokens: list[Tensor], vocab: int) -> tuple[Tensor, Tensor]:
        """Return (N, 1) log-probabilities of every token except the first, and the hidden states (N, H) before them."""
        rows, states = [], []
        for sequence in tokens:
            logits, hidden = self.logits(sequence)
            rows.append(logits[:-1, :vocab].log_softmax(-1).gather(1, sequence[1:, None]))
            states.append(hidden[:-1])
        return torch.cat(rows), torch.cat(states)


def plain_model(config: Any, case: dict[str, Any]) -> Plain:
    """Build the model with Megatron-Core from the configuration of transformers."""
    tp, pp, ep = (case.get(name, 1) for name in ("tp", "pp", "ep"))
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    experts = getattr(config, "num_experts", None)
    of_experts: dict[str, Any] = {}
    if experts is not None:
        of_experts = {
            "num_moe_experts": experts, "moe_ffn_hidden_size": config.moe_intermediate_size,
            "moe_router_topk": config.num_experts_per_tok, "moe_router_dtype": "fp32",
            "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0,
        }  # fmt: skip
    settings = TransformerConfig(
        num_layers=config.num_hidden_layers, hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads, num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim, ffn_hidden_size=config.intermediate_size, layernorm_epsilon=config.rms_norm_eps,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=silu, qk_layernorm=True, add_bias_linear=False,
        hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True, tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp, expert_model_parallel_size=ep, pipeline_dtype=torch.float32,
        moe_token_dispatcher_type="allgather", **of_experts,
    )  # fmt: skip
    layer = get_gpt_layer_local_spec(experts, qk_layernorm=True, normalization="RMSNorm")
    if case.get("plain_norms"):  # the name in layers with experts of Transformer Engine
        del layer.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    model = GPTModel(
        settings, layer, vocab_size=case["padded_vocab"], max_sequence_length=config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False, share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="rope", rotary_base=config.rope_parameters["rope_theta"],
    )  # fmt: skip
    return Plain(model.eval(), tp, pp)


def draw(plain: Plain) -> None:
    """Draw random weights. Ranks with different parts of a parameter have different numbers."""
    for name, parameter in plain.model.named_parameters():
        own = plain.pp > 1 or ".experts." in name
        own |= plain.tp > 1 and bool(getattr(parameter, "tensor_model_parallel", False))
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + 7 * own * dist.get_rank())
        drawn = 0.15 * torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(drawn + (parameter.dim() == 1))
    if plain.pp > 1 and plain.model.share_embeddings_and_output_weights:
        dist.broadcast(plain.model.shared_embedding_or_output_weight().data, 0)


def arguments_of(config: Any, case: dict[str, Any]) -> Namespace:
    """Return some of the arguments in checkpoints of Megatron-LM."""
    return Namespace(
        num_layers=config.num_hidden_layers, hidden_size=config.hidden_size,
        num_experts=getattr(config, "num_experts", None), norm_epsilon=config.rms_norm_eps,
        rotary_base=int(config.rope_parameters["rope_theta"]),
        untie_embeddings_and_output_weights=not config.tie_word_embeddings, make_vocab_size_divisible_by=128,
        tensor_model_parallel_size=case.get("tp", 1), attention_backend=AttnBackend.auto, params_dtype=torch.float32,
        data_path=[Path("data")],
    )  # fmt: skip


def save(plain: Plain, root: Path, case: dict[str, Any]) -> None:
    """Write a Megatron-LM folder of one iteration, with optimizer and random states."""
    folder = root / "iter_0000100"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        (root / "latest_checkpointed_iteration.txt").write_text("100")
    dist.barrier()
    metadata = {**case.get("metadata", {}), "dp_cp_group": parallel_state.get_data_parallel_group(True)}
    rank, ranks = dist.get_rank(), dist.get_world_size()
    state = {
        "model": plain.model.sharded_state_dict(metadata=metadata),
        "optimizer": ShardedTensor.from_rank_offsets(
            "optimizer.state.exp_avg.decoder.final_layernorm.weight", torch.ones(4), (0, rank, ranks)
        ),
        "rng_state": ShardedObject("rng_state", [{"numbers": [rank]}], (ranks,), (rank,)),
        "args": arguments_of(plain_config(case), case),
        "iteration": 100,
    }
    dist_checkpointing.save(state, str(folder), content_metadata=case.get("metadata", {}))


def plain_config(case: dict[str, Any]) -> Any:
    return read_architecture(Path(case["folder"])).hf_config


def load(plain: Plain, folder: Path) -> tuple[list[str], list[str]]:
    """Load a plain model from a checkpoint. Return the names that are missing in the checkpoint, and the unused
    names, without the extra states of float8 layers."""
    for parameter in plain.model.parameters():
        parameter.data.fill_(float("nan"))
    state, unused, missing = dist_checkpointing.load(plain.model.sharded_state_dict(), str(folder), strict="return_all")
    plain.model.load_state_dict({name: value for name, value in state.items() if isinstance(value, Tensor)})
    return sorted(missing), sorted(name for name in unused if "_extra_state" not in name)


def ours(
    root: Path, role: str, arch: ArchitectureConfig, runtime: Runtime, cut: dict[str, Any]
) -> tuple[Tensor, RoleModel] | None:
    """Return the output of the megappo model from a checkpoint on another layout, and the model. Ranks without the
    output return None."""
    grid = Grid((0, 1), cut.get("tp", 1), cut.get("pp", 1), cut.get("ep", 1))
    layout = make_layouts({role: Cut(grid, 1, cut.get("sp", False))}, "cpu", 120)[role]
    assert isinstance(layout, Layout)
    vocab = padded_vocab_size(arch.vocab_size, grid.tp, 8 * grid.tp)
    std = VALUE_HEAD_STD if role == "critic" else None
    options = BuildOptions(torch.float32, runtime.device, vocab, value_head_std=std)
    source = open_origin(str(root), role, arch, runtime).source
    model = build_model(arch, layout, options, source)
    output = forward(model, layout, sequences(arch.vocab_size), train=False)
    return None if output is None else (output, model)


def difference(output: Tensor | None, truth: Tensor) -> float:
    """Return on every rank the largest difference on the rank with the output."""
    own = torch.tensor([0.0 if output is None else float((output - truth).abs().max())])
    dist.all_reduce(own, dist.ReduceOp.MAX)
    return float(own)


def check(case: dict[str, Any], runtime: Runtime) -> dict[str, Any]:
    """Return the differences of one case in both directions."""
    folder, root = Path(case["folder"]), Path(case["root"])
    arch = read_architecture(folder)
    tokens = sequences(arch.vocab_size)
    plain = plain_model(plain_config(case), case)
    draw(plain)
    save(plain, root / "plain", case)
    logprobs, hidden = plain.logprobs(tokens, arch.vocab_size)
    actor = ours(root / "plain", "actor", arch, runtime, case["other"])
    critic = ours(root / "plain", "critic", arch, runtime, case["other"])
    values = hidden @ critic[1].chunks[-1].output_layer.weight.detach().T if critic is not None else hidden
    results: dict[str, Any] = {
        "actor": difference(actor[0] if actor is not None else None, logprobs),
        "critic": difference(critic[0] if critic is not None else None, values),
        "largest": float(logprobs.abs().max()),
    }
    if runtime.is_main:
        source = SafetensorsSource(folder, arch)
        write_torch_dist(root / "ours", arch, source, torch.float32, role="actor", step=7)
    dist.barrier()
    names = load(plain, root / "ours/release")
    results |= {"missing": names[0], "unused": names[1]}
    results["plain"] = difference(plain.logprobs(tokens, arch.vocab_size)[0], expected(folder, tokens))
    return results


if __name__ == "__main__":
    fix_router()
    writer: Any = filesystem_async
    # The queue of Megatron is served by a process that would import everything again.
    writer._results_queue = queue.Queue()
    answer(lambda cases, runtime: {name: check(case, runtime) for name, case in cases.items()})
