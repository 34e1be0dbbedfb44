"""Comparison of the end of a model turn in the chat template with the tokens and texts that end a response."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from megappo.models.tokens import Message, rendered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUESTION, _REPLY = "Begin.", "Done."


def unmatched_end(
    tokenizer: PreTrainedTokenizerBase, stop_token_ids: Sequence[int], stop_texts: Sequence[str], time: str | None
) -> tuple[int | None, str] | None:
    """Return the end of a model turn in the chat template if this end does not end a response, otherwise None.

    Args:
        tokenizer: tokenizer with the template.
        stop_token_ids: tokens that end a response.
        stop_texts: texts that end a response.
        time: date and time for templates that use them; None: now.

    Returns:
        The token at the end of a turn (None: several tokens, or no special token) and its text.
    """
    last, inner = _behind_a_turn(tokenizer, time)
    if not {*_ids(tokenizer, last)}.isdisjoint(stop_token_ids):
        return None
    token, text = _end_of_turn(tokenizer, last, inner)
    if not text or token in stop_token_ids or any(stop in last or stop in text for stop in stop_texts):
        return None
    return token, text


def _behind_a_turn(tokenizer: PreTrainedTokenizerBase, time: str | None) -> tuple[str, str]:
    """Return the text after the last turn of the model and the text after a turn that a user message follows.

    Both texts are empty if the template renders no turns of the model.
    """
    turn: list[Message] = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _REPLY}]
    try:
        last = rendered(tokenizer, turn, goes_on=False, time=time)
        inner = rendered(tokenizer, [*turn, {"role": "user", "content": _QUESTION}], goes_on=False, time=time)
    except Exception:  # noqa: BLE001 - a template may reject this test conversation but accept those of the run
        return "", ""
    if not 0 <= last.find(_QUESTION) < last.rfind(_REPLY) or _REPLY not in inner:  # only the last message is rendered
        return "", ""
    return last[last.rindex(_REPLY) + len(_REPLY) :], inner[inner.rindex(_REPLY) + len(_REPLY) :]


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, last: str, inner: str) -> tuple[int | None, str]:
    """Return the token that ends a turn, and its text.

    Some templates have no such token. They end a turn with the tag of the next role (GLM) or with several tokens. The
    token is then None. The text is empty if the template does not mark the end of a turn.
    """
    unknown = tokenizer.unk_token_id
    added = {token: str(piece) for token, piece in tokenizer.added_tokens_decoder.items() if token != unknown}
    common = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(last, inner, strict=False))).strip()
    for text in (common, inner.lstrip()):
        first = next(iter(_ids(tokenizer, text)), None)
        if first in added and text.startswith(added[first]):
            return first, added[first]
    return None, common


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
    return ids
