"""Tests of episodes: metrics, limits, failures, chat templates and tools."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch

from megappo.config import ConfigError, derive, load_config
from megappo.config.schema import RewardSettings
from megappo.config.sections.algorithm import AlgorithmSettings
from megappo.config.sections.data import DataSourceSettings
from megappo.config.sections.environment import EnvironmentSettings, ToolSettings
from megappo.data.sources import read_records
from megappo.environments.chat import ChatTokens
from megappo.environments.episodes import TooManyFailuresError
from megappo.environments.guess import GuessNumber, numbers
from megappo.environments.metrics import episode_metrics
from megappo.environments.registry import make_environment
from megappo.environments.session import Session
from megappo.environments.tool_calling import ToolCalling
from megappo.environments.tools.mathematics import calculate, python
from megappo.environments.tools.tool_calls import FORMATS, llama3_calls, qwen_calls
from megappo.environments.tools.tool_pool import ToolPool, ToolResult
from megappo.models.stop_texts import StopTexts
from megappo.observe.ends import End
from megappo.ppo.experience import ExperienceMaker
from megappo.ppo.rollout.episodes import keep_episodes, kept_episodes
from megappo.ppo.rollout.sampling import SampleRequests, finish_rollout
from megappo.rewards.scorer import RewardScorer
from megappo.runtime.waiting import wait_until
from megappo.types import Episode, Rollouts, Scored, ToolUse, Turn
from tests.house.commands import blocks
from tests.support.config import SHAPE
from tests.support.episodes import (
    END,
    PARAMS,
    TOKENIZER,
    PromptEngine,
    SayingEngine,
    episode_pool,
    prompts_and_requests,
    text_of,
    tokenizer,
)
from tests.support.places import BASE, ROOT

GREETING = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
CPU = torch.device("cpu")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = (  # like Qwen 3: drops the thoughts of turns before the last user message
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.index0 < ns.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


pytestmark = pytest.mark.usefixtures("world_of_one")


def test_readme_environment_runs() -> None:
    readme = ROOT / "megappo" / "environments" / "README.md"
    names: dict[str, Any] = {}
    (shown,) = blocks(readme.read_text(), "python")
    exec(compile(shown, readme, "exec"), names)
    episode, text, _ = played(names["Countdown"](rounds=2), "1 or so")
    assert text == "1 or so<|im_end|>1 left.1 or so<|im_end|>"
    assert [turn.reward for turn in episode.turns] == [1.0, 1.0]


def rollouts_of(completions: Any, prompts: Any) -> Rollouts:
    sample_requests = SampleRequests(tuple(prompts), tuple(range(len(prompts))), 1, ())
    return finish_rollout(sample_requests, completions, TOKENIZER)


class Echo:
    """Repeats the model's text after each turn. Rewards each turn and the whole episode."""

    def __init__(self, turns: int = 3) -> None:
        self._turns = turns

    async def run(self, session: Session) -> float:
        for number in range(self._turns):
            reply = await session.generate()
            session.reward(number + 1)
            session.observe(f"you said {reply.text}.")
        return 10.0


def test_model_sees_observations_and_trains_on_own_tokens() -> None:
    engine = SayingEngine(lambda request: f"t{len(text_of(request.token_ids))}")
    pool = episode_pool(Echo(), engine)
    prompts, requests = prompts_and_requests(2)
    completions = pool.generate(prompts, requests, PARAMS)
    pool.close()
    text = text_of(completions[0].token_ids)
    assert text == "t3<|im_end|>you said t3.t27<|im_end|>you said t27.t53<|im_end|>"
    assert [len(round_requests) for round_requests in engine.rounds] == [2, 2, 2]
    for number, round_requests in enumerate(engine.rounds):  # each request starts with the sampled tokens
        assert text_of(round_requests[0].token_ids) == ("go " + text)[: len(text_of(round_requests[0].token_ids))]
        assert (round_requests[0].seed == requests[0].seed) == (number == 0)
        assert [r.conversation for r in round_requests] == [r.seed for r in requests]
    rollouts = rollouts_of(completions, prompts)
    assert rollouts.episodes is not None
    own = rollouts.response_mask_BR[0]
    assert text_of(rollouts.sequences[0][3:][own].tolist()) == "t3<|im_end|>t27<|im_end|>t53<|im_end|>"
    logprobs = rollouts.engine_logprob_BR[0]
    assert torch.equal(logprobs[own], -rollouts.sequences[0][3:][own].float()) and not logprobs[~own].any()
    ends = rollouts.episodes.turn_rewards_BR[0].nonzero()[:, 0].tolist()
    assert [text_of(rollouts.sequences[0][3:][: end + 1].tolist())[-12:] for end in ends] == [
        "t3<|im_end|>", "27<|im_end|>", "53<|im_end|>",
    ]  # fmt: skip
    assert rollouts.episodes.turn_rewards_BR[0, ends].tolist() == [1.0, 2.0, 13.0]
    assert rollouts.total_rewards_B(torch.tensor([0.5, 0.0])).tolist() == [16.5, 16.0]
    assert rollouts.responses == ("t53", "t53")
    assert [message["by"] for message in rollouts.episodes.conversations[0]] == ["model", "environment"] * 2 + ["model"]
    assert rollouts.weight_versions_B.tolist() == [7, 7]


def test_single_turn_episode_equals_plain_response() -> None:
    """The requests, the seeds and the samples are the same."""

    class Once:
        async def run(self, session: Session) -> None:
            await session.generate()

    engine = SayingEngine(lambda request: f"seed {request.seed}")
    pool = episode_pool(Once(), engine)
    prompts, requests = prompts_and_requests(5)
    episodes = rollouts_of(pool.generate(prompts, requests, PARAMS), prompts)
    pool.close()
    plain = rollouts_of([engine.answer(request, PARAMS) for request in requests], prompts)
    assert [replace(r, max_new_tokens=None, conversation=None) for r in engine.rounds[0]] == requests
    assert all(map(torch.equal, episodes.sequences, plain.sequences))
    for name in ("engine_logprob_BR", "response_mask_BR", "truncated_B", "group_ids_B", "special_tokens_B"):
        assert torch.equal(getattr(episodes, name), getattr(plain, name)), name
    assert (episodes.responses, episodes.raw_responses) == (plain.responses, plain.raw_responses)


def test_advantages_of_three_turns_match_manual_calculation() -> None:
    """Tokens 2 and 5 belong to the environment. Their values and log-probabilities are NaN."""
    nan, gamma, lam = float("nan"), 0.5, 0.5
    mask = torch.tensor([[True, True, False, True, True, False, True]])
    values = torch.tensor([[1.0, 2.0, nan, 0.5, 1.5, nan, 3.0]])
    logprob = torch.tensor([[-1.0, -1.0, nan, -1.0, -1.0, nan, -1.0]])
    episode = Episode((Turn(0, 2, 1.0), Turn(3, 5, 2.0), Turn(6, 7, 4.0)))
    prompts, _ = prompts_and_requests(1)
    plain = rollouts_of([], [])
    ids = torch.zeros(1, dtype=torch.int64)
    one = replace(
        plain,
        prompts=tuple(prompts),
        sample_ids_B=ids,
        group_ids_B=ids,
        sequences=(torch.zeros(10, dtype=torch.int64),),
        response_lengths_B=torch.tensor([7]),
        engine_logprob_BR=logprob,
        response_mask_BR=mask,
        episodes=episodes_of_one(episode, 7),
    )
    scored = Scored(one, torch.tensor([8.0]), logprob, None, values)
    settings = AlgorithmSettings.model_validate({"gamma": gamma, "lam": lam, "whiten_advantages": False})
    experience, metrics = ExperienceMaker(settings, CPU).make(scored, 1)
    # Backwards from the last token: delta = reward + gamma * next value - value, advantage = delta + gamma * lam *
    # next advantage.
    a6 = 4.0 + 8.0 - 3.0
    a4 = 2.0 + 0.5 * 3.0 - 1.5 + 0.25 * a6
    a3 = 0.0 + 0.5 * 1.5 - 0.5 + 0.25 * a4
    a1 = 1.0 + 0.5 * 0.5 - 2.0 + 0.25 * a3
    a0 = 0.0 + 0.5 * 2.0 - 1.0 + 0.25 * a1
    assert (a6, a4, a3, a1, a0) == (9.0, 4.25, 1.3125, -0.421875, -0.10546875)
    assert experience.advantages_BR[0].tolist() == [a0, a1, 0.0, a3, a4, 0.0, a6]
    assert experience.returns_BR[0, mask[0]].tolist() == [a0 + 1.0, a1 + 2.0, a3 + 0.5, a4 + 1.5, a6 + 3.0]
    assert metrics["reward/mean"] == 15.0


def episodes_of_one(episode: Episode, tokens: int) -> Any:
    """Return the `Episodes` of one sample with the given number of response tokens."""
    from megappo.engines.protocol import Completion
    from megappo.ppo.rollout.episodes import episodes_of

    completion = Completion((5,) * tokens, (0.0,) * tokens, False, 1, episode=episode)
    return episodes_of([completion], torch.ones(1, tokens, dtype=torch.bool), TOKENIZER)


class Mixed:
    """Of twenty samples, one raises, one hangs and one returns an invalid reward. A few of the hanging samples also
    block the event loop."""

    async def run(self, session: Session) -> Any:
        number = session.seed - 1000
        await session.generate()
        match number % 20:
            case 0:
                raise KeyError("no such key")
            case 1:
                await self._hang(number)
            case 2:
                if number % 3 == 0:
                    session.reward(float("inf"))
                return ["soon", float("nan")][number % 2]
        session.observe("on")
        await session.generate()
        return 1.0

    async def _hang(self, number: int) -> None:
        if number == 21:
            time.sleep(3600)
        if number == 41:
            while True:
                pass
        if number == 61:
            while True:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:  # ignores the cancellation
                    continue
        await asyncio.Event().wait()


@pytest.mark.parametrize("kind", [SayingEngine, PromptEngine])
def test_thousand_episodes_with_three_kinds_of_failure(kind: type[SayingEngine]) -> None:
    processes = {process.pid for process in psutil.Process().children(recursive=True)}
    pool = episode_pool(Mixed(), kind(lambda request: "ok"), max_seconds=1.5)
    prompts, requests = prompts_and_requests(1000)
    start = time.monotonic()
    completions = pool.generate(prompts, requests, PARAMS)
    assert time.monotonic() - start < 60
    failures = Counter(c.episode.failure for c in completions if c.episode is not None)
    assert failures == {"": 850, "raised": 50, "hung": 50, "nonsense": 50}
    metrics = episode_metrics([c.episode for c in completions if c.episode], [len(c.token_ids) for c in completions])
    assert [metrics[f"episode/{name}"] for name in ("raised", "hung", "nonsense", "failures")] == [0.05] * 3 + [0.15]
    assert metrics["episode/turns"] == 2 and metrics["turn/reward"] == 0.5
    rollouts = rollouts_of(completions, prompts)  # failed samples are masked and belong to no group
    failed = torch.tensor([i % 20 < 3 for i in range(1000)])
    assert torch.equal(~rollouts.response_mask_BR.any(-1), failed) and torch.equal(rollouts.group_ids_B < 0, failed)
    assert len(rollouts.group_ids_B.unique()) == 1000
    pool.close()
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= processes


def test_too_many_failures_end_the_run() -> None:
    pool = episode_pool(Mixed(), SayingEngine(lambda request: "ok"), max_seconds=1.0, max_failure_fraction=0.1)
    with pytest.raises(TooManyFailuresError, match=r"3 of 20 episodes failed, .* the first: raised: KeyError"):
        pool.generate(*prompts_and_requests(20), PARAMS)
    pool.close()


def test_episodes_do_not_wait_for_slow_turns() -> None:
    """Episode 3 gets its first answer after the 99 other episodes have ended."""
    ended, ended_counts = list[int](), list[int]()

    class Noted(Echo):
        async def run(self, session: Session) -> float:
            reward = await super().run(session)
            ended.append(session.prompt.index)
            return reward

    def reply(request: Any) -> str:
        ended_counts.extend([len(ended)] if request.prompt_id == 3 else [])
        return "ok"

    deadline = time.monotonic() + 60
    engine = PromptEngine(reply)
    engine.is_delayed = lambda request: request.prompt_id == 3 and len(ended) < 99 and time.monotonic() < deadline
    pool = episode_pool(Noted(), engine)
    pool.generate(*prompts_and_requests(100), PARAMS)
    pool.close()
    assert ended_counts == [99, 99, 99] and len(ended) == 100


def played(environment: Any, reply: str = "ok", **limits: Any) -> Any:
    """Return the episode of one sample, its tokens as text, and the completion."""
    params = replace(PARAMS, max_new_tokens=limits.pop("max_new_tokens", 200))
    pool = episode_pool(environment, SayingEngine(lambda request: reply), **limits)
    try:
        [completion] = pool.generate(*prompts_and_requests(1), params)
    finally:
        pool.close()
    return completion.episode, text_of(completion.token_ids), completion


@pytest.mark.parametrize(
    ("limits", "end", "turns"),
    [
        ({"max_turns": 2}, End.OUT_OF_TURNS, 2),
        ({"max_new_tokens": 15}, End.RESPONSE_LIMIT, 1),
        ({"max_new_tokens": 2, "max_turns": 1}, End.RESPONSE_LIMIT, 1),
        ({"max_turns": 3}, End.COMPLETE, 3),
        ({"max_turns": 3, "max_turn_tokens": 2}, End.TURN_CUT, 3),
        ({"max_turns": 2, "max_turn_tokens": 2}, End.OUT_OF_TURNS, 2),
        ({"max_turns": 3, "max_new_tokens": 2, "max_turn_tokens": 2}, End.RESPONSE_LIMIT, 1),
    ],
)
def test_limited_episodes_keep_their_rewards(limits: dict[str, Any], end: End, turns: int) -> None:
    episode, text, completion = played(Echo(3), **limits)
    assert (episode.end, len(episode.turns), episode.failure) == (end, turns, "")
    assert [turn.reward for turn in episode.turns][:2] == [1.0, 2.0][:turns]
    assert completion.truncated == (2 in (limits.get("max_new_tokens"), limits.get("max_turn_tokens")))
    assert len(completion.token_ids) <= limits.get("max_new_tokens", 200)
    assert text.endswith("ok" if completion.truncated else "<|im_end|>")  # a final observation is dropped


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda s: json.loads("{"), "JSONDecodeError: Expecting property name"),
        (lambda s: [][1], "IndexError: list index out of range"),
        (lambda s: s.reward(float("nan")), "gave the reward nan, must be finite"),
        (lambda s: s.reward("good"), "gave the reward 'good', must be a number"),
    ],
)
def test_failed_episode_reports_line_of_user_code(act: Any, message: str) -> None:
    """The reason names the user's code, even if a library raised the error."""

    class Acting:
        async def run(self, session: Session) -> None:
            await session.generate()
            act(session)

    episode, _, _ = played(Acting(), max_failure_fraction=1.0)
    assert episode.reason.startswith(message) and f"({__file__}:{act.__code__.co_firstlineno})" in episode.reason


TAGS_IN_TEXTS = [
    "print('</tool_call>')",
    'x = "<tool_call>{}</tool_call>"\nprint(x)',
    "a</tool_call></tool_call>b<tool_call>",
    '\\"</tool_call>\\\\',
    '</tool_call>\n<tool_call>\n{"name": "other", "arguments": {}}',
]


@pytest.mark.parametrize("code", TAGS_IN_TEXTS)
def test_tags_inside_call_arguments_are_ignored(code: str) -> None:
    """The prose contains no part of a call, and contains the text between two calls."""
    first = json.dumps({"name": "python", "arguments": {"code": code}})
    second = json.dumps({"name": "f", "arguments": {"x": [code, {"y": code}]}})
    text = f"First.\n<tool_call>\n{first}\n</tool_call>\nThen <tool_call>{second}</tool_call> that."
    calls = FORMATS["qwen"].calls(text)
    assert [(call.tool, call.arguments, call.problem) for call in calls] == [
        ("python", {"code": code}, ""), ("f", {"x": [code, {"y": code}]}, ""),
    ]  # fmt: skip
    assert FORMATS["qwen"].prose(text) == "First.\n\nThen  that."
    cut = f"<tool_call>{first}"
    assert [call.arguments for call in qwen_calls(cut)] == [{"code": code}] and FORMATS["qwen"].prose(cut) == ""
    llama = [{**json.loads(call), "parameters": json.loads(call)["arguments"]} for call in (first, second)]
    calls = llama3_calls(f" <|python_tag|>{json.dumps(llama[0])}; <|python_tag|>{json.dumps(llama[1])}")
    assert [call.arguments for call in calls] == [{"code": code}, {"x": [code, {"y": code}]}]


def test_unterminated_quotes_are_parsed_quickly() -> None:
    """A search for the end of each quote would take a minute."""
    started = time.monotonic()
    assert len(qwen_calls('<tool_call>"' + '\\"' * 70_000 + "</tool_call>")) == 1
    assert time.monotonic() - started < 15


def test_invalid_json_call_ends_at_its_tag() -> None:
    """The code of a broken call contains a closing tag. The JSON has a trailing comma or a line break in a string."""
    for broken in ('{"name": "f", "arguments": {"x": "a</tool_call>b"},}', '{"name": "f", "x": "a\n</tool_call>b"}'):
        text = f'<tool_call>{broken}</tool_call>So<tool_call>{{"name": "g"}}</tool_call>'
        first, second = qwen_calls(text)
        assert "no JSON" in first.problem and (second.tool, second.problem) == ("g", "")
        assert FORMATS["qwen"].prose(text) == "So"
    assert [call.problem[:11] for call in llama3_calls('{"a": ' + "[" * 100000)] == ["the call is"]


def test_tool_calls_are_limited_and_counted() -> None:
    class Calls:
        async def run(self, session: Session) -> float:
            await session.generate()
            for number in range(5):
                try:
                    async with session.using("own"):
                        assert number != 1, "no"
                except AssertionError:
                    continue
            return 1.0

    episode, _, _ = played(Calls(), max_calls=3)
    assert episode.end is End.OUT_OF_CALLS and not episode.failure
    assert (episode.tools["own"].calls, episode.tools["own"].failures) == (3, 1)
    metrics = episode_metrics([episode], [3])
    assert metrics["tool/own/calls"] == 3 and metrics["tool/own/failures"] == pytest.approx(1 / 3)
    assert metrics["episode/limit_calls"] == 1


def test_mean_without_values_is_absent() -> None:
    failed = Episode((), failure="hung", seconds=3.0, tools={"own": ToolUse(0, 0, 0.0)})
    played = Episode((Turn(0, 2, 0.5),), seconds=1.0)
    metrics = episode_metrics([failed], [4])
    assert metrics["episode/failures"] == 1.0 and metrics["episode/seconds_max"] == 3.0
    assert metrics["tool/own/calls"] == 0.0
    unknown = {"turns", "turns_max", "trajectories", "left_out_tokens", "observed_tokens"}
    names = {*(f"episode/{name}" for name in unknown), "turn/tokens", "turn/reward", "tool/own/failures"}
    assert not names & metrics.keys()
    assert names - {"tool/own/failures"} <= episode_metrics([failed, played], [4, 2]).keys()


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda s: s.observe_token_ids([1, len(TOKENIZER)]), "must be one of"),
        (lambda s: s.observe_token_ids([True, "a"]), "'a', must be one of"),
        (lambda s: s.observe(3), "observed 3, must be a text"),
        (lambda s: s.reward("1"), "gave the reward '1', must be a number"),
        (lambda s: s.reward(None), "gave the reward null, must be a number"),
        (lambda s: s.reward(1e10), "must be finite and at most"),
    ],
)
def test_invalid_actions_are_reported(act: Any, reason: str) -> None:
    class Acting:
        async def run(self, session: Session) -> None:
            await session.generate()
            act(session)

    with pytest.raises(TooManyFailuresError, match=reason):
        played(Acting())


def test_episodes_with_no_or_concurrent_turns_are_invalid() -> None:
    class Silent:
        async def run(self, session: Session) -> float:
            return 1.0

    class Twice:
        async def run(self, session: Session) -> None:
            await asyncio.gather(session.generate(), session.generate())

    for environment, message in ((Silent(), "ended without a turn"), (Twice(), "two turns of the model at the same")):
        with pytest.raises(TooManyFailuresError, match=message):
            played(environment)
        episode, _, completion = played(environment, max_failure_fraction=1.0)
        assert (episode.failure, episode.turns) == ("nonsense", ()) and completion.token_ids


@pytest.mark.waits
def test_failed_episodes_get_the_failure_score() -> None:
    """Other episodes keep the environment's rewards. The score of the reward function is added to the last token."""
    pool = episode_pool(Mixed(), SayingEngine(lambda request: "ok"), max_seconds=1.0)
    prompts, requests = prompts_and_requests(20, answer="ok")
    rollouts = rollouts_of(pool.generate(prompts, requests, PARAMS), prompts)
    pool.close()
    for function, own in (("environment", 0.0), ("exact", 1.0)):
        scorer = RewardScorer(RewardSettings(function=function, failure_score=-2.0), CPU)
        try:
            scores, metrics = scorer.score(rollouts)
        finally:
            scorer.close()
        assert scores.tolist() == [-2.0] * 3 + [own] * 17
        assert rollouts.total_rewards_B(scores).tolist() == [-2.0] * 3 + [own + 1.0] * 17
        assert metrics["reward/failures"] == 0


def test_episodes_survive_a_checkpoint() -> None:
    _, _, first = played(Echo())
    _, _, failed = played(Mixed(), max_failure_fraction=1.0)
    state = keep_episodes([first, failed])
    assert kept_episodes(state, [False] * 2) == [first.episode, failed.episode]
    assert keep_episodes([replace(first, episode=None)]) == {} and kept_episodes({}, [False] * 2) == [None, None]


# Chat templates


class Chatty:
    """Adds two messages at once, with the role of a user or a tool."""

    def __init__(self, role: str = "user") -> None:
        self.role = role

    async def run(self, session: Session) -> None:
        await session.generate()
        session.observe("one")
        session.observe("two")
        await session.generate()


def test_chat_continues_with_the_template() -> None:
    """The template also closes a turn that `max_turn_tokens` truncated."""
    for most, end in ((None, "Yes.<|im_end|>"), (2, "Ye<|im_end|>")):
        pool = episode_pool(Chatty(), SayingEngine(lambda request: "Yes."), template=CHATML, max_turn_tokens=most)
        [completion] = pool.generate(
            *prompts_and_requests(1, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"), PARAMS
        )
        pool.close()
        messages = [{"role": "user", "content": text} for text in ("one", "two")]
        rendered = tokenizer(CHATML).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text_of(completion.token_ids) == f"{end}\n{rendered}" + end.removesuffix("<|im_end|>" if most else "")
        assert completion.episode is not None
        assert [t.stop - t.start for t in completion.episode.turns] == [2 if most else 5] * 2


def test_template_closes_turn_ended_by_stop_text() -> None:
    """The turn keeps the tokens of the stop text and does not count as truncated."""
    params = replace(PARAMS, stop_texts=StopTexts(("es", "No"), TOKENIZER))
    pool = episode_pool(Chatty(), SayingEngine(lambda request: "Yes. No."), template=CHATML)
    [completion] = pool.generate(
        *prompts_and_requests(1, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"), params
    )
    pool.close()
    messages = [{"role": "user", "content": text} for text in ("one", "two")]
    rendered = tokenizer(CHATML).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text_of(completion.token_ids) == f"Yes<|im_end|>\n{rendered}Yes"
    assert completion.episode is not None and not completion.truncated
    assert [t.stop - t.start for t in completion.episode.turns] == [3, 3]


def test_total_tokens_of_prompt_and_episode_are_limited() -> None:
    prompts, requests = prompts_and_requests(1)
    pool = episode_pool(Echo(5), SayingEngine(lambda request: "okay"))
    [completion] = pool.generate(prompts, [replace(requests[0], max_new_tokens=33)], PARAMS)
    pool.close()
    assert completion.episode is not None and completion.episode.end is End.POSITION_LIMIT
    # A turn has 5 tokens and its observation 14. After the second turn no tokens are left for a third.
    assert [turn.stop for turn in completion.episode.turns] == [5, 24]
    assert not completion.truncated and rollouts_of([completion], prompts).truncated_B.tolist() == [True]


@pytest.mark.parametrize(
    ("template", "role", "sentence"),
    [
        (CHATML, "user", None),
        (FORGETFUL, "tool", None),
        (FORGETFUL, "user", "changes what was said in earlier turns once a message of the role 'user' follows"),
        (CHATML.replace("<|im_end|>", "."), "user", "ends what the model says with none of the stop tokens"),
        ("{{ raise_exception('no tools') if messages|length > 2 }}" + CHATML, "tool", "refuses a conversation"),
    ],
)
def test_templates_that_rewrite_earlier_turns_are_rejected(template: str, role: str, sentence: str | None) -> None:
    chat = ChatTokens(tokenizer(template), (END,))
    if sentence is None:
        chat.check(role)
    else:
        with pytest.raises(ValueError, match=sentence):
            chat.check(role)


# Tools


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('So.<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', [("f", {"x": 1}, "")]),
        ('<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}', [("f", {}, ""), ("g", {}, "")]),
        ("<tool_call>{oops}</tool_call>", [("", {}, "no JSON")]),
        ("<tool_call>[1]</tool_call>", [("", {}, "no name")]),
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>', [("f", {}, "no object")]),
        (f"<tool_call>{'[' * 100000}</tool_call>", [("", {}, "no JSON")]),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}}<tool_call>{"name": "g"}</tool_call>',
         [("f", {"x": 1}, ""), ("g", {}, "")]),
        ('<tool_call><tool_call>\n{"name": "f"}</tool_call></tool_call>', [("f", {}, "")]),
        ('<tool_call>{"name": "f"} or so</tool_call><tool_call>{"name": "g"}</tool_call>',
         [("", {}, "no JSON"), ("g", {}, "")]),
        ('<tool_call>{"name": "f", "arguments": {"x": "oops}</tool_call><tool_call>{"name": "g"}</tool_call>',
         [("", {}, "no JSON"), ("g", {}, "")]),
        ("<tool_call></tool_call>", [("", {}, "no JSON")]),
        ("The answer is 4.", []),
    ],
)  # fmt: skip
def test_qwen_calls_are_parsed(text: str, expected: list[Any]) -> None:
    calls = qwen_calls(text)
    assert [(call.tool, call.arguments) for call in calls] == [e[:2] for e in expected]
    assert all(
        e[2] in call.problem and bool(e[2]) == bool(call.problem) for call, e in zip(calls, expected, strict=True)
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "f", "parameters": {"x": 1}}', [("f", {"x": 1})]),
        ('<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', [("f", {}), ("g", {})]),
        ('{"name": "f", "parameters": {}} oops', [("f", {}), ("", {})]),
        ('It is {"name": "f"}.', []),
    ],
)
def test_llama_calls_are_parsed(text: str, expected: list[Any]) -> None:
    assert [(call.tool, call.arguments) for call in llama3_calls(text)] == expected


def test_mathematics_tools_compute_results() -> None:
    assert calculate("(3 + 4) * 2 ^ 5") == "224" and calculate("sqrt(16) + factorial(3)") == "10.0"
    for text in ("__import__('os')", "True", "(1).real", "open('x')", "max(1, key=2)"):
        with pytest.raises(ValueError, match="is no arithmetic"):
            calculate(text)
    assert python("x = 3\nprint(x)\nx + 1") == "3\n4\n"
    assert "ZeroDivisionError" in python("1 / 0") and "SyntaxError" in python("1 +") and python("") == ""


BOTH = ("calculator", "python")
FORKS = "import os, time\nfor _ in range(1000):\n    if os.fork() == 0:\n        time.sleep(1000)\ntime.sleep(1000)"
SHELL = "import os\nos.system('for i in $(seq 1000); do sleep 1000 & done; wait')"
FLOODS = """
import os
while True:
    for fd in range(3, 64):
        try: os.write(fd, b"[" * 10**6)
        except OSError: pass
"""
TRICKLES = """
import os, time
for _ in range(3): os.fork() and None
held = b"x" * (2 * 10**8)
while True:
    time.sleep(0.002)
    for fd in range(3, 64):
        try: os.write(fd, b"[")
        except OSError: pass
"""
HOSTILE = {
    "forks": (FORKS, "processes"),
    "forks of forks": ("import os\nwhile True: os.fork()", "processes"),
    "a shell's": (SHELL, "processes"),
    "memory": ("x = bytearray(8 * 10**9)", "memory"),
    "never": ("while True: pass", "time"),
    "sleeps": ("import time; time.sleep(1000)", "time"),
    "deaf": ("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(1000)", "time"),
    "dies": ("import os; os.kill(os.getpid(), 9)", "died"),
    "writes": ("import os\nfor fd in range(3, 50):\n  try: os.write(fd, b'[' * 9)\n  except OSError: pass", ""),
    "floods": (FLOODS, "died"),
    "trickles": (TRICKLES, "memory"),
    "leaves": ("import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True); print('left')", ""),
}


def descendants(excluded: Sequence[psutil.Process] = ()) -> list[psutil.Process]:
    """Return the child processes of this process, except those in `but`."""
    return [process for process in psutil.Process().children(recursive=True) if process not in excluded]


@pytest.mark.slow
@pytest.mark.waits
def test_hostile_tool_calls_leave_no_processes() -> None:
    """Calls start 1,000 processes, allocate 8 GB or never end. Each of these calls fails, its processes are gone, and
    the next call gets an answer."""
    settings = ToolSettings(workers=2, timeout_seconds=3.0, memory_gigabytes=0.5, processes=8)
    existing = descendants()
    pool = ToolPool({"python": "megappo.environments.tools.mathematics:python"}, settings)

    async def call(code: str) -> ToolResult:
        return await pool.call("python", {"code": code})

    async def call_all() -> dict[str, ToolResult]:
        results = await asyncio.gather(*(call(code) for code, _ in HOSTILE.values()))
        assert (await call("6 * 7")).text == "42\n"
        return dict(zip(HOSTILE, results, strict=True))

    with asyncio.Runner() as loop:
        results = loop.run(call_all())
        assert {name: result.failure for name, result in results.items() if name != "writes"} == {
            name: failure for name, (_, failure) in HOSTILE.items() if name != "writes"
        }
        assert results["leaves"].text == "left\n" and "more processes" in results["forks"].text
        assert results["writes"].failure in ("", "died")
        # Only the workers and their supervisors remain.
        assert wait_until(lambda: len(descendants(existing)) <= 4, 5.0, every_seconds=0.05), descendants()
        pool.close()
    assert wait_until(lambda: not descendants(existing), 10.0, every_seconds=0.05), descendants()


@pytest.mark.waits
def test_worker_of_cancelled_call_serves_the_next() -> None:
    """One worker starts, no matter how many calls were cancelled. A worker that is still starting ends with
    the pool."""
    existing = descendants()
    pool = ToolPool({"calculator": "megappo.environments.tools.mathematics:calculate"}, ToolSettings(workers=1))

    async def cancel_call() -> None:
        call = asyncio.ensure_future(pool.call("calculator", {"expression": "6 * 7"}))
        for _ in range(5):
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    async def play() -> ToolResult:
        for _ in range(3):
            await cancel_call()
        return await pool.call("calculator", {"expression": "6 * 7"})

    with asyncio.Runner() as loop:
        assert loop.run(play()).text == "42"
        assert len(descendants(existing)) <= 2, "only the worker and its supervisor may run"
        pool.close()
        pool = pool.again()
        loop.run(cancel_call())
        pool.close()
    assert wait_until(lambda: not descendants(existing), 10.0, every_seconds=0.05), descendants()


SEES = """
import os
print({**os.environ}, open("/proc/self/environ").read(), len(os.listdir("/proc/self/fd")))
"""


@pytest.mark.waits
def test_programs_of_the_model_see_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs do not inherit open files of the worker either. A user's own tool in the same pool gets all
    variables."""
    for name in ("WANDB_API_KEY", "ANYTHING_ELSE"):
        monkeypatch.setenv(name, "s3cret")
    python = {"python": "megappo.environments.tools.mathematics:python"}

    def text_of_call(pool: ToolPool, tool: str, **arguments: str) -> str:
        return loop.run(pool.call(tool, arguments)).text

    with asyncio.Runner() as loop:
        pool = ToolPool(python, ToolSettings(workers=1))
        seen = text_of_call(pool, "python", code=SEES)
        assert "s3cret" not in seen and "PATH" in seen and int(seen.split()[-1]) <= 5, seen
        pool.close()
        pool = ToolPool(python | {"own": "os:getenv"}, ToolSettings(workers=1))
        seen = text_of_call(pool, "python", code="import os; print({**os.environ})")
        assert "s3cret" not in seen and "PATH" in seen
        assert text_of_call(pool, "own", key="WANDB_API_KEY") == "s3cret"
        pool.close()


def test_missing_tools_are_reported() -> None:
    with pytest.raises(ValueError, match="tool 'x' 'nowhere:f': module 'nowhere' cannot be imported"):
        ToolPool({"x": "nowhere:f"}, ToolSettings())
    pool = ToolPool({}, ToolSettings())
    with asyncio.Runner() as loop, pytest.raises(ValueError, match="there is no tool 'y'; the environment's tools are"):
        loop.run(pool.call("y", {}))


@pytest.mark.waits
def test_a_model_calls_tools_and_answers() -> None:
    """The model uses the format of its family and receives the errors of its calls. The last reply is scored."""
    replies = [
        '<tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>'
        '<tool_call>{"name": "python", "arguments": {"code": "print(1/0)"}}</tool_call>',
        '<tool_call>{"name": "rocket", "arguments": {}}</tool_call>'
        '<tool_call>{"name": "python", "arguments": {"script": "1"}}</tool_call>',
        "It is 42.",
    ]
    answers = iter(replies)
    pool = episode_pool(ToolCalling(tools=BOTH), SayingEngine(lambda request: next(answers)), template=CHATML)
    prompts, requests = prompts_and_requests(1, "<|im_start|>user\n6*7?<|im_end|>\n<|im_start|>assistant\n")
    [completion] = pool.generate(prompts, requests, replace(PARAMS, max_new_tokens=2000))
    pool.close()
    text = text_of(completion.token_ids)
    assert "<|im_start|>tool\n42<|im_end|>" in text and "ZeroDivisionError" in text
    assert "there is no tool 'rocket'; there are calculator, python" in text and "python takes one text, code" in text
    assert completion.episode is not None
    assert {name: use.calls for name, use in completion.episode.tools.items()} == {"calculator": 1, "python": 1}
    assert rollouts_of([completion], prompts).responses == ("It is 42.",)
    assert list(ToolCalling().tools) == ["calculator"]  # python is off by default


def test_guess_environment_returns_hints() -> None:
    answers = iter(["50", "well", "no 25?", "37"])
    engine = SayingEngine(lambda request: next(answers))
    pool = episode_pool(GuessNumber(cost_per_turn=0.125), engine)
    [completion] = pool.generate(*prompts_and_requests(1, answer="37"), PARAMS)
    pool.close()
    assert "Lower.well<|im_end|>Say a number.no 25?<|im_end|>Higher.37" in text_of(completion.token_ids)
    assert completion.episode is not None and completion.episode.turns[-1].reward == 1 - 3 * 0.125
    assert len({record["answer"] for record in numbers(highest=20, count=200)}) == 20


@pytest.mark.slow
@pytest.mark.waits
def test_reasoning_gym_task_allows_several_tries() -> None:
    """A worker computes the generator's own score. A turn is rewarded with the increase of the score."""
    pytest.importorskip("reasoning_gym")
    settings = DataSourceSettings(source="reasoning_gym:mini_sudoku", options={"size": 1, "seed": 3})
    [record] = read_records(settings)
    solution = str(record.answer)
    wrong = solution.translate(str.maketrans("1234", "2143"))
    answers = iter(["no idea", wrong, solution, solution])
    arguments = {"tries": 4, "cost_per_turn": 0.125, "feedback": "{score:.1f}?"}
    environment = make_environment(EnvironmentSettings(name="reasoning_gym", arguments=arguments))
    pool = episode_pool(environment, SayingEngine(lambda request: next(answers)))
    [prompt], requests = prompts_and_requests(1)
    [completion] = pool.generate([replace(prompt, metadata=record.metadata)], requests, PARAMS)
    pool.close()
    episode = completion.episode
    assert episode is not None and not episode.failure, episode
    first, second, third = (turn.reward for turn in episode.turns)
    assert first == 0.0 and second >= -0.125 and third > 0.5
    assert first + second + third == pytest.approx(1.0 - 2 * 0.125) and next(answers) == solution
    assert episode.tools["score"].calls == 3 and "0.0?" in text_of(completion.token_ids)


# Settings


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"name": "gess"}, "did you mean 'guess'"),
        ({"name": "nowhere:Class"}, "module 'nowhere' cannot be imported"),
        ({"name": "tests.environments.test_environments:played"}, "has no class 'played'"),
        ({"name": "pathlib:Path"}, "has no `async def run"),
        ({"name": "guess", "arguments": {"heigher": "x"}}, "cannot be called with"),
        ({"name": "reasoning_gym", "arguments": {"tries": 0}}, "tries is 0, must be a whole number above 0"),
        ({"name": "reasoning_gym", "arguments": {"feedback": "{points}"}}, "write {score} at"),
        ({"name": "tools", "arguments": {"format": "qwin"}}, "'qwin', must be qwen or llama3"),
        ({"name": "tools", "arguments": {"tools": ["rocket"]}}, "must be a list of calculator or python"),
    ],
)
def test_unusable_environments_are_rejected(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_environment(EnvironmentSettings(**settings))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["reward.function=environment"], "rollout.environment has no environment with rewards"),
        (["reward.function=environment", "rollout.environment={name: single_turn}"], "has no environment with rewards"),
        (["rollout.environment={name: guess, max_turn_tokens: 99999}"], "the limit of all turns together"),
    ],
)
def test_conflicting_settings_are_rejected(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        derive(load_config(BASE, overrides), 1, SHAPE)


@pytest.mark.parametrize("text", ['{"a":' * 100_000, "[" * 100_000, '{"name": "x", "parameters": ' + "[" * 100_000])
def test_deeply_nested_calls_report_invalid_json(text: str) -> None:
    (call,) = qwen_calls(f"<tool_call>{text}</tool_call>")
    assert "the call is no JSON (" in call.problem
    assert all("the call is no JSON (" in call.problem for call in llama3_calls(text))


@pytest.mark.waits
def test_deeply_nested_tool_answer_fails_its_call() -> None:
    """The program writes into every open file descriptor, next to the tool's own answer. The next call gets
    an answer."""
    code = "import os\nfor n in range(3, 64):\n  try: os.write(n, b'[' * 60000)\n  except OSError: pass\nos._exit(0)"
    pool = ToolPool({"python": "megappo.environments.tools.mathematics:python"}, ToolSettings(workers=1))
    with asyncio.Runner() as loop:
        assert loop.run(pool.call("python", {"code": code})).failure == "died"
        assert loop.run(pool.call("python", {"code": "6 * 7"})).text == "42\n"
        pool.close()
