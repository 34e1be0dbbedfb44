"""Turns the conversations of an agent into trajectories of tokens.

An agent sends its whole conversation with every request. Where that continues a recorded one, the model's turns keep
their recorded tokens, and only the messages after them are tokenized. Otherwise a new trajectory begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from megappo.config.tokens import Message
from megappo.environments.chat import PLACEHOLDER, ChatTokens
from megappo.environments.gateway.wire import Asked, Json, RefusedError, Said, name_of
from megappo.environments.protocol import Limit, LimitReached, NonsenseError, Reply
from megappo.environments.tool_calls import CallFormat
from megappo.environments.trajectory import Trajectory
from megappo.errors import RunError

if TYPE_CHECKING:
    from megappo.environments.session import Session


@dataclass
class _Conversation:
    """Messages of a conversation, and the trajectory that they became."""

    tools: tuple[Json, ...]
    chat: ChatTokens
    trajectory: Trajectory
    messages: list[Message] = field(default_factory=list)
    replies: set[int] = field(default_factory=set)
    """Positions of the messages that the model wrote."""

    def is_continued_by(self, asked: Asked) -> bool:
        count = len(self.messages)
        return (
            asked.tools == self.tools
            and len(asked.messages) > count
            and list(asked.messages[:count]) == self.messages
            and bool(self.replies)
        )

    def tokens_of(self, heard: Sequence[Message]) -> list[int]:
        """Tokens of the messages that follow the last turn. Raises ValueError where the template changes earlier
        turns."""
        said: Message = {"role": "assistant", "content": PLACEHOLDER}
        before = [said if i in self.replies else message for i, message in enumerate(self.messages)]
        return self.chat.between(before, heard, closed=self.chat.ends(self.trajectory.tokens))


class Recorder:
    """Answers the requests of one episode's agent, one after the other."""

    def __init__(self, session: Session, call_format: CallFormat) -> None:
        self._session, self._format = session, call_format
        self._conversations: list[_Conversation] = []
        self._turn = asyncio.Lock()
        self.limit: Limit | None = None
        """Limit that the episode has reached, once the agent was told so."""
        self.error: RunError | None = None
        """Error that ends the run."""

    async def answer(self, asked: Asked) -> Said:
        """The model's next turn. Raises RefusedError for a request that cannot be answered, LimitReached, and RunError
        for errors that end the run."""
        async with self._turn:
            try:
                said = await self._next(asked)
                self.limit = None  # the agent has continued within its limits
                return said
            except LimitReached as reached:
                self.limit = reached.limit
                raise
            except RunError as error:
                self.error = error
                raise

    async def _next(self, asked: Asked) -> Said:
        if not asked.messages or asked.messages[-1]["role"] == "assistant":
            raise RefusedError("the last message must not be the model's, which writes the next one")
        conversation = self._continued(asked) or self._begun(asked)
        prompt_tokens = self._session.next_prompt_tokens
        try:
            reply = await self._session.generate(asked.max_tokens)
        except asyncio.CancelledError:  # the agent does not wait any more, and may ask once more
            conversation.trajectory.drop_unanswered()
            raise
        said = self._said(reply, asked.tools)
        conversation.messages = [*asked.messages, said.message]
        conversation.replies.add(len(asked.messages))
        for _, call in said.calls:
            if any(name_of(tool) == call.tool for tool in asked.tools):  # models may make up others
                self._session.count_call(call.tool)
        return replace(said, prompt_tokens=prompt_tokens)

    def _continued(self, asked: Asked) -> _Conversation | None:
        """The longest recorded conversation that the request continues, the newest of equal ones; None: there is
        none."""
        newest = reversed(self._conversations)
        for conversation in sorted((c for c in newest if c.is_continued_by(asked)), key=lambda c: -len(c.messages)):
            try:
                heard = conversation.tokens_of(asked.messages[len(conversation.messages) :])
            except ValueError:
                continue  # the template changes earlier turns, which the model would not recognise
            self._go_on(conversation.trajectory, heard)
            return conversation
        return None

    def _go_on(self, trajectory: Trajectory, heard: Sequence[int]) -> None:
        try:
            self._session.go_on(trajectory, heard)
        except NonsenseError as error:
            raise RefusedError(str(error)) from error

    def _begun(self, asked: Asked) -> _Conversation:
        chat = self._session.chat_tokens(asked.tools)
        try:
            trajectory = self._session.begin(chat.opening(asked.messages))
        except ValueError as error:  # also NonsenseError, for tokens that the model has no row for
            raise RefusedError(str(error)) from error
        self._conversations.append(_Conversation(asked.tools, chat, trajectory))
        return self._conversations[-1]

    def _said(self, reply: Reply, tools: Sequence[Json]) -> Said:
        """A reply in the form of the protocols; text that cannot be read as calls stays text."""
        text, calls = reply.text, self._format.calls(reply.text) if tools else []
        if any(call.problem for call in calls):
            calls = []
        if calls:
            text = self._format.prose(text)
        name = str(self._session.turns)
        named = tuple((f"call_{name}_{number}", call) for number, call in enumerate(calls))
        return Said(name, text, named, reply.truncated, 0, len(reply.token_ids))
