"""Texts and tokens: ends of texts, exact texts of tokens, and the clock of chat templates."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megappo.config import load_config
from megappo.config.rules.rollout import response_length_rules
from megappo.config.sections.data import DataSettings
from megappo.config.sections.environment import EnvironmentSettings
from megappo.data import PromptDataset
from megappo.engines.protocol import Completion, GenerateRequest
from megappo.environments.chat import ChatTokens
from megappo.environments.gateway.server import Gateway
from megappo.environments.registry import make_environment, make_environment_context
from megappo.environments.session import Session, SharedEpisodeState
from megappo.environments.tools.tool_pool import ToolPool
from megappo.errors import ConfigError
from megappo.models.context import token_text
from megappo.models.tokens import TokenRows, decoded, whole_ids
from megappo.ppo.rollout.sampling import SampleRequests, finish_rollout
from megappo.types import Prompt
from tests.support.data import ROLES, character_tokenizer, records
from tests.support.episodes import PARAMS, TOKENIZER, tokenizer
from tests.support.places import BASE, ROOT
from tests.support.worlds import QUICKSTART

END = len(TOKENIZER)


def with_ends(single: str, *, template: str | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the 40 characters, <b> and </e>. The template `single` adds <b> and </e> to texts."""
    made = character_tokenizer(template)
    made.backend_tokenizer.decoder = decoders.Fuse()
    made.add_special_tokens({"bos_token": "<b>", "eos_token": "</e>"})
    ends = [("<b>", made.bos_token_id), ("</e>", made.eos_token_id)]
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ends)
    return made


@pytest.mark.parametrize(
    ("single", "prompt", "seen"),
    [
        ("$A </e>", "a+b=", "a+b="), ("<b> $A </e>", "a+b=", "<b>a+b="), ("<b> $A </e> </e>", "a+b=", "<b>a+b="),
        ("<b> $A", "a+b=", "<b>a+b="), ("<b> $A", "<b>a+b=", "<b>a+b="), ("<b> $A </e>", "<b>a</e>b=", "<b>a</e>b="),
        ("<b> $A </e>", "</e>a", "<b></e>a"), ("$A", "<b>a", "<b>a"), ("<b> $A </e>", "a" * 30, "<b>" + "a" * 19),
    ],
)  # fmt: skip
def test_prompts_begin_once_and_do_not_end(tmp_path: Path, single: str, prompt: str, seen: str) -> None:
    source = records(tmp_path, prompt)
    data = DataSettings(train=source, max_prompt_tokens=20, apply_chat_template=False, overlong_prompts="truncate")
    tok = with_ends(single)
    prompt_read = PromptDataset(source, data, tok)[0]
    assert decoded(tok, prompt_read.token_ids) == seen
    assert prompt_read.token_ids[-1] != tok.eos_token_id


def test_rendered_chat_is_not_changed(tmp_path: Path) -> None:
    source = records(tmp_path, "ab")
    tok = with_ends("<b> $A </e>", template="{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}=")
    prompt = PromptDataset(source, DataSettings(train=source, max_prompt_tokens=20), tok)[0]
    assert decoded(tok, prompt.token_ids) == "<b>ab="


@pytest.mark.parametrize(
    ("single", "text", "read"),
    [
        ("<b> $A", "<b>a=7", "<b>a=7"), ("<b> $A", "a=7", "<b>a=7"), ("<b> $A </e>", "<b>a=7", "<b>a=7</e>"),
        ("$A </e>", "a=7</e>", "a=7</e>"), ("$A", "<b>a=7</e>", "<b>a=7</e>"),
    ],
)  # fmt: skip
def test_whole_texts_begin_and_end_once(single: str, text: str, read: str) -> None:
    tok = with_ends(single)
    assert decoded(tok, whole_ids(tok, text)) == read


SPACED = ["a", "!=", "b", ",", "5", ".", "do", "n't", "we", "'re", "?"]


@pytest.mark.parametrize(
    ("pieces", "exact"),
    [(["a", "!=", "b", ",", "5", ".", "5"], "a != b , 5 . 5"), (["do", "n't", "?"], "do n't ?"),
     (["we", "'re", "."], "we 're .")],
)  # fmt: skip
def test_texts_equal_the_sampled_tokens(pieces: list[str], exact: str) -> None:
    """The tokenizer is configured to remove spaces, as in the folders of Llama 3. Rewards, logs and environments get
    the exact text."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*SPACED, "<unk>", "</e>"])}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tok = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", eos_token="</e>", clean_up_tokenization_spaces=True
    )
    ids = tok.convert_tokens_to_ids([*pieces, "</e>"])
    assert tok.decode(ids) != f"{exact} </e>"  # the default of transformers
    answer = Completion(tuple(ids), (0.0,) * len(ids), False, 0)
    prompt = Prompt(0, (0,), "a", None, {})
    rollouts = finish_rollout(SampleRequests((prompt,), (0,), 1, ()), [answer], tok)
    assert (rollouts.responses, rollouts.raw_responses) == ((exact,), (f"{exact} </e>",))
    settings = EnvironmentSettings()
    pool, gateway = ToolPool({}, settings.tools), Gateway(settings.gateway_host)
    shared = SharedEpisodeState(settings, tok, len(tok), None, "user", pool, gateway, 100)

    async def engine(_: GenerateRequest) -> Completion:
        return answer

    session = Session(prompt, GenerateRequest((0,), 1, 0), shared, PARAMS, engine)
    reply = asyncio.run(session.generate())
    assert (reply.text, reply.raw_text) == (exact, f"{exact} </e>")
    sample = session.completion(failure="", reason="", limit="", version=0)
    rollouts = finish_rollout(SampleRequests((prompt,), (0,), 1, ()), [sample], tok)
    assert rollouts.episodes is not None and rollouts.episodes.conversations[0][0]["text"] == f"{exact} </e>"


def test_truncated_prompts_are_decoded_exactly(tmp_path: Path) -> None:
    source = records(tmp_path, "b != a , do n't")
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*SPACED, "<unk>"])}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tok = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", clean_up_tokenization_spaces=True)
    data = DataSettings(train=source, max_prompt_tokens=4, apply_chat_template=False, overlong_prompts="truncate")
    assert PromptDataset(source, data, tok)[0].text == "a , do n't"


MOMENT = "2024-07-26 09:30:15"
CLOCK = "{{ strftime_now('%d %m %Y %H %M %S') }}" + ROLES
"""The template has a clock like the template of Llama 3.2, with more fields."""


@pytest.mark.parametrize(
    ("form", "rendered_time"),
    [("%d %b %Y", "26 Jul 2024"), ("%Y-%m-%d", "2024-07-26"), ("%H:%M:%S", "09:30:15"),
     ("%A, week %W", "Friday, week 30")],
)  # fmt: skip
def test_templates_receive_one_time(tmp_path: Path, form: str, rendered_time: str) -> None:
    source = records(tmp_path, "ab")
    tok = tokenizer("{{ strftime_now('" + form + "') }}" + ROLES)
    data = DataSettings(train=source, max_prompt_tokens=50, template_time=MOMENT)
    dataset = PromptDataset(source, data, tok)
    assert (dataset.reads_clock, dataset[0].text) == (True, f"{rendered_time}uab")
    chat = ChatTokens(tok, (END,), (), MOMENT)
    assert decoded(tok, chat.opening([{"role": "user", "content": "ab"}])) == f"{rendered_time}uab"


def test_prompts_without_clock_do_not_depend_on_time(tmp_path: Path) -> None:
    source = records(tmp_path, "ab")
    datasets = []
    for time in (MOMENT, "2031-01-01"):
        data = DataSettings(train=source, max_prompt_tokens=50, template_time=time)
        plain = data.model_copy(update={"apply_chat_template": False})
        datasets += [PromptDataset(source, data, tokenizer(ROLES)), PromptDataset(source, plain, tokenizer(CLOCK))]
    assert not any(dataset.reads_clock for dataset in datasets)
    assert [dataset.fingerprint for dataset in datasets[:2]] == [dataset.fingerprint for dataset in datasets[2:]]


def test_template_time_is_a_date_or_a_time(tmp_path: Path) -> None:
    def template_time(time: str) -> str | None:
        return load_config(ROOT / QUICKSTART, [f"data.template_time={time}"]).data.template_time

    assert (template_time("2024-07-26"), template_time(f"'{MOMENT}'")) == ("2024-07-26 00:00:00", MOMENT)
    for wrong in ("yesterday", "'2024-13-01'", "'26 Jul 2024'"):
        with pytest.raises(ConfigError, match=r"data\.template_time.* is not a time; write it as 2025-11-25"):
            template_time(wrong)


def test_gateway_passes_the_time_of_the_run() -> None:
    tok, settings = tokenizer(CLOCK), EnvironmentSettings()
    pool, gateway = ToolPool({}, settings.tools), Gateway(settings.gateway_host)
    shared = SharedEpisodeState(settings, tok, len(tok), None, "user", pool, gateway, 100, MOMENT)

    async def silent(_: GenerateRequest) -> Completion:
        raise AssertionError

    session = Session(Prompt(0, (1,), "a", None, {}), GenerateRequest((1,), 1, 0), shared, PARAMS, silent)
    opening = session.chat_tokens([]).opening([{"role": "user", "content": "ab"}])
    assert decoded(tok, opening) == "26 07 2024 09 30 15uab"


def test_episodes_have_the_time_of_the_run() -> None:
    overrides = ["rollout.environment={name: guess}", f"data.template_time='{MOMENT}'"]
    config = load_config(ROOT / QUICKSTART, overrides)
    assert config.rollout.episodes is not None
    environment = make_environment(config.rollout.episodes)
    stage = make_environment_context(config, environment, tokenizer(CLOCK), (END,), TokenRows(16, "m"))
    assert stage.shared.template_time == MOMENT


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("rollout.min_response_tokens=65", "rollout.min_response_tokens 65 is above rollout.max_response_tokens 64"),
        (
            "rollout.max_total_tokens=20",
            "leaves no room for a response of 1 after a prompt of data.max_prompt_tokens 20",
        ),
        ("rollout.max_total_tokens=21", ""),
    ],
)
def test_limits_leave_room_for_a_response(override: str, sentence: str) -> None:
    config = load_config(BASE, ["data.max_prompt_tokens=20", "rollout.max_response_tokens=64", override])
    assert sentence in "".join(response_length_rules(config))
    if not sentence:
        assert list(response_length_rules(config)) == []
        assert config.max_sequence_tokens == 21


def test_single_token_has_a_text() -> None:
    """Spaces are not removed. A token with half of a character is shown with its name in the tokenizer."""
    made = Tokenizer(models.BPE({"a": 0, "Ã": 1, "Ġb": 2}, []))
    made.decoder = decoders.ByteLevel()
    tok = PreTrainedTokenizerFast(tokenizer_object=made)
    assert [token_text(tok, token) for token in (1, 2)] == ["Ã", " b"]
