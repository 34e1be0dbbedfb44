"""Tests of the reasons why episodes end, and of their effect on masks, scores, metrics and saved samples."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import parquet

from megappo.config import load_config
from megappo.config.sections.algorithm import AlgorithmSettings
from megappo.engines.protocol import Completion
from megappo.environments.episodes import TooManyFailuresError
from megappo.environments.metrics import episode_metrics
from megappo.environments.protocol import LimitReached
from megappo.environments.session import Session
from megappo.observe.ends import End
from megappo.observe.saved_samples import read_lines
from megappo.ppo.experience import trained_tokens
from megappo.ppo.records.experience_files import read_samples, write_samples
from megappo.ppo.rollout.episodes import keep_episodes, kept_episodes
from megappo.ppo.rollout.sampling import SampleRequests, finish_rollout
from megappo.ppo.shaping import RewardShaper
from megappo.types import Rollouts
from tests.support.episodes import PARAMS, TOKENIZER, SayingEngine, episode_pool, prompts_and_requests
from tests.support.places import BASE
from tests.support.saved import samples

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("world_of_one")


class Echo:
    """Repeats the model's text after each turn."""

    def __init__(self, turns: int = 3) -> None:
        self._turns = turns

    async def run(self, session: Session) -> float:
        for _ in range(self._turns):
            reply = await session.generate()
            session.observe(f"you said {reply.text}.")
        return 10.0


class RaisesItsOwnLimit:
    """Raises an unknown limit."""

    async def run(self, session: Session) -> float:
        await session.generate()
        limit: Any = "budget"
        raise LimitReached(limit)


def played(environment: Any, **limits: Any) -> Completion:
    """Return the sample of one episode. Each turn has three tokens: `ok` and an end-of-turn token."""
    params = replace(PARAMS, max_new_tokens=limits.pop("max_new_tokens", 200))
    pool = episode_pool(environment, SayingEngine(lambda request: "ok"), **limits)
    try:
        [completion] = pool.generate(*prompts_and_requests(1), params)
    finally:
        pool.close()
    return completion


def rollouts_of(completion: Completion, max_total_tokens: int | None = None) -> Rollouts:
    [prompt], _ = prompts_and_requests(1)
    requests = SampleRequests((prompt,), (0,), 1, (), max_total_tokens)
    return finish_rollout(requests, [completion], TOKENIZER)


@pytest.mark.parametrize(
    ("limit", "truncated", "end"),
    [
        ("turns", True, End.OUT_OF_TURNS),
        ("calls", True, End.OUT_OF_CALLS),
        ("tokens", True, End.RESPONSE_LIMIT),
        ("", True, End.RESPONSE_LIMIT),
        ("", False, End.COMPLETE),
    ],
)
def test_older_checkpoints_get_an_end_per_episode(limit: str, truncated: bool, end: End) -> None:
    """Older versions saved a limit instead of the end, and counted every truncated turn as a truncated response."""
    completion = played(Echo())
    assert completion.episode is not None
    state = keep_episodes([completion])
    (record,) = json.loads(bytes(state["episodes"].tolist()))
    assert record.pop("end") == "complete"
    old = {"episodes": torch.frombuffer(bytearray(json.dumps([record | {"limit": limit}]).encode()), dtype=torch.uint8)}
    assert kept_episodes(old, [truncated]) == [replace(completion.episode, end=end)]


class Catches(Echo):
    """Catches the limit and returns a reward."""

    async def run(self, session: Session) -> float:
        try:
            return await super().run(session)
        except LimitReached:
            return 0.5


class CallsTooOften:
    """Continues without the tool when the calls are used up."""

    async def run(self, session: Session) -> None:
        await session.generate()
        for _ in range(2):
            with suppress(LimitReached):
                session.count_call("own")
        session.observe("no more")
        await session.generate()


@pytest.mark.parametrize(
    ("environment", "limits", "end"),
    [
        (Catches(3), {"max_turns": 2}, End.OUT_OF_TURNS),
        (Catches(3), {"max_new_tokens": 15}, End.RESPONSE_LIMIT),
        (Catches(3), {"max_turns": 3}, End.COMPLETE),
        (CallsTooOften(), {"max_calls": 1}, End.COMPLETE),
    ],
)
def test_caught_limit_ends_episode_unless_turn_follows(environment: Any, limits: dict[str, Any], end: End) -> None:
    episode = played(environment, **limits).episode
    assert episode is not None and episode.end is end


ENDED: dict[End, dict[str, Any]] = {
    End.COMPLETE: {"max_turns": 3}, End.OUT_OF_TURNS: {"max_turns": 2}, End.RESPONSE_LIMIT: {"max_new_tokens": 15},
    End.TURN_CUT: {"max_turn_tokens": 2},
}  # fmt: skip


@pytest.mark.parametrize("end", [*ENDED])
def test_only_response_limits_mask_and_penalize(end: End) -> None:
    """An episode that completes or reaches a limit of turns is trained with its own reward."""
    completion = played(Echo(3), **ENDED[end])
    rollouts = rollouts_of(completion)
    cut = end is End.RESPONSE_LIMIT
    assert (rollouts.ends, rollouts.truncated_B.tolist()) == ((end,), [cut])
    trained_BR = trained_tokens(rollouts, AlgorithmSettings(mask_truncated=True))
    assert torch.equal(trained_BR, rollouts.response_mask_BR & (not cut)) and rollouts.response_mask_BR.any()
    shaper = RewardShaper(load_config(BASE, ["reward.truncated_score=-7", "reward.truncated_penalty=1"]), CPU)
    scores_B, _ = shaper.shape(torch.tensor([0.25]), rollouts)
    assert scores_B.tolist() == [-8.0 if cut else 0.25]
    assert completion.episode is not None
    metrics = episode_metrics([completion.episode], [len(completion.token_ids)])
    limits = {name.removeprefix("episode/limit_"): x for name, x in metrics.items() if "/limit_" in name}
    names = {End.OUT_OF_TURNS: "turns", End.RESPONSE_LIMIT: "tokens", End.TURN_CUT: "turn_tokens"}
    assert limits == {name: float(name == names.get(end)) for name in ("turns", "calls", "turn_tokens", "tokens")}
    # The final end-of-turn token is not counted as a special token.
    assert rollouts.special_tokens_B.tolist() == [0]


@pytest.mark.parametrize(
    ("truncated", "tokens", "total", "end"),
    [
        (False, 4, None, End.COMPLETE),
        (True, 4, None, End.RESPONSE_LIMIT),
        (True, 4, 8, End.RESPONSE_LIMIT),
        (True, 4, 7, End.POSITION_LIMIT),
        (False, 4, 7, End.COMPLETE),
    ],
)
def test_response_end_names_the_truncating_limit(truncated: bool, tokens: int, total: int | None, end: End) -> None:
    """The prompt has 3 tokens and the response 4."""
    completion = Completion((5,) * tokens, (0.0,) * tokens, truncated, 1)
    assert rollouts_of(completion, total).ends == (end,)


def test_saved_samples_store_ends(tmp_path: Path) -> None:
    saved, path = samples((3, 2, 4, 1, 2, 3)), tmp_path / "new.parquet"
    rollouts = saved.experience.scored.rollouts
    write_samples(path, saved, range(6), str)
    read = read_samples(path).experience.scored.rollouts
    assert read.ends == rollouts.ends == tuple(End) and read.episodes is not None and rollouts.episodes is not None
    ends = [[episode.end for episode in episodes.of_samples] for episodes in (read.episodes, rollouts.episodes)]
    assert ends[0] == ends[1]
    assert [line.end for line in read_lines(path)] == list(End)
    assert rollouts.truncated_B.tolist() == [False] * 4 + [True] * 2


def test_unknown_end_in_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "new.parquet"
    write_samples(path, samples((2, 3)), range(2), str)
    table = parquet.read_table(path)
    parquet.write_table(table.set_column(table.column_names.index("end"), "end", [["stop", "stop"]]), path)
    with pytest.raises(ValueError, match="contains no saved samples .*'stop' is not a valid End"):
        read_lines(path)


def test_unknown_limit_fails_the_episode() -> None:
    with pytest.raises(
        TooManyFailuresError, match="raised: ValueError: the limit is 'budget', must be one of turns, c"
    ):
        played(RaisesItsOwnLimit())
