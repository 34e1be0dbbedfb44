"""Agents that speak HTTP: what they are told, what is recorded of it, and what they cost when they fail."""

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

from megappo.config.environment import EnvironmentSettings
from megappo.engines.protocol import Completion, GenerateRequest
from megappo.environments.agent import Agent, AgentError, task_of
from megappo.environments.gateway.server import AgentEndpoint
from megappo.environments.metrics import episode_metrics
from megappo.environments.registry import make_environment
from megappo.environments.runner import TooManyFailuresError
from megappo.environments.session import Session
from megappo.environments.trajectory import Trajectory
from megappo.observe.ends import End
from megappo.ppo.episodes import keep_episodes, kept_episodes
from megappo.ppo.sampling import SampleRequests, finish_rollout
from megappo.runtime.waiting import wait_until
from megappo.types import CHAT_MESSAGES, Prompt, RoutingShape
from tests.support.episodes import PARAMS, TOKENIZER, PromptEngine, SayingEngine, asked, runner, text_of

openai = pytest.importorskip("openai", reason="OpenAI's SDK is not installed; it comes with SGLang")
anthropic = pytest.importorskip("anthropic", reason="Anthropic's SDK is not installed; it comes with SGLang")

TEMPLATE = (  # as Qwen 2.5's
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
    """The completions of episodes of an agent, to whom the model says one thing after another, and the engine."""
    said = iter(replies)
    engine = kind(lambda request: next(said, "on"))
    params = replace(PARAMS, max_new_tokens=limits.pop("max_new_tokens", 400))
    environment = agent if hasattr(agent, "run") else Served(agent)
    made = runner(environment, engine, template=TEMPLATE, **limits)
    try:
        return made.generate(*asked(count), params), engine
    finally:
        made.close()


async def asks_openai(endpoint: AgentEndpoint, prompt: Prompt) -> float:
    """Written with nothing but OpenAI's SDK."""
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
                found = str(6 * int(json.loads(call.function.arguments)["key"]))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})


async def asks_openai_for_a_stream(endpoint: AgentEndpoint, prompt: Prompt) -> float:
    """Put together from chunks; a role and contents as newer models have them."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
    messages: list[Any] = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": prompt.text}]},
    ]
    wanted = {"model": "m", "tools": tools, "stream": True, "stream_options": {"include_usage": True}}
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        while True:
            text, used = "", 0
            calls: list[Any] = []
            async for chunk in await client.chat.completions.create(messages=messages, **wanted):
                used += chunk.usage.total_tokens if chunk.usage else 0
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    calls += choice.delta.tool_calls or []
            assert used > 0
            told = [{**call.model_dump(exclude={"index"})} for call in calls]
            messages.append({"role": "assistant", "content": text, "tool_calls": told or None})
            if not calls:
                return float(text == "It is 42.")
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "42"} for call in calls]


async def asks_anthropic(endpoint: AgentEndpoint, prompt: Prompt, *, stream: bool = False) -> float:
    """Written with nothing but Anthropic's SDK."""
    tools = [{"name": "look", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": prompt.text}]
    wanted = {"model": "m", "max_tokens": 300, "system": "Be kind.", "tools": tools}
    async with anthropic.AsyncAnthropic(base_url=endpoint.anthropic_base_url, api_key=endpoint.api_key) as client:
        while True:
            if stream:
                async with client.messages.stream(messages=messages, **wanted) as streamed:
                    answer = await streamed.get_final_message()
            else:
                answer = await client.messages.create(messages=messages, **wanted)
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
def test_what_the_engine_made_is_what_is_recorded(agent: Any, kind: type[SayingEngine]) -> None:
    """Tokens and log-probabilities to the last bit, the same whichever SDK the agent is written with."""
    replies: list[Completion] = []

    class Kept(kind):  # type: ignore[valid-type,misc]
        def answer(self, *given: Any) -> Completion:
            replies.append(super().answer(*given))
            return replies[-1]

    [completion], engine = played(agent, CALL, "It is 42.", kind=Kept)
    episode = completion.episode
    assert (episode.failure, episode.trajectories, episode.left_out_tokens) == ("", 1, 0)
    words = (
        "<|im_start|>system\nlook<|im_end|>\n<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\ngo <|im_end|>"
    )
    assert text_of(episode.prompt_ids) == words + "\n<|im_start|>assistant\n"
    heard = "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(completion.token_ids) == f"{CALL}<|im_end|>{heard}It is 42.<|im_end|>"
    for turn, reply in zip(episode.turns, replies, strict=True):
        assert completion.token_ids[turn.start : turn.stop] == reply.token_ids
        assert completion.logprobs[turn.start : turn.stop] == reply.logprobs
    assert [turn.reward for turn in episode.turns] == [0.0, 1.0]
    assert episode.tools["look"].calls == 1
    if kind is SayingEngine:  # what the model saw is what the trainer will see
        first, second = (round_[0].token_ids for round_ in engine.rounds)
        assert first == episode.prompt_ids
        assert second == episode.prompt_ids + completion.token_ids[: episode.turns[1].start]


def test_the_trainer_sees_the_prompt_that_the_agent_wrote() -> None:
    completions, _ = played(asks_openai, count=2)
    prompts, _ = asked(2)
    rollouts = finish_rollout(SampleRequests(tuple(prompts), (0, 1), 1, ()), completions, TOKENIZER)
    assert completions[0].episode is not None and completions[0].episode.prompt_ids is not None
    whole = completions[0].episode.prompt_ids + completions[0].token_ids
    assert rollouts.sequences[0].tolist() == list(whole) and rollouts.response_lengths_B.tolist() == [3, 3]
    assert rollouts.episodes is not None and rollouts.responses == ("on", "on")
    assert [said["by"] for said in rollouts.episodes.conversations[0]] == ["agent", "model"]
    kept = kept_episodes(keep_episodes(completions), [False] * 2)
    assert kept == [completion.episode for completion in completions]


def test_a_changed_prefix_opens_a_trajectory_and_the_last_spoken_one_is_the_sample() -> None:
    """It goes on from whatever it goes on from; a conversation that was shortened begins anew."""

    async def wanders(endpoint: AgentEndpoint, prompt: Prompt) -> float:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:

            async def ask(*messages: Any) -> list[Any]:
                answer = await client.chat.completions.create(model="m", messages=messages)
                return [*messages, answer.choices[0].message]

            def user(text: str) -> dict[str, str]:
                return {"role": "user", "content": text}

            first = await ask(user("one"))
            await ask(user("title?"))  # beside it
            second = await ask(*first, user("two"))  # goes on from the first
            await ask(user("sum: one two"))  # shortened
            await ask(*second[:-1], {"role": "assistant", "content": "changed"}, user("three"))  # rewritten
            await ask(*second, user("four"))
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


def test_saying_nothing_is_an_empty_text() -> None:
    """Not null, which is for turns that only call tools."""
    only_calls = CALL.removeprefix("I ask.")

    async def reads(endpoint: AgentEndpoint, prompt: Prompt) -> float:
        wanted: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        tools = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            silent = await client.chat.completions.create(**wanted)
            calling = await client.chat.completions.create(**wanted, tools=tools)
        assert silent.choices[0].message.content == "" and calling.choices[0].message.content is None
        return float(calling.choices[0].finish_reason == "tool_calls")

    [completion], _ = played(reads, "", only_calls)
    assert completion.episode.turns[-1].reward == 1.0, completion.episode.reason


def test_what_a_template_rewrites_is_another_trajectory() -> None:
    """Thoughts of earlier turns that are left out once a user speaks: the model no longer sees what it said."""
    forgetful = TEMPLATE.replace(
        "{{ m.content }}", "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}"
    )

    async def talks(endpoint: AgentEndpoint, prompt: Prompt) -> None:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            messages: list[Any] = [{"role": "user", "content": "go"}]
            for _ in range(2):
                answer = await client.chat.completions.create(model="m", messages=messages)
                messages += [answer.choices[0].message, {"role": "user", "content": "on"}]

    made = runner(Served(talks), SayingEngine(lambda request: "<think>so</think>yes"), template=forgetful)
    [completion] = made.generate(*asked(1), PARAMS)
    made.close()
    assert completion.episode is not None and completion.episode.trajectories == 2
    assert "<think>" not in text_of(completion.episode.prompt_ids or ())


def test_half_a_character_is_a_question_mark() -> None:
    """JSON can hold halves of surrogate pairs, and tokenizers refuse them."""

    async def asks(endpoint: AgentEndpoint, prompt: Prompt) -> None:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.api_key}"}) as http:
            data = '{"messages": [{"role": "user", "content": "a\\ud800b"}]}'
            async with http.post(f"{endpoint.base_url}/chat/completions", data=data) as answer:
                assert answer.status == 200

    [completion], _ = played(asks)
    assert "a?b" in text_of(completion.episode.prompt_ids), completion.episode.reason


def test_two_requests_at_once_are_answered_one_after_the_other() -> None:
    async def hurries(endpoint: AgentEndpoint, prompt: Prompt) -> float:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            asks = [{"role": "user", "content": str(number)} for number in range(3)]
            answers = [client.chat.completions.create(model="m", messages=[ask]) for ask in asks]
            return float(len({answer.id for answer in await asyncio.gather(*answers)}))

    completions, _ = played(hurries, count=4)
    assert all(c.episode.turns[-1].reward == 3.0 and c.episode.trajectories == 3 for c in completions)


def test_what_an_agent_gave_up_is_recorded_nowhere() -> None:
    """A side question is dropped, and a request that is asked once more goes on with the conversation."""
    asked_for, answers = list[str](), list[str]()

    def seconds(request: GenerateRequest) -> float:
        asked_for.append(text_of(request.token_ids))
        return 0.3 if len(asked_for) in (2, 3) else 0.0

    async def gives_up(endpoint: AgentEndpoint, prompt: Prompt) -> float:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:

            async def ask(messages: list[dict[str, str]], *, waits: bool = True) -> str:
                known = len(asked_for)
                answer = asyncio.ensure_future(client.chat.completions.create(model="m", messages=messages))
                if waits:
                    return str((await answer).choices[0].message.content)
                while len(asked_for) == known:
                    await asyncio.sleep(0.01)
                answer.cancel()
                return ""

            messages = [{"role": "user", "content": "the task"}]
            messages.append({"role": "assistant", "content": await ask(messages)})
            await ask([{"role": "user", "content": "a hint?"}], waits=False)
            messages.append({"role": "user", "content": "go on"})
            await ask(messages, waits=False)
            answers.append(await ask(messages))
            await asyncio.sleep(0.7)  # an answer that nobody waits for would have come
        return 1.0

    engine = PromptEngine(lambda request: str(len(asked_for)), seconds)
    made = runner(Served(gives_up), engine, template=TEMPLATE)
    try:
        [completion] = made.generate(*asked(1), replace(PARAMS, max_new_tokens=400))
    finally:
        made.close()
    episode = completion.episode
    assert episode is not None and (episode.failure, episode.trajectories, episode.left_out_tokens) == ("", 1, 0)
    assert text_of(completion.token_ids).count("go on") == 1
    assert [text_of(completion.token_ids[turn.start : turn.stop]) for turn in episode.turns] == [
        "1<|im_end|>",
        f"{answers[0]}<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("limits", "end", "told"),
    [
        ({"max_turns": 2}, End.OUT_OF_TURNS, "reached its limit of turns"),
        ({"max_calls": 1}, End.OUT_OF_CALLS, "reached its limit of calls"),
        ({"max_new_tokens": 90}, End.RESPONSE_LIMIT, "reached its limit of tokens"),
    ],
)
@pytest.mark.parametrize("catches", [True, False])
def test_a_limit_ends_the_episode_whatever_the_agent_makes_of_it(
    limits: dict[str, Any], end: End, told: str, catches: bool
) -> None:
    """It is told once, and the rewards until then count, with the agent's own where it goes on to give one."""
    refusals: list[str] = []

    async def meets_it(endpoint: AgentEndpoint, prompt: Prompt) -> float:
        try:
            return await asks_openai(endpoint, prompt)
        except openai.BadRequestError as error:
            refusals.append(str(error))
            if not catches:
                raise
            return 0.5

    [completion], _ = played(meets_it, CALL, CALL, CALL, CALL, **limits)
    assert len(refusals) == 1 and told in refusals[0]
    assert ("context_length_exceeded" in refusals[0]) == (end is End.RESPONSE_LIMIT)
    episode = completion.episode
    assert (episode.end, episode.failure) == (end, "")
    assert sum(turn.reward for turn in episode.turns) == (0.5 if catches else 0.0)


def test_a_prompt_that_does_not_fit_is_told() -> None:
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
def test_what_cannot_be_asked_is_told(path: str, body: Any, sentence: str) -> None:
    """Before anything is generated, in the form of the protocol's errors."""

    async def asks_nonsense(endpoint: AgentEndpoint, prompt: Prompt) -> None:
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            data = "{" if body is None else json.dumps(body)
            async with http.post(f"{endpoint.base_url}/{path}", data=data) as answer:
                told = await answer.json()
                assert (answer.status, told["error"]["type"]) == (400, "invalid_request_error")
                raise RuntimeError(told["error"]["message"])

    [completion], engine = played(asks_nonsense, max_failure_fraction=1.0)
    assert completion.episode.failure == "raised" and sentence in completion.episode.reason, completion.episode.reason
    assert not engine.rounds


def test_a_key_is_of_one_episode_and_ends_with_it() -> None:
    seen: list[AgentEndpoint] = []

    async def ask(endpoint: AgentEndpoint, key: str) -> None:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=key) as client:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])

    async def tries_others(endpoint: AgentEndpoint, prompt: Prompt) -> None:
        assert endpoint.base_url.startswith("http://127.0.0.1:")
        for key in ("", "megappo-", *(other.api_key for other in seen)):
            with pytest.raises(openai.AuthenticationError, match="the key belongs to no running episode"):
                await ask(endpoint, key or "none")
        await ask(endpoint, endpoint.api_key)
        seen.append(endpoint)

    completions, _ = played(tries_others)
    completions += played(tries_others)[0]
    assert all(not completion.episode.failure for completion in completions)
    assert seen[0].api_key != seen[1].api_key


class Mixed:
    """Of four agents one raises, one hangs in the middle of a request that it has forgotten, one asks no one."""

    serves, role = True, "tool"

    async def run(self, session: Session) -> Any:
        async with session.serve() as endpoint:
            match session.prompt.index % 4:
                case 1:
                    raise KeyError("no such key")
                case 2:
                    asking = asyncio.create_task(asks_openai(endpoint, session.prompt))
                    await asyncio.sleep(0.3)
                    asking.cancel()
                    await asyncio.Event().wait()
                case 3:
                    return 1.0
            return await asks_openai(endpoint, session.prompt)


def test_an_agent_that_fails_costs_its_own_sample() -> None:
    completions, _ = played(Mixed(), count=16, kind=PromptEngine, max_seconds=1.5, max_failure_fraction=0.75)
    found = [completion.episode.failure for completion in completions]
    assert found == ["", "raised", "hung", "nonsense"] * 4
    assert "no such key" in completions[1].episode.reason


def test_a_trajectory_keeps_the_routing_of_each_turn() -> None:
    """Of its own prompt on; what was heard last has been seen by no engine, and a later turn changes no earlier one."""
    shape = RoutingShape(layers=1, experts_per_token=1, experts=4)
    trajectory = Trajectory((1, 2, 3))

    def turn(tokens: int, expert: int) -> Completion:
        computed = len(trajectory.seen) + tokens - 1
        return Completion((7,) * tokens, (-1.0,) * tokens, False, 1, torch.full((computed, 1, 1), expert))

    trajectory.say(turn(2, 0), End.RESPONSE_LIMIT)
    trajectory.hear((8, 8))
    trajectory.say(turn(1, 1), End.RESPONSE_LIMIT)
    trajectory.hear((9,))
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
    """What stands in the environment of many clusters, and leads nowhere from here."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")  # and so it is again after the test


@pytest.mark.usefixtures("dead_proxy")
@pytest.mark.parametrize(("mode", "failure"), [("plays", ""), ("raises", "raised"), ("hangs", "hung")])
def test_an_agent_that_is_a_program(mode: str, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its variables lead it to the model; it ends with its episode, with all that it started and its folder."""
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
def test_an_agents_program_gets_the_secrets_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no task that it would take for an option, which it can read from its standard input."""
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
def test_an_agent_that_is_a_function() -> None:
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
def test_an_agent_that_cannot_be_run_is_refused(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_environment(EnvironmentSettings(name="agent", arguments=arguments))


def test_agents_are_let_in_at_one_address() -> None:
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ValueError, match="every address of the machine"):
            EnvironmentSettings(gateway_host=host)
    with pytest.raises(Exception, match="cannot be served on rollout.environment.gateway_host '192.0.2.1'"):
        played(asks_openai, gateway_host="192.0.2.1")
