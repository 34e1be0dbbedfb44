"""Why a response or an episode ended. This module imports no torch."""

from __future__ import annotations

from enum import StrEnum


class End(StrEnum):
    """Why a response or an episode ended. The value is the word in saved samples and in `samples.jsonl`."""

    COMPLETE = "complete"
    """A stop token or a stop text ended the response, or the environment returned."""
    TURN_CUT = "turn_cut"
    """The environment returned after a turn that `max_turn_tokens`, or the agent's own limit, had cut."""
    OUT_OF_TURNS = "out_of_turns"
    """`rollout.environment.max_turns` ended the episode."""
    OUT_OF_CALLS = "out_of_calls"
    """`rollout.environment.max_calls` ended the episode."""
    RESPONSE_LIMIT = "response_limit"
    """`rollout.max_response_tokens`, or the limit of evaluations, cut the response or prevented the next turn."""
    POSITION_LIMIT = "position_limit"
    """`rollout.max_total_tokens` cut the response or prevented the next turn. In an episode with a longer prompt of an
    agent, the limit is `data.max_prompt_tokens` + `rollout.max_response_tokens`."""

    @property
    def is_truncated(self) -> bool:
        """Whether a limit of the whole response ended the response. `algorithm.mask_truncated`,
        `reward.truncated_score` and `reward.truncated_penalty` apply only to truncated samples."""
        return self in (End.RESPONSE_LIMIT, End.POSITION_LIMIT)

    @property
    def description(self) -> str:
        """Readable reason."""
        return {
            End.COMPLETE: "ended by itself",
            End.TURN_CUT: "ended after a turn that the limit of a turn cut",
            End.OUT_OF_TURNS: "out of turns",
            End.OUT_OF_CALLS: "out of tool calls",
            End.RESPONSE_LIMIT: "cut at the response limit",
            End.POSITION_LIMIT: "cut at the limit of prompt and response together",
        }[self]


def end_of_older_version(limit: str, *, truncated: bool) -> End:
    """Return the end of a sample from an older version. Older versions saved the limit of the episode ("" for none),
    and counted every cut turn as a truncated response."""
    ends = {"turns": End.OUT_OF_TURNS, "calls": End.OUT_OF_CALLS, "tokens": End.RESPONSE_LIMIT}
    return ends.get(limit) or (End.RESPONSE_LIMIT if truncated else End.COMPLETE)
