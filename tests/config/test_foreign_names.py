"""Names of other trainers lead to the correct settings of megappo, with the differences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from megappo.commands.settings import explanation
from megappo.config import ConfigError, load_config
from megappo.config.fields import all_keys, find_field
from megappo.config.foreign.answers import ROLE
from megappo.config.foreign.common import NAMES
from megappo.config.reading.other_names import TRAINERS, counterpart
from tests.support.places import BASE

_LINES = (Path(__file__).parent / "foreign_names.txt").read_text().splitlines()
ANSWERS = dict(line.split(" = ", 1) for line in _LINES if line and not line.startswith("#"))
"""The settings of megappo for each foreign name, or `none: ` and a part of the reason."""
VALUES = {"algo.advantage.is_correction_type": "tis"}
"""Values for names whose answers depend on the value."""
_KEY = re.compile(r"[a-z_]+(?:\.[A-Za-z_0-9]+)+|[a-z]+")


def _keys_of_sentence(sentence: str) -> set[str]:
    remedy = re.search(r"; (?:did you mean|see) ([^?(]*)", sentence)
    return {*re.split(r", | or ", remedy[1].strip())} if remedy else set()


def _keys_of_explanation(text: str) -> set[str]:
    """Return the settings that a text explains. Each setting is at the start of a line."""
    starts = [line.split(" (")[0] for line in text.splitlines() if not line.startswith((" ", "'"))]
    return {start for start in starts if _KEY.fullmatch(start)}


def test_list_has_the_names_of_all_trainers() -> None:
    assert len(ANSWERS) >= 200
    for trainer, names in TRAINERS.items():
        assert len(names.keys() & ANSWERS.keys()) >= 20, trainer


def test_overrides_with_foreign_names_name_our_settings() -> None:
    wrong = {}
    for name, answer in ANSWERS.items():
        if find_field(tuple(name.split("."))) is not None:
            assert name == answer
            continue
        with pytest.raises(ConfigError) as error:
            load_config(BASE, [f"{name}={VALUES.get(name, 1)}"])
        sentence = str(error.value)
        _, is_none, reason = answer.rpartition("none: ")
        is_right = (
            f"{name} is not a setting: " in sentence and reason in sentence
            if is_none
            else _keys_of_sentence(sentence) == {*answer.split()}
        )
        if not is_right:
            wrong[name] = (answer, sentence)
    assert not wrong


def test_settings_explains_foreign_names() -> None:
    wrong = {}
    for name, answer in ANSWERS.items():
        text = explanation(name)
        _, is_none, reason = answer.rpartition("none: ")
        has_place = find_field(tuple(name.split("."))) is not None
        is_ours = any(key.endswith(f".{name}") for key in answer.split())
        if is_none and not text.startswith("there is no setting"):
            # megappo has a section `optimizer`, which is the better answer to the bare word.
            assert name == "optimizer" and "actor.optimizer" in text
        elif is_none:
            if reason not in text:
                wrong[name] = (answer, text)
        elif has_place or is_ours:
            if not {*answer.split()} <= _keys_of_explanation(text):
                wrong[name] = (answer, text)
        elif _keys_of_explanation(text) != {*answer.split()}:
            wrong[name] = (answer, text)
    assert not wrong


def test_flags_and_hydra_additions_are_the_same_names() -> None:
    for typed in ("--rollout-batch-size", "+rollout_batch_size", "rollout_batch_size=32"):
        assert "rollout.prompts_per_step (" in explanation(typed)


def test_each_setting_in_a_foreign_file_is_reported(tmp_path: Path) -> None:
    theirs = {
        "critic": {"model": {"path": "org/critic"}, "optim": {"lr": 1.0e-5}},
        "algorithm": {"kl_ctrl": {"type": "adaptive", "target_kl": 0.1}},
        "policy": {"megatron_cfg": {"optimizer": {"lr": 1.0e-6}}},
        "target_kl": 0.1,
    }
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(theirs))
    with pytest.raises(ConfigError) as error:
        load_config(BASE, [str(path)])
    named = {sentence.split(" is not a setting")[0]: _keys_of_sentence(sentence) for sentence in error.value.problems}
    assert named == {
        "critic.model.path": {"critic.path"},
        "critic.optim.lr": {"critic.optimizer.learning_rate"},
        "algorithm.kl_ctrl.type": {"algorithm.kl_in_reward.controller"},
        "algorithm.kl_ctrl.target_kl": {"algorithm.kl_in_reward.target"},
        "policy.megatron_cfg.optimizer.lr": {"actor.optimizer.learning_rate"},
        "target_kl": {"algorithm.target_kl", "algorithm.kl_in_reward.target"},
    }


@pytest.mark.parametrize(
    "name",
    ["foo.type", "some.path", "critic_foo", "xyz.mode", "frobnicate", "foo.beta", "bar.n", "lr_foo", "other.save"],
)
def test_unknown_name_has_no_answer(name: str) -> None:
    *section, last = name.split(".")
    assert counterpart(section, last) is None
    with pytest.raises(ConfigError, match="lists all sections"):
        explanation(name)
    with pytest.raises(ConfigError) as error:
        load_config(BASE, [f"{name}=1"])
    assert "did you mean" not in str(error.value)


def test_nested_setting_with_the_same_name_is_not_suggested() -> None:
    """`reward.judge.prompt` is unrelated to the prompts of the data."""
    with pytest.raises(ConfigError) as error:
        load_config(BASE, ["data.prompt=x"])
    assert "reward.judge" not in str(error.value)


def test_every_answer_contains_a_setting_or_a_reason() -> None:
    for name, answer in [item for answers in (NAMES, *TRAINERS.values()) for item in answers.items()]:
        assert answer.keys or answer.note, name
        for key in answer.keys:
            for role in ("actor", "critic"):
                assert find_field(tuple(key.replace(ROLE, role).split("."))) is not None, (name, key)


def test_own_setting_is_not_a_foreign_name() -> None:
    """If a name of megappo has a different meaning in other trainers, the answer contains both settings."""
    ours = {key[-1] for key in all_keys()}
    both = ours & NAMES.keys()
    assert both == {"target_kl", "warmup_steps"}
    assert all(any(key.endswith(f".{name}") for key in NAMES[name].keys) for name in both)


def test_answer_uses_the_role_of_the_section() -> None:
    for section, expected in (
        (("critic",), ["critic.optimizer.learning_rate"]),
        (("actor", "optimizer"), ["actor.optimizer.learning_rate"]),
        ((), ["actor.optimizer.learning_rate", "critic.optimizer.learning_rate"]),
    ):
        match = counterpart(section, "LR")
        assert match is not None and list(match.keys) == expected


def test_misspelt_name_of_the_section_comes_first() -> None:
    """In TRL, `beta` is the coefficient of the KL term. In an optimizer, `beta` has a different meaning."""
    with pytest.raises(ConfigError, match="did you mean actor.optimizer.beta[12]"):
        load_config(BASE, ["actor.optimizer.beta=0.9"])
    with pytest.raises(ConfigError, match="algorithm.kl_in_loss.coef"):
        load_config(BASE, ["algorithm.beta=0.04"])


TYPED = {
    "actor.loss_mode=cispo": "did you mean algorithm.policy_loss?",
    "algorithm.loss_type=sapo": "algorithm.policy_loss? (TRL and ms-swift",
    "importance_sampling_level=sequence": "algorithm.policy_loss? (ratios of sequences",
    "actor.tau_pos=1.0": "did you mean algorithm.gate.positive?",
    "dppo_mask_high=0.2": "did you mean algorithm.band.high?",
    "kl_coef=0.1": "algorithm.kl_in_reward.coef?",
    "algorithm.init_kl_coef=0.1": "algorithm.kl_in_reward.coef?",
    "algorithm.kl_penalty=kl": "algorithm.kl_in_reward.kind?",
    "actor.use_kl_loss=true": "see algorithm.kl_in_loss",
    "actor.kl_loss_coef=0.001": "algorithm.kl_in_loss.coef?",
    "eps_clip=0.2": "algorithm.clip_low or algorithm.clip_high? (a ratio below",
    "algorithm.cliprange=0.2": "algorithm.clip_low or algorithm.clip_high?",
    "actor.clip_ratio_high=0.28": "did you mean algorithm.clip_high?",
    "critic.cliprange_value=0.2": "critic.value_clip?",
    "rollout_batch_size=128": "rollout.prompts_per_step?",
    "global_batch_size=256": "actor.minibatch_sequences or critic.minibatch_sequences? (samples of an update)",
    "data.train_batch_size=128": "did you mean rollout.prompts_per_step?",
    "train_batch_size=128": "rollout.prompts_per_step, actor.minibatch_sequences or critic.minibatch_sequences? (",
    "actor.ppo_mini_batch_size=256": "actor.minibatch_sequences? (verl counts prompts",
    "actor.ppo_micro_batch_size_per_gpu=4": "actor.microbatch_budget_tokens? (the size of a microbatch",
    "actor.max_tokens_per_gpu=8192": "actor.microbatch_budget_tokens? (this counts the tokens of a context",
    "critic_warmup=10": "critic.warmup_steps? (in these steps only the critic learns)",
    "run.num_critic_only_steps=10": "critic.warmup_steps?",
    "run.save_freq=20": "checkpoint.every_steps?",
    "test_freq=5": "evaluation.every_steps?",
    "rollout.gpu_memory_utilization=0.5": "rollout.servers.memory_fraction?",
    "n_samples_per_prompt=8": "rollout.samples_per_prompt?",
    "run.total_epochs=15": "run.epochs?",
    "actor.ppo_epochs=2": "did you mean actor.epochs?",
    "temperature=0.7": "rollout.temperature?",
    "actor.optimizer.warmup_steps=10": "actor.optimizer.warmup_updates? (it counts optimizer updates, not steps)",
    "actor.optimizer.lr_warmup_steps_ratio=0.1": "did you mean actor.optimizer.warmup_ratio?",
    "critic.num_mini_batches=12": "did you mean critic.minibatches?",
    "algorithm.vf_coef=0.5": "is not a setting: actor and critic have separate losses and optimizers",
    "nnodes=2": "is not a setting: the launcher decides the number of ranks",
    "actor.gradient_accumulation_steps=4": "is not a setting: it follows from minibatch_sequences",
    "algorithm.gae_lambda=0.95": "see algorithm.lam",
    "lambd=1.0": "see algorithm.lam",
    "rollout.max_completion_length=512": "rollout.max_response_tokens?",
    "actor.grad_clip=1.0": "actor.optimizer.clip_grad_norm?",
    "actor_rollout_ref.rollout.n=8": "actor_rollout_ref.rollout.n is not a setting; did you mean rollout.samples_per_",
    "actor_rollout_ref.model.lora_rank=16": "did you mean actor.lora.rank?",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2": "did you mean rollout.servers.tensor_parallel?",
    "actor.megatron.tensor_model_parallel_size=2": "did you mean actor.layout.tensor_parallel?",
    "trainer.total_epochs=15": "trainer.total_epochs is not a setting; did you mean run.epochs?",
    "trainer.unknown=15": "trainer is not a setting; did you mean run, checkpoint, evaluation or logging? (this",
    "partial_rollout=true": "see rollout.ahead (2 or more)",
    "actor.strategy=fsdp": "is not a setting: Megatron-Core always trains",
}


@pytest.mark.parametrize("override", TYPED)
def test_names_of_other_trainers_are_answered(override: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(BASE, [override])
    assert TYPED[override] in str(error.value)


def test_each_setting_in_a_foreign_section_is_reported() -> None:
    block = "actor_rollout_ref={actor: {optim: {lr: 1.0e-6}}, rollout: {name: vllm, foo: 3}}"
    with pytest.raises(ConfigError) as error:
        load_config(BASE, [block])
    assert [problem.split(": ", 2)[2].partition("actor_rollout_ref.")[2] for problem in error.value.problems] == [
        "actor.optim.lr is not a setting; did you mean actor.optimizer.learning_rate?",
        "rollout.name is not a setting; did you mean rollout.servers.kind?",
        "rollout.foo is not a setting; `megappo settings` lists all settings",
    ]
