"""Adapters without processes: initial values, PEFT folders and errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from megappo.config import ConfigError, check_run, load_config
from megappo.families.adapters import LoraShape, RowOrder, adapter_tensors, adapters
from megappo.families.declaration import ArchitectureConfig
from megappo.families.flops import update_flops
from megappo.families.parameters import Piece, pieces
from megappo.families.weights import read_shard
from megappo.megatron.layers.lora import merged
from megappo.models.model_files import read_architecture
from megappo.plan.bytes.memory import role_memory
from megappo.plan.inputs import make_setup
from megappo.plan.planner import read_models
from megappo.ppo.assembly.origins import open_origin
from megappo.reshard.peft import FreshAdapters, MergedSource, PeftSource, write_peft
from megappo.reshard.sources import SafetensorsSource
from megappo_kernels.losses import PolicyInputs
from megappo_kernels.ppo_head import ppo_head_loss
from tests.support.adapters import MATRICES, PREFIX, write_adapters
from tests.support.models import write_model
from tests.support.places import QUICKSTART

RANK, ALPHA, KL = 3, 5.0, "algorithm.kl_in_loss={coef: 0.1}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a dense model and a model with experts, each with a PEFT folder."""
    root = tmp_path_factory.mktemp("adapters")
    for name, family in (("dense", "qwen3"), ("experts", "qwen3_moe")):
        write_model(root / name, family, 3)
        write_adapters(root / f"{name}-peft", root / name, rank=RANK, alpha=ALPHA, seed=4)
    return root


def shape_of(arch: ArchitectureConfig, targets: Any = "all", rank: int = RANK) -> LoraShape:
    return LoraShape.of(arch, rank, ALPHA, targets)


def test_adapters_are_initialised_like_peft(world: Path) -> None:
    """A is uniform with the bound of PEFT, and B is zero. A tensor depends only on the seed and the name."""
    arch = read_architecture(world / "dense")
    lora = shape_of(arch, rank=16)
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_pretrained(world / "dense", dtype=torch.float32)
    theirs = get_peft_model(model, LoraConfig(r=16, target_modules=list(MATRICES))).state_dict()
    ours, others = FreshAdapters(arch, lora, seed=1), FreshAdapters(arch, lora, seed=2)
    seen = set()
    for name, size in adapter_tensors(arch, lora).items():
        tensor = ours.read(Piece(name, 0, 0, size[0]))
        reference = theirs[PREFIX + name.replace(".weight", ".default.weight")]
        assert tensor.shape == reference.shape
        if ".lora_B." in name:
            assert not tensor.any() and not reference.any()
            continue
        bound = size[1] ** -0.5
        for drawn in (tensor, reference):
            assert 0.9 * bound < drawn.abs().max() <= bound
            assert drawn.std() == pytest.approx(bound / 3**0.5, rel=0.15)
        assert not torch.equal(tensor, others.read(Piece(name, 0, 0, size[0])))
        seen.add(tensor.sum().item())
    assert len(seen) == 4 * len(MATRICES)


def peft_logits(base: Path, folder: Path, tokens: Tensor) -> Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        logits: Tensor = PeftModel.from_pretrained(model, folder)(input_ids=tokens).logits
    return logits


def merged_logits(base: Path, folder: Path, tokens: Tensor, out: Path) -> Tensor:
    """Return the logits of transformers with the merged weights of a model and its adapters."""
    arch = read_architecture(base)
    lora = shape_of(arch)
    source = MergedSource(
        arch, lora, SafetensorsSource(base, arch), PeftSource(folder, arch, lora), False, torch.float32
    )
    shutil.copytree(base, out)
    save_file(dict(source.tensors()), out / "model.safetensors", metadata={"format": "pt"})
    return plain_logits(out, tokens)


def plain_logits(folder: Path, tokens: Tensor) -> Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits: Tensor = model(input_ids=tokens).logits
    return logits


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_written_adapters_load_with_peft(world: Path, name: str, tmp_path: Path) -> None:
    """PEFT computes the same logits as the merged weights. Transformers stores all experts of a layer in one
    parameter, and PEFT applies the adapters of each expert."""
    arch = read_architecture(world / name)
    lora = shape_of(arch)
    source = PeftSource(world / f"{name}-peft", arch, lora)
    whole = ((n, source.read(Piece(n, 0, 0, size[0]))) for n, size in adapter_tensors(arch, lora).items())
    write_peft(tmp_path / "written", arch, lora, whole, str(world / name))
    original, written = (
        load_file(f / "adapter_model.safetensors") for f in (world / f"{name}-peft", tmp_path / "written")
    )
    assert original.keys() == written.keys() and all(torch.equal(original[n], written[n]) for n in original)
    tokens = torch.randint(1, arch.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    with_peft = peft_logits(world / name, tmp_path / "written", tokens)
    merged_weights = merged_logits(world / name, world / f"{name}-peft", tokens, tmp_path / "merged")
    assert (merged_weights - with_peft).abs().max() < 1e-4
    assert (plain_logits(world / name, tokens) - with_peft).abs().max() > 0.1


def test_partially_loadable_folders_are_not_written(tmp_path: Path) -> None:
    """If experts and a dense or shared matrix have the same names, PEFT ignores the adapters of the experts."""
    arch = read_architecture(write_model(tmp_path / "model", "glm4_moe", 3))
    write_adapters(tmp_path / "peft", tmp_path / "model", rank=RANK, alpha=ALPHA, seed=4)
    lora = shape_of(arch)
    assert any(".shared_experts." in n for n in adapter_tensors(arch, lora))
    with pytest.raises(ValueError, match=r"both experts and other .* of a glm4_moe are named gate_proj, up_proj"):
        write_peft(tmp_path / "out", arch, lora, (), "base")
    assert not (tmp_path / "out").exists()
    # PEFT loads such a folder without the adapters of the experts.
    tokens = torch.randint(1, arch.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    expected = merged_logits(tmp_path / "model", tmp_path / "peft", tokens, tmp_path / "merged")
    assert (peft_logits(tmp_path / "model", tmp_path / "peft", tokens) - expected).abs().max() > 1e-2
    attention = shape_of(arch, ("q_proj", "o_proj"))
    write_peft(tmp_path / "out", arch, attention, (), "base")
    assert (tmp_path / "out/adapter_config.json").exists()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("targets", ["all", ("q_proj", "v_proj"), ("k_proj", "up_proj", "o_proj"), ("down_proj",)])
def test_merged_shards_equal_shards_of_merged_weights(world: Path, tp: int, targets: Any) -> None:
    """Adapters can cover all matrices or only some matrices of a parameter."""
    arch = read_architecture(world / "dense")
    lora, everything = shape_of(arch, targets), shape_of(arch)
    adapted, base = PeftSource(world / "dense-peft", arch, everything), SafetensorsSource(world / "dense", arch)
    whole = MergedSource(arch, lora, base, adapted, False, torch.float32)
    compared = 0
    for adapter in adapters(arch, lora):
        for rank in range(tp):
            parts = []
            for entry, source in ((adapter.base, base), (adapter.a, adapted), (adapter.b, adapted)):
                cut = pieces(arch, entry, rank, tp, arch.vocab_size)
                parts.append(torch.cat([source.read(piece) for piece in cut], cut[0].dim))
            weight, a, b = parts
            shard = merged(weight, a, b, lora.scale, RowOrder.of(arch, adapter, tp))
            expected = read_shard(whole, arch, adapter.base, shard, rank, tp, arch.vocab_size)
            torch.testing.assert_close(shard, expected, rtol=0, atol=1e-6)
            assert not torch.equal(shard, parts[0])
            compared += 1
    assert compared == tp * arch.layers * len({a.base.megatron.split(".")[-2] for a in adapters(arch, lora)})


def broken(world: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    out = tmp_path / "peft"
    shutil.copytree(world / "dense-peft", out)
    content = json.loads((out / "adapter_config.json").read_text())
    change(content)
    (out / "adapter_config.json").write_text(json.dumps(content))
    return out


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"peft_type": "IA3"}, "has peft_type 'IA3', must be LORA"),
        (
            {"use_rslora": True},
            "has use_rslora true, which is more than plain LoRA; merge the adapters into their base",
        ),
        ({"use_dora": True}, "has use_dora true, which is more than plain LoRA"),
        ({"bias": "all"}, "has bias 'all', which is more than plain LoRA; merge"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "has rank_pattern"),
        ({"kasa_config": {"beta": 1e-4}}, "has kasa_config"),
        ({"a_variant_of_a_later_peft": True}, "has a_variant_of_a_later_peft true, which is more than plain LoRA"),
        ({"init_lora_weights": "corda"}, "has init_lora_weights 'corda', which changes the base weights"),
        ({"init_lora_weights": "PiSSA_niter_4"}, "has init_lora_weights 'PiSSA_niter_4', which changes the base"),
        ({"init_lora_weights": 1}, "has init_lora_weights 1, which changes the base weights"),
        ({"r": 8}, "has r 8, the settings have 3; use the same value"),
        ({"lora_alpha": 4}, "has lora_alpha 4, the settings have 5.0; use the same value"),
        ({"target_modules": ["q_proj"]}, "has target_modules"),
    ],
)
def test_unsupported_folders_are_rejected(world: Path, tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    folder, arch = broken(world, tmp_path, lambda content: content.update(change)), read_architecture(world / "dense")
    with pytest.raises(ValueError, match=r"adapter_config\.json has") as caught:
        open_origin(str(folder), "actor", arch, lora=shape_of(arch))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "initialisation", [True, False, "gaussian", "orthogonal", "eva", "mica", "pissa", "pissa_niter_2", "olora", "loftq"]
)
def test_initialisation_matches_peft_or_is_rejected(tmp_path: Path, initialisation: bool | str) -> None:
    """An accepted folder has the log-probabilities of PEFT. A rejected folder would have different
    log-probabilities."""
    base = write_model(tmp_path / "base", "llama", 3, tie_word_embeddings=False)
    folder = tmp_path / "peft"
    torch.manual_seed(2)
    plain: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config: Any = LoraConfig(r=4, target_modules=list(MATRICES), task_type="CAUSAL_LM")  # even for `orthogonal`
    config.lora_alpha, config.init_lora_weights = ALPHA, True if initialisation == "loftq" else initialisation
    get_peft_model(plain, config).save_pretrained(folder)
    if initialisation == "loftq":  # LoftQ itself needs bitsandbytes
        content = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(content | {"init_lora_weights": "loftq"}))
    arch = read_architecture(base)
    lora = shape_of(arch, rank=4)
    if initialisation in ("pissa", "pissa_niter_2", "olora", "loftq"):
        with pytest.raises(ValueError, match=f"init_lora_weights '{initialisation}', which changes the base"):
            open_origin(str(folder), "actor", arch, lora=lora)
        return
    tokens = torch.arange(3, 40)[None]
    fresh: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged_model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    source = open_origin(str(folder), "actor", arch, lora=lora).source
    weights = MergedSource(arch, lora, SafetensorsSource(base, arch), source, is_critic=False, dtype=torch.float32)
    merged_model.load_state_dict(dict(weights.tensors()))
    with torch.no_grad():
        expected = PeftModel.from_pretrained(fresh, folder)(tokens).logits.log_softmax(-1)
        torch.testing.assert_close(merged_model(tokens).logits.log_softmax(-1), expected, rtol=0, atol=2e-5)


def test_other_tensors_are_rejected(world: Path, tmp_path: Path) -> None:
    arch = read_architecture(world / "experts")
    with pytest.raises(ValueError, match=r"differ from the adapters of this model"):
        open_origin(str(world / "dense-peft"), "actor", arch, lora=shape_of(arch))
    folder = broken(world, tmp_path, lambda content: None)
    (folder / "adapter_model.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(ValueError, match=r"cannot be read .*; save the adapters as safetensors"):
        open_origin(str(folder), "actor", read_architecture(world / "dense"), lora=shape_of(arch))


def test_non_finite_adapters_are_reported(world: Path, tmp_path: Path) -> None:
    arch, folder = read_architecture(world / "dense"), broken(world, tmp_path, lambda content: None)
    tensors = load_file(folder / "adapter_model.safetensors")
    name = min(tensors)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    rows, _ = tensors[name].shape
    with pytest.raises(ValueError, match=rf"tensor '{name}' in {folder}/adapter_model.safetensors contains nan"):
        PeftSource(folder, arch, shape_of(arch)).read(Piece(name.removeprefix(PREFIX), 0, 0, rows))


def test_weights_and_adapters_are_not_mixed(world: Path) -> None:
    arch = read_architecture(world / "dense")
    with pytest.raises(ValueError, match=r"it contains only adapters, but without actor\.lora all weights are trained"):
        open_origin(str(world / "dense-peft"), "actor", arch)
    with pytest.raises(ValueError, match=r"it contains whole weights, but actor\.lora trains adapters of the model"):
        open_origin(str(world / "dense"), "actor", arch, lora=shape_of(arch))
    with pytest.raises(ValueError, match=r"a PEFT folder has no steps"):
        open_origin(f"{world / 'dense-peft'}@3", "actor", arch, lora=shape_of(arch))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["actor.lora={rank: 4, alpha: 8, dropout: 0.1}"], "dropout 0.1 would change the policy between rollout"),
        (["actor.lora={rank: 4, alpha: 8, targets: []}"], "must be all, or a list of different names"),
        (["actor.lora={rank: 4, alpha: 8, targets: [q_proj, q_proj]}"], "must be all, or a list of different names"),
        (["actor.lora={rank: 4, alpha: 8, targets: [q_prj]}"], "and 'q_proj' is the nearest"),
        (["actor.lora={rank: 400, alpha: 8}"], "actor.lora.rank 400 is above"),
        (["reference={share_actor_base: true}", KL], "without actor.lora the actor's weights"),
        (
            ["reference={share_actor_base: true, path: configs/models/tiny_arithmetic}", KL],
            "names other weights; remove one of them",
        ),
        (["reference={share_actor_base: true, offload: true}", KL], "so the reference has no weights to offload"),
    ],
)
def test_invalid_settings_are_rejected(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_run(load_config(QUICKSTART, overrides), 2)
    assert sentence in str(caught.value)


def test_plan_counts_trained_parameters(world: Path) -> None:
    """A frozen matrix needs two products in forward and backward, and an adapter needs three. A
    reference that shares the base of the actor has no separate weights."""
    arch = read_architecture(world / "dense")
    lora, tokens = shape_of(arch), 100
    weights = load_file(world / "dense/model.safetensors")  # norms are counted with the matrices
    in_layers = sum(w.numel() for name, w in weights.items() if ".layers." in name or name == "model.norm.weight")
    factors = sum(rows * columns for rows, columns in adapter_tensors(arch, lora).values()) / arch.layers
    attention = 4 * arch.heads * arch.head_dim * tokens
    layer, head = update_flops(arch, tokens, is_critic=False, lora=lora)
    assert layer == pytest.approx(2 * 2 * in_layers / arch.layers + 3 * attention + 3 * 2 * factors)
    assert head == pytest.approx(3 * 2 * arch.vocab_size * arch.hidden_size)  # logits twice, and their gradient
    settings = [f"model.path={world / 'dense'}", "actor.lora={rank: 3, alpha: 5}", KL, "actor.layout={}"]
    config = load_config(QUICKSTART, [*settings, "reference={share_actor_base: true}"])
    setup = make_setup(config, read_models(config, None).models, 2, on_cuda=False)
    assert setup.reference is not None
    actor, reference = (role_memory(role, 0, setup.work) for role in (setup.actor, setup.reference))
    assert reference.weights == 0 and actor.gradients == 4 * factors * arch.layers
    assert actor.parameters == reference.parameters + factors * arch.layers


def test_frozen_output_matrix_changes_no_other_gradient() -> None:
    g = torch.Generator().manual_seed(1)
    rows, hidden, vocab = 6, 8, 11
    weight, labels = torch.randn(vocab, hidden, generator=g), torch.randint(0, vocab, (rows,), generator=g)
    numbers = [torch.randn(rows, generator=g) for _ in range(2)]
    inputs = PolicyInputs(
        mask=torch.ones(rows, dtype=torch.bool), weights=torch.full((rows,), 1 / rows),
        old_logprob=-numbers[0].abs(), advantages=numbers[1],
    )  # fmt: skip
    results = []
    for trains in (True, False):
        matrix, states = weight.clone().requires_grad_(trains), torch.randn(rows, hidden).requires_grad_()
        states.data.copy_(weight[:rows])
        loss = ppo_head_loss(states, matrix, labels, inputs, accumulate_main_grad=False).loss
        loss.backward()
        assert (matrix.grad is not None) == trains
        results.append((loss.detach(), states.grad))
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))
