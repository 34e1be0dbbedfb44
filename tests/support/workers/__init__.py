"""Programs that tests run on several processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megappo.config.schema import RuntimeSettings
from megappo.runtime.process import Runtime, start_runtime
from megappo.runtime.ranks.objects import all_gather_objects


def answer(result_of: Callable[[Any, Runtime], Any]) -> None:
    """Call a function with the case of `harness.run_worker` and the runtime of this rank. Rank 0 writes its result."""
    case = json.loads(Path(sys.argv[1]).read_text())
    with start_runtime(RuntimeSettings(collective_timeout_seconds=120)) as runtime:
        result = result_of(case, runtime)
        if runtime.is_main:
            Path(sys.argv[2]).write_text(json.dumps(result))


def answer_of_all_ranks(result_of: Callable[[Any, Runtime], Any]) -> None:
    """Call `answer` with the list of the results of all ranks."""
    answer(lambda case, runtime: all_gather_objects(result_of(case, runtime)))
