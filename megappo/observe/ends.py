"""Why a response or an episode ended. This module imports no torch."""

from __future__ import annotations

from enum import StrEnum


class End(StrEnum):
    """Why a response or an episode ended. The value is the word in saved samples and in `samples.jsonl`."""

    COMPLETE = "complete"
    """It ended by itself: a stop token or a stop text, or the environment returned."""
    TURN_CUT = "turn_cut"
    """The environment returned after a turn that `max_turn_tokens`, or the agent's own limit, had cut."""
    OUT_OF_TURNS = "out_of_turns"
    """`rollout.environment.max_turns` ended the episode."""
    OUT_OF_CALLS = "out_of_calls"
    """`rollout.environment.max_calls` ended the episode."""
    RESPONSE_LIMIT = "response_limit"
    """`rollout.max_response_tokens`, or that of evaluations, cut the response or left no room for the next turn."""
    POSITION_LIMIT = "position_limit"
    """`rollout.max_total_tokens` did. In an episode with a longer prompt of an agent: `data.max_prompt_tokens` +
    `rollout.max_response_tokens` did."""

    @property
    def is_truncated(self) -> bool:
        """Whether a limit of the whole response ended it. `algorithm.mask_truncated`, `reward.truncated_score` and
        `reward.truncated_penalty` apply to such samples only."""
        return self in (End.RESPONSE_LIMIT, End.POSITION_LIMIT)

    @property
    def description(self) -> str:
        """The reason in a few words, for people."""
        return {
            End.COMPLETE: "ended by itself",
            End.TURN_CUT: "ended after a turn that the limit of a turn cut",
            End.OUT_OF_TURNS: "out of turns",
            End.OUT_OF_CALLS: "out of tool calls",
            End.RESPONSE_LIMIT: "cut at the response limit",
            End.POSITION_LIMIT: "cut at the limit of prompt and response together",
        }[self]


def end_of_older_version(limit: str, *, truncated: bool) -> End:
    """The end of a sample of an older version, which saved the limit of its episode ("" for none). These versions
    counted every cut turn as a truncated response."""
    ends = {"turns": End.OUT_OF_TURNS, "calls": End.OUT_OF_CALLS, "tokens": End.RESPONSE_LIMIT}
    return ends.get(limit) or (End.RESPONSE_LIMIT if truncated else End.COMPLETE)
