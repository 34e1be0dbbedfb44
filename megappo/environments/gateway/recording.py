"""Converts the conversations of an agent into trajectories of tokens.

An agent sends its whole conversation with every request. If a request continues a recorded conversation, turns of the
model keep their recorded tokens, and only the messages after the turns are tokenized. Otherwise a new trajectory
begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from megappo.environments.chat import PLACEHOLDER, ChatTokens
from megappo.environments.gateway.wire import AssistantTurn, ChatRequest, Json, RefusedError, name_of
from megappo.environments.tools.tool_calls import CallFormat
from megappo.environments.trajectory import Trajectory
from megappo.environments.turns import Limit, LimitReached, NonsenseError, Reply
from megappo.errors import RunError
from megappo.files.json_values import JSONValue
from megappo.models.tokens import Message


@dataclass
class _Conversation:
    """Messages of a conversation and their trajectory."""

    tools: tuple[Json, ...]
    chat: ChatTokens
    trajectory: Trajectory
    messages: list[Message] = field(default_factory=list)
    replies: set[int] = field(default_factory=set)
    """Positions of the messages that the model wrote."""

    def is_continued_by(self, request: ChatRequest) -> bool:
        count = len(self.messages)
        return (
            request.tools == self.tools
            and len(request.messages) > count
            and list(request.messages[:count]) == self.messages
            and bool(self.replies)
        )

    def tokens_of(self, observed: Sequence[Message]) -> list[int]:
        """Return the tokens of messages after the last turn. Raises ValueError if the template changes earlier
        turns."""
        turn: Message = {"role": "assistant", "content": PLACEHOLDER}
        before = [turn if i in self.replies else message for i, message in enumerate(self.messages)]
        return self.chat.between(before, observed, closed=self.chat.ends(self.trajectory.tokens))


class RecordedEpisode(Protocol):
    """The part of a `Session` that `Recorder` needs."""

    @property
    def turns(self) -> int:
        """Number of turns of the model so far."""

    @property
    def next_prompt_tokens(self) -> int:
        """Number of tokens before the next turn."""

    async def generate(self, max_tokens: int | None = None) -> Reply:
        """Generate the next turn of the model."""

    def chat_tokens(self, schemas: Sequence[JSONValue]) -> ChatTokens:
        """Return the chat template for a conversation with these tools."""

    def begin(self, prompt_ids: Sequence[int]) -> Trajectory:
        """Start a trajectory whose next turn answers this prompt."""

    def go_on(self, trajectory: Trajectory, observed: Sequence[int]) -> None:
        """Continue a trajectory after the tokens `observed`."""

    def count_call(self, tool: str) -> None:
        """Count a call of a tool."""


class Recorder:
    """Answers the requests of the agent of one episode sequentially."""

    def __init__(self, session: RecordedEpisode, call_format: CallFormat) -> None:
        self._session, self._format = session, call_format
        self._conversations: list[_Conversation] = []
        self._turn = asyncio.Lock()
        self.limit: Limit | None = None
        """Limit that the episode has reached and that the agent was notified of."""
        self.error: RunError | None = None
        """Error that ends the run."""

    async def answer(self, request: ChatRequest) -> AssistantTurn:
        """Return the next turn of the model.

        Raises RefusedError for a request that cannot be answered, LimitReached, and RunError for errors that end the
        run.
        """
        async with self._turn:
            try:
                turn = await self._next(request)
                self.limit = None  # the agent has continued within its limits
                return turn
            except LimitReached as reached:
                self.limit = reached.limit
                raise
            except RunError as error:
                self.error = error
                raise

    async def _next(self, request: ChatRequest) -> AssistantTurn:
        if not request.messages or request.messages[-1]["role"] == "assistant":
            raise RefusedError(
                "the last message must not be a message of the model, because the model writes the next message"
            )
        conversation = self._continued(request) or self._begun(request)
        prompt_tokens = self._session.next_prompt_tokens
        try:
            reply = await self._session.generate(request.max_tokens)
        except asyncio.CancelledError:  # the agent no longer waits, and may repeat the request
            conversation.trajectory.drop_unanswered()
            raise
        turn = self._assistant_turn(reply, request.tools)
        conversation.messages = [*request.messages, turn.message]
        conversation.replies.add(len(request.messages))
        for _, call in turn.calls:
            if any(name_of(tool) == call.tool for tool in request.tools):  # models may invent other tools
                self._session.count_call(call.tool)
        return replace(turn, prompt_tokens=prompt_tokens)

    def _continued(self, request: ChatRequest) -> _Conversation | None:
        """Return the longest recorded conversation that the request continues, or None. The newest of equal length
        wins."""
        newest = reversed(self._conversations)
        for conversation in sorted((c for c in newest if c.is_continued_by(request)), key=lambda c: -len(c.messages)):
            try:
                observed = conversation.tokens_of(request.messages[len(conversation.messages) :])
            except ValueError:
                continue  # the template changes earlier turns, so the tokens would differ
            self._go_on(conversation.trajectory, observed)
            return conversation
        return None

    def _go_on(self, trajectory: Trajectory, observed: Sequence[int]) -> None:
        try:
            self._session.go_on(trajectory, observed)
        except NonsenseError as error:
            raise RefusedError(str(error)) from error

    def _begun(self, request: ChatRequest) -> _Conversation:
        chat = self._session.chat_tokens(request.tools)
        try:
            trajectory = self._session.begin(chat.opening(request.messages))
        except ValueError as error:  # also NonsenseError, for tokens without an embedding row
            raise RefusedError(str(error)) from error
        self._conversations.append(_Conversation(request.tools, chat, trajectory))
        return self._conversations[-1]

    def _assistant_turn(self, reply: Reply, tools: Sequence[Json]) -> AssistantTurn:
        """Return a reply in the form of the protocols. Text that cannot be parsed as calls remains text."""
        text, calls = reply.text, self._format.calls(reply.text) if tools else []
        if any(call.problem for call in calls):
            calls = []
        if calls:
            text = self._format.prose(text)
        name = str(self._session.turns)
        named = tuple((f"call_{name}_{number}", call) for number, call in enumerate(calls))
        return AssistantTurn(name, text, named, reply.truncated, 0, len(reply.token_ids))
