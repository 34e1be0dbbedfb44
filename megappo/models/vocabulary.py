"""Comparison of tokenizers. All models of a run must read the token ids of the run's tokenizer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from megappo.errors import ConfigError, reason
from megappo.files.folder_texts import OF_TOKENIZERS, check_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "spm.model", "sentencepiece.bpe.model", "tiktoken.model",
    "tekken.json", "vocab.json", "vocab.txt",
)  # fmt: skip
"""Vocabulary files. A folder with one of these files has a tokenizer."""
_NUMBERED_BY = (*_VOCABULARIES, "added_tokens.json", "tokenizer_config.json")
"""Files that determine the id of each token."""


def check_same_tokens(
    tokenizer: PreTrainedTokenizerBase, own: Path, other: Path, key: str, *, trust_remote_code: bool = False
) -> None:
    """Check that the tokenizer in the folder `other` has the same token at each id as the run's tokenizer.

    An id that only one tokenizer has is not compared, because a model may lack tokens that were added to its base. A
    folder without a tokenizer is not compared.

    Args:
        tokenizer: the run's tokenizer, read from the folder `own`.
        own: folder of the run's tokenizer.
        other: folder of the other tokenizer.
        key: setting that names `other`, for errors.
        trust_remote_code: whether code in the folder `other` may run.

    Raises ConfigError if the tokenizers differ or if the other one cannot be loaded.
    """
    if not any((other / name).exists() for name in _VOCABULARIES) or _same_files(own, other):
        return
    tokens, others = _tokens(tokenizer), _tokens(_load(other, key, trust_remote_code))
    for token_id in sorted(tokens.keys() & others.keys()):
        if tokens[token_id] != others[token_id]:
            raise ConfigError(
                f"{key} '{other}' has a tokenizer with {others[token_id]!r} at token {token_id}, where the run's "
                f"tokenizer has {tokens[token_id]!r}; use a model that was trained with the run's tokenizer, or remove "
                "the tokenizer's files from the folder if the model was trained with the run's tokenizer"
            )


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the sha256 of all tokens and their ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def _same_files(own: Path, other: Path) -> bool:
    """Return whether both folders have the same bytes in every file that numbers tokens."""

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
    except Exception as error:  # transformers and the code in the folder may raise any exception
        raise ConfigError(
            f"{key} '{folder}' has a tokenizer that cannot be compared with the run's ({reason(error)}); remove the "
            "tokenizer's files from the folder if its model was trained with the run's tokenizer"
        ) from error
    return other
