"""Conversion between texts and tokens, and tokens for which models have no row, from any source."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from transformers import AddedToken, PreTrainedTokenizerFast

from megappo.config import check_run, load_config
from megappo.config.role_models import load_tokenizer, token_rows
from megappo.config.sections.data import DataSettings
from megappo.config.sections.environment import EnvironmentSettings
from megappo.data import PromptDataset, read_prompts
from megappo.doctor.inputs import origin_findings
from megappo.engines.protocol import Completion, GenerateRequest, SamplingParams
from megappo.engines.requests import RequestTracker
from megappo.environments.chat import ChatTokens
from megappo.environments.episodes import EpisodePool, TooManyFailuresError
from megappo.environments.gateway.server import Gateway
from megappo.environments.protocol import Environment
from megappo.environments.registry import EnvironmentContext
from megappo.environments.session import Session, SharedEpisodeState
from megappo.environments.tools.tool_pool import ToolPool
from megappo.errors import ConfigError, RunError
from megappo.families.parameters import tensor_shapes
from megappo.models.model_files import read_architecture, resolve_stop_token_ids
from megappo.models.tokens import TokenRows
from megappo.models.vocabulary import vocabulary_digest
from megappo.ppo.rollout.answering import generated
from megappo.ppo.rollout.sampling import SampleRequests, finish_rollout
from megappo.preflight.inputs import read_tokens
from megappo.reshard.writer import write_policy
from megappo.runtime.watch.interrupts import NeverStop
from tests.support.data import ROLES, character_tokenizer, records
from tests.support.episodes import PARAMS, TOKENIZER, SayingEngine, prompts_and_requests, tokenizer
from tests.support.places import ROOT, TINY
from tests.support.worlds import QUICKSTART, megappo, pretrained

ADDED = "<tool>"
"""A token of the tokenizers of these tests for which the models have no row."""


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


@pytest.mark.parametrize(
    ("prompt", "template", "tools", "settings"),
    [(f"ab{ADDED}", None, [], {}), ("ab", ROLES + ADDED, [], {}),
     ("ab", "{% if tools %}{{ tools[0].name }}{% endif %}" + ROLES, [{"name": ADDED}], {}),
     ("ab", ROLES, [], {"system_prompt": ADDED}), ([{"role": "user", "content": ADDED}], ROLES, [], {}),
     ("a" * 30 + ADDED, None, [], {"overlong_prompts": "truncate"})],
    ids=["text", "template", "tools", "system prompt", "message", "cut"],
)  # fmt: skip
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


def narrow_pool(environment: Environment, engine: SayingEngine, template: str | None) -> EpisodePool:
    """Return a pool for which half of the episodes of a step may fail."""
    settings, tok = EnvironmentSettings(max_failure_fraction=0.5), tokenizer(template)
    tok.add_tokens([AddedToken(ADDED, special=True)])
    chat = None if template is None else ChatTokens(tok, PARAMS.stop_token_ids)
    tools, gateway = ToolPool({}, settings.tools), Gateway(settings.gateway_host)
    shared = SharedEpisodeState(settings, tok, END, chat, "user", tools, gateway, 1000)
    return EpisodePool(EnvironmentContext(environment, shared), engine, RequestTracker(engine, END), NeverStop())


class Reading(SayingEngine):
    """An engine that checks that the model has a row for every prompt token."""

    def answer(self, request: GenerateRequest, params: SamplingParams) -> Completion:
        assert max(request.token_ids) < END
        return super().answer(request, params)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("act", "template"),
    [(lambda s: s.observe(ADDED), None), (lambda s: s.observe(f"what? {ADDED}"), WITH_ADDED),
     (lambda s: s.observe("plain words", role="tool"), WITH_ADDED), (lambda s: s.observe_token_ids([1, END]), None)],
    ids=["text", "message", "template", "ids"],
)  # fmt: skip
def test_episode_with_token_without_a_row_fails_alone(act: Any, template: str | None) -> None:
    class Speaks:
        async def run(self, session: Session) -> float:
            await session.generate()
            if session.seed == 1001:
                act(session)
                await session.generate()
            return 1.0

    pool = narrow_pool(Speaks(), Reading(lambda _: "yes"), template)
    try:
        done = pool.generate(*prompts_and_requests(2), PARAMS)
    finally:
        pool.close()
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

    pool = narrow_pool(Served(), Reading(lambda _: "yes"), WITH_ADDED)
    with pytest.raises(TooManyFailuresError, match="the agent gives up"):
        try:
            pool.generate(*prompts_and_requests(1), PARAMS)
        finally:
            pool.close()
    status, text = answers[-1]
    assert [s for s, _ in answers] == ([200, 400] if later else [400])
    assert status == 400 and f"would see token {END}, for which it has no row" in text


@pytest.mark.usefixtures("world_of_one")
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
    def own(*, requests: Any, params: Any, generate: Any, **_: Any) -> list[Completion]:
        generate([replace(requests[0], token_ids=prompt)], params)
        return [Completion(answer, (0.0,) * len(answer), True, 0)]

    request = GenerateRequest((3,), seed=1, prompt_id=0)
    with pytest.raises(RunError, match=sentence):
        generated(own, SayingEngine(lambda _: "a"), (), [request], PARAMS, 16)


def test_completions_with_tokens_without_a_row_are_refused() -> None:
    prompts, requests = prompts_and_requests(1)
    samples = SampleRequests(tuple(prompts), (0,), 1, tuple(requests))
    answer = [Completion((1, END), (0.0, 0.0), False, 0)]
    with pytest.raises(RunError, match=f"the engine answered with token {END}, for which the model has no row"):
        finish_rollout(samples, answer, TOKENIZER, END)
    assert finish_rollout(samples, answer, TOKENIZER, END + 1).response_lengths_B.tolist() == [2]
