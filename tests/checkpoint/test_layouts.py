"""Every layout reads and writes the same checkpoints, and plain Megatron-Core models do the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from safetensors.torch import load_file
from torch import Tensor

from megappo.checkpoint.reader import ShardReader, read_metadata
from megappo.checkpoint.source import CheckpointSource
from megappo.models.model_files import read_architecture
from tests.plan.test_measured import PROMPT, RESPONSE, SAMPLES, base_config
from tests.support.harness import run_worker
from tests.support.models import VOCAB, write_model

pytestmark = [pytest.mark.slow, pytest.mark.waits]


RATE, MOST = 1e-30, 1.001e-30
"""The learning rate, and the largest change of a weight by an update."""
TP2, PP2 = "layout.tensor_parallel=2", "layout.pipeline_parallel=2"
SHARDED = [f"{role}.optimizer.distributed=true" for role in ("actor", "critic")]
CASES: dict[str, tuple[str, dict[str, Any], list[str], list[str]]] = {
    "tied": ("qwen3", {"tie_word_embeddings": True}, [f"actor.{PP2}", f"critic.{TP2}"], [f"actor.{TP2}", *SHARDED]),
    "uneven": ("qwen3", {},
        [f"{role}.{x}" for role in ("actor", "critic") for x in (PP2, "layout.pipeline_layers=[3, 1]")],
        [f"actor.{TP2}", f"critic.{PP2}", "critic.layout.pipeline_layers=[1, 3]", *SHARDED]),
    "biases": ("qwen2", {}, [f"actor.{TP2}", f"critic.{PP2}", *SHARDED], [f"actor.{PP2}"]),
    "experts": ("qwen3_moe", {},
        ["actor.layout.expert_parallel=2", "actor.optimizer.distributed=false", f"critic.{TP2}"],
        [f"actor.{PP2}", *SHARDED]),
    "context": (
        "qwen3_moe", {},
        ["actor.layout={context_parallel: 2, expert_parallel: 2}",
         "critic.layout={tensor_parallel: 2, sequence_parallel: true}", *SHARDED],
        [f"actor.{PP2}", "critic.layout.context_parallel=2", *SHARDED],
    ),
    "apart": ("llama", {}, ["actor.layout.ranks=1", "critic.layout.first_rank=1"], []),
}  # fmt: skip
"""A family, changes of its model, and overrides with the layouts of two runs."""


def everything(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint without the padding of the vocabulary."""
    metadata = read_metadata(folder)
    state: dict[str, Any] = {
        key: torch.empty(entry.size) for key, entry in metadata.state_dict_metadata.items() if hasattr(entry, "size")
    }
    dcp.load(state, storage_reader=ShardReader(folder, metadata), no_dist=True)
    return {key: tensor[:VOCAB] if len(tensor) in (VOCAB, VOCAB + 1) else tensor for key, tensor in state.items()}


def shares(folder: Path) -> list[float]:
    """Return the share of the bytes that each rank has written."""
    written = [sum(path.stat().st_size for path in folder.glob(f"__{rank}_*.distcp")) for rank in range(2)]
    return [n_bytes / sum(written) for n_bytes in written]


def same(a: dict[str, Tensor], b: dict[str, Tensor], within: float = 0.0) -> bool:
    shapes = [{key: tensor.shape for key, tensor in tensors.items()} for tensors in (a, b)]
    return shapes[0] == shapes[1] and all((a[key] - b[key]).abs().max() <= within for key in a)


@pytest.mark.versions
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", CASES)
def test_layouts_read_checkpoints_of_each_other(name: str, tmp_path: Path) -> None:
    """A very small learning rate keeps weights nearly unchanged, and updates the moments."""
    family, changes, first, second = CASES[name]
    model = write_model(tmp_path / "model", family, 1, **changes)
    content = base_config(model)
    content["model"] |= {"init": "pretrained", "dtype": "float32"}
    for role in ("actor", "critic"):
        content[role] = {**content[role], "optimizer": {"learning_rate": RATE, "distributed": False}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    case = {"config": str(tmp_path / "run.yaml"), "samples": SAMPLES, "sequence_tokens": PROMPT + RESPONSE}
    case |= {"response_tokens": RESPONSE}
    steps = [tmp_path / "first" / f"step-00000{step}" for step in (1, 2)]
    updates = run_worker(
        "checkpoint_worker.py", 2, {**case, "overrides": first, "out": str(steps[0].parent), "read": []}
    )
    assert updates == [[dict.fromkeys(("actor", "critic"), n) for n in (0, 1)]] * 2
    read = [(str(steps[1]), {"actor": 7, "critic": 9}), (str(steps[0]), {"actor": 0, "critic": 0})]
    out = tmp_path / "second"
    updates = run_worker("checkpoint_worker.py", 2, {**case, "overrides": second, "out": str(out), "read": read})
    assert [counts[2:] for counts in updates] == [[{"actor": 7, "critic": 9}, {"actor": 0, "critic": 0}]] * 2
    least = 0.2 if name == "uneven" else 0.4  # ranks share equal tensors, and stages write separate tensors
    assert all(share > least for folder in (steps[1], out / "step-000002") for share in shares(folder))
    before, after = map(everything, steps)
    fresh, updated, restored, again = (everything(out / f"step-00000{step}") for step in (1, 2, 3, 4))
    assert same(before, fresh) and same(before, again) and same(after, restored)
    assert {key.split(".")[1] for key in before} == {"weight"}
    moments = after.keys() - before.keys()
    weights = {key.replace(".exp_avg_sq.", ".weight.").replace(".exp_avg.", ".weight.") for key in moments}
    assert len(moments) == 2 * len(before) and weights == before.keys() == updated.keys() - moments
    for key in moments:
        assert after[key].shape == before[key.replace("exp_avg_sq", "weight").replace("exp_avg", "weight")].shape
        assert (after[key] - updated[key]).norm() <= 1e-4 * updated[key].norm(), key
    assert any(after[key].abs().sum() > 0 for key in moments)
    stored, arch = load_file(model / "model.safetensors"), read_architecture(model)
    for folder in (*steps, out / "step-000002"):
        actor, critic = CheckpointSource(folder, "actor", arch), CheckpointSource(folder, "critic", arch)
        assert same(dict(actor.tensors()), stored, MOST) and actor.value_head() is None
        assert same(dict(critic.tensors()), {n: t for n, t in stored.items() if n != "lm_head.weight"}, MOST)
        head = critic.value_head()
        assert head is not None and (head.weight.shape, head.bias.shape) == ((1, arch.hidden_size), (1,))
        assert 0.05 < float(head.weight.std()) < 0.2


# Not marked `versions`: torch 2.13 names groups by the number of groups of a rank, and Megatron makes uneven groups.

# The layout of a plain model, the names of its tensors, and the layout of the model that is started from it.
PLAIN_CASES: dict[str, dict[str, Any]] = {
    "dense-tp2-to-pp2": {"tp": 2, "padded_vocab": 256, "other": {"pp": 2}},
    "tied-pp2-to-tp2": {
        "pp": 2, "padded_vocab": VOCAB + 1, "metadata": {"non_homogeneous_layers": True}, "other": {"tp": 2},
    },
    "experts-ep2-to-tp2": {"ep": 2, "padded_vocab": VOCAB, "plain_norms": True, "other": {"tp": 2, "sp": True}},
    "experts-tp2-to-ep2": {
        "tp": 2, "padded_vocab": 256, "metadata": {"singleton_local_shards": True}, "other": {"ep": 2},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of all cases in one run of two processes."""
    root = tmp_path_factory.mktemp("torch_dist")
    cases: dict[str, Any] = {}
    for name, case in PLAIN_CASES.items():
        family = "qwen3_moe" if name.startswith("experts") else "qwen3"
        folder = write_model(root / name / "model", family, 3, tie_word_embeddings=name.startswith("tied"))
        cases[name] = {"folder": str(folder), "root": str(root / name), **case}
    return dict(run_worker("torch_dist_worker.py", 2, cases))


@pytest.mark.slow
@pytest.mark.quick
@pytest.mark.parametrize("name", PLAIN_CASES)
def test_models_start_from_checkpoints_of_megatron(results: dict[str, Any], name: str) -> None:
    """Log-probabilities equal those of the plain model. Values equal the value head of its hidden states."""
    assert results[name]["actor"] < 1e-4 and results[name]["critic"] < 1e-4, results[name]
    assert results[name]["largest"] > 1  # the outputs are not uniform


@pytest.mark.quick
@pytest.mark.parametrize("name", PLAIN_CASES)
def test_megatron_loads_exported_models(results: dict[str, Any], name: str) -> None:
    """The plain model has another layout, and then has the outputs of transformers."""
    assert results[name]["plain"] < 1e-4, results[name]
    assert results[name]["missing"] == []
    other_norm = "decoder.layers.pre_mlp_layernorm.weight"
    if PLAIN_CASES[name].get("plain_norms"):
        other_norm = "decoder.layers.mlp.linear_fc1.layer_norm_weight"
    assert results[name]["unused"] == ([other_norm] if name.startswith("experts") else [])
