"""Decoding and encoding of texts that follow other text.

SentencePiece-like tokenizers (Llama 2, Mistral, Mixtral) add a leading space when they encode a text, and remove the
leading space when they decode a text. Byte-level tokenizers with `add_prefix_space` also add a leading space. A
response or an observation follows other text. Its tokens are therefore decoded, and its text is encoded, after a short
text, an anchor. The anchor is removed from the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from megappo.models.tokens import decoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CANDIDATES = ".=0a:,+-1b"
_MOST_ANCHORS = 8
_TOKENIZERS = 64
_SPACE, _BYTE_SPACE = "▁", "Ġ"
"""Space in the pieces of SentencePiece tokenizers and byte-level tokenizers."""


class _Anchor(NamedTuple):
    """Text that is placed before another text."""

    text: str
    token_ids: list[int]


def continuation_text(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], *, skip_special_tokens: bool = False
) -> str:
    """Return the exact text of tokens that follow other tokens, including the leading space of the first token."""
    anchors = _anchors(tokenizer)
    if anchors:
        ids = [*anchors[0].token_ids, *token_ids]
        text = decoded(tokenizer, ids, skip_special_tokens=skip_special_tokens)
        if text.startswith(anchors[0].text):
            return text.removeprefix(anchors[0].text)
    return decoded(tokenizer, token_ids, skip_special_tokens=skip_special_tokens)


def continuation_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a text that follows other text, without a leading space added by the tokenizer.

    JSON can contain halves of surrogate pairs, which tokenizers reject. They are replaced by `?`.
    """
    text = text.encode("utf-8", "replace").decode()
    whole = _ids(tokenizer, text)
    if not text or continuation_text(tokenizer, whole) == text:
        return whole
    for anchor in _anchors(tokenizer):
        ids, start = _ids(tokenizer, anchor.text + text), len(anchor.token_ids)
        if ids[:start] == anchor.token_ids:  # no token spans the border of anchor and text
            return ids[start:]
    return whole


def token_text(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    """Return the text of a token that follows other tokens, or its vocabulary name for a part of a character."""
    text = continuation_text(tokenizer, [token_id])
    return str(tokenizer.convert_ids_to_tokens(token_id)) if "\ufffd" in text else text


@lru_cache(maxsize=_TOKENIZERS)
def _anchors(tokenizer: PreTrainedTokenizerBase) -> tuple[_Anchor, ...]:
    """Return the anchors of a tokenizer. The tuple is empty if the tokenizer puts spaces between all tokens."""
    pieces = {piece.removeprefix(_SPACE) for piece in tokenizer.get_vocab()}
    characters = [piece for piece in sorted(pieces) if len(piece) == 1 and piece.isascii() and piece.isalnum()]
    known = [text for text in _CANDIDATES if text in pieces] or characters  # others may have no token
    anchors = (_anchor(tokenizer, text) for text in known[:_MOST_ANCHORS])
    return tuple(anchor for anchor in anchors if anchor is not None)


def _anchor(tokenizer: PreTrainedTokenizerBase, text: str) -> _Anchor | None:
    """Return the text as an anchor.

    Return None if the tokens do not decode to the text, or if the decoder joins tokens with spaces.
    """
    ids = _ids(tokenizer, text)
    pieces = "".join(map(str, tokenizer.convert_ids_to_tokens(ids * 2)))
    pieces = pieces.replace(_SPACE, " ").replace(_BYTE_SPACE, " ")
    once, twice = decoded(tokenizer, ids), decoded(tokenizer, ids * 2)
    if once.removeprefix(" ") != text or twice.removeprefix(" ") != pieces.removeprefix(" "):
        return None
    return _Anchor(once, ids)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
