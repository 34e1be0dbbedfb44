"""What `critic.freeze` names: words and patterns, of weights and of adapters, and what is refused."""

from __future__ import annotations

import pytest

from megappo.checkpoint.changes import tensor_changes
from megappo.config import ConfigError, derive, load_config
from megappo.config.model_files import read_architecture
from megappo.families.adapters import LoraShape
from megappo.families.architecture import ArchitectureConfig
from megappo.families.frozen import frozen_parameters
from tests.support.models import write_model
from tests.support.places import BASE


@pytest.fixture(scope="module")
def archs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ArchitectureConfig]:
    """Four layers each: a dense model, one with experts, and one of which three layers have linear attention."""
    root = tmp_path_factory.mktemp("models")
    for family in ("qwen3", "qwen3_moe", "qwen3_next"):
        write_model(root / family, family, 1)
    return {path.name: read_architecture(path) for path in root.iterdir()}


def names(arch: ArchitectureConfig, *freeze: str, lora: LoraShape | None = None) -> list[str]:
    """Of the first layer, its Hugging Face names within it; others whole."""
    found = [name for p in frozen_parameters(arch, freeze, lora) for name in p.hf]
    here = [name for name in found if name.startswith("model.layers.0.") or not name.startswith("model.layers.")]
    return [name.removeprefix("model.layers.0.") for name in here]


def test_words_are_what_they_mean_in_every_family(archs: dict[str, ArchitectureConfig]) -> None:
    dense = names(archs["qwen3"], "attention", "embeddings")
    of_attention = [f"self_attn.{x}.weight" for x in ("q_norm", "k_norm", "q_proj", "k_proj", "v_proj", "o_proj")]
    assert sorted(dense) == sorted(["model.embed_tokens.weight", *of_attention])
    linear = names(archs["qwen3_next"], "attention")
    assert linear and all(name.startswith("linear_attn.") for name in linear)
    assert frozen_parameters(archs["qwen3"], ()) == ()


def test_patterns_are_of_names_as_files_have_them(archs: dict[str, ArchitectureConfig]) -> None:
    assert names(archs["qwen3"], "model.layers.0.mlp.*") == [
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    ]
    assert names(archs["qwen3"], "*norm.weight", "embeddings")[-1] == "model.norm.weight"
    experts = names(archs["qwen3_moe"], "*.mlp.experts.*.down_proj.weight")
    assert len(experts) == archs["qwen3_moe"].experts and all("experts" in name for name in experts)


def test_of_a_model_with_adapters_these_are_frozen(archs: dict[str, ArchitectureConfig]) -> None:
    """Only they are trained: those of what is named stay as they begin, at nothing."""
    lora = LoraShape.of(archs["qwen3"], 4, 8.0, ["q_proj", "v_proj", "down_proj"])
    found = names(archs["qwen3"], "attention", lora=lora)
    ends = ("q_proj.lora_A.weight", "v_proj.lora_A.weight", "q_proj.lora_B.weight", "v_proj.lora_B.weight")
    assert sorted(found) == sorted(f"self_attn.{end}" for end in ends)
    assert names(archs["qwen3"], "embeddings", lora=lora) == []


def test_one_word_is_a_list_of_one() -> None:
    assert load_config(BASE, ["critic.freeze=attention"]).critic.freeze == ("attention",)  # type: ignore[union-attr]
    assert load_config(BASE, []).critic.freeze == ()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("family", "freeze", "words"),
    [
        ("qwen3", "[model.layer.0.*]", "'model.layer.0.*' matches no tensor of a qwen3, such as model.layers.0."),
        (
            "qwen3",
            "['*.q_proj.weight']",
            "q_proj.weight would be frozen and model.layers.0.self_attn.k_proj.weight not",
        ),
        ("qwen3_moe", "['*.experts.1.*']", "some experts of a layer would be frozen and some not; write *"),
        ("qwen3", "['model.layers.2.*']", "all parameters of layer 2 are frozen"),
        ("qwen3", "[attention, attention]", "must be attention, embeddings, or a list of at most 100 different words"),
        ("qwen3", "3", "3 must be attention, embeddings, or a list"),
    ],
)
def test_what_cannot_be_frozen_is_refused(
    family: str, freeze: str, words: str, archs: dict[str, ArchitectureConfig]
) -> None:
    with pytest.raises(ConfigError) as error:
        derive(load_config(BASE, [f"critic.freeze={freeze}"]), 1, archs[family])
    assert words in str(error.value)


def test_adapters_must_be_left_in_every_layer(archs: dict[str, ArchitectureConfig]) -> None:
    given = ["critic.freeze=attention", "critic.lora={rank: 4, alpha: 8, targets: [q_proj, o_proj]}"]
    with pytest.raises(ConfigError, match="all parameters of layer 0 are frozen"):
        derive(load_config(BASE, given), 1, archs["qwen3"])
    derive(load_config(BASE, [given[0], given[1].replace("o_proj", "up_proj")]), 1, archs["qwen3"])


def test_a_run_goes_on_with_what_it_froze() -> None:
    """A checkpoint has no moments of the rest; the order of words says nothing, nor does a run of before."""
    now = load_config(BASE, ["critic.freeze=[attention, embeddings]"])
    before = now.model_dump(mode="json")
    assert tensor_changes(before, load_config(BASE, ["critic.freeze=[embeddings, attention]"])) is None
    changed = tensor_changes(before, load_config(BASE, ["critic.freeze=attention"]))
    assert changed is not None and changed.startswith("critic.freeze ['attention', 'embeddings'] and not ['attention']")
    plain = load_config(BASE, [])
    old = plain.model_dump(mode="json")
    del old["critic"]["freeze"]
    assert tensor_changes(old, plain) is None and tensor_changes(old, now) is not None
