"""Tests of agents that use the HTTP gateway: requests, recorded trajectories and failures."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import psutil
import pytest
import torch

from megappo.config.sections.environment import EnvironmentSettings
from megappo.engines.protocol import Completion, GenerateRequest
from megappo.environments.episodes import TooManyFailuresError
from megappo.environments.gateway.agent import Agent, AgentError, task_of
from megappo.environments.gateway.server import AgentEndpoint
from megappo.environments.metrics import episode_metrics
from megappo.environments.registry import make_environment
from megappo.environments.session import Session
from megappo.environments.trajectory import Trajectory
from megappo.observe.ends import End
from megappo.ppo.rollout.episodes import keep_episodes, kept_episodes
from megappo.ppo.rollout.sampling import SampleRequests, finish_rollout
from megappo.runtime.waiting import wait_until
from megappo.types import CHAT_MESSAGES, Prompt, RoutingShape
from tests.support.episodes import (
    PARAMS,
    TOKENIZER,
    PromptEngine,
    SayingEngine,
    episode_pool,
    prompts_and_requests,
    text_of,
)

openai = pytest.importorskip("openai", reason="OpenAI's SDK is not installed; it comes with SGLang")
anthropic = pytest.importorskip("anthropic", reason="Anthropic's SDK is not installed; it comes with SGLang")

TEMPLATE = (  # like Qwen 2.5
    "{% if tools %}<|im_start|>system\n{{ tools | map(attribute='function.name') | join(' ') }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or () %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = 'I ask.<tool_call>{"name": "look", "arguments": {"key": "7"}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"key": {"type": "string"}}}


pytestmark = [pytest.mark.usefixtures("world_of_one"), pytest.mark.waits]


class Served:
    """An environment whose agent is a function of the endpoint."""

    serves, role = True, "tool"

    def __init__(self, agent: Callable[..., Any]) -> None:
        self._agent = agent

    async def run(self, session: Session) -> Any:
        async with session.serve() as endpoint:
            return await self._agent(endpoint, session.prompt)


def played(agent: Any, *replies: str, kind: type[SayingEngine] = SayingEngine, count: int = 1, **limits: Any) -> Any:
    """Return the completions of an agent's episodes and the engine. The model answers with `replies` in order."""
    answers = iter(replies)
    engine = kind(lambda request: next(answers, "on"))
    params = replace(PARAMS, max_new_tokens=limits.pop("max_new_tokens", 400))
    environment = agent if hasattr(agent, "run") else Served(agent)
    pool = episode_pool(environment, engine, template=TEMPLATE, **limits)
    try:
        return pool.generate(*prompts_and_requests(count), params), engine
    finally:
        pool.close()


async def asks_openai(endpoint: AgentEndpoint, prompt: Prompt) -> float:
    """Call a tool with OpenAI's SDK until the model answers."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": prompt.text}]
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        while True:
            answer = await client.chat.completions.create(model="m", messages=messages, tools=tools, temperature=0.0)
            message = answer.choices[0].message
            messages.append(message)
            if answer.choices[0].finish_reason != "tool_calls":
                return float(message.content == "It is 42.")
            for call in message.tool_calls:
                value = str(6 * int(json.loads(call.function.arguments)["key"]))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": value})


async def asks_openai_for_a_stream(endpoint: AgentEndpoint, prompt: Prompt) -> float:
    """Call a tool over OpenAI's streaming API. The role and contents have the form of newer models."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
    messages: list[Any] = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": prompt.text}]},
    ]
    arguments = {"model": "m", "tools": tools, "stream": True, "stream_options": {"include_usage": True}}
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        while True:
            text, used = "", 0
            calls: list[Any] = []
            async for chunk in await client.chat.completions.create(messages=messages, **arguments):
                used += chunk.usage.total_tokens if chunk.usage else 0
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    calls += choice.delta.tool_calls or []
            assert used > 0
            tool_calls = [{**call.model_dump(exclude={"index"})} for call in calls]
            messages.append({"role": "assistant", "content": text, "tool_calls": tool_calls or None})
            if not calls:
                return float(text == "It is 42.")
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "42"} for call in calls]


async def asks_anthropic(endpoint: AgentEndpoint, prompt: Prompt, *, stream: bool = False) -> float:
    """Call a tool with Anthropic's SDK until the model answers."""
    tools = [{"name": "look", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": prompt.text}]
    arguments = {"model": "m", "max_tokens": 300, "system": "Be kind.", "tools": tools}
    async with anthropic.AsyncAnthropic(base_url=endpoint.anthropic_base_url, api_key=endpoint.api_key) as client:
        while True:
            if stream:
                async with client.messages.stream(messages=messages, **arguments) as streamed:
                    answer = await streamed.get_final_message()
            else:
                answer = await client.messages.create(messages=messages, **arguments)
            messages.append({"role": "assistant", "content": answer.content})
            if answer.stop_reason != "tool_use":
                return float(answer.content[0].text == "It is 42.")
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": str(6 * int(block.input["key"]))}
                for block in answer.content
                if block.type == "tool_use"
            ]
            messages.append({"role": "user", "content": results})


async def asks_anthropic_for_a_stream(endpoint: AgentEndpoint, prompt: Prompt) -> float:
    return await asks_anthropic(endpoint, prompt, stream=True)


AGENTS = [asks_openai, asks_openai_for_a_stream, asks_anthropic, asks_anthropic_for_a_stream]


@pytest.mark.parametrize("kind", [SayingEngine, PromptEngine])
@pytest.mark.parametrize("agent", AGENTS)
def test_recorded_tokens_equal_engine_output(agent: Any, kind: type[SayingEngine]) -> None:
    """Tokens and log-probabilities are bitwise identical for every SDK."""
    replies: list[Completion] = []

    class Recorder(kind):  # type: ignore[valid-type,misc]
        def answer(self, *arguments: Any) -> Completion:
            replies.append(super().answer(*arguments))
            return replies[-1]

    [completion], engine = played(agent, CALL, "It is 42.", kind=Recorder)
    episode = completion.episode
    assert (episode.failure, episode.trajectories, episode.left_out_tokens) == ("", 1, 0)
    rendered = (
        "<|im_start|>system\nlook<|im_end|>\n<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\ngo <|im_end|>"
    )
    assert text_of(episode.prompt_ids) == rendered + "\n<|im_start|>assistant\n"
    tool_message = "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(completion.token_ids) == f"{CALL}<|im_end|>{tool_message}It is 42.<|im_end|>"
    for turn, reply in zip(episode.turns, replies, strict=True):
        assert completion.token_ids[turn.start : turn.stop] == reply.token_ids
        assert completion.logprobs[turn.start : turn.stop] == reply.logprobs
    assert [turn.reward for turn in episode.turns] == [0.0, 1.0]
    assert episode.tools["look"].calls == 1
    if kind is SayingEngine:  # the trainer gets the model's input
        first, second = (round_[0].token_ids for round_ in engine.rounds)
        assert first == episode.prompt_ids
        assert second == episode.prompt_ids + completion.token_ids[: episode.turns[1].start]


def test_trainer_gets_the_prompt_of_the_agent() -> None:
    completions, _ = played(asks_openai, count=2)
    prompts, _ = prompts_and_requests(2)
    rollouts = finish_rollout(SampleRequests(tuple(prompts), (0, 1), 1, ()), completions, TOKENIZER)
    assert completions[0].episode is not None and completions[0].episode.prompt_ids is not None
    whole = completions[0].episode.prompt_ids + completions[0].token_ids
    assert rollouts.sequences[0].tolist() == list(whole) and rollouts.response_lengths_B.tolist() == [3, 3]
    assert rollouts.episodes is not None and rollouts.responses == ("on", "on")
    assert [message["by"] for message in rollouts.episodes.conversations[0]] == ["agent", "model"]
    restored = kept_episodes(keep_episodes(completions), [False] * 2)
    assert restored == [completion.episode for completion in completions]


def test_changed_prefix_starts_a_new_trajectory() -> None:
    """The trajectory with the last turn becomes the sample. A shortened conversation starts another trajectory."""

    async def wanders(endpoint: AgentEndpoint, prompt: Prompt) -> float:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:

            async def send(*messages: Any) -> list[Any]:
                answer = await client.chat.completions.create(model="m", messages=messages)
                return [*messages, answer.choices[0].message]

            def user(text: str) -> dict[str, str]:
                return {"role": "user", "content": text}

            first = await send(user("one"))
            await send(user("title?"))  # a separate conversation
            second = await send(*first, user("two"))  # continues the first conversation
            await send(user("sum: one two"))  # shortened
            await send(*second[:-1], {"role": "assistant", "content": "changed"}, user("three"))  # rewritten
            await send(*second, user("four"))
        return 1.0

    [completion], _ = played(wanders, "a", "b", "c", "d", "e", "f")
    episode = completion.episode
    assert (episode.trajectories, len(episode.turns), episode.failure) == (4, 3, "")
    assert text_of(completion.token_ids).replace("<|im_end|>", "|").replace("<|im_start|>", "") == (
        "a|\nuser\ntwo|\nassistant\nc|\nuser\nfour|\nassistant\nf|"
    )
    assert [turn.reward for turn in episode.turns] == [0.0, 0.0, 1.0] and episode.left_out_tokens == 6
    metrics = episode_metrics([episode], [len(completion.token_ids)])
    assert metrics["episode/trajectories"] == 4 and metrics["episode/left_out_tokens"] == 6


def test_empty_reply_has_empty_content() -> None:
    """The content is null only for turns that consist of tool calls."""
    only_calls = CALL.removeprefix("I ask.")

    async def reads(endpoint: AgentEndpoint, prompt: Prompt) -> float:
        arguments: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        tools = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            silent = await client.chat.completions.create(**arguments)
            calling = await client.chat.completions.create(**arguments, tools=tools)
        assert silent.choices[0].message.content == "" and calling.choices[0].message.content is None
        return float(calling.choices[0].finish_reason == "tool_calls")

    [completion], _ = played(reads, "", only_calls)
    assert completion.episode.turns[-1].reward == 1.0, completion.episode.reason


def test_rewritten_history_starts_a_new_trajectory() -> None:
    """The template drops the thoughts of earlier turns, so the model no longer sees its full reply."""
    forgetful = TEMPLATE.replace(
        "{{ m.content }}", "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}"
    )

    async def talks(endpoint: AgentEndpoint, prompt: Prompt) -> None:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            messages: list[Any] = [{"role": "user", "content": "go"}]
            for _ in range(2):
                answer = await client.chat.completions.create(model="m", messages=messages)
                messages += [answer.choices[0].message, {"role": "user", "content": "on"}]

    pool = episode_pool(Served(talks), SayingEngine(lambda request: "<think>so</think>yes"), template=forgetful)
    [completion] = pool.generate(*prompts_and_requests(1), PARAMS)
    pool.close()
    assert completion.episode is not None and completion.episode.trajectories == 2
    assert "<think>" not in text_of(completion.episode.prompt_ids or ())


def test_lone_surrogate_becomes_a_question_mark() -> None:
    """JSON can contain half of a surrogate pair. Tokenizers reject such text."""

    async def asks(endpoint: AgentEndpoint, prompt: Prompt) -> None:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.api_key}"}) as http:
            data = '{"messages": [{"role": "user", "content": "a\\ud800b"}]}'
            async with http.post(f"{endpoint.base_url}/chat/completions", data=data) as answer:
                assert answer.status == 200

    [completion], _ = played(asks)
    assert "a?b" in text_of(completion.episode.prompt_ids), completion.episode.reason


def test_concurrent_requests_are_answered_in_sequence() -> None:
    async def hurries(endpoint: AgentEndpoint, prompt: Prompt) -> float:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            questions = [{"role": "user", "content": str(number)} for number in range(3)]
            answers = [client.chat.completions.create(model="m", messages=[question]) for question in questions]
            return float(len({answer.id for answer in await asyncio.gather(*answers)}))

    completions, _ = played(hurries, count=4)
    assert all(c.episode.turns[-1].reward == 3.0 and c.episode.trajectories == 3 for c in completions)


def test_cancelled_requests_are_not_recorded() -> None:
    """A cancelled side question is dropped. A repeated request continues the conversation."""
    received, answers = list[str](), list[str]()

    def seconds(request: GenerateRequest) -> float:
        received.append(text_of(request.token_ids))
        return 0.3 if len(received) in (2, 3) else 0.0

    async def cancels_requests(endpoint: AgentEndpoint, prompt: Prompt) -> float:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:

            async def send(messages: list[dict[str, str]], *, waits: bool = True) -> str:
                known = len(received)
                answer = asyncio.ensure_future(client.chat.completions.create(model="m", messages=messages))
                if waits:
                    return str((await answer).choices[0].message.content)
                while len(received) == known:
                    await asyncio.sleep(0.01)
                answer.cancel()
                return ""

            messages = [{"role": "user", "content": "the task"}]
            messages.append({"role": "assistant", "content": await send(messages)})
            await send([{"role": "user", "content": "a hint?"}], waits=False)
            messages.append({"role": "user", "content": "go on"})
            await send(messages, waits=False)
            answers.append(await send(messages))
            await asyncio.sleep(0.7)  # time for a late answer to arrive
        return 1.0

    engine = PromptEngine(lambda request: str(len(received)), seconds)
    pool = episode_pool(Served(cancels_requests), engine, template=TEMPLATE)
    try:
        [completion] = pool.generate(*prompts_and_requests(1), replace(PARAMS, max_new_tokens=400))
    finally:
        pool.close()
    episode = completion.episode
    assert episode is not None and (episode.failure, episode.trajectories, episode.left_out_tokens) == ("", 1, 0)
    assert text_of(completion.token_ids).count("go on") == 1
    assert [text_of(completion.token_ids[turn.start : turn.stop]) for turn in episode.turns] == [
        "1<|im_end|>",
        f"{answers[0]}<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("limits", "end", "message"),
    [
        ({"max_turns": 2}, End.OUT_OF_TURNS, "reached its limit of turns"),
        ({"max_calls": 1}, End.OUT_OF_CALLS, "reached its limit of calls"),
        ({"max_new_tokens": 90}, End.RESPONSE_LIMIT, "reached its limit of tokens"),
    ],
)
@pytest.mark.parametrize("catches", [True, False])
def test_limit_ends_episode_despite_agent_handling(
    limits: dict[str, Any], end: End, message: str, catches: bool
) -> None:
    """The agent receives one error. Earlier rewards count, and so does a reward that the agent returns afterwards."""
    refusals: list[str] = []

    async def reaches_limit(endpoint: AgentEndpoint, prompt: Prompt) -> float:
        try:
            return await asks_openai(endpoint, prompt)
        except openai.BadRequestError as error:
            refusals.append(str(error))
            if not catches:
                raise
            return 0.5

    [completion], _ = played(reaches_limit, CALL, CALL, CALL, CALL, **limits)
    assert len(refusals) == 1 and message in refusals[0]
    assert ("context_length_exceeded" in refusals[0]) == (end is End.RESPONSE_LIMIT)
    episode = completion.episode
    assert (episode.end, episode.failure) == (end, "")
    assert sum(turn.reward for turn in episode.turns) == (0.5 if catches else 0.0)


def test_oversized_prompt_is_reported() -> None:
    async def long_winded(endpoint: AgentEndpoint, prompt: Prompt) -> None:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "no " * 1000}])

    with pytest.raises(TooManyFailuresError, match="limit of tokens before the model's first turn"):
        played(long_winded)


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 2}, "n is 2, which the model"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "stop": ["."]}, "stop is ['.'], which"),
        ("chat/completions", {"messages": "x"}, "messages is 'x', must be a list"),
        ("chat/completions", {"messages": [{"role": "bot"}]}, "must have the role system, developer"),
        ("chat/completions", {"messages": []}, "the last message must not be a message of the model"),
        ("chat/completions", {"messages": [{"role": "assistant", "content": "x"}]}, "must not be a message of"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "reads text alone"),
        ("chat/completions", {"messages": [{"role": "user", "content": 3}]}, "has the content 3, must be a text"),
        ("chat/completions", {"messages": [{"role": "user"}], "max_tokens": 0}, "max_tokens is 0, must be a whole"),
        ("chat/completions", {"messages": [{"role": "user"}], "tools": [1]}, "a tool is 1, must be a function"),
        ("chat/completions", {"messages": [{"role": "user"}], "tools": 3}, "tools is 3, must be a list"),
        ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": 3}]}, "tool_calls is 3, must be a list"),
        (
            "chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
            "arguments that are no JSON",
        ),
        ("chat/completions", [], "the request is no object"),
        ("chat/completions", None, "the request is no JSON"),
        ("messages", {"messages": [{"role": "user", "content": "x"}], "stop_sequences": ["."]}, "stop_sequences is"),
        ("messages", {"messages": [{"role": "user", "content": "x"}], "tools": 3}, "tools is 3, must be a list"),
        ("messages", {"messages": [{"role": "tool"}]}, "must have the role user or assistant"),
        ("messages", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "must have a name and an input"),
    ],
)  # fmt: skip
def test_invalid_requests_are_rejected(path: str, body: Any, sentence: str) -> None:
    """The error has the form of the protocol, and precedes any generation."""

    async def asks_nonsense(endpoint: AgentEndpoint, prompt: Prompt) -> None:
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            data = "{" if body is None else json.dumps(body)
            async with http.post(f"{endpoint.base_url}/{path}", data=data) as answer:
                payload = await answer.json()
                assert (answer.status, payload["error"]["type"]) == (400, "invalid_request_error")
                raise RuntimeError(payload["error"]["message"])

    [completion], engine = played(asks_nonsense, max_failure_fraction=1.0)
    assert completion.episode.failure == "raised" and sentence in completion.episode.reason, completion.episode.reason
    assert not engine.rounds


def test_key_belongs_to_one_episode() -> None:
    seen: list[AgentEndpoint] = []

    async def send(endpoint: AgentEndpoint, key: str) -> None:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=key) as client:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])

    async def tries_others(endpoint: AgentEndpoint, prompt: Prompt) -> None:
        assert endpoint.base_url.startswith("http://127.0.0.1:")
        for key in ("", "megappo-", *(other.api_key for other in seen)):
            with pytest.raises(openai.AuthenticationError, match="the key belongs to no running episode"):
                await send(endpoint, key or "none")
        await send(endpoint, endpoint.api_key)
        seen.append(endpoint)

    completions, _ = played(tries_others)
    completions += played(tries_others)[0]
    assert all(not completion.episode.failure for completion in completions)
    assert seen[0].api_key != seen[1].api_key


class Mixed:
    """Of four agents, one answers, one raises, one hangs after a cancelled request and one sends no request."""

    serves, role = True, "tool"

    async def run(self, session: Session) -> Any:
        async with session.serve() as endpoint:
            match session.prompt.index % 4:
                case 1:
                    raise KeyError("no such key")
                case 2:
                    task = asyncio.create_task(asks_openai(endpoint, session.prompt))
                    await asyncio.sleep(0.3)
                    task.cancel()
                    await asyncio.Event().wait()
                case 3:
                    return 1.0
            return await asks_openai(endpoint, session.prompt)


def test_failing_agent_affects_only_its_sample() -> None:
    completions, _ = played(Mixed(), count=16, kind=PromptEngine, max_seconds=1.5, max_failure_fraction=0.75)
    failures = [completion.episode.failure for completion in completions]
    assert failures == ["", "raised", "hung", "nonsense"] * 4
    assert "no such key" in completions[1].episode.reason


def test_trajectory_keeps_routing_of_each_turn() -> None:
    """The routing starts at the trajectory's own prompt. A final observation has no routing, and later turns do not
    change earlier routing."""
    shape = RoutingShape(layers=1, experts_per_token=1, experts=4)
    trajectory = Trajectory((1, 2, 3))

    def turn(tokens: int, expert: int) -> Completion:
        computed = len(trajectory.seen) + tokens - 1
        return Completion((7,) * tokens, (-1.0,) * tokens, False, 1, torch.full((computed, 1, 1), expert))

    trajectory.add_turn(turn(2, 0), End.RESPONSE_LIMIT)
    trajectory.add_observation((8, 8))
    trajectory.add_turn(turn(1, 1), End.RESPONSE_LIMIT)
    trajectory.add_observation((9,))
    routing = trajectory.routing(shape)
    assert routing is not None and routing[:, 0, 0].tolist() == [0, 0, 0, 0, 1, 1, 1, 255]
    assert len(routing) == len(trajectory.seen) - 1 and trajectory.routing(None) is None
    assert trajectory.own_tokens == 3 and [(t.start, t.stop) for t in trajectory.turns] == [(0, 2), (4, 5)]


# The environment `agent`

PROGRAM = """
import json, os, sys, urllib.request
task = sys.stdin.read()
assert sys.argv[1] == f"--task={task}" and os.listdir(".") == [], sys.argv
def ask(messages):
    url, key = os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    request = urllib.request.Request(url, body, {"Authorization": "Bearer " + key, "Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
messages = [{"role": "user", "content": task}]
messages.append(ask(messages))
if "MODE" == "raises":
    sys.exit("it went wrong")
if "MODE" == "hangs":
    import subprocess
    subprocess.Popen(["sleep", "1000"], start_new_session=True).wait()
messages.append({"role": "user", "content": "again"})
ask(messages)
"""


def processes() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.fixture
def dead_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set proxy variables, as many clusters do, to an unreachable address."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")  # restored after the test


@pytest.mark.usefixtures("dead_proxy")
@pytest.mark.parametrize(("mode", "failure"), [("plays", ""), ("raises", "raised"), ("hangs", "hung")])
def test_program_agent_plays_and_cleans_up(
    mode: str, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program finds the model through its variables. Its child processes and its folder are removed when its
    episode ends."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before, code = processes(), PROGRAM.replace("MODE", mode)
    agent = Agent(command=[sys.executable, "-c", code, "--task={prompt}"])
    start = time.monotonic()
    completions, _ = played(agent, count=2, max_seconds=3.0, max_failure_fraction=1.0)
    assert [c.episode.failure for c in completions] == [failure] * 2, completions[0].episode.reason
    if mode == "plays":
        assert all(len(c.episode.turns) == 2 and c.episode.trajectories == 1 for c in completions)
    if mode == "raises":
        assert "ended with status 1: it went wrong" in completions[0].episode.reason
    assert time.monotonic() - start < 30
    assert wait_until(lambda: processes() <= before, 10.0, every_seconds=0.05)
    assert wait_until(lambda: not list(tmp_path.iterdir()), 10.0, every_seconds=0.05)


@pytest.mark.usefixtures("dead_proxy")
def test_agent_program_gets_only_named_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that looks like an option is rejected as an argument."""
    names = ("WANDB_API_KEY", "SEARCH_KEY", "TOKENIZERS_PARALLELISM")
    for name in names:
        monkeypatch.setenv(name, "given")
    code = f"import os, sys; sys.exit(' '.join(os.environ.get(name, 'none') for name in {names}))"
    [completion], _ = played(
        Agent(command=[sys.executable, "-c", code], variables=["SEARCH_KEY"]), max_failure_fraction=1.0
    )
    assert completion.episode.reason.endswith("ended with status 1: none given given")
    with pytest.raises(ValueError, match="variables is 'KEY', must be a list of names"):
        Agent(command=["x"], variables="KEY")
    prompt = Prompt(0, (1,), "--upload-all", None, {})
    session = SimpleNamespace(prompt=prompt, serve=lambda _format: nullcontext(None))
    with pytest.raises(AgentError, match="the program would misinterpret the task '--upload-all' as an argument"):
        asyncio.run(Agent(command=["x", "{prompt}"]).run(cast(Any, session)))


@pytest.mark.usefixtures("dead_proxy")
def test_function_agent_plays() -> None:
    environment = make_environment(
        EnvironmentSettings(name="agent", arguments={"function": "tests.environments.test_gateway:asks_openai"})
    )
    [completion], _ = played(environment, CALL, "It is 42.")
    assert [turn.reward for turn in completion.episode.turns] == [0.0, 1.0]
    chat = Prompt(0, (1,), "<|im_start|>6*7?", None, {CHAT_MESSAGES: [{"role": "user", "content": "6*7?"}]})
    assert task_of(chat) == "6*7?" and task_of(replace(chat, metadata={})) == "<|im_start|>6*7?"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "must contain either function or command of the agent"),
        ({"function": "a:b", "command": ["x"]}, "must contain either function or command of the agent"),
        ({"function": "tests.environments.test_gateway:played"}, "has no async function 'played'"),
        ({"command": "python x"}, "must be a list of texts"),
        ({"command": ["x"], "format": "qwin"}, "must be qwen or llama3"),
    ],
)
def test_unusable_agents_are_rejected(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_environment(EnvironmentSettings(name="agent", arguments=arguments))


def test_gateway_listens_on_one_address() -> None:
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ValueError, match="every address of the machine"):
            EnvironmentSettings(gateway_host=host)
    with pytest.raises(Exception, match="cannot be served on rollout.environment.gateway_host '192.0.2.1'"):
        played(asks_openai, gateway_host="192.0.2.1")
