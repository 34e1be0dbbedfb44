"""Reward models: the score of a text does not depend on the other texts of the batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from tokenizers import processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from megappo.config import ConfigError
from megappo.config.schema import RewardSettings
from megappo.config.sections.reward import reward_rules
from megappo.plan.bytes.rewards import reward_parameters
from megappo.rewards.model import RewardModel, batches_of
from megappo.rewards.processes.workers import RewardError
from megappo.rewards.scorer import RewardScorer
from megappo.types import CHAT_MESSAGES
from tests.support.data import ALPHABET, character_tokenizer
from tests.support.rewards import LLAMA, SIZES, rollouts, save

TEMPLATE = "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}{% endfor %}"


def load(path: str, **options: Any) -> RewardModel:
    return RewardModel(path, dtype=torch.float32, device=torch.device("cpu"), **options)


@pytest.fixture
def llama() -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    return LlamaForSequenceClassification(LlamaConfig(**LLAMA, num_labels=1)).eval()


@pytest.mark.parametrize("batch_tokens", [1, 50, 16384])
def test_scores_do_not_depend_on_the_batch(
    tmp_path: Path, llama: LlamaForSequenceClassification, batch_tokens: int
) -> None:
    model = load(save(tmp_path, llama), batch_tokens=batch_tokens)
    # "a" is also the padding token. The head of transformers would read these scores at other positions.
    responses = ["b" * n + "a" for n in (1, 3, 30, 7, 2)] * 4
    prompts = [f"{i}+1=" for i in range(len(responses))]
    together = model.score(prompts, responses)
    assert together.shape == (20,) and together.dtype == torch.float32 and len(set(together.tolist())) == 20
    alone = torch.cat([model.score([p], [r]) for p, r in zip(prompts, responses, strict=True)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    ids = torch.tensor([[ALPHABET.index(c) for c in prompts[2] + responses[2]]])
    hidden = llama.model(input_ids=ids).last_hidden_state[:, -1]
    torch.testing.assert_close(together[2], llama.score(hidden).squeeze().detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.waits
def test_reward_model_of_the_hub(tmp_path: Path, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model in the cache of the Hub is found by its name, with its scores and its size. The size is known without the
    weights."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached, name = tmp_path / "models--some--reward", "some/reward"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0123")
    folder = save(cached / "snapshots" / "0123", llama)
    samples, count = rollouts("a", "b"), sum(p.numel() for p in llama.parameters())
    settings = RewardSettings(function="model", model_path=name)
    assert not list(reward_rules(settings))
    actual = RewardScorer(settings, torch.device("cpu")).score_local(samples)
    torch.testing.assert_close(actual, load(folder).score(["1+1="] * 2, samples.responses))
    reward_parameters.cache_clear()
    assert reward_parameters(name) == count
    (Path(folder) / "model.safetensors").unlink()
    reward_parameters.cache_clear()
    assert reward_parameters(name) == count
    with pytest.raises(ConfigError, match=r"reward.model_path 'some/reward' .* does not hold its weights"):
        RewardScorer(settings, torch.device("cpu"))
    missing = RewardSettings(function="model", model_path="./nowhere")
    assert [problem[:50] for problem in reward_rules(missing)] == ["reward.model_path './nowhere' is not a folder (fro"]


def test_failing_template_is_reported(tmp_path: Path, llama: Any) -> None:
    model = load(save(tmp_path, llama, "{{ 1 + messages[1]['content'] }}"))
    with pytest.raises(ValueError, match=r"the reward model's chat template fails on .* \(TypeError: .*; fix the"):
        model.score([[{"role": "user", "content": "a"}]], ["b"])


def test_chat_messages_use_the_template_of_the_model(tmp_path: Path, llama: Any) -> None:
    model = load(save(tmp_path, llama, TEMPLATE))
    assert model.texts.has_chat_template
    chat = model.score([[{"role": "user", "content": "x"}]], ["y"])
    torch.testing.assert_close(chat, model.score(["<u>x<a>"], ["y"]))


def test_long_texts_are_truncated_at_the_beginning(tmp_path: Path, llama: Any) -> None:
    model = load(save(tmp_path, llama))
    torch.testing.assert_close(model.score(["c" * 100], ["d" * 60]), model.score(["c" * 4], ["d" * 60]))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: LlamaForSequenceClassification(LlamaConfig(**LLAMA, num_labels=3)), "has 3 labels, must have 1"),
        (lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, num_labels=1)), r"lacks the weights score\.weight"),
        (lambda: BertForSequenceClassification(BertConfig(**SIZES, num_labels=1)), "does not score at the last token"),
    ],
)
def test_unusable_models(tmp_path: Path, make: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        load(save(tmp_path, make()))


def test_batches_obey_their_token_budget() -> None:
    lengths = [3, 9, 1, 30, 3, 2]
    batches = list(batches_of(lengths, 9))
    assert sorted(i for batch in batches for i in batch) == list(range(6))
    assert [[lengths[i] for i in batch] for batch in batches] == [[1, 2, 3], [3], [9], [30]]
    assert list(batches_of([], 9)) == []


def test_tokenizer_larger_than_the_model(tmp_path: Path, llama: Any) -> None:
    path = save(tmp_path, llama)
    character_tokenizer(alphabet=ALPHABET + "?!").save_pretrained(path)
    model = load(path)
    assert model.score(["a"], ["b"]).shape == (1,)
    with pytest.raises(ValueError, match="makes token 41, its vocabulary has 40"):
        model.score(["a"], ["!"])


def test_rendered_texts_begin_once(tmp_path: Path, llama: Any) -> None:
    """The template of the policy has added the beginning that the tokenizer of the reward model would add."""
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<", "eos_token": ">"})
    ends = [("<", tokenizer.bos_token_id), (">", tokenizer.eos_token_id)]
    for single, read in (("< $A", "<a=7"), ("< $A >", "<a=7>"), ("$A >", "<a=7>")):
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ends)
        path = save(tmp_path, llama)
        tokenizer.save_pretrained(path)
        texts = load(path).texts
        assert texts.ids("<a=", "7") == tokenizer(read, add_special_tokens=False)["input_ids"], single
        assert texts.ids("<a=", "7>") == tokenizer("<a=7>", add_special_tokens=False)["input_ids"], single


def test_template_receives_the_time_of_the_run(tmp_path: Path, llama: Any) -> None:
    path = save(tmp_path, llama, "{{ strftime_now('%d%m%Y') }}" + TEMPLATE)
    chat, time = [{"role": "user", "content": "x"}], "2024-07-26"
    expected_ids = character_tokenizer()("26072024<u>x<a>y", add_special_tokens=False)["input_ids"]
    assert load(path, template_time=time).texts.ids(chat, "y") == expected_ids
    assert load(path, template_time="2025-07-26").texts.ids(chat, "y") != expected_ids
    settings, samples = RewardSettings(function="model", model_path=path), rollouts("a", "bc")
    scorer = RewardScorer(settings, torch.device("cpu"), template_time=time)
    chats = [prompt.metadata[CHAT_MESSAGES] for prompt in samples.prompts]
    expected = load(path, template_time=time).score(chats, samples.responses)
    torch.testing.assert_close(scorer.score_local(samples), expected)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(b"garbage"),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        lambda folder: (folder / "config.json").write_text("{"),
        lambda folder: change_config(folder, hidden_size=32),
        lambda folder: change_config(folder, hidden_size="x"),
    ],
    ids=["garbage weights", "no weights", "other tokenizer", "half a config", "other shape", "size is text"],
)
def test_damaged_folders(tmp_path: Path, llama: Any, damage: Callable[[Path], object]) -> None:
    save(tmp_path, llama)
    damage(tmp_path)
    with pytest.raises(
        ValueError, match=r"reward\.model_path '.*' cannot be loaded \(.*\); check the folder"
    ) as caught:
        load(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be loaded"):
        load(str(tmp_path))


def test_scorer_with_a_model_scores_each_text(tmp_path: Path, llama: Any) -> None:
    settings = RewardSettings(function="model", model_path=save(tmp_path, llama))
    scorer, failures = RewardScorer(settings, torch.device("cpu")), dict[int, str]()
    first, second, third, again = scorer.score_local(rollouts("a", "b", "cb", "a"), failures).tolist()
    scorer.close()
    assert not failures
    assert first == again and len({first, second, third}) == 3


@pytest.mark.parametrize("worth", [float("nan"), float("inf"), float("-inf")])
def test_text_without_a_score_costs_its_own_sample(tmp_path: Path, llama: Any, worth: float) -> None:
    with torch.no_grad():
        llama.model.embed_tokens.weight[ALPHABET.index("b")] = worth
    settings = RewardSettings(function="model", model_path=save(tmp_path, llama), failure_score=-7.0)
    scorer, failures = RewardScorer(settings, torch.device("cpu")), dict[int, str]()
    scores_B = scorer.score_local(rollouts("a", "b", "c", "cb"), failures)
    assert scores_B[[1, 3]].tolist() == [-7.0, -7.0] and scores_B.isfinite().all() and scores_B[0] != scores_B[2]
    sentence = "the reward model gave nan, must be finite and within float32"
    assert failures == {1: sentence, 3: sentence}


@pytest.mark.parametrize("head", [3e38, -3e38, float("nan")])
def test_head_beyond_float32_ends_the_run(tmp_path: Path, llama: Any, head: float) -> None:
    with torch.no_grad():
        llama.score.weight.copy_(llama.score.weight.sign() * head * 100)
    settings = RewardSettings(function="model", model_path=save(tmp_path, llama))
    with pytest.raises(RewardError, match=r"2 of 2 rewards failed, .* the reward model gave (-?inf|nan), must be"):
        RewardScorer(settings, torch.device("cpu")).score_local(rollouts("a", "b"))
