"""Output of a run on the terminal."""

import io
import math
import sys
import time
from typing import Any, Literal, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from megappo.observe.metric_docs import METRICS
from megappo.observe.terminal.charts import curve, sparkline
from megappo.observe.terminal.console import LiveView, PlainView, make_view
from megappo.observe.terminal.messages import MESSAGES, SteadyView

Mode = Literal["live", "plain", "quiet"]
ALL = dict.fromkeys(METRICS, 0.5)


def terminal(encoding: str = "utf-8") -> tuple[io.TextIOWrapper, io.BytesIO]:
    raw = io.BytesIO()
    return io.TextIOWrapper(raw, encoding=encoding, write_through=True), raw


def show(mode: Mode, stream: Any, *metrics: dict[str, float]) -> None:
    view = make_view(mode, len(metrics), stream)
    view.message("4 training prompts")
    for step, numbers in enumerate(metrics, start=1):
        view.begin_step(step)
        view.stage("rollout")
        view.step(step, numbers)
        view.message(f"step {step}: Entropie fällt [not markup] \ud800")
        view.warn(f"step {step}: \ud800 [not markup]")
    view.close()
    view.close()
    view.message("after the end")


@pytest.mark.parametrize("mode", get_args(Mode))
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
@pytest.mark.parametrize("columns", ["24", "100"])
def test_no_mode_raises_an_error(mode: Mode, encoding: str, columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    stream, raw = terminal(encoding)
    odd = {"reward/mean": math.nan, "time/step": 0.0, "time/rollout": math.inf, "unknown/name": 1.0}
    show(mode, stream, {}, ALL, odd, ALL | {"reward/mean": 0.75})
    assert b"after the end" in raw.getvalue()


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("mode", get_args(Mode))
def test_write_error_of_the_log_ends_no_run(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    view = SteadyView(make_view(mode, 1, FullDisk()))
    monkeypatch.setattr(sys, "stderr", FullDisk())
    for target in (view, None):
        MESSAGES.show_in(target)
        MESSAGES.show("a message")
    view.begin_step(1)
    view.stage("rollout")
    view.step(1, ALL)
    view.close()
    with pytest.raises(OSError, match="No space left"):
        make_view("quiet", 1, FullDisk()).message("seen nowhere")


def test_live_view_shows_all_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "40")
    stream, raw = terminal()
    show("live", stream, *({"reward/mean": i / 8, "time/rollout": 1.0, "time/step": 4.0} for i in range(8)))
    text = raw.getvalue().decode()
    last = text[text.rindex("metric") :]
    assert "reward/mean" in last and "▁▂▃▄▅▆▇█" in last and "0.875" in last
    assert "rollout" in last and "25%" in last and "4.00" in last
    assert "8/8" in text and "ETA" in text and "step 8: rollout" in text
    for step in range(1, 9):
        assert f"step {step}: Entropie fällt [not markup]" in text


def test_live_view_keeps_the_last_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three distinct warnings remain visible next to messages. Older warnings are above."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("LINES", "60")
    stream, raw = terminal()
    view = make_view("live", 9, stream)
    MESSAGES.show_in(view)
    view.begin_step(1)
    for step, sentence in enumerate(("first", "second", "first", "third [bold]", "fourth"), start=1):
        MESSAGES.show(f"step {step}: the {sentence}", warns=True)
        MESSAGES.show(f"message {step}")
    MESSAGES.show_in(None)
    view.step(1, ALL)
    view.close()
    view.warn("after the end")
    text = Text.from_ansi(raw.getvalue().decode()).plain
    last = text[text.rindex("message 5") :]
    shown = [line.strip() for line in last.splitlines() if line.startswith("step ") and ": the " in line]
    assert shown == ["step 3: the first", "step 4: the third [bold]", "step 5: the fourth"]
    assert "step 1: the first" in text and "step 2: the second" in text
    assert text.endswith("after the end\n")


def test_live_view_in_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    stream, raw = terminal("ascii")
    view = make_view("live", 2, stream)
    for step in (1, 2):
        view.begin_step(step)
        view.step(step, ALL | {"reward/mean": float(step)})
    view.close()
    text = raw.getvalue().decode("ascii")
    assert "_#" in text and "\\u" not in text and "\\x" not in text


def test_live_view_shows_eta_of_slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    clock = [0.0]
    monkeypatch.setattr("rich.console.monotonic", lambda: clock[0])
    stream, raw = terminal()
    view = make_view("live", 10, stream)
    for step in range(4, 8):  # resumed after step 3
        view.begin_step(step)
        clock[0] += 100.0
        view.step(step, {})
    view.close()
    shown = Text.from_ansi(raw.getvalue().decode()).plain
    assert "7/10" in shown and shown[shown.rindex("ETA") :].split()[1] == "0:05:00"


def test_unused_live_view_prints_nothing() -> None:
    stream, raw = terminal()
    make_view("live", 2, stream).close()
    assert raw.getvalue() == b""


def at(seconds: float) -> str:
    """Return the local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def test_plain_view_prints_one_line_per_step() -> None:
    """The remaining time uses the steps of this process only. The last step has no remaining time."""
    stream, now = io.StringIO(), [1000.0]
    view = PlainView(stream, 20, clock=lambda: now[0])
    for step, later in ((7, 1090.0), (8, 1300.0), (20, 2000.0)):
        view.begin_step(step)
        view.step(step, {"reward/mean": 0.5, "time/step": 1.25})
        now[0] = later
        if step == 8:
            view.step(9, {})
    view.close()
    assert stream.getvalue().splitlines() == [
        f"step 7/20  reward 0.500  s 1.25  {at(1000)}  ETA 0 s",
        f"step 8/20  reward 0.500  s 1.25  {at(1090)}  ETA 9 min 0 s",
        f"step 9/20  {at(1300)}  ETA 18 min 20 s",
        f"step 20/20  reward 0.500  s 1.25  {at(1300)}",
    ]


RESULTS = {
    "eval/reward_mean": 0.5, "eval/pass@2": 0.5, "eval/code/pass@16": 0.75, "eval/code/pass@4": 0.25,
    "eval/code/reward_mean": 0.125, "eval/code/response_length": 7.0, "eval/code/failures": 0.0,
}  # fmt: skip
THRESHOLDS = {"": 0.5, "code": 0.0}


def test_evaluation_results_are_first_on_the_line() -> None:
    """The line has the mean reward and pass@k of each set, with the threshold for a correct response."""
    stream = io.StringIO()
    view = PlainView(stream, 20, clock=lambda: 0.0, right_above=THRESHOLDS)
    view.step(1, {"reward/mean": 0.5, **RESULTS})
    assert stream.getvalue().startswith(
        "step 1/20  eval 0.500  pass@2 (score > 0.5) 0.500  eval code 0.125  code pass@4 (score > 0) 0.250  "
        "code pass@16 (score > 0) 0.750  reward 0.500  "
    )


def test_evaluation_results_are_first_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step without an evaluation does not change the results in the table."""
    monkeypatch.setenv("COLUMNS", "120")
    stream, raw = terminal()
    view = make_view("live", 2, stream, right_above=THRESHOLDS)
    view.step(1, {"reward/mean": 0.5, **RESULTS})
    view.step(2, {"reward/mean": 0.625})
    view.close()
    text = raw.getvalue().decode()
    rows = [line.split("  ")[0] for line in text[text.rindex("metric") :].splitlines()[1:7]]
    assert rows == [
        "eval", "pass@2 (score > 0.5)", "eval code", "code pass@4 (score > 0)", "code pass@16 (score > 0)",
        "reward/mean",
    ]  # fmt: skip


def test_failures_are_part_of_the_line() -> None:
    stream = io.StringIO()
    view = PlainView(stream, 20, clock=lambda: 0.0)
    view.step(1, {"reward/mean": 0.5, "reward/failures": 0.48, "episode/failures": 0.0})
    view.step(2, {"reward/failures": 0.0, "episode/failures": 0.0125})
    view.step(3, {"reward/failures": 0.0, "episode/failures": 0.0})
    lines = [line.removesuffix(f"  {at(0)}") for line in stream.getvalue().splitlines()]
    assert lines == ["step 1/20  reward 0.500  failed rewards 48.0%", "step 2/20  failed episodes 1.2%", "step 3/20"]


def test_quiet_view_prints_messages_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    view = make_view("quiet", 2)
    view.step(1, ALL)
    view.message("hello")
    assert capsys.readouterr() == ("", "hello\n")


def test_auto_mode_is_plain_for_a_file() -> None:
    assert type(make_view("auto", 2, terminal()[0])) is PlainView


class Terminal(io.StringIO):
    """Stream that reports to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("term", "kind"), [("xterm-256color", LiveView), ("dumb", PlainView)])
def test_auto_mode_is_live_on_a_terminal(term: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    assert type(make_view("auto", 2, Terminal())) is kind


def test_sparkline_by_hand() -> None:
    assert sparkline([0, 1, 2, 3], 10, blocks="abcd") == "abcd"
    assert sparkline([9, 0, math.nan, 3], 2, blocks="abcd") == "ad"
    assert sparkline([5, 5], 10, blocks="abcd") == "aa"
    assert sparkline([math.nan], 10) == sparkline([1.0], 0) == ""


def test_curve_by_hand() -> None:
    assert curve([0.0, 1.0, math.nan, 4.0], width=10, height=3).splitlines() == [
        "4 |   *", "2 |", "0 |**", "  +----", "   1  4",
    ]  # fmt: skip
    assert curve([1.0, 3.0, 5.0, 7.0], width=2, height=2).splitlines() == ["6 | *", "2 |*", "  +--", "   1 4"]
    assert curve([7.0]).splitlines()[-3:] == ["7 |*", "  +-", "   1"]
    assert curve([]) == curve([math.inf]) == "(nothing to show)"


def test_charts_of_extreme_numbers() -> None:
    huge = sys.float_info.max
    assert curve([0.0, -huge, -huge], width=2, height=2).splitlines()[0].endswith("|*")
    assert curve([huge] * 9, width=2, height=1).splitlines()[0].endswith("|**")
    assert sparkline([0.0, 5e-324], 2, blocks="ab") == "aa"


@given(
    st.lists(st.floats(), max_size=200), st.integers(min_value=1, max_value=80), st.integers(min_value=1, max_value=20)
)
def test_charts_accept_any_numbers(values: list[float], width: int, height: int) -> None:
    assert len(sparkline(values, width)) <= width
    lines = curve(values, width, height).splitlines()
    assert len(lines) == (height + 2 if any(math.isfinite(v) for v in values) else 1)
