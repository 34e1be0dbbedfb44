"""Page of a report: comparison with numbers that are computed by hand, and texts that must not become markup."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from megappo.observe.metric_docs import METRICS
from megappo.observe.page.curves import FIRST, curves, descriptions, ordered, points_of
from megappo.observe.page.document import document
from megappo.observe.page.experience import histograms, saved_samples, spread
from megappo.observe.page.records import jumps, written_samples
from tests.support.saved import save_step, two_samples


def embedded(page: bytes) -> Any:
    """Return the data of a page."""
    (text,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page.decode(), re.DOTALL)
    return json.loads(text)


def test_curves_keep_steps_and_gaps() -> None:
    """Values have six digits. Nonfinite values are None. Rare metrics have two lists. Hours count the time in steps."""
    result = curves(
        {3: {"reward/mean": 1.0, "time/step": 1800.0},
         1: {"reward/mean": 0.12345678, "time/step": 3600.0, "eval/reward_mean": 0.25}, 2: {"reward/mean": math.nan}},
        10,
    )  # fmt: skip
    assert result.plain() == {
        "steps": [1, 2, 3],
        "hours": [1, 1, 1.5],
        "stepsPerPoint": 1,
        "metrics": [
            ("reward/mean", [0.123457, None, 1]),
            ("time/step", [3600, None, 1800]),
            ("eval/reward_mean", [[0], [0.25]]),
        ],
    }


def test_long_curves_are_averaged() -> None:
    lines = {step: {"reward/mean": float(step)} for step in range(1, 8)}
    lines[4]["reward/mean"] = math.inf
    result = curves(lines, 3)
    assert (result.steps, result.steps_per_point) == ([3, 6, 7], 3)
    assert result.series == {"reward/mean": [2, 5.5, 7]} and result.hours == [None, None, None]
    maxima = {step: {"response/length_max": float(-step), "reward/min": float(step)} for step in range(1, 8)}
    maxima[4]["memory/peak_gigabytes"] = 2.0
    assert curves(maxima, 3).series == {
        "reward/min": [1, 4, 7], "response/length_max": [-1, -4, -7], "memory/peak_gigabytes": [[1], [2]],
    }  # fmt: skip
    assert points_of(100) == 2_000 and points_of(1_000) == 250 and points_of(10**6) == 100


def test_too_large_step_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"a step is beyond 9007199254740992; remove its line"):
        curves({10**400: {"reward/mean": 1.0}}, 10)


def test_metrics_are_in_the_documented_order() -> None:
    names = ["mine", "time/step", "eval/math/pass@8", "kl/mean", "reward/mean", "eval/math/reward_mean"]
    assert ordered(names) == [
        "reward/mean", "kl/mean", "time/step", "eval/math/reward_mean", "eval/math/pass@8", "mine",
    ]  # fmt: skip
    assert descriptions(["mine", "eval/math/pass@8"]) == [["eval/math/pass@8", *METRICS["eval/NAME/pass@K"]]]
    assert set(FIRST) <= METRICS.keys()


HOSTILE = "</script><img src=x onerror=\"document.title='broken'\"><!--\u2028\ud83d&amp;$data"


def test_texts_cannot_end_the_script_element() -> None:
    page = document({"runs": [HOSTILE]})
    assert embedded(page) == {"runs": [HOSTILE]}
    text = page.decode()
    assert "<img" not in text[text.index('<script id="data"') :].replace("<image", "")
    assert "\u2028" not in text[text.index('<script id="data"') : text.index("<script>")]
    assert "default-src 'none'" in text and "unsafe-eval" not in text
    assert "unsafe-inline" not in re.findall(r"script-src [^;]*", text)[0]


def test_numbers_outside_of_json_are_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        document({"runs": [math.nan]})


def test_distributions_of_two_samples(tmp_path: Path) -> None:
    """The rewards are 1 and -0.5, for 3 and 1 tokens. Own tokens have values of 0.5 and advantages of 0.25, 0.5 and
    -1, and one ratio of exp(0.5). Few numbers have one bin each, with edges halfway between."""
    save_step(tmp_path, 3, two_samples(0))
    distributions = histograms({3: [tmp_path / "step-000003" / "rank-00000.parquet"]})
    assert distributions == {
        "steps": [3],
        "of": {
            "reward": {"edges": [-1.25, 0.25, 1.75], "shares": [[0.5, 0.5]]},
            "length": {"edges": [0, 2, 4], "shares": [[0.5, 0.5]]},
            "ratio": {"edges": [0.675639, 1.32436, 1.97308], "shares": [[0.667, 0.333]]},
            "value": {"edges": [0.499, 0.501], "shares": [[1]]},
            "advantage": {"edges": [-1.625, -0.375, 0.375, 0.625], "shares": [[0.333, 0.333, 0.333]]},
        },
    }


def test_samples_contain_numbers_of_tokens(tmp_path: Path) -> None:
    for step in range(1, 9):
        save_step(tmp_path, step, two_samples(0), two_samples(2))
    files = {s: [tmp_path / f"step-{s:06d}" / f"rank-{rank:05d}.parquet" for rank in (0, 1)] for s in range(1, 9)}
    samples = saved_samples(files, 1.0)
    assert [sample["step"] for sample in samples[::4]] == [8, 6, 5, 3, 1] == spread(range(1, 9), 5)[::-1]
    assert [sample["id"] for sample in samples[:4]] == [0, 1, 2, 3]
    first, second = samples[:2]
    assert (first["prompt"], first["response"], first["answer"], first["reward"]) == ("0+4=", "4\x1b[2J!<eos>", "4", 1)
    assert (first["length"], first["end"], second["answer"]) == (3, None, None)
    assert second["end"] == "cut at the response limit"
    assert first["tokens"] == ["\x1b[2J", "é\n", "ok"] and first["own"] == [1, 0, 1]
    columns: Any = first["columns"]
    assert dict(columns) == {
        "logprob": [-0.5, None, -2], "value": [0.5, None, 0.5], "advantage": [0.25, None, 0.5],
        "return": [0.75, None, 1], "reward": [0, 0, 1], "ratio": [1.649, None, 1], "version": [7, 7, 7],
    }  # fmt: skip


def test_page_has_a_limit_of_tokens(tmp_path: Path) -> None:
    """Of samples with 3, 1, 3 and 1 tokens, the lowest reward is first, then the highest, up to the limit."""
    save_step(tmp_path, 1, two_samples(0), two_samples(2))
    files = {1: [tmp_path / "step-000001" / f"rank-{rank:05d}.parquet" for rank in (0, 1)]}
    of_tokens = 1 / 24_000
    assert [sample["id"] for sample in saved_samples(files, of_tokens)] == [1]
    assert [sample["id"] for sample in saved_samples(files, 4 * of_tokens)] == [1, 2]
    assert [sample["id"] for sample in saved_samples(files, 5 * of_tokens)] == [1, 2, 3]


def test_texts_of_a_run_contain_no_secrets(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"step": step, "prompt": "1+1=", "raw_response": "nan", "answer": None, "score": "nan", "tokens": 2}
        for step in range(200)
    ]
    lines[-1] |= {"prompt": "Bearer sk-abcdefghijklmnop1", "raw_response": "x" * 3_000, "answer": 2, "score": 10**400}
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "cut')
    samples = written_samples(tmp_path)
    assert len(samples) == 100 and samples[0]["step"] == 100
    assert (samples[0]["response"], samples[0]["answer"], samples[0]["reward"], samples[0]["length"]) == (
        "nan", None, None, 2,
    )  # fmt: skip
    assert (samples[-1]["prompt"], samples[-1]["answer"], samples[-1]["reward"]) == ("Bearer (hidden)", "2", None)
    assert len(str(samples[-1]["response"])) == 2_000
    record = {"step": 7, "role": "actor", "minibatch": 2, "reasons": ["gradient norm 9, usually 1"], "samples": []}
    (tmp_path / "jumps.jsonl").write_text(json.dumps(record) + "\n" + json.dumps({"step": 8, "role": ["x"]}) + "\n")
    assert jumps(tmp_path) == [
        [7, "actor update stands out", "update 2: gradient norm 9, usually 1"],
        [8, "an update stands out", "update None: "],
    ]
    assert written_samples(tmp_path / "none") == [] and jumps(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("text", "why"), [("[1]\n", "line 1 of its last 1 has no step"), ("{\n", "line 1 of its last 1 is not JSON")]
)
def test_damaged_lines_are_an_error(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "jumps.jsonl").write_text(text)
    with pytest.raises(ValueError, match=why):
        jumps(tmp_path)
