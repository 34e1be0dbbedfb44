"""Model shapes, rules between sections, derived numbers, and their table."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from rich.console import Console
from transformers import AutoConfig

from megappo.config import Config, ConfigError, ModelShape, derive, derive_run, describe, load_config, print_rows
from megappo.config.grid import Grid
from megappo.config.rules.rollout import length_rules
from megappo.config.schema import EvaluationSettings
from megappo.config.sections.engine import ServerSettings
from megappo.config.sections.roles import CriticSettings, OptimizerSettings, ReferenceSettings
from megappo.errors import either
from megappo.families import FAMILIES
from megappo.megatron.optimizer.optimization import rate_schedule
from megappo.models.model_files import read_architecture
from megappo.ppo.updates import draw_minibatches
from tests.support.config import EXPERTS, NO_CRITIC, SHAPE
from tests.support.models import write_model
from tests.support.places import BASE

HF_CONFIG: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 97, "max_position_embeddings": 256,
}  # fmt: skip


def config_with(*overrides: str) -> Config:
    return load_config(BASE, overrides)


def model_folder(folder: Path, **changes: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**HF_CONFIG, **changes}))
    return str(folder)


def test_layouts_of_experts() -> None:
    """Each rank of an expert has the whole matrices, so tensor parallelism does not have to divide them."""
    odd = dataclasses.replace(EXPERTS, ffn_hidden_size=95)
    actor = "actor.layout={tensor_parallel: 2, sequence_parallel: true, expert_parallel: 4}"
    wide = (actor, "critic.layout.tensor_parallel=2")
    derived = derive(config_with(*wide), 4, odd, SHAPE)
    assert (derived.actor.grid.ep, derived.actor.grid.dp) == (4, 2)
    rows = dict(describe(config_with(*wide), derived))
    assert rows["actor"].startswith("ranks 0-3: TP 2 x PP 1 x DP 2, EP 4, sequence parallel")
    with pytest.raises(ConfigError, match="expert_parallel 4, but the reference model has no experts; set it to 1"):
        derive(config_with(*wide), 4, odd, SHAPE, SHAPE)


def test_samples_longer_than_the_model() -> None:
    overrides = ("actor.microbatch_budget_tokens=512", "critic.microbatch_budget_tokens=512")
    config = config_with("rollout.max_response_tokens=200", *overrides)
    with pytest.raises(ConfigError) as caught:
        derive(config, 1, SHAPE)
    assert caught.value.problems == (
        "data.max_prompt_tokens 64 + rollout.max_response_tokens 200 = 264 is above max_position_embeddings 256 of the "
        "actor model; set rollout.max_response_tokens to at most 192",
    )
    with pytest.raises(ConfigError, match="128 of the critic model"):
        derive(
            config,
            1,
            dataclasses.replace(SHAPE, max_position_embeddings=512),
            dataclasses.replace(SHAPE, max_position_embeddings=128),
        )
    with pytest.raises(ConfigError, match="32 of the reference model; shorten both"):
        derive(config_with(), 1, SHAPE, None, dataclasses.replace(SHAPE, max_position_embeddings=32))


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "linear", "factor": 2.0}, 512),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}, 0),
        ({"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64}, 0),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}, 0),
        ({"rope_type": "default"}, 0),
        ({"full_attention": {"rope_type": "linear", "factor": 8.0}}, 0),
    ],
)
def test_error_suggests_the_length_of_a_rope_scaling(tmp_path: Path, rope: dict[str, Any], positions: int) -> None:
    """Model cards describe how to enable YaRN without a change of max_position_embeddings."""
    read = read_architecture(write_model(tmp_path / "model", "qwen3", 1))
    config = SimpleNamespace(rope_parameters={"rope_theta": 1e4, **rope})
    shape = dataclasses.replace(read, hf_config=config, max_position_embeddings=256)
    overrides = ("actor.microbatch_budget_tokens=512", "critic.microbatch_budget_tokens=512")
    (problem,) = length_rules(config_with("rollout.max_response_tokens=200", *overrides), {"actor": shape})
    end = f"192, or set max_position_embeddings in config.json to {positions}, the length of its rope scaling"
    assert problem.endswith(end if positions else "set rollout.max_response_tokens to at most 192")


def test_reference_has_the_layout_of_the_actor() -> None:
    reference = dataclasses.replace(SHAPE, layers=5)
    config = config_with("actor.layout.pipeline_parallel=5")
    derive(config, 5, dataclasses.replace(SHAPE, layers=6), None, reference)
    with pytest.raises(ConfigError, match=r"5 chunks are more than the 4 layers of the reference model; .* 4 x 1 or 3"):
        derive(config, 5, reference, None, SHAPE)
    config = config_with("actor.layout={pipeline_parallel: 2, pipeline_layers: [3, 1]}")
    with pytest.raises(ConfigError, match=r"\[3, 1\] has 4 layers, must have the 5 of the reference model"):
        derive(config, 2, SHAPE, None, reference)


@pytest.mark.parametrize("layers", ["[4, 0]", "[]", "'even'", "[3.5, 1]", "4"])
def test_layers_of_a_stage_are_positive_integers(layers: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_with(f"actor.layout={{pipeline_parallel: 2, pipeline_layers: {layers}}}")
    rule = "must be auto, balanced or a list of positive integers such as [3, 1]"
    assert caught.value.problems == (f"actor.layout.pipeline_layers: {layers} {rule}",)


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        derive(config_with("reference=null", "data.validation=null", "actor.minibatch_sequences=5"), 1, SHAPE)
    assert len(caught.value.problems) == 3


def test_numbers_on_one_rank() -> None:
    config = config_with("critic.warmup_steps=4")
    derived = derive(config, 1, SHAPE)
    assert (config.rollout.batch_sequences, config.max_sequence_tokens) == (16, 128)
    actor, critic = derived.actor, derived.critic
    assert critic is not None
    assert (actor.minibatches_per_step, actor.updates_per_step, actor.total_updates) == (2, 2, 12)
    assert (critic.minibatches_per_step, critic.updates_per_step, critic.total_updates) == (1, 2, 20)
    assert (actor.grid, actor.vpp, actor.padded_vocab_size) == (Grid(range(1), 1, 1), 1, 97)


def test_critic_can_be_trained_alone() -> None:
    derived = derive(config_with("critic.warmup_steps=10", "critic.minibatches=3"), 1, SHAPE)
    assert derived.critic is not None
    assert (derived.actor.total_updates, derived.critic.total_updates) == (0, 60)
    message = "3 minibatches of 5 or 6 = 6 per step"
    assert message in dict(describe(config_with("critic.minibatches=3"), derived))["critic updates"]


def test_sizes_of_minibatches_differ_by_one_sample() -> None:
    """ORZ has 12 updates of the critic in a step of 8,192 samples. Each epoch contains each sample once."""
    settings_of_role = {"optimizer": {"learning_rate": 1.0}, "epochs": 2}
    settings = CriticSettings.model_validate({**settings_of_role, "minibatches": 12})
    drawn = draw_minibatches(settings, 8192, seed=5)
    assert [len(ids) for ids in drawn] == ([683] * 8 + [682] * 4) * 2
    assert all(sorted(n for ids in drawn[e : e + 12] for n in ids) == list(range(8192)) for e in (0, 12))
    by_size = CriticSettings.model_validate({**settings_of_role, "minibatch_sequences": 2048})
    by_number = CriticSettings.model_validate({**settings_of_role, "minibatches": 4})
    assert draw_minibatches(by_size, 8192, seed=5) == draw_minibatches(by_number, 8192, seed=5)


@pytest.mark.parametrize(
    ("conflicting", "sentence"),
    [
        ({"minibatch_sequences": 4, "minibatches": 2}, "minibatch_sequences 4 and minibatches 2 are both given"),
        ({"minibatches": 2, "optimizer": {"learning_rate": 1.0, "warmup_updates": 3, "warmup_ratio": 0.1}},
         "warmup_updates 3 and warmup_ratio 0.1 are both given; keep one"),
        ({"minibatches": 2, "optimizer": {"learning_rate": 1.0, "decay_ratio": 0.2}},
         "decay_ratio belongs to the schedule wsd, but schedule is constant; remove"),
    ],
)  # fmt: skip
def test_alternative_settings_cannot_be_combined(conflicting: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(sentence)):
        CriticSettings.model_validate({"optimizer": {"learning_rate": 1.0}, **conflicting})


def test_override_replaces_its_alternative() -> None:
    role = config_with("actor.minibatches=4", "actor.optimizer.warmup_ratio=0.25").actor
    assert (role.minibatch_sequences, role.minibatches) == (None, 4)
    assert (role.optimizer.warmup_updates, role.optimizer.warmup(20)) == (0, 5)


@pytest.mark.parametrize(
    ("optimizer", "rates"),
    [
        ({"schedule": "inverse_sqrt", "warmup_ratio": 0.2}, {1: 0.25, 4: 1.0, 9: 2 / 3, 16: 0.5}),
        ({"schedule": "inverse_sqrt"}, {1: 1.0, 4: 0.5, 16: 0.25}),
        (
            {"schedule": "wsd", "decay_ratio": 0.25, "warmup_ratio": 0.1, "min_learning_rate": 0.5},
            {0: 0.0, 1: 0.5, 2: 1.0, 15: 1.0, 16: 0.9, 18: 0.7, 20: 0.5},
        ),
        ({"schedule": "linear", "warmup_ratio": 0.24}, {2: 0.5, 4: 1.0, 12: 0.5, 20: 0.0}),  # 4.8 is rounded down
    ],
)
def test_learning_rate_after_a_number_of_updates(optimizer: dict[str, Any], rates: dict[int, float]) -> None:
    """The run has 20 updates and a peak learning rate of 1."""
    adam = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    schedule = rate_schedule(adam, OptimizerSettings.model_validate({"learning_rate": 1.0, **optimizer}), 20)
    learning_rates = {0: adam.param_groups[0]["lr"]}
    for update in range(1, 21):
        schedule.step(increment=1)
        learning_rates[update] = adam.param_groups[0]["lr"]
    assert {update: learning_rates[update] for update in rates} == pytest.approx(rates)


def test_best_checkpoint_can_precede_the_last_step() -> None:
    for every in ("checkpoint.every_steps=1", "checkpoint.keep_every_steps=5"):
        derive(config_with("checkpoint.keep_best=eval/reward_mean", every), 1, SHAPE)


@pytest.mark.parametrize("other", [{"path": "elsewhere"}, {"share_actor_base": True}])
def test_separate_reference_is_not_refreshed(other: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="refresh_every_steps 3 copies the actor's weights to"):
        ReferenceSettings.model_validate({"refresh_every_steps": 3, **other})


@pytest.mark.parametrize(("before", "steps"), [(True, [0, 4, 8, 10]), (False, [4, 8, 10])])
def test_evaluations_include_the_last_step(before: bool, steps: list[int]) -> None:
    settings = EvaluationSettings(every_steps=4, before_training=before)
    assert [step for step in range(11) if settings.is_due(step, 10)] == steps


def test_epochs_are_converted_to_steps() -> None:
    """A step has 8 prompts. Every prompt is used for the given number of epochs. The last step is completed with
    prompts of the next epoch."""
    config = config_with("run.epochs=2.5", "critic.warmup_steps=4")
    derived = derive(config, 1, SHAPE, prompts=20)
    assert derived.steps == 7  # 50 prompts
    assert derived.critic is not None
    assert (derived.actor.total_updates, derived.critic.total_updates) == (6, 14)
    assert dict(describe(config, derived))["run"].startswith("base: 2.5 epochs of 20 prompts = 7 steps, seed 3")
    assert derive(config_with("run.epochs=0.1"), 1, SHAPE, prompts=1600).steps == 20  # 0.1 adds no step
    with pytest.raises(ConfigError, match=r"warmup_steps 4 is above the 3 steps of run\.epochs"):
        derive(config_with("run.epochs=1", "critic.warmup_steps=4"), 1, SHAPE, prompts=20)


def test_plan_of_epochs_needs_no_data() -> None:
    config = config_with("run.epochs=1", "critic.warmup_steps=4")
    derived = derive(config, 1, SHAPE)
    assert (derived.known_steps, derived.actor.updates_per_step) == (None, 2)
    assert "base: 1 epoch of the data, seed 3" in dict(describe(config, derived))["run"]
    with pytest.raises(ConfigError, match=r"run\.epochs 1 is no number of steps before data are read"):
        derive_run(config, 1)


def test_numbers_of_disjoint_roles() -> None:
    config = config_with(
        "actor.layout={tensor_parallel: 2, sequence_parallel: true, ranks: 4}",
        "critic.layout={pipeline_parallel: 2, virtual_pipeline_chunks: 2, first_rank: 4}",
    )
    derived = derive(config, 6, SHAPE)
    assert derived.actor.grid.ranks == range(4)
    assert (derived.actor.grid.dp, derived.actor.padded_vocab_size) == (2, 98)
    assert derived.critic is not None
    assert derived.critic.grid == Grid(range(4, 6), tp=1, pp=2)
    assert (derived.critic.vpp, derived.critic.grid.dp) == (2, 1)
    assert derived.critic.padded_vocab_size == 97
    assert derived.notes == (
        "critic: the interleaved schedule (virtual_pipeline_chunks 2) runs microbatches in multiples of "
        "pipeline_parallel 2",
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        derived.world_size = 2  # type: ignore[misc]


def test_context_parallel_layouts() -> None:
    config = config_with("actor.layout={context_parallel: 2, tensor_parallel: 2}", "critic.layout.context_parallel=4")
    derived = derive(config, 8, SHAPE)
    assert derived.critic is not None and (derived.actor.grid.dp, derived.critic.grid.dp) == (2, 2)
    rows = dict(describe(config, derived))
    assert rows["actor"].startswith("ranks 0-7: TP 2 x PP 1 x DP 2, CP 2, sequence parallel, distributed optimizer")


def test_ranks_without_prompts_are_reported() -> None:
    few = config_with("rollout.prompts_per_step=3", "actor.minibatch_sequences=6", "critic.minibatch_sequences=6")
    for engine, notes in {
        "transformers": ("1 of 4 ranks have nothing to generate: every rank has an engine, and "
                         "rollout.prompts_per_step is 3",),
        None: (),  # servers
    }.items():  # fmt: skip
        servers = ServerSettings() if engine is None else None
        rollout = few.rollout.model_copy(update={"engine": engine, "servers": servers})
        config = few.model_copy(update={"rollout": rollout})
        assert derive(config, 4, SHAPE).notes == notes


def test_one_override_disables_evaluation() -> None:
    config = config_with("evaluation=null")
    assert config.data.validation is not None
    notes = derive(config, 1, SHAPE).notes
    assert notes == ("data.validation is used only by `megappo eval`, because the section evaluation is missing",)


def test_padded_vocabulary() -> None:
    config = config_with("actor.layout.tensor_parallel=2", "model.pad_vocab_to_multiple_of=64")
    assert derive(config, 2, SHAPE).actor.padded_vocab_size == 128


def test_without_critic() -> None:
    derived = derive(config_with(*NO_CRITIC), 8, SHAPE)
    assert derived.critic is None
    assert derived.actor.grid.dp == 8


def sizes(shape: ModelShape) -> ModelShape:
    """Return only the sizes of a model, without the rest of its architecture."""
    return ModelShape(**{field.name: getattr(shape, field.name) for field in dataclasses.fields(ModelShape)})


def test_model_shape(tmp_path: Path) -> None:
    assert sizes(read_architecture(model_folder(tmp_path / "a"))) == SHAPE
    own = read_architecture(model_folder(tmp_path / "b", model_type="qwen3", head_dim=32, tie_word_embeddings=True))
    assert sizes(own) == dataclasses.replace(SHAPE, family="qwen3", head_dim=32, tied_embeddings=True)
    for family in ("llama", "mistral"):
        assert read_architecture(model_folder(tmp_path / family, model_type=family)).family == family


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"model_type": "gpt2"}, ["model_type 'gpt2' is not supported", f"use a model of {either(FAMILIES)}"]),
        ({"model_type": None}, ["has no model_type", "use a model of llama"]),
        ({"hidden_size": "wide"}, ["its config.json is refused", "hidden_size"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads 4 is not a multiple of num_key_value_heads 3"]),
        ({"hidden_act": "gelu"}, ["hidden_act 'gelu' is not supported"]),
    ],
)
def test_refused_models(tmp_path: Path, changes: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_architecture(model_folder(tmp_path / "m", **changes), key="critic.path")
    assert len(caught.value.problems) == 1
    for word in ("critic.path", *fragments):
        assert word in caught.value.problems[0]


def test_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "file").write_text("")
    expected = {
        "empty": "has no config.json", "broken": "is not valid JSON", "file": "is a file; give the folder",
        "nowhere": "there is no such folder", "./a/b": "there is no such folder",
        "empty/model": "there is no such folder", "~/model": "there is no such folder",
    }  # fmt: skip
    for path, message in expected.items():
        with pytest.raises(ConfigError, match=message):
            read_architecture(path)


def test_derive_run_reads_every_model(tmp_path: Path) -> None:
    actor = model_folder(tmp_path / "actor")
    critic = model_folder(tmp_path / "critic", vocab_size=101)
    derived = derive_run(config_with(f"model.path={actor}", f"critic.path={critic}"), 1)
    assert derived.critic is not None
    assert (derived.actor.padded_vocab_size, derived.critic.padded_vocab_size) == (97, 101)
    with pytest.raises(ConfigError, match=r"reference\.path 'nowhere'"):
        derive_run(config_with(f"model.path={actor}", "reference.path=nowhere"), 1)


def test_table() -> None:
    config = config_with("critic.layout.pipeline_parallel=2", "run.name=my[bold]run", "algorithm.kl_in_loss.coef=0.1")
    derived = derive(config, 2, SHAPE)
    rows = dict(describe(config, derived))
    assert rows["actor"] == "ranks 0-1: TP 1 x PP 1 x DP 2, distributed optimizer, vocabulary padded to 97"
    assert rows["critic"].startswith("ranks 0-1: TP 1 x PP 2 x DP 1")
    assert rows["step"] == "8 prompts x 2 samples = 16 sequences of at most 128 tokens"
    assert "2 minibatches of 8 = 2 per step, 20 in all; learning rate 1e-05 cosine" in rows["actor updates"]
    assert "KL in reward 0.01" in rows["algorithm"]
    text = io.StringIO()
    print_rows(describe(config, derived), Console(file=text, width=80))
    assert "my[bold]run" in text.getvalue()
    assert "critic updates" in text.getvalue()


@pytest.mark.parametrize(
    ("overrides", "summary"),
    [
        (["kl_in_reward=null", "clip_low=0.1", "clip_high=0.3"],
         "policy loss clip (clip_low 0.1, clip_high 0.3, dual_clip 3), old logprobs decoupled"),
        (["kl_in_reward=null", "policy_loss=dppo_tv", "band={low: 0.1, cap: 5}"],
         "policy loss dppo_tv (band.low 0.1, band.high 0.2, band.cap 5), old logprobs decoupled"),
        (["kl_in_reward=null", "policy_loss=sapo"], "policy loss sapo, old logprobs decoupled"),
        (["kl_in_reward=null", "policy_loss=penalty", "penalty.target=0.02"],
         "adaptive penalty towards 0.02 nats per token, old logprobs decoupled"),
        (["kl_in_reward={coef: 0.5, kind: mse}", "kl_in_loss={coef: 0.1}", "old_logprob=bypass"],
         "policy loss clip (clip_low 0.2, clip_high 0.2, dual_clip 3), KL in reward 0.5 (mse, fixed), "
         "KL in loss 0.1 (low_var_kl), old logprobs bypass"),
    ],
)  # fmt: skip
def test_the_row_of_the_algorithm(overrides: list[str], summary: str) -> None:
    reference = ["reference=null"] if "kl_in_reward=null" in overrides else []
    config = config_with(*(f"algorithm.{word}" for word in ["gamma=0.9", "lam=0.8", *overrides]), *reference)
    assert dict(describe(config, derive(config, 1, SHAPE)))["algorithm"] == f"gae (gamma 0.9, lambda 0.8), {summary}"
    lam = config_with("algorithm.lam={actor: {length_adaptive: 0.05}}").algorithm.lam
    assert lam.summary == "1 - 1 / (0.05 x tokens), of the critic 1"


def test_offload_of_all_or_some_state() -> None:
    config = config_with("actor.offload=true", "critic.offload={optimizer: true}", "reference.offload=true")
    assert config.critic is not None and config.reference is not None
    assert config.actor.offload.parts == ("weights", "gradients", "optimizer")
    assert config.critic.offload.parts == ("optimizer",) and config.reference.offload.parts == ("weights",)
    assert config.offloads and not config_with().offloads
    assert not config_with("actor.offload=false", "reference.offload={weights: false}").offloads
    assert config_with("actor.offload.weights=true").actor.offload.parts == ("weights",)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reference.offload={optimizer: true}", "offload.optimizer is true, but the reference is not trained"),
        ("actor.offload=most", "actor.offload is 'most', must be true or false, or a section"),
        ("actor.offload={moments: true}", "actor.offload.moments is not a setting"),
        ("actor.optimizer.on_host=2", "actor.optimizer.on_host is 2, must be at most 1"),
    ],
)
def test_invalid_offload_settings_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_with(override)


def test_offload_directory_must_exist() -> None:
    config = config_with("runtime.offload_directory=nowhere/at/all")
    with pytest.raises(ConfigError, match="runtime.offload_directory 'nowhere/at/all' is not a folder"):
        derive(config, 1, SHAPE, SHAPE, SHAPE)


def test_config_json_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parsed configuration is cached until the file changes. A change by one caller is not visible to the next
    caller."""
    model_folder(tmp_path)
    from_pretrained, calls = AutoConfig.from_pretrained, []

    def counting(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return from_pretrained(*arguments, **options)

    monkeypatch.setattr(AutoConfig, "from_pretrained", counting)
    first, second = read_architecture(tmp_path), read_architecture(tmp_path)
    assert len(calls) == 1 and first == second and first.hf_config is not second.hf_config
    first.hf_config.eos_token_id = 77
    assert read_architecture(tmp_path).hf_config.eos_token_id == second.hf_config.eos_token_id != 77
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "rms_norm_eps": 0.125}))
    assert read_architecture(tmp_path).norm_eps == 0.125 and len(calls) == 2
    read_architecture(tmp_path, trust_remote_code=True)
    assert len(calls) == 3
