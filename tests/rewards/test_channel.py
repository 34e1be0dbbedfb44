"""Messages of a worker reach the pool completely."""

from __future__ import annotations

import os

import pytest

from megappo.config.sections.environment import ToolSettings
from megappo.rewards.processes.channel import PoolEnd, WorkerEnd

MOST = next(rule.le for rule in ToolSettings.model_fields["output_characters"].metadata if hasattr(rule, "le"))


@pytest.mark.parametrize("character", ["a", "\x01", "\u4e2d", "\U0001f600", "\ud800"])
def test_longest_text_of_a_tool(character: str) -> None:
    """JSON encodes a character with one, six or twelve bytes."""
    pool = PoolEnd()
    theirs = [os.dup(descriptor) for descriptor in pool.their_descriptors]
    pool.started("first")
    worker = WorkerEnd(*theirs)
    assert worker.first == "first"
    worker.send([1, "", MOST * character])
    assert pool.receive() == [1, "", MOST * character] and pool.receive() is None
    pool.close()
    with pytest.raises(EOFError):
        worker.receive()
