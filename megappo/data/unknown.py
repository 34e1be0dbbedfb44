"""Unknown tokens in prompts, for text outside of the vocabulary."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from megappo.data.prompts import PromptDataset


def unknown_token_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the unknown token. Return None if the tokenizer has no unknown token, or if the token is also
    the bos or eos token."""
    token_id = tokenizer.unk_token_id
    if token_id is None:  # the settings of a tokenizer may lack the unknown token of its model
        model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
        token = getattr(model, "unk_token", None)
        token_id = tokenizer.convert_tokens_to_ids(token) if token else None
    return None if token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id) else token_id


def unknown_token_warning(prompts: PromptDataset, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a sentence about unknown tokens in the prompts of a source, or "" without unknown tokens."""
    token_id = unknown_token_id(tokenizer)
    if token_id is None:
        return ""
    counts = [prompts[i].token_ids.count(token_id) for i in range(len(prompts))]
    if not (unknown := sum(counts)):
        return ""
    tokens = sum(len(prompts[i].token_ids) for i in range(len(prompts)))
    return (
        f"{sum(map(bool, counts))} of {len(prompts)} prompts of {prompts.source} have unknown tokens: {unknown} of "
        f"{tokens} tokens are {tokenizer.convert_ids_to_tokens(token_id)}; use the tokenizer of the model, or write "
        "the prompts in the alphabet of the tokenizer"
    )
