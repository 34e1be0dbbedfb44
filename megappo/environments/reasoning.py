"""Tasks of reasoning-gym with several tries: `rollout.environment.name: reasoning_gym`, with data of the same name."""

from __future__ import annotations

from importlib.util import find_spec

from megappo.environments.session import Session
from megappo.errors import show
from megappo.files.json_values import JSONValue
from megappo.rewards.rules import reasoning_gym, warm_up

_SCORE = "score"

if find_spec("reasoning_gym") is not None:  # imported once per worker, not in the fork of each call
    warm_up("reasoning_gym")


def score(*, reply: str, metadata: dict[str, JSONValue], tagged: bool) -> str:
    """Return the score of a reply by the generator of the task, as text. Tools return text."""
    return repr(reasoning_gym(prompt="", response=reply, answer=None, metadata=metadata, tagged=tagged))


class ReasoningGym:
    """Environment in which the model answers, receives its score, and tries again until it is right or has no tries
    left.

    The reward of a turn is the improvement over the best earlier score, minus `cost_per_turn` for every further try.
    The rewards of an episode therefore sum to its best score without costs. Worker processes compute the scores with
    the generator of the task.
    """

    def __init__(
        self,
        *,
        tries: int = 3,
        feedback: str = "That scores {score:.2f} out of 1. Try again.",
        cost_per_turn: float = 0.0,
        tagged: bool = False,
    ) -> None:
        """`tagged`: the answer is between the last <answer> tags.

        Raises ValueError for invalid arguments, or if the library is missing.
        """
        warm_up("reasoning_gym")
        if isinstance(tries, bool) or not isinstance(tries, int) or tries < 1:
            raise ValueError(
                f"rollout.environment.arguments.tries is {show(tries)}, must be a whole number above 0; change it"
            )
        try:
            feedback.format(score=0.5)
        except (LookupError, ValueError, AttributeError) as error:
            raise ValueError(
                f"rollout.environment.arguments.feedback {show(feedback)} cannot be filled in ({error}); "
                "write {score} at the position of the score"
            ) from error
        self.tools = {_SCORE: "megappo.environments.reasoning:score"}
        self._tries, self._feedback, self._cost, self._tagged = tries, feedback, cost_per_turn, tagged

    async def run(self, session: Session) -> None:
        """See `Environment.run`."""
        best = 0.0
        for number in range(self._tries):
            value = await self._score(session, (await session.generate()).text)
            session.reward(max(0.0, value - best) - (self._cost if number else 0.0))
            best = max(best, value)
            if best >= 1.0 or number == self._tries - 1:
                return
            session.observe(self._feedback.format(score=value))

    async def _score(self, session: Session, reply: str) -> float:
        text = await session.use(_SCORE, reply=reply, metadata=session.prompt.metadata, tagged=self._tagged)
        try:
            return float(text)
        except ValueError as error:
            raise ValueError(f"reasoning-gym does not score a reply: {text}") from error
