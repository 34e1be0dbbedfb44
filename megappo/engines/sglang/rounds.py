"""Agreement of all ranks on the outcome of their rounds of requests."""

from __future__ import annotations

from collections.abc import Sequence

from megappo.engines.protocol import Completion, GenerateRequest
from megappo.engines.sglang.dispatch import Outcome, Round
from megappo.engines.sglang.server import EngineError
from megappo.runtime.objects import all_gather_objects

ROUNDS_IN_VAIN = 3
"""Maximum number of consecutive rounds in which servers fail and no request is answered. The run then ends, because
the remaining requests are the likely cause of the failures."""


def answers_of_each(rounds: Sequence[Round]) -> tuple[dict[int, Completion], dict[int, str]]:
    """Wait for rounds with one server and one request each. Returns the answers of this rank, and the failure reasons
    of the servers of all ranks. A collective of the world. Raises EngineError if a server rejects its request."""
    outcomes = [round_.result() for round_ in rounds]
    mine = {server: reason for outcome in outcomes for server, reason in outcome.failures.items()}
    facts = all_gather_objects((mine, [outcome.refusal for outcome in outcomes if outcome.refusal]))
    if refusals := [refusal for _, of_rank in facts for refusal in of_rank]:
        raise EngineError(refusals[0])
    failures = {server: reason for of_rank, _ in facts for server, reason in of_rank.items()}
    return {number: answer for outcome in outcomes for number, answer in outcome.completions.items()}, failures


class Rounds:
    """Counter of consecutive rounds without an answer, over a run."""

    def __init__(self) -> None:
        self._in_vain = 0

    def agree(
        self, left: int, outcome: Outcome, requests: Sequence[GenerateRequest] = ()
    ) -> tuple[bool, dict[int, str]]:
        """Return whether all requests of all ranks are answered, and the reasons of failed servers. A collective of
        the world.

        `left` is the number of unanswered requests of this rank, and `requests` contains the known ones. Raises
        EngineError if every server would reject a request, or if servers failed in `ROUNDS_IN_VAIN` rounds without an
        answer.
        """
        example = f"prompt {requests[0].prompt_id}, of {len(requests[0].token_ids)} tokens" if requests else ""
        facts = all_gather_objects((left, outcome.failures, outcome.refusal, outcome.answered, example))
        if refusals := [refusal for _, _, refusal, _, _ in facts if refusal]:
            raise EngineError(refusals[0])
        failures = {server: reason for _, of_rank, _, _, _ in facts for server, reason in of_rank.items()}
        is_in_vain = failures and not any(answered for _, _, _, answered, _ in facts)
        self._in_vain = self._in_vain + 1 if is_in_vain else 0
        if self._in_vain == ROUNDS_IN_VAIN:
            examples = [example for *_, example in facts if example]
            which = f", such as {examples[0]}," if examples else ""
            raise EngineError(
                f"servers failed {ROUNDS_IN_VAIN} times in a row before any request was answered; the likely cause "
                f"is a remaining request{which} or the machines of all servers; the last failure: "
                f"{next(iter(failures.values()))}"
            )
        return not any(count for count, *_ in facts), failures
