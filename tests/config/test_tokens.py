"""Conversion between texts and tokens, and tokens for which models have no row, from any source."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AddedToken, PreTrainedTokenizerFast

from megappo.config import check_run, load_config
from megappo.config.context import token_text
from megappo.config.data import DataSettings, DataSourceSettings
from megappo.config.environment import EnvironmentSettings
from megappo.config.model_files import load_tokenizer, read_architecture, resolve_stop_token_ids, token_rows
from megappo.config.tokens import TokenRows, decoded, response_length_rules, whole_ids
from megappo.config.vocabulary import vocabulary_digest
from megappo.data import PromptDataset, read_prompts
from megappo.doctor.inputs import origin_findings
from megappo.engines.protocol import Completion, GenerateRequest, SamplingParams
from megappo.environments.chat import ChatTokens
from megappo.environments.gateway.server import Gateway
from megappo.environments.protocol import Environment
from megappo.environments.registry import EnvironmentContext, make_environment, make_environment_context
from megappo.environments.runner import EpisodeRunner, TooManyFailuresError
from megappo.environments.session import Session, SharedEpisodeState
from megappo.environments.tool_pool import ToolPool
from megappo.errors import ConfigError, RunError
from megappo.families.parameters import tensor_shapes
from megappo.ppo.answering import generated
from megappo.ppo.sampling import SampleRequests, finish_rollout
from megappo.preflight.inputs import read_tokens
from megappo.reshard.writer import write_policy
from megappo.runtime.interrupts import NeverStop
from megappo.types import Prompt
from tests.support.data import character_tokenizer
from tests.support.episodes import PARAMS, TOKENIZER, SayingEngine, prompts_and_requests, tokenizer
from tests.support.places import BASE, ROOT, TINY
from tests.support.worlds import QUICKSTART, megappo, pretrained

ADDED = "<tool>"
"""A token of the tokenizers of these tests for which the models have no row."""
ROLES = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"


def with_added_token(**parts: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the 40 characters and a token with the id 40."""
    made = character_tokenizer(**parts)
    made.add_tokens([AddedToken(ADDED, special=True)])
    return made


def tiny_model(folder: Path, edit: Callable[[dict[str, Any]], object] = lambda _: None, **config: Any) -> Path:
    """Write the model of the quickstart without weights, with a changed tokenizer.json and config.json."""
    shutil.copytree(TINY, folder)
    for name, change in (("tokenizer.json", edit), ("config.json", lambda content: content.update(config))):
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))
    return folder


def add_token(tokenizer: dict[str, Any]) -> None:
    """Add a 16th and a 17th token, without resizing the model."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{"id": 15, "content": "<x>", **plain}, {"id": 16, "content": ADDED, **plain}]


def records(folder: Path, *prompts: Any) -> DataSourceSettings:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt, "answer": "1"}) for prompt in prompts))
    return DataSourceSettings(source=str(path))


@pytest.mark.parametrize(
    ("prompt", "template", "tools", "settings"),
    [
        (f"ab{ADDED}", None, [], {}),
        ("ab", ROLES + ADDED, [], {}),
        ("ab", "{% if tools %}{{ tools[0].name }}{% endif %}" + ROLES, [{"name": ADDED}], {}),
        ("ab", ROLES, [], {"system_prompt": ADDED}),
        ([{"role": "user", "content": ADDED}], ROLES, [], {}),
        ("a" * 30 + ADDED, None, [], {"overlong_prompts": "truncate"}),
    ],
    ids=["text", "template", "tools", "system prompt", "message", "cut"],
)
def test_prompts_with_tokens_without_a_row_are_refused(
    tmp_path: Path, prompt: Any, template: str | None, tools: list[Any], settings: dict[str, Any]
) -> None:
    source = records(tmp_path, "ab", prompt)
    data = DataSettings(
        train=source, **{"max_prompt_tokens": 20, "apply_chat_template": template is not None} | settings
    )
    tokenizer = with_added_token(template=template)
    sentence = r"prompt \d of '.*prompts.jsonl' has token 40, .* 'models/m' has no row \(its vocab_size is 40\); use"
    with pytest.raises(ValueError, match=sentence):
        PromptDataset(source, data, tokenizer, tools, rows=TokenRows(40, "models/m"))
    assert len(PromptDataset(source, data, tokenizer, tools, rows=TokenRows(41, "models/m"))) == 2
    mixed = data.model_copy(update={"train": None, "mixture": {"a": source.model_copy(update={"weight": 1.0})}})
    with pytest.raises(ValueError, match="has token 40"):
        read_prompts(mixed, tokenizer, tools, TokenRows(40, "models/m"))


def test_dropped_prompts_may_have_such_tokens(tmp_path: Path) -> None:
    source = records(tmp_path, "ab", "a" * 30 + ADDED)
    data = DataSettings(train=source, max_prompt_tokens=20, apply_chat_template=False)
    dataset = PromptDataset(source, data, with_added_token(), rows=TokenRows(40, "m"))
    assert (len(dataset), dataset.dropped) == (1, 1)


@pytest.mark.waits
@pytest.mark.parametrize("key", ["train", "validation"])
def test_dry_run_refuses_tokens_without_a_row(tmp_path: Path, key: str) -> None:
    """A padded row is not a row of the model. With padding to a multiple of 64, the embedding has 64 rows, and the
    model has 16."""
    model = tiny_model(tmp_path / "model", add_token)
    source = records(tmp_path, "1+1=", f"1+{ADDED}=").source
    overrides = [f"data.{key}={{source: {source}}}", f"model.path={model}", "model.pad_vocab_to_multiple_of=64"]
    done = megappo("train", "--dry-run", QUICKSTART, *overrides, f"run.directory={tmp_path}")
    assert done.returncode == 2 and "would run" not in done.stdout
    assert f"prompt 1 of '{source}' has token 16, for which the model '{model}' has no row" in done.stderr


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["rollout.stop_token_ids=[99999]"], "rollout.stop_token_ids has 99999, for which the actor model has no row"),
        (["rollout.stop_token_ids=[3, 16]"], r"has 16, .* \(its vocab_size is 16\); set ids of at most 15"),
        (["rollout.stop_token_ids=[63]", "model.pad_vocab_to_multiple_of=64"], "has 63, for which"),
    ],
)
def test_stop_tokens_without_a_row_are_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_run(load_config(ROOT / QUICKSTART, overrides), 2)
    check_run(load_config(ROOT / QUICKSTART, ["rollout.stop_token_ids=[15]"]), 2)


def test_stop_tokens_of_the_model_files_have_rows(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", add_token)
    config = load_config(ROOT / QUICKSTART, [f"model.path={model}"])
    tokenizer = load_tokenizer(config)
    rows = token_rows(config, tokenizer)
    assert (rows.count, resolve_stop_token_ids(model, tokenizer, (3,), rows)) == (16, (1, 3))
    (model / "generation_config.json").write_text('{"eos_token_id": [1, 16]}')
    with pytest.raises(ConfigError, match=r"eos_token_id in .*generation_config.json has token 16, for which"):
        resolve_stop_token_ids(model, tokenizer, (), rows)
    tokenizer.eos_token = ADDED
    with pytest.raises(ConfigError, match="the tokenizer's eos_token is token 16, .* never ends a response"):
        resolve_stop_token_ids(model, tokenizer, (), rows)


@pytest.mark.parametrize(
    ("config", "generation", "stops"),
    [
        ({"eos_token_id": [1, 14]}, None, (1, 14)),
        ({"eos_token_id": 14}, None, (1, 14)),
        ({"eos_token_id": [14, 15]}, {"eos_token_id": 13}, (1, 13, 14, 15)),
        ({"eos_token_id": None}, {"eos_token_id": [13]}, (1, 13)),
        ({"eos_token_id": 14}, {"temperature": 0.7}, (1, 14)),
        ({"eos_token_id": None, "text_config": {"eos_token_id": [12, 1]}}, None, (1, 12)),
        ({"eos_token_id": 14, "text_config": {"eos_token_id": 12}}, None, (1, 14)),
        ({}, None, (1,)),
    ],
)
def test_stop_tokens_are_read_from_the_model_files(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, stops: tuple[int, ...]
) -> None:
    """The stop tokens are in config.json, in generation_config.json, or in both. An export contains all of them."""
    model = tiny_model(tmp_path / "model", **config)
    if generation is not None:
        (model / "generation_config.json").write_text(json.dumps(generation))
    tok = load_tokenizer(load_config(ROOT / QUICKSTART, [f"model.path={model}"]))
    assert resolve_stop_token_ids(model, tok, ()) == stops
    assert resolve_stop_token_ids(model, tok, (3,), TokenRows(16, "it")) == (stops[0], 3, *stops[1:])
    if 12 in stops or 14 in stops:
        with pytest.raises(ConfigError, match=r"eos_token_id in .*/config.json has token 1\d, for which"):
            resolve_stop_token_ids(model, tok, (), TokenRows(12, "it"))
    arch = read_architecture(TINY)
    tensors = ((name, torch.zeros(shape)) for name, shape in tensor_shapes(arch).items())
    write_policy(tmp_path / "out", arch, tensors, tok, started_from=model, stop_token_ids=stops)
    assert resolve_stop_token_ids(tmp_path / "out", tok, ()) == stops


def test_roles_have_rows_for_sampled_tokens(tmp_path: Path) -> None:
    """Padding of the vocabulary is never sampled, and differs among the models of a family."""
    small = tiny_model(tmp_path / "small", vocab_size=12)
    wide = tiny_model(tmp_path / "wide", vocab_size=64)
    for role in ("critic", "reference"):
        config = load_config(ROOT / QUICKSTART, [f"{role}.path={small}"])
        with pytest.raises(ConfigError, match=rf"{role}.path '.*small' has rows for 12 tokens .* samples from 15; use"):
            token_rows(config, load_tokenizer(config))
        assert token_rows(config, load_tokenizer(config), training=False).count == 16
    config = load_config(ROOT / QUICKSTART, [f"model.path={wide}", f"critic.path={TINY}"])
    assert token_rows(config, load_tokenizer(config)) == TokenRows(16, str(TINY))


def renumbered(content: dict[str, Any]) -> None:
    """Exchange the ids of two tokens of the vocabulary."""
    vocabulary = content["model"]["vocab"]
    vocabulary["3"], vocabulary["4"] = vocabulary["4"], vocabulary["3"]


def with_one_more(content: dict[str, Any]) -> None:
    """Assign the first id after the vocabulary to a token that the base lacks."""
    content["added_tokens"].append({**content["added_tokens"][0], "id": 15, "content": ADDED})


@pytest.mark.parametrize("setting", ["critic.path", "reference.path", "model.path"])
def test_models_with_different_token_ids_are_refused(tmp_path: Path, setting: str) -> None:
    """Two tokens are exchanged. A token in only one of the tokenizers is not a difference."""
    other, base = tiny_model(tmp_path / "other", renumbered), tiny_model(tmp_path / "base", with_one_more)
    same = tiny_model(tmp_path / "same", lambda content: content.update(version="1.0", padding=None))
    bare = tiny_model(tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    overrides = [f"model.tokenizer={TINY}"]
    ids = load_tokenizer(load_config(ROOT / QUICKSTART, overrides)).get_vocab()
    first, second = (ids[token] for token in "34")
    assert {first, second} <= set(range(15))
    for folder in (base, same, bare, TINY):
        config = load_config(ROOT / QUICKSTART, [*overrides, f"{setting}={folder}"])
        assert token_rows(config, load_tokenizer(config)).count == 16
    config = load_config(ROOT / QUICKSTART, [*overrides, f"{setting}={other}"])
    message = (
        rf"{setting} '{other}' has a tokenizer with '4' at token {first}, where the run's tokenizer has '3'; use a"
    )
    with pytest.raises(ConfigError, match=message):
        token_rows(config, load_tokenizer(config))
    (other / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"{setting} '{other}' has a tokenizer that cannot be compared with the run"):
        token_rows(config, load_tokenizer(config))


def test_dry_run_compares_tokenizers_of_start_models(tmp_path: Path) -> None:
    """The tokenizer is in a model folder, or is the tokenizer of another run."""
    other, same = (pretrained(tmp_path / name) for name in ("other", "same"))
    content = json.loads((other / "tokenizer.json").read_text())
    renumbered(content)
    (other / "tokenizer.json").write_text(json.dumps(content))
    for role in ("actor", "critic"):
        config = load_config(ROOT / QUICKSTART, [f"{role}.start_from={same}"])
        assert [finding.state for finding in origin_findings(config)] == ["fine"]
        config = load_config(ROOT / QUICKSTART, [f"{role}.start_from={other}"])
        with pytest.raises(ConfigError, match=rf"{role}.start_from '{other}' has a tokenizer with '4' at token"):
            list(origin_findings(config))


def test_saved_samples_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    """Folders of earlier versions record no vocabulary and are accepted."""
    other = tiny_model(tmp_path / "other", renumbered)
    folder = tmp_path / "experience/step-000001"
    folder.mkdir(parents=True)
    marker = {"step": 1, "run": "/runs/a", "ranks": 1, "saved": 2, "prompts_per_step": 2, "samples_per_prompt": 1}
    config = load_config(ROOT / QUICKSTART, [f"rollout.load_from={folder.parent}", "evaluation=null"])
    for tokenizer_of, is_refused in ((None, False), (TINY, False), (other, True)):
        recorded: dict[str, Any] = {}
        if tokenizer_of is not None:
            tok = load_tokenizer(load_config(ROOT / QUICKSTART, [f"model.path={tokenizer_of}"]))
            recorded = {"vocabulary": vocabulary_digest(tok)}
        (folder / "step.json").write_text(json.dumps({**marker, "temperature": 1.0, **recorded}))
        if is_refused:
            with pytest.raises(ConfigError, match="has samples of a run with another tokenizer, in which ids"):
                read_tokens(config)
        else:
            read_tokens(config)


END = len(TOKENIZER)
"""The id of `ADDED` among the tokens of episodes. The model has no row for this id."""
WITH_ADDED = (
    "{% for m in messages %}{{ m.content }}<|im_end|>{% if m.role == 'tool' %}" + ADDED + "{% endif %}{% endfor %}"
)


def narrow_runner(environment: Environment, engine: SayingEngine, template: str | None) -> EpisodeRunner:
    """Return a runner for which half of the episodes of a step may fail."""
    settings, tok = EnvironmentSettings(max_failure_fraction=0.5), tokenizer(template)
    tok.add_tokens([AddedToken(ADDED, special=True)])
    chat = None if template is None else ChatTokens(tok, PARAMS.stop_token_ids)
    pool, gateway = ToolPool({}, settings.tools), Gateway(settings.gateway_host)
    shared = SharedEpisodeState(settings, tok, END, chat, "user", pool, gateway, 1000)
    return EpisodeRunner(EnvironmentContext(environment, shared), engine, NeverStop())


class Reading(SayingEngine):
    """An engine that checks that the model has a row for every prompt token."""

    def answer(self, request: GenerateRequest, params: SamplingParams) -> Completion:
        assert max(request.token_ids) < END
        return super().answer(request, params)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("act", "template"),
    [
        (lambda s: s.observe(ADDED), None),
        (lambda s: s.observe(f"what? {ADDED}"), WITH_ADDED),
        (lambda s: s.observe("plain words", role="tool"), WITH_ADDED),
        (lambda s: s.observe_token_ids([1, END]), None),
    ],
    ids=["text", "message", "template", "ids"],
)
def test_episode_with_token_without_a_row_fails_alone(act: Any, template: str | None) -> None:
    class Speaks:
        async def run(self, session: Session) -> float:
            await session.generate()
            if session.seed == 1001:
                act(session)
                await session.generate()
            return 1.0

    runner = narrow_runner(Speaks(), Reading(lambda _: "yes"), template)
    try:
        done = runner.generate(*prompts_and_requests(2), PARAMS)
    finally:
        runner.close()
    good, bad = (completion.episode for completion in done)
    assert good is not None and bad is not None
    assert (good.failure, bad.failure, bad.turns) == ("", "nonsense", ())
    assert str(END) in bad.reason
    assert all(max(completion.token_ids) < END for completion in done)


@pytest.mark.waits
@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("later", [False, True], ids=["first request", "second request"])
def test_agent_request_with_token_without_a_row_is_refused(later: bool) -> None:
    answers: list[tuple[int, str]] = []

    class Served:
        serves = True

        async def run(self, session: Session) -> float:
            async with session.serve() as endpoint, aiohttp.ClientSession() as client:
                messages = [{"role": "user", "content": "go" if later else ADDED}]
                for _ in range(2 if later else 1):
                    body = {"model": "m", "messages": messages}
                    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
                    async with client.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers) as got:
                        answers.append((got.status, await got.text()))
                    messages = [*messages, {"role": "assistant", "content": "yes"}, {"role": "user", "content": ADDED}]
            raise ValueError("the agent gives up")

    runner = narrow_runner(Served(), Reading(lambda _: "yes"), WITH_ADDED)
    with pytest.raises(TooManyFailuresError, match="the agent gives up"):
        try:
            runner.generate(*prompts_and_requests(1), PARAMS)
        finally:
            runner.close()
    status, text = answers[-1]
    assert [s for s, _ in answers] == ([200, 400] if later else [400])
    assert status == 400 and f"would see token {END}, for which it has no row" in text


@pytest.mark.parametrize(
    ("prompt", "answer", "sentence"),
    [
        ((3, 16), (1,), "rollout.generation has a prompt with token 16, for which the model has no row"),
        ((3,), (4, 16), "rollout.generation answered with token 16"),
        ((3,), (4, -1), "rollout.generation answered with token -1"),
    ],
)
def test_custom_generation_needs_rows_for_its_tokens(
    prompt: tuple[int, ...], answer: tuple[int, ...], sentence: str
) -> None:
    class Engine:
        def generate(self, requests: Any, params: Any) -> list[Completion]:
            return [Completion((1,), (0.0,), False, 0)]

    def own(*, requests: Any, params: Any, generate: Any, **_: Any) -> list[Completion]:
        generate([replace(requests[0], token_ids=prompt)], params)
        return [Completion(answer, (0.0,) * len(answer), True, 0)]

    engine: Any = Engine()
    params = SamplingParams(1.0, 9, (1,))
    request = GenerateRequest((3,), seed=1, prompt_id=0)
    with pytest.raises(RunError, match=sentence):
        generated(own, engine, (), [request], params, 16)


def test_completions_with_tokens_without_a_row_are_refused() -> None:
    prompts, requests = prompts_and_requests(1)
    samples = SampleRequests(tuple(prompts), (0,), 1, tuple(requests))
    answer = [Completion((1, END), (0.0, 0.0), False, 0)]
    with pytest.raises(RunError, match=f"the engine answered with token {END}, for which the model has no row"):
        finish_rollout(samples, answer, TOKENIZER, END)
    assert finish_rollout(samples, answer, TOKENIZER, END + 1).response_lengths_B.tolist() == [2]


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
        ("$A </e>", "a+b=", "a+b="),
        ("<b> $A </e>", "a+b=", "<b>a+b="),
        ("<b> $A </e> </e>", "a+b=", "<b>a+b="),
        ("<b> $A", "a+b=", "<b>a+b="),
        ("<b> $A", "<b>a+b=", "<b>a+b="),
        ("<b> $A </e>", "<b>a</e>b=", "<b>a</e>b="),
        ("<b> $A </e>", "</e>a", "<b></e>a"),
        ("$A", "<b>a", "<b>a"),
        ("<b> $A </e>", "a" * 30, "<b>" + "a" * 19),
    ],
)
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
        ("<b> $A", "<b>a=7", "<b>a=7"),
        ("<b> $A", "a=7", "<b>a=7"),
        ("<b> $A </e>", "<b>a=7", "<b>a=7</e>"),
        ("$A </e>", "a=7</e>", "a=7</e>"),
        ("$A", "<b>a=7</e>", "<b>a=7</e>"),
    ],
)
def test_whole_texts_begin_and_end_once(single: str, text: str, read: str) -> None:
    tok = with_ends(single)
    assert decoded(tok, whole_ids(tok, text)) == read


SPACED = ["a", "!=", "b", ",", "5", ".", "do", "n't", "we", "'re", "?"]


@pytest.mark.parametrize(
    ("pieces", "exact"),
    [
        (["a", "!=", "b", ",", "5", ".", "5"], "a != b , 5 . 5"),
        (["do", "n't", "?"], "do n't ?"),
        (["we", "'re", "."], "we 're ."),
    ],
)
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
    [
        ("%d %b %Y", "26 Jul 2024"),
        ("%Y-%m-%d", "2024-07-26"),
        ("%H:%M:%S", "09:30:15"),
        ("%A, week %W", "Friday, week 30"),
    ],
)
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
