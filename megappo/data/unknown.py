"""Tokens of prompts that stand for text outside the tokenizer's vocabulary."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from megappo.data.prompts import PromptDataset


def unknown_token_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id of the tokenizer's unknown token; None where there is none, or where the same token begins or ends
    texts."""
    token_id = tokenizer.unk_token_id
    if token_id is None:  # a tokenizer may have one that its settings do not name
        model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
        token = getattr(model, "unk_token", None)
        token_id = tokenizer.convert_tokens_to_ids(token) if token else None
    return None if token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id) else token_id


def unknown_words(prompts: PromptDataset, tokenizer: PreTrainedTokenizerBase) -> str:
    """How many tokens of a source's prompts are unknown, for people; "" where there are none."""
    token_id = unknown_token_id(tokenizer)
    if token_id is None:
        return ""
    counts = [prompts[i].token_ids.count(token_id) for i in range(len(prompts))]
    if not (unknown := sum(counts)):
        return ""
    tokens = sum(len(prompts[i].token_ids) for i in range(len(prompts)))
    return (
        f"{sum(map(bool, counts))} of {len(prompts)} prompts of {prompts.source} have tokens that the tokenizer does "
        f"not know, {unknown} of {tokens} tokens are {tokenizer.convert_ids_to_tokens(token_id)}; use the model's own "
        "tokenizer, or write the prompts in its alphabet"
    )
