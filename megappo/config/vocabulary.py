"""Comparison of tokenizers: all models of a run read the token ids that the run's tokenizer makes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from megappo.config.folder_texts import OF_TOKENIZERS, check_texts
from megappo.config.rules.experience import saved_steps
from megappo.errors import ConfigError, reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "spm.model", "sentencepiece.bpe.model", "tiktoken.model",
    "tekken.json", "vocab.json", "vocab.txt",
)  # fmt: skip
"""Files of which each is a vocabulary; a folder with one of them has a tokenizer."""
_NUMBERED_BY = (*_VOCABULARIES, "added_tokens.json", "tokenizer_config.json")
"""Files that determine which id a token has."""


def check_same_tokens(
    tokenizer: PreTrainedTokenizerBase, own: Path, other: Path, key: str, *, trust_remote_code: bool = False
) -> None:
    """Raise ConfigError where the tokenizer of the folder `other` has another token at an id than the run's tokenizer.

    An id that only one of them has is not compared: a model may lack tokens that were added to its base. A folder
    without a tokenizer is not compared either.

    Args:
        tokenizer: the run's tokenizer, read from the folder `own`.
        key: the setting that names `other`, for the error.
        trust_remote_code: whether code in the folder `other` may run.
    """
    if not any((other / name).exists() for name in _VOCABULARIES) or _same_files(own, other):
        return
    tokens, others = _tokens(tokenizer), _tokens(_load(other, key, trust_remote_code))
    for token_id in sorted(tokens.keys() & others.keys()):
        if tokens[token_id] != others[token_id]:
            raise ConfigError(
                f"{key} '{other}' has a tokenizer with {others[token_id]!r} at token {token_id}, where the run's "
                f"tokenizer has {tokens[token_id]!r}; use a model that was trained with the run's tokenizer, or remove "
                "the tokenizer's files from the folder if it was"
            )


def check_saved_tokens(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Raise ConfigError where a run with another vocabulary saved the samples in `folder`, which `rollout.load_from`
    names."""
    digests = {step.vocabulary for step in saved_steps(folder).values()} - {None}
    if digests and digests != {vocabulary_digest(tokenizer)}:
        raise ConfigError(
            f"rollout.load_from '{folder}' has samples of a run with another tokenizer, whose ids stand for other "
            "tokens; set model.tokenizer to the tokenizer of that run"
        )


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of all tokens and their ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def _same_files(own: Path, other: Path) -> bool:
    """Whether both folders have the same bytes in every file that numbers tokens."""

    def content(folder: Path, name: str) -> bytes | None:
        return (folder / name).read_bytes() if (folder / name).exists() else None

    return own == other or all(content(own, name) == content(other, name) for name in _NUMBERED_BY)


def _tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}


def _load(folder: Path, key: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        check_texts(folder, OF_TOKENIZERS)
        other: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers, and the folder's own code, over any content
        raise ConfigError(
            f"{key} '{folder}' has a tokenizer that cannot be compared with the run's ({reason(error)}); remove the "
            "tokenizer's files from the folder if its model was trained with the run's tokenizer"
        ) from error
    return other
