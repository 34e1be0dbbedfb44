"""Texts that follow other text: tokens and texts are the same as within the whole text."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megappo.config.context import continuation_ids, continuation_text, token_text
from megappo.config.environment import EnvironmentSettings
from megappo.config.tokens import decoded
from megappo.engines.protocol import Completion, GenerateRequest
from megappo.engines.stopping import StopTexts
from megappo.environments.gateway.server import Gateway
from megappo.environments.session import Session, SharedEpisodeState
from megappo.environments.tool_pool import ToolPool
from megappo.ppo.sampling import SampleRequests, finish_rollout
from megappo.types import Prompt
from tests.support.episodes import PARAMS
from tests.support.sentencepiece import KINDS, TEXTS, sentencepiece

PROMPT = "[INST] hi [/INST]"
CONTINUATIONS = (" Hello! yes", "Hello", "  said you", "\nnext", ": 1 + 2 = 3", " ", " 3 ", "no </s>", "yes.</s>")


def byte_level(*, prefix_space: bool) -> PreTrainedTokenizerBase:
    """As GPT 2's, or RoBERTa's with a space in front of a text."""
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


def plain_ids(words: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = words(text, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.parametrize("kind", [*KINDS, "bytes"])
def test_a_continuation_is_decoded_as_within_the_whole(kind: str) -> None:
    """Wherever the tokens of a text are divided, both parts together are the text of all tokens."""
    words = tokenizer(kind)
    for behind in CONTINUATIONS:
        ids = plain_ids(words, PROMPT + behind)
        for place in range(1, len(ids)):
            assert decoded(words, ids[:place]) + continuation_text(words, ids[place:]) == decoded(words, ids)
            visible = continuation_text(words, ids[place:], skip_special_tokens=True)
            assert visible == continuation_text(words, ids[place:]).replace("</s>", "")
    assert continuation_text(words, []) == ""


@pytest.mark.parametrize("kind", [*KINDS, "bytes"])
def test_a_continuation_is_encoded_as_within_the_whole(kind: str) -> None:
    words = tokenizer(kind)
    for behind in CONTINUATIONS:
        ids = continuation_ids(words, behind)
        assert continuation_text(words, ids) == behind.encode().decode()
        assert decoded(words, [*plain_ids(words, PROMPT), *ids]) == PROMPT + behind
        assert [*plain_ids(words, PROMPT), *ids] == plain_ids(words, PROMPT + behind)
    assert continuation_ids(words, "") == []


@pytest.mark.parametrize("kind", ["prepend", "first", "always", "llama", "bytes"])
def test_what_is_no_text_by_itself_stays(kind: str) -> None:
    """A character of which a part is missing, and half of a surrogate pair, which JSON can hold."""
    words = tokenizer(kind)
    ids = continuation_ids(words, "é")
    assert len(ids) == 2
    assert continuation_text(words, ids) == "é" and continuation_text(words, ids[:1]) == "\ufffd"
    assert continuation_text(words, continuation_ids(words, "a\ud83d")) == "a?"


def test_a_decoder_that_puts_spaces_between_tokens_adds_none_in_front() -> None:
    vocabulary = {"a": 0, "b": 1}
    for model in (models.WordLevel(vocabulary, "a"), models.WordPiece(vocabulary, unk_token="a")):
        made = Tokenizer(model)
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        made.decoder = decoders.WordPiece() if isinstance(model, models.WordPiece) else None
        words = PreTrainedTokenizerFast(tokenizer_object=made)
        assert continuation_text(words, [1, 0]) == "b a" and continuation_ids(words, "b a") == [1, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_environments_and_logs_get_the_first_space(kind: str) -> None:
    """And a plain text of an environment follows a turn without an additional space."""
    words = sentencepiece(kind)
    end = words.convert_tokens_to_ids("</s>")
    turn = [*plain_ids(words, PROMPT + " Hello yes")[len(plain_ids(words, PROMPT)) :], end]
    prompt = Prompt(0, tuple(plain_ids(words, PROMPT)), PROMPT, None, {})
    answer = Completion(tuple(turn), (0.0,) * len(turn), False, 0)
    rollouts = finish_rollout(SampleRequests((prompt,), (0,), 1, ()), [answer], words)
    assert (rollouts.responses, rollouts.raw_responses) == ((" Hello yes",), (" Hello yes</s>",))
    settings = EnvironmentSettings()
    pool, gateway = ToolPool({}, settings.tools), Gateway(settings.gateway_host)
    shared = SharedEpisodeState(settings, words, len(words), None, "user", pool, gateway, 100)
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
    assert decoded(words, prompts[1].token_ids) == decoded(words, [*prompt.token_ids, *turn]) + "you said yes or no"
    sample = session.completion(failure="", reason="", limit="", version=0)
    rollouts = finish_rollout(SampleRequests((prompt,), (0,), 1, ()), [sample], words)
    assert rollouts.episodes is not None and rollouts.responses == (" Hello yes",)
    texts = [said["text"] for said in rollouts.episodes.conversations[0]]
    assert texts == [" Hello yes</s>", "you said yes or no", " Hello yes</s>"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_text_may_be_the_first_space(kind: str) -> None:
    words = sentencepiece(kind)
    ids = plain_ids(words, PROMPT + " yes or no")[len(plain_ids(words, PROMPT)) :]
    end = StopTexts((" yes",), words).end(ids)
    assert end is not None and continuation_text(words, ids[:end]) == " yes"
    assert token_text(words, ids[0])[0] == " "


def test_a_byte_level_tokenizer_adds_no_prefix_space_to_a_continuation() -> None:
    words = tokenizer("bytes-prefixed")
    whole = decoded(words, plain_ids(words, PROMPT))
    for behind in CONTINUATIONS:
        ids = continuation_ids(words, behind)
        assert continuation_text(words, ids) == behind
        assert decoded(words, [*plain_ids(words, PROMPT), *ids]) == whole + behind
