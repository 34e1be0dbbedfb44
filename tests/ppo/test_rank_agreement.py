"""Tests of the comparison of ranks: differing settings, data or versions end the run with an error."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megappo.errors import ConfigError
from megappo.ppo.assembly.rank_agreement import check_alike
from tests.support.attempts import attempts, train

pytestmark = pytest.mark.waits


def of_rank(rank: int, folder: Path, facts: list[dict[str, Any]]) -> None:
    store = dist.FileStore(str(folder / "store"), len(facts))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(facts))
    message = ""
    try:
        check_alike(facts[rank])
    except ConfigError as error:
        message = str(error)
    (folder / f"message-{rank}").write_text(message)


def compared(folder: Path, *facts: dict[str, Any]) -> set[str]:
    """Return the messages of the ranks of a world with these facts."""
    folder.mkdir()
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=of_rank, args=(r, folder, facts)) for r in range(len(facts))]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    return {path.read_text() for path in folder.glob("message-*")}


def test_error_names_differing_ranks_and_values(tmp_path: Path) -> None:
    facts = {"run.seed": 1, "the device": "cuda", "the checksum of the training data": "a" * 64}
    assert compared(tmp_path / "same", facts, facts) == {""}
    (message,) = compared(tmp_path / "two", facts, facts | {"run.seed": 2})
    assert message.startswith(
        "settings, files or software differ between ranks: run.seed is 1 on rank 0 and 2 on rank 1; start all"
    )
    other = facts | {"the device": "cpu", "the checksum of the training data": "b" * 64, "the version of sglang": "1"}
    (message,) = compared(tmp_path / "three", facts, facts, other)
    assert "the device is 'cuda' on most ranks and 'cpu' on rank 2; " in message
    assert "the checksum of the training data is 'aaaaaaaaaaaa' on most ranks and 'bbbbbbbbbbbb' on rank 2; " in message
    assert "the version of sglang is null on most ranks and '1' on rank 2; start all" in message


def sums_of_rank() -> Iterator[dict[str, Any]]:
    """Yield prompts that differ between ranks, like a source that draws without a seed."""
    for n in range(100):
        yield {"prompt": f"{n % 10}+{os.environ['RANK']}=", "answer": str(n % 10)}


def test_differing_data_end_run_before_model_construction(tmp_path: Path) -> None:
    source = {"train": {"source": f"{__name__}:sums_of_rank"}, "apply_chat_template": False, "max_prompt_tokens": 8}
    overrides = (f"data={json.dumps(source)}", "evaluation=null", "checkpoint=null", "run.steps=1")
    output = attempts(tmp_path, train(tmp_path / "run", *overrides, expect="2"))
    message = "megappo: error: settings, files or software differ between ranks: the checksum of the training data is '"
    assert message in output
    assert "on rank 0 and '" in output and "Traceback" not in output
