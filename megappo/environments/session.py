"""An episode from the view of its environment: turns of the model, observations and rewards."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from transformers import PreTrainedTokenizerBase

from megappo.config.sections.environment import EnvironmentSettings
from megappo.engines.protocol import Completion, GenerateRequest, SamplingParams
from megappo.engines.rows import check_answers
from megappo.environments.chat import BEGINNING, PLACEHOLDER, ChatTokens
from megappo.environments.gateway.recording import Recorder
from megappo.environments.gateway.server import AgentEndpoint, Gateway
from megappo.environments.tools.tool_calls import call_format
from megappo.environments.tools.tool_pool import ToolPool
from megappo.environments.trajectory import Trajectory
from megappo.environments.turns import LIMIT_ENDS, Limit, LimitReached, NonsenseError, Reply
from megappo.errors import RunError, show
from megappo.files.json_values import JSONValue
from megappo.models.context import continuation_ids, continuation_text
from megappo.models.tokens import Message, without_row
from megappo.observe.ends import End
from megappo.runtime.seeds import derived_seed
from megappo.types import CHAT_MESSAGES, Episode, Prompt, ToolUse

_REASON_CHARACTERS = 300


def turn_seed(seed: int, turn: int) -> int:
    """Return a 63-bit seed for each turn of a sample.

    The first turn uses the seed of the sample, like a response without an environment.
    """
    return derived_seed(seed, "turn", turn) if turn else seed


@dataclass(frozen=True)
class SharedEpisodeState:
    """State that all episodes of a rank share over the run."""

    limits: EnvironmentSettings
    tokenizer: PreTrainedTokenizerBase
    vocabulary: int
    """Number of embedding rows. Every model of the run has rows for smaller token ids."""
    chat: ChatTokens | None
    """Chat template of the run. None if observations are plain text."""
    role: str
    tools: ToolPool
    gateway: Gateway
    most_prompt_tokens: int
    template_time: str | None = None
    """See `DataSettings.template_time`."""


class Session:
    """Interface of one episode to its environment: requests turns, adds observations and rewards, and calls tools."""

    def __init__(
        self,
        prompt: Prompt,
        request: GenerateRequest,
        shared: SharedEpisodeState,
        params: SamplingParams,
        request_turn: Callable[[GenerateRequest], Awaitable[Completion]],
    ) -> None:
        self.prompt = prompt
        """Initial text of the episode with its answer and metadata."""
        self.seed = request.seed
        """Seed for random draws of the environment."""
        self.is_over = False
        self.waits = 0
        """Number of engine and tool answers that the episode waits for. Waiting time is not charged to the episode."""
        self._generates = False
        self.spent_seconds = 0.0
        self._request, self._shared, self._params, self._request_turn = request, shared, params, request_turn
        self._current = self._sample = Trajectory(request.token_ids)
        self._trajectories: list[Trajectory] = []
        """Trajectories with at least one turn of the model."""
        self._limit: Limit | Literal[""] = ""
        """Limit that the episode has reached since its last turn."""
        self._observed_ids: list[int] = []
        """Tokens to add before the next turn of the model."""
        self._messages: list[Message] = list(prompt.metadata.get(CHAT_MESSAGES) or [BEGINNING])
        self._observed_messages: list[Message] = []
        self._uses: dict[str, ToolUse] = {}

    @property
    def turns(self) -> int:
        """Number of turns of the model so far, in all trajectories."""
        return sum(len(trajectory.turns) for trajectory in self._trajectories)

    async def generate(self, max_tokens: int | None = None) -> Reply:
        """Generate the next turn of the model with at most `max_tokens` tokens.

        Raises LimitReached if turns or tokens are used up.
        """
        self._require_running()
        if self._generates:
            raise NonsenseError("requested two turns of the model at the same time")
        self._generates = True
        try:
            return await self._next_turn(max_tokens)
        finally:
            self._generates = False

    async def _next_turn(self, max_tokens: int | None) -> Reply:
        limits, params, current = self._shared.limits, self._params, self._current
        if self.turns >= limits.max_turns:
            raise self._reached("turns")
        observed = self._take_observed()
        left = params.max_new_tokens - len(current.tokens)
        whole = self._shared.most_prompt_tokens + params.max_new_tokens
        positions = min(whole, self._request.most_in_all or whole) - len(current.seen)
        room, limit = min(left, positions) - len(observed), cast(Limit, "tokens" if left <= positions else "positions")
        if room < 1:
            raise self._reached(limit)
        current.add_observation(observed)
        most = min(x for x in (room, limits.max_turn_tokens, max_tokens) if x is not None)
        end_if_cut = LIMIT_ENDS[limit] if most == room else End.TURN_CUT
        seed = turn_seed(self._request.seed, self.turns)
        with self._off_the_clock():
            request = GenerateRequest(
                current.seen, seed, self._request.prompt_id, most, conversation=self._request.seed
            )
            completion = await self._request_turn(request)
        self._require_running()
        return self._take_turn(completion, most, end_if_cut)

    def _reached(self, limit: Limit) -> LimitReached:
        """Record a limit, which ends the episode unless the model generates another turn."""
        self._limit = limit
        return LimitReached(limit)

    def observe(self, text: str, role: str | None = None) -> None:
        """Add an observation: a message of a role (default: role of the environment), or plain text without chat
        template."""
        self._require_running()
        if not isinstance(text, str):
            raise NonsenseError(f"observed {show(text)}, must be a text")
        if self._shared.chat is None:
            self._observed_ids += self._readable(continuation_ids(self._shared.tokenizer, text))
        else:
            self._observed_messages.append({"role": role or self._shared.role, "content": text})

    def observe_token_ids(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the sequence without a chat template."""
        self._require_running()
        wrong = [t for t in token_ids if not isinstance(t, int) or not 0 <= t < self._shared.vocabulary]
        if wrong:
            raise NonsenseError(f"observed {show(wrong[0])}, must be one of {self._shared.vocabulary} tokens")
        self._observed_ids += token_ids

    def _readable(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens. Raises NonsenseError if the model has no embedding row for a token."""
        missing = without_row(token_ids, self._shared.vocabulary)
        if missing is not None:
            raise NonsenseError(
                f"the model would see token {missing}, for which it has no row (its vocab_size is "
                f"{self._shared.vocabulary}); change the observation, or use the tokenizer of the model"
            )
        return list(token_ids)

    def reward(self, value: float) -> None:
        """Reward the last turn of the model. Rewards of a turn are added."""
        self._require_running()
        if not self.turns:
            raise NonsenseError("rewarded an episode before the first turn of the model")
        self._sample.reward(_number(value))

    async def use(self, tool: str, **arguments: Any) -> str:
        """Call one of the environment's `tools` in a worker process and return its text.

        If the call raises, hangs or exceeds a limit, the text describes the failure. Raises LimitReached if the calls
        are used up.
        """
        self.count_call(tool)
        with self._off_the_clock():
            result = await self._shared.tools.call(tool, arguments)
        self._require_running()
        self._note_use(tool, failed=bool(result.failure), seconds=result.seconds)
        return result.text

    @asynccontextmanager
    async def using(self, tool: str) -> AsyncIterator[None]:
        """Context that counts a call of a custom tool, its duration, and its failure. Raises LimitReached like
        `use`."""
        self.count_call(tool)
        start, failed = time.monotonic(), True
        try:
            yield
            failed = False
        finally:
            self._note_use(tool, failed=failed, seconds=time.monotonic() - start)

    def serve(self, format: str = "qwen") -> AbstractAsyncContextManager[AgentEndpoint]:
        """Context in which an HTTP agent can reach the model, at the returned address with the returned key.

        `format`: format of tool calls, `qwen` or `llama3`. The context raises LimitReached if the agent fails because
        of a limit of the episode.
        """
        self._require_running()
        return self._shared.gateway.serve(Recorder(self, call_format(format, "the format of calls")))

    # For the gateway

    def chat_tokens(self, schemas: Sequence[JSONValue]) -> ChatTokens:
        """Return the chat template for a conversation with these tools."""
        shared = self._shared
        return ChatTokens(shared.tokenizer, self._params.stop_token_ids, schemas, shared.template_time)

    def begin(self, prompt_ids: Sequence[int]) -> Trajectory:
        """Start a trajectory whose next turn answers this prompt.

        Raises NonsenseError if the model has no embedding row for a token.
        """
        self._current, self._observed_ids = Trajectory(self._readable(prompt_ids)), []
        return self._current

    def go_on(self, trajectory: Trajectory, observed: Sequence[int]) -> None:
        """Continue a trajectory. The next turn follows the tokens of the trajectory and `observed`. Raises like
        `begin`."""
        self._current, self._observed_ids = trajectory, self._readable(observed)

    @property
    def next_prompt_tokens(self) -> int:
        """Number of tokens before the next turn."""
        return len(self._current.seen) + len(self._observed_ids)

    def count_call(self, tool: str) -> None:
        """Count a call of a tool. Raises LimitReached if the calls are used up."""
        self._require_running()
        if sum(use.calls for use in self._uses.values()) >= self._shared.limits.max_calls:
            raise self._reached("calls")
        use = self._uses.get(tool, ToolUse())
        self._uses[tool] = replace(use, calls=use.calls + 1)

    # For the runner of the episode

    def finish(self, value: object) -> None:
        """End the episode with the result of the environment. Raises NonsenseError if the result is invalid."""
        if not self.turns:
            raise NonsenseError("ended without a turn of the model")
        if value is not None:
            self.reward(_number(value))

    def completion(
        self,
        *,
        failure: Literal["", "raised", "hung", "nonsense"],
        reason: str,
        limit: Limit | Literal[""],
        version: int,
    ) -> Completion:
        """Close the episode and return its sample. Failed episodes are excluded from training.

        `version`: version of the engine weights.
        """
        self.is_over = True
        sample, limit = self._sample, limit or self._limit
        sample.drop_unanswered()
        if not sample.tokens:  # a sample needs a token after its prompt
            sample.add_observation([next(iter(self._params.stop_token_ids), 0)])
        others = [trajectory for trajectory in self._trajectories if trajectory is not sample]
        episode = Episode(
            turns=() if failure else tuple(sample.turns),
            failure=failure,
            reason=reason[:_REASON_CHARACTERS],
            end=sample.last_end if sample.last_end.is_truncated or not limit else LIMIT_ENDS[limit],
            seconds=self.spent_seconds,
            tools=dict(self._uses),
            prompt_ids=None if sample.prompt_ids == self._request.token_ids else sample.prompt_ids,
            trajectories=len(self._trajectories),
            left_out_tokens=0 if failure else sum(trajectory.own_tokens for trajectory in others),
        )
        return Completion(
            tuple(sample.tokens),
            tuple(sample.logprobs),
            truncated=sample.last_end is not End.COMPLETE,
            weight_version=min((made_by for made_by, _ in sample.stretches), default=version),
            routing=sample.routing(self._params.routing),
            episode=episode,
            stretches=tuple(sample.stretches) if len(sample.stretches) > 1 else (),
        )

    def _require_running(self) -> None:
        if self.is_over:
            raise RuntimeError("the episode is over; return from it")

    def _take_turn(self, completion: Completion, most: int, end_if_cut: End) -> Reply:
        if len(completion.token_ids) > most:
            raise RunError(
                f"the engine returned {len(completion.token_ids)} tokens for a request of at most {most} tokens; "
                "the engine must obey GenerateRequest.max_new_tokens, or cannot run environments"
            )
        check_answers([completion], self._shared.vocabulary)
        self._sample = self._current
        self._sample.add_turn(completion, end_if_cut)
        self._limit = ""
        if self._sample not in self._trajectories:
            self._trajectories.append(self._sample)
        self._messages.append({"role": "assistant", "content": PLACEHOLDER})
        tokenizer, ids = self._shared.tokenizer, completion.token_ids
        return Reply(
            completion.token_ids,
            completion.logprobs,
            continuation_text(tokenizer, ids, skip_special_tokens=True),
            continuation_text(tokenizer, ids),
            completion.truncated,
            completion.weight_version,
        )

    def _take_observed(self) -> list[int]:
        """Take the tokens before the next turn of the model."""
        if self._observed_messages:
            assert self._shared.chat is not None
            if self._observed_ids:
                raise NonsenseError("observed tokens and messages between the same two turns; observe either of them")
            if not self._current.turns:
                raise NonsenseError("observed a message before the model's first turn; write it into the prompt")
            observed, self._observed_messages = self._observed_messages, []
            ids = self._shared.chat.between(
                self._messages, observed, closed=self._shared.chat.ends(self._current.tokens)
            )
            self._messages += observed
            return self._readable(ids)
        observed_ids, self._observed_ids = self._observed_ids, []
        return observed_ids

    def _note_use(self, tool: str, *, failed: bool, seconds: float) -> None:
        use = self._uses[tool]
        self._uses[tool] = replace(use, failures=use.failures + failed, seconds=use.seconds + seconds)

    @contextmanager
    def _off_the_clock(self) -> Iterator[None]:
        self.waits += 1
        try:
            yield
        finally:
            self.waits -= 1


def _number(value: object) -> float:
    """Return the value as a reward. Raises NonsenseError unless the value is a finite number of at most 1e9."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise NonsenseError(f"gave the reward {show(value)}, must be a number")
    number = float(value)
    if not math.isfinite(number) or abs(number) > 1e9:
        raise NonsenseError(f"gave the reward {number}, must be finite and at most 1e9")
    return number
