"""Reward models: a score belongs to its text, whatever stands beside it in the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from megappo.config.schema import RewardSettings
from megappo.rewards import RewardScorer
from megappo.rewards.model import RewardModel

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789+=<>"
TEMPLATE = "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}{% endfor %}"
SIZES: dict[str, Any] = {
    "vocab_size": len(ALPHABET),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA: dict[str, Any] = SIZES | {"num_key_value_heads": 2, "pad_token_id": 0, "initializer_range": 0.5}


def save(folder: Path, model: Any, template: str | None = None) -> str:
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(ALPHABET)}, []))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template).save_pretrained(folder)
    return str(folder)


def load(path: str) -> RewardModel:
    return RewardModel(path, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture
def llama() -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    return LlamaForSequenceClassification(LlamaConfig(**LLAMA, num_labels=1)).eval()


def test_scores_do_not_depend_on_the_batch(tmp_path: Path, llama: LlamaForSequenceClassification) -> None:
    model = load(save(tmp_path, llama))
    # "a" is also the padding token: transformers' own head would read these scores elsewhere
    responses = ["b" * n + "a" for n in (1, 3, 30, 7, 2)] * 4
    prompts = [f"{i}+1=" for i in range(len(responses))]
    together = model.score(prompts, responses)
    assert together.shape == (20,) and together.dtype == torch.float32 and len(set(together.tolist())) == 20
    alone = torch.cat([model.score([p], [r]) for p, r in zip(prompts, responses, strict=True)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    ids = torch.tensor([[ALPHABET.index(c) for c in prompts[2] + responses[2]]])
    hidden = llama.model(input_ids=ids).last_hidden_state[:, -1]
    torch.testing.assert_close(together[2], llama.score(hidden).squeeze().detach(), atol=1e-5, rtol=1e-5)


def test_chat_messages_are_rendered_by_its_own_template(tmp_path: Path, llama: Any) -> None:
    model = load(save(tmp_path, llama, TEMPLATE))
    assert model.has_chat_template
    chat = model.score([[{"role": "user", "content": "x"}]], ["y"])
    torch.testing.assert_close(chat, model.score(["<u>x<a>"], ["y"]))


def test_long_texts_lose_their_beginning(tmp_path: Path, llama: Any) -> None:
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


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be loaded"):
        load(str(tmp_path))


def test_scorer_with_a_model(tmp_path: Path, llama: Any) -> None:
    settings = RewardSettings(function="model", model_path=save(tmp_path, llama))
    scorer = RewardScorer(settings, torch.device("cpu"))
    scorer.close()
