"""Agreement of all ranks on the outcome of their rounds of requests."""

from __future__ import annotations

from collections.abc import Sequence

from megappo.engines.protocol import Completion, GenerateRequest
from megappo.engines.sglang.dispatch import Outcome, Round
from megappo.engines.sglang.server import EngineError
from megappo.runtime.objects import all_gather_objects

ROUNDS_IN_VAIN = 3
"""Rounds in a row in which servers fail and no request of any rank is answered, after which the run ends: the remaining
requests must be what makes the servers fail."""


def answers_of_each(rounds: Sequence[Round]) -> tuple[dict[int, Completion], dict[int, str]]:
    """Wait for rounds with one server and one request each. Returns this rank's answers, and why which servers of any
    rank failed. A collective of the world; raises EngineError where a server refuses its request."""
    outcomes = [round_.result() for round_ in rounds]
    mine = {server: reason for outcome in outcomes for server, reason in outcome.failures.items()}
    facts = all_gather_objects((mine, [outcome.refusal for outcome in outcomes if outcome.refusal]))
    if refusals := [refusal for _, of_rank in facts for refusal in of_rank]:
        raise EngineError(refusals[0])
    failures = {server: reason for of_rank, _ in facts for server, reason in of_rank.items()}
    return {number: answer for outcome in outcomes for number, answer in outcome.completions.items()}, failures


class Rounds:
    """Counts rounds without any answer, over a run."""

    def __init__(self) -> None:
        self._in_vain = 0

    def agree(
        self, left: int, outcome: Outcome, requests: Sequence[GenerateRequest] = ()
    ) -> tuple[bool, dict[int, str]]:
        """Whether no rank has a request left, and why which servers failed; a collective of the world.

        `left` counts this rank's, `requests` are those of them that are known. Raises EngineError for a request that
        no server will ever take, and where servers have failed `ROUNDS_IN_VAIN` times before anything was answered.
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
                f"servers failed {ROUNDS_IN_VAIN} times in a row before one request was answered: what is left{which} "
                f"seems to be the cause, or every server's machine; the last time {next(iter(failures.values()))}"
            )
        return not any(count for count, *_ in facts), failures
