"""Each saved token has the log-probability of its recorded weights.

The tests run random configurations with real SGLang, and transformers recomputes the tokens. The cases include
repeated prompts, responses up to the last position of a model, pools of one sequence, retractions and a minimum
number of tokens. Servers are also killed during generation, a weight sync or a restart.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from megappo.observe.metrics import read_metrics

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs the full environment", allow_module_level=True)

from tests.support.served_cases import FAMILIES, STEPS, draw_case, recompute, run_case

pytestmark = [pytest.mark.slow, pytest.mark.waits]
TOLERANCE_NATS = 2e-5  # float32 on both sides
TABLE = [(seed, family, ahead) for seed in (1, 2) for family in FAMILIES for ahead in (0, 1, 2)]
DEFAULT = (9, "qwen2", 2)
"""Interrupted responses with a least number of tokens, retractions in a pool for one sequence, and three kills."""
CASES = [
    pytest.param(*case, id="{1}-ahead{2}-{0}".format(*case), marks=[] if case == DEFAULT else pytest.mark.exhaustive)
    for case in (DEFAULT, *TABLE)
]


@pytest.mark.parametrize(("seed", "family", "ahead"), CASES)
def test_saved_tokens_match_their_recorded_versions(tmp_path: Path, seed: int, family: str, ahead: int) -> None:
    case = draw_case(seed, family, ahead)
    print(case)
    output = run_case(case, tmp_path)
    print(output)
    result = recompute(case, tmp_path)
    print(result)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines][-STEPS:] == [*range(1, STEPS + 1)]
    assert result.gap < TOLERANCE_NATS and result.tokens > 24 * STEPS
    assert max(result.versions) <= STEPS and (ahead == 1 or len(result.versions) > 1)
    assert result.longest <= case.positions
    assert lines[-1]["engine/restarts"] == len(set(re.findall(r"killed start (\d+)", output)))
