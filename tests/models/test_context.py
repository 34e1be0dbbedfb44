"""Continuations of other text have the same tokens and text as within the whole text."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megappo.config.sections.environment import EnvironmentSettings
from megappo.engines.protocol import Completion, GenerateRequest
from megappo.environments.gateway.server import Gateway
from megappo.environments.session import Session, SharedEpisodeState
from megappo.environments.tools.tool_pool import ToolPool
from megappo.models.context import continuation_ids, continuation_text, token_text
from megappo.models.stop_texts import StopTexts
from megappo.models.tokens import decoded
from megappo.ppo.rollout.sampling import SampleRequests, finish_rollout
from megappo.types import Prompt
from tests.support.episodes import PARAMS
from tests.support.sentencepiece import KINDS, TEXTS, sentencepiece

PROMPT = "[INST] hi [/INST]"
CONTINUATIONS = (" Hello! yes", "Hello", "  said you", "\nnext", ": 1 + 2 = 3", " ", " 3 ", "no </s>", "yes.</s>")


def byte_level(*, prefix_space: bool) -> PreTrainedTokenizerBase:
    """Return a byte-level tokenizer like the one of GPT 2. With `prefix_space`, a text begins with a space as in
    RoBERTa."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", bos_token="<s>")


def tokenizer(kind: str) -> PreTrainedTokenizerBase:
    if kind in ("bytes", "bytes-prefixed"):
        return byte_level(prefix_space=kind != "bytes")
    return sentencepiece(kind)


def plain_ids(tok: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tok(text, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.parametrize("kind", [*KINDS, "bytes"])
def test_continuation_is_decoded_as_within_the_whole_text(kind: str) -> None:
    """If the tokens of a text are split at any position, both parts together decode to the text of all tokens."""
    tok = tokenizer(kind)
    for behind in CONTINUATIONS:
        ids = plain_ids(tok, PROMPT + behind)
        for place in range(1, len(ids)):
            assert decoded(tok, ids[:place]) + continuation_text(tok, ids[place:]) == decoded(tok, ids)
            visible = continuation_text(tok, ids[place:], skip_special_tokens=True)
            assert visible == continuation_text(tok, ids[place:]).replace("</s>", "")
    assert continuation_text(tok, []) == ""


@pytest.mark.parametrize("kind", [*KINDS, "bytes"])
def test_continuation_is_encoded_as_within_the_whole_text(kind: str) -> None:
    tok = tokenizer(kind)
    for behind in CONTINUATIONS:
        ids = continuation_ids(tok, behind)
        assert continuation_text(tok, ids) == behind.encode().decode()
        assert decoded(tok, [*plain_ids(tok, PROMPT), *ids]) == PROMPT + behind
        assert [*plain_ids(tok, PROMPT), *ids] == plain_ids(tok, PROMPT + behind)
    assert continuation_ids(tok, "") == []


@pytest.mark.parametrize("kind", ["prepend", "first", "always", "llama", "bytes"])
def test_invalid_text_is_decoded_with_replacements(kind: str) -> None:
    """Check a character with a missing byte, and half of a surrogate pair, which JSON can contain."""
    tok = tokenizer(kind)
    ids = continuation_ids(tok, "é")
    assert len(ids) == 2
    assert continuation_text(tok, ids) == "é" and continuation_text(tok, ids[:1]) == "\ufffd"
    assert continuation_text(tok, continuation_ids(tok, "a\ud83d")) == "a?"


def test_decoder_with_spaces_between_tokens_adds_no_leading_space() -> None:
    vocabulary = {"a": 0, "b": 1}
    for model in (models.WordLevel(vocabulary, "a"), models.WordPiece(vocabulary, unk_token="a")):
        made = Tokenizer(model)
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        made.decoder = decoders.WordPiece() if isinstance(model, models.WordPiece) else None
        tok = PreTrainedTokenizerFast(tokenizer_object=made)
        assert continuation_text(tok, [1, 0]) == "b a" and continuation_ids(tok, "b a") == [1, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_environments_and_logs_get_the_first_space(kind: str) -> None:
    """Plain text of an environment also follows a turn without an additional space."""
    tok = sentencepiece(kind)
    end = tok.convert_tokens_to_ids("</s>")
    turn = [*plain_ids(tok, PROMPT + " Hello yes")[len(plain_ids(tok, PROMPT)) :], end]
    prompt = Prompt(0, tuple(plain_ids(tok, PROMPT)), PROMPT, None, {})
    answer = Completion(tuple(turn), (0.0,) * len(turn), False, 0)
    rollouts = finish_rollout(SampleRequests((prompt,), (0,), 1, ()), [answer], tok)
    assert (rollouts.responses, rollouts.raw_responses) == ((" Hello yes",), (" Hello yes</s>",))
    settings = EnvironmentSettings()
    pool, gateway = ToolPool({}, settings.tools), Gateway(settings.gateway_host)
    shared = SharedEpisodeState(settings, tok, len(tok), None, "user", pool, gateway, 100)
    prompts: list[GenerateRequest] = []

    async def engine(request: GenerateRequest) -> Completion:
        prompts.append(request)
        return answer

    async def play() -> None:
        reply = await session.generate()
        assert (reply.text, reply.raw_text) == (" Hello yes", " Hello yes</s>")
        session.observe("you said yes")
        session.observe(" or no")
        await session.generate()

    params = replace(PARAMS, stop_token_ids=(end,))
    session = Session(prompt, GenerateRequest(prompt.token_ids, 1, 0), shared, params, engine)
    asyncio.run(play())
    assert decoded(tok, prompts[1].token_ids) == decoded(tok, [*prompt.token_ids, *turn]) + "you said yes or no"
    sample = session.completion(failure="", reason="", limit="", version=0)
    rollouts = finish_rollout(SampleRequests((prompt,), (0,), 1, ()), [sample], tok)
    assert rollouts.episodes is not None and rollouts.responses == (" Hello yes",)
    texts = [message["text"] for message in rollouts.episodes.conversations[0]]
    assert texts == [" Hello yes</s>", "you said yes or no", " Hello yes</s>"]


@pytest.mark.parametrize("kind", KINDS)
def test_stop_text_can_be_the_first_space(kind: str) -> None:
    tok = sentencepiece(kind)
    ids = plain_ids(tok, PROMPT + " yes or no")[len(plain_ids(tok, PROMPT)) :]
    end = StopTexts((" yes",), tok).end(ids)
    assert end is not None and continuation_text(tok, ids[:end]) == " yes"
    assert token_text(tok, ids[0])[0] == " "


def test_byte_level_tokenizer_adds_no_space_to_continuations() -> None:
    tok = tokenizer("bytes-prefixed")
    whole = decoded(tok, plain_ids(tok, PROMPT))
    for behind in CONTINUATIONS:
        ids = continuation_ids(tok, behind)
        assert continuation_text(tok, ids) == behind
        assert decoded(tok, [*plain_ids(tok, PROMPT), *ids]) == whole + behind
