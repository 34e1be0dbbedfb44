"""Protocol of an environment. Custom environments import their types from this module."""

from __future__ import annotations

from typing import Protocol

from megappo.environments.session import Session
from megappo.environments.turns import LimitReached, Reply

__all__ = ["Environment", "LimitReached", "Reply", "Session"]


class Environment(Protocol):
    """An environment: the class `rollout.environment.name`, called with `rollout.environment.arguments`.

    An environment may also have these attributes or properties:

        tools     {name: import path} of functions that `Session.use` calls in worker processes, with limits of
                  time, memory and processes for each call. The functions take keyword arguments and return a text.
        programs  {name: argument} of tools that take a Python program as this argument. With
                  `rollout.environment.tools.sandbox`, the sandbox runs these programs.
        schemas   descriptions of the tools for the chat template (OpenAI format), used to render prompts
        role      role of messages that are observed as text, "user" by default
        serves    True if the environment uses `Session.serve`, which needs a chat template
    """

    async def run(self, session: Session) -> float | None:
        """Run one episode. All episodes of a rank run in one event loop.

        Returns a reward for the last turn in addition to `Session.reward`, or None. `LimitReached` need not be
        caught: the episode then ends with its rewards so far. Any other exception fails the sample, which is excluded
        from training. Random draws should depend on `Session.seed`, so that a run can be repeated.
        """
