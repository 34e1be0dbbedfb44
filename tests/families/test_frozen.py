"""Parameters that `critic.freeze` selects by words and patterns, for weights and adapters, and rejected values."""

from __future__ import annotations

import pytest

from megappo.checkpoint.changes import tensor_changes
from megappo.config import ConfigError, derive, load_config
from megappo.families.adapters import LoraShape
from megappo.families.declaration import ArchitectureConfig
from megappo.families.frozen import frozen_parameters
from megappo.models.model_files import read_architecture
from tests.support.models import write_model
from tests.support.places import BASE


@pytest.fixture(scope="module")
def archs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ArchitectureConfig]:
    """Return three models of four layers: dense, with experts, and with linear attention in three layers."""
    root = tmp_path_factory.mktemp("models")
    for family in ("qwen3", "qwen3_moe", "qwen3_next"):
        write_model(root / family, family, 1)
    return {path.name: read_architecture(path) for path in root.iterdir()}


def names(arch: ArchitectureConfig, *freeze: str, lora: LoraShape | None = None) -> list[str]:
    """Return the Hugging Face names of frozen parameters, relative to the first layer or absolute outside of layers."""
    frozen = [name for p in frozen_parameters(arch, freeze, lora) for name in p.hf]
    first_layer = [
        name for name in frozen if name.startswith("model.layers.0.") or not name.startswith("model.layers.")
    ]
    return [name.removeprefix("model.layers.0.") for name in first_layer]


def test_patterns_select_parameters(archs: dict[str, ArchitectureConfig]) -> None:
    dense = names(archs["qwen3"], "attention", "embeddings")
    of_attention = [f"self_attn.{x}.weight" for x in ("q_norm", "k_norm", "q_proj", "k_proj", "v_proj", "o_proj")]
    assert sorted(dense) == sorted(["model.embed_tokens.weight", *of_attention])
    linear = names(archs["qwen3_next"], "attention")
    assert linear and all(name.startswith("linear_attn.") for name in linear)
    assert frozen_parameters(archs["qwen3"], ()) == ()


def test_patterns_match_names_of_files(archs: dict[str, ArchitectureConfig]) -> None:
    assert names(archs["qwen3"], "model.layers.0.mlp.*") == [
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    ]
    assert names(archs["qwen3"], "*norm.weight", "embeddings")[-1] == "model.norm.weight"
    experts = names(archs["qwen3_moe"], "*.mlp.experts.*.down_proj.weight")
    assert len(experts) == archs["qwen3_moe"].experts and all("experts" in name for name in experts)


def test_adapters_of_frozen_weights_are_frozen(archs: dict[str, ArchitectureConfig]) -> None:
    """With LoRA only adapters are trained. Adapters of the selected weights keep their initial value of zero."""
    lora = LoraShape.of(archs["qwen3"], 4, 8.0, ["q_proj", "v_proj", "down_proj"])
    frozen = names(archs["qwen3"], "attention", lora=lora)
    ends = ("q_proj.lora_A.weight", "v_proj.lora_A.weight", "q_proj.lora_B.weight", "v_proj.lora_B.weight")
    assert sorted(frozen) == sorted(f"self_attn.{end}" for end in ends)
    assert names(archs["qwen3"], "embeddings", lora=lora) == []


def test_single_word_equals_a_list() -> None:
    assert load_config(BASE, ["critic.freeze=attention"]).critic.freeze == ("attention",)  # type: ignore[union-attr]
    assert load_config(BASE, []).critic.freeze == ()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("family", "freeze", "message"),
    [
        ("qwen3", "[model.layer.0.*]", "'model.layer.0.*' matches no tensor of a qwen3, such as model.layers.0."),
        ("qwen3", "['*.q_proj.weight']",
         "q_proj.weight would be frozen and model.layers.0.self_attn.k_proj.weight not"),
        ("qwen3_moe", "['*.experts.1.*']", "some experts of a layer would be frozen and some not; write *"),
        ("qwen3", "['model.layers.2.*']", "all parameters of layer 2 are frozen"),
        ("qwen3", "[attention, attention]", "must be attention, embeddings, or a list of at most 100 different parts"),
        ("qwen3", "3", "'3' matches no tensor of a qwen3"),
    ],
)  # fmt: skip
def test_invalid_freeze_values_are_rejected(
    family: str, freeze: str, message: str, archs: dict[str, ArchitectureConfig]
) -> None:
    with pytest.raises(ConfigError) as error:
        derive(load_config(BASE, [f"critic.freeze={freeze}"]), 1, archs[family])
    assert message in str(error.value)


def test_each_layer_needs_a_trainable_adapter(archs: dict[str, ArchitectureConfig]) -> None:
    overrides = ["critic.freeze=attention", "critic.lora={rank: 4, alpha: 8, targets: [q_proj, o_proj]}"]
    with pytest.raises(ConfigError, match="all parameters of layer 0 are frozen"):
        derive(load_config(BASE, overrides), 1, archs["qwen3"])
    derive(load_config(BASE, [overrides[0], overrides[1].replace("o_proj", "up_proj")]), 1, archs["qwen3"])


def test_resumed_run_needs_the_same_frozen_weights() -> None:
    """A checkpoint has no optimizer moments of frozen weights. The order of words does not matter. Older runs
    without the setting are equal to an empty list."""
    now = load_config(BASE, ["critic.freeze=[attention, embeddings]"])
    before = now.model_dump(mode="json")
    assert tensor_changes(before, load_config(BASE, ["critic.freeze=[embeddings, attention]"])) is None
    changed = tensor_changes(before, load_config(BASE, ["critic.freeze=attention"]))
    assert changed is not None and changed.startswith(
        "critic.freeze ['attention', 'embeddings'] instead of ['attention']"
    )
    plain = load_config(BASE, [])
    old = plain.model_dump(mode="json")
    del old["critic"]["freeze"]
    assert tensor_changes(old, plain) is None and tensor_changes(old, now) is not None
