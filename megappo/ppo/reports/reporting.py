"""Reports of a run: stage times on every rank, and files, console and advice on the main rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict

from torch import Tensor

from megappo.config import Config, Derived
from megappo.errors import one_line
from megappo.files.json_values import JSONValue
from megappo.observe.distributions import Distribution, of_all_ranks
from megappo.observe.evaluations import evaluation_label, evaluation_results
from megappo.observe.terminal.console import make_view
from megappo.observe.terminal.messages import MESSAGES, SteadyView, show_message
from megappo.observe.terminal.progress import PROGRESS
from megappo.observe.timing.profiler import StepProfiler
from megappo.observe.timing.stopwatch import Lap, StageTimer
from megappo.observe.timing.stragglers import Stragglers
from megappo.ppo.assembly.start import Start
from megappo.ppo.records.run_record import RunRecord
from megappo.ppo.reports.advice import Advisor
from megappo.ppo.reports.jumps import Jump
from megappo.ppo.reports.measures import distributed_numbers
from megappo.runtime.process import Runtime
from megappo.runtime.ranks.objects import all_gather_objects, attempt, first_of_ranks
from megappo.types import Episodes, Experience, Rollouts

_JUMP_SAMPLES = 16
# counts for the computation of other metrics
_INTERNAL = ("step_tokens", "step_samples")
_AWAITED = {
    "forward": "log-probabilities and values of all ranks' responses",
    "update_critic": "the slowest rank of each minibatch",
    "update_actor": "the slowest rank of each minibatch",
    "sync": "the engines to load the weights",
    "evaluate": "answers to the validation prompts",
    "checkpoint": "the disk, or the previous checkpoint",
    "export": "the model's files to be written",
}
"""Work that a stage waits for, unless the caller specifies the work."""
_FAILED = {
    "reward": "each sets its sample to reward.failure_score and counts in reward/failures",
    "episode": "its tokens are not trained, and episode/failures counts it",
}
"""Consequence of a failed sample."""


class Reporter:
    """Times the stages of a step and shows the metrics of the step. The reporter must always be closed."""

    def __init__(
        self,
        config: Config,
        derived: Derived,
        runtime: Runtime,
        on_stage: Callable[[str, str], None] | None = None,
        check_directory: Callable[[], None] = lambda: None,
        *,
        writes: bool = True,
    ) -> None:
        """`on_stage` receives the name of each new stage, and a description of the work that the stage waits for.

        `check_directory` raises on all ranks if log files would be lost. `writes`: whether the run has anything to
        record.
        """
        self._check_directory = check_directory
        self._config, self._runtime, self._on_stage = config, runtime, on_stage
        self._stage = ("start", "")
        mode = config.logging.console if runtime.is_main else "quiet"
        self._right_above = config.data.thresholds
        self._view = SteadyView(make_view(mode, derived.steps, right_above=self._right_above))
        if runtime.is_main:
            MESSAGES.show_in(self._view)
        self._timer = StageTimer(runtime.synchronize, self._view.stage, runtime.peak_since)
        self._advisor = Advisor(config.algorithm)
        self._stragglers = Stragglers()
        self._reported_failures: set[str] = set()
        self._distributions: dict[str, Distribution] = {}
        on_cuda, steps = runtime.device.type == "cuda", config.logging.profile_steps
        self._profiler = StepProfiler(config.run.path, steps, rank=runtime.rank, on_cuda=on_cuda)
        self._slow: dict[str, list[float]] = {}
        self._record = RunRecord(config) if runtime.is_main and writes else None

    def continue_after(self, start: Start) -> None:
        """Drop log entries of later steps when the first step begins. The run repeats these steps."""
        if self._record is not None:
            self._record.continue_after(start)

    def stage(self, name: str, waits_for: str = "") -> AbstractContextManager[Lap]:
        """Time a stage of the step. `waits_for` describes the outstanding work, in case the stage hangs."""
        self._stage = (name, waits_for)
        self.goes_on()
        PROGRESS.enter(name, waits_for or _AWAITED.get(name, ""))
        return self._timed(name)

    def goes_on(self) -> None:
        """Restart the time limit of the stage, because a part of the stage is done."""
        if self._on_stage is not None:
            self._on_stage(*self._stage)

    @contextmanager
    def _timed(self, name: str) -> Iterator[Lap]:
        with self._profiler.stage(name), self._timer.stage(name) as lap:
            yield lap

    @property
    def stage_peaks(self) -> Mapping[str, float]:
        """Peak memory of this rank in each stage of the step, in GB (1e9 bytes).

        On a CPU: memory of the process at the end of the stage.
        """
        return self._timer.peaks

    def begin_step(self, step: int) -> None:
        """Start the clock of a step."""
        self._profiler.begin(step)
        self._timer.reset()
        if self._record is not None:
            self._record.begin_step()
            self._view.begin_step(step)

    def end_step(self, metrics: Mapping[str, float], experience: Experience) -> dict[str, float]:
        """Return `time/*`, throughput and memory of the step. A collective of the world.

        Also determines the slowest ranks. If a logger shows distributions, determines the distributions of the
        `experience` of all ranks.
        """
        seconds = self._timer.total
        if self._profiler.is_running:
            self._write_profile()
        of_ranks = all_gather_objects(self._timer.seconds)
        self._slow = {stage: [times[stage] for times in of_ranks] for stage in self._timer.seconds}
        if self._config.logging.shows_distributions:
            self._distributions = of_all_ranks(distributed_numbers(experience), self._runtime.device)
        memory = self._runtime.memory()
        return {
            **{f"time/{name}": value for name, value in self._timer.seconds.items()},
            "time/step": seconds,
            "tokens_per_second": metrics["step_tokens"] / seconds,
            "samples_per_second": metrics["step_samples"] / seconds,
            **{f"memory/{name}": value for name, value in asdict(memory).items()},
            **{f"memory/{name}/peak_gigabytes": value for name, value in self._timer.peaks.items()},
            "memory/peak_gigabytes": max(self._timer.peak, memory.peak_gigabytes),
        }

    def _write_profile(self) -> None:
        """Write the profile of the step. A failure is only reported, because it must not end the run."""
        caught = (OSError, RuntimeError)
        trace, problem = attempt(self._profiler.end, caught)
        of_ranks = all_gather_objects((trace, problem))
        if self._runtime.is_main:
            problem = next((problem for _, problem in of_ranks if problem), "")
            if not problem:
                page, problem = attempt(
                    lambda: self._profiler.write_page([rank for rank, _ in of_ranks if rank]), caught
                )
            self.message(f"the step is not traced: {problem}" if problem else f"the profile of the step is in {page}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write and show a finished step with advice on its metrics. A collective of the world."""
        self._check_directory()
        if self._record is None:
            return
        shown = {name: value for name, value in metrics.items() if name not in _INTERNAL}
        log = self._record.log()
        log.log(step, shown)
        log.log_distributions(step, self._distributions)
        self._distributions = {}  # an open step of a stopped run has no distributions
        PROGRESS.leave()
        self._view.step(step, shown)
        for sentence in (*self._advisor.observe(step, shown), *self._stragglers.observe(step, self._slow)):
            self.message(f"step {step}: {sentence}", warns=True)

    def note_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show an evaluation. An evaluation before the first step gets its own line in the log."""
        sets = [name.removesuffix("/failures") for name in metrics if name.endswith("/failures")]
        results = ", ".join(f"{of.removeprefix('eval').strip('/')} {_result_of(of, metrics)}".strip() for of in sets)
        rates = [name for name in evaluation_results(metrics) if not name.endswith("/reward_mean")]
        shown = [f"; {evaluation_label(name, self._right_above)} {metrics[name]:.3f}" for name in rates]
        self.message(f"step {step}: validation reward {results}{''.join(shown)}")
        if step == 0 and self._record is not None:
            self._record.log().log(step, metrics)

    def note_failures(self, step: int, rollouts: Rollouts) -> None:
        """Show the first failed reward and the first failed episode of the run.

        A collective of the world until both have been shown.
        """
        episodes = rollouts.episodes.of_samples if rollouts.episodes is not None else ()
        failed = {
            "reward": list(filter(None, rollouts.reward_failures or ())),
            "episode": [f"{episode.failure}: {episode.reason}" for episode in episodes if episode.failure],
        }
        for kind in sorted(failed.keys() - self._reported_failures):
            if reasons := first_of_ranks(failed[kind]):
                self._reported_failures.add(kind)
                text = f"the first {kind} that failed: {one_line(reasons[0])}; {_FAILED[kind]}"
                self.message(f"step {step}: {text}", warns=True)

    def samples(self, step: int, rollouts: Rollouts, scores_B: Tensor) -> None:
        """Write some samples of this rank to the log."""
        if self._record is None:
            return
        chosen = range(min(self._config.logging.sample_texts, len(rollouts.responses)))
        total_rewards_B, episodes = rollouts.total_rewards_B(scores_B), rollouts.episodes
        failures = rollouts.reward_failures or ("",) * len(rollouts.responses)
        self._record.log().log_samples(
            step,
            [
                {
                    "prompt": rollouts.prompts[b].text,
                    "response": rollouts.responses[b],
                    "raw_response": rollouts.raw_responses[b],
                    "answer": rollouts.prompts[b].answer,
                    "score": float(total_rewards_B[b]),
                    **({"score_failure": failures[b]} if failures[b] else {}),
                    "tokens": int(rollouts.response_lengths_B[b]),
                    "end": rollouts.ends[b],
                    **({} if episodes is None else _episode_fields(episodes, b)),
                }
                for b in chosen
            ],
        )

    def jump(self, step: int, jump: Jump) -> None:
        """Write an unusual update and the samples with the largest effect on the update. A collective of the world."""
        of_ranks = all_gather_objects(jump.samples)
        if self._record is None:
            return
        samples = sorted((s for part in of_ranks for s in part), key=lambda s: -s["sum_abs_advantage"])
        record: dict[str, JSONValue] = {"role": jump.role, "minibatch": jump.minibatch + 1, "reasons": jump.reasons}
        self._record.log().log_jump(step, {**record, "of_samples": len(samples), "samples": samples[:_JUMP_SAMPLES]})
        self.message(
            f"step {step}: {jump.role} update {jump.minibatch + 1} stands out: {', '.join(jump.reasons)}; "
            "its samples are in jumps.jsonl"
        )

    def message(self, text: str, *, warns: bool = False) -> None:
        """Print a line on the main rank. A line with `warns` stays visible."""
        if self._runtime.is_main:
            show_message(text, warns=warns)

    def close(self) -> None:
        """Close files and restore the terminal."""
        PROGRESS.leave()
        self._profiler.cancel()
        MESSAGES.show_in(None)
        self._view.close()
        if self._record is not None:
            self._record.close()


def _result_of(evaluated: str, metrics: Mapping[str, float]) -> str:
    """Return the mean reward of a validation set, and the share of graded answers if some answers have no grade."""
    graded = 1 - metrics[f"{evaluated}/failures"]
    if not graded:
        return "unknown, because no answer has a grade"
    mean = f"{metrics[f'{evaluated}/reward_mean']:.3f}"
    return mean if graded == 1 else f"{mean} of the {graded:.1%} with a grade"


def _episode_fields(episodes: Episodes, b: int) -> dict[str, JSONValue]:
    """Return the fields of a sample's record that describe its episode."""
    episode = episodes.of_samples[b]
    outcome = {"failure": episode.failure, "reason": episode.reason}
    calls = {name: use.calls for name, use in episode.tools.items()}
    return {"conversation": episodes.conversations[b], "tools": calls, **{k: v for k, v in outcome.items() if v}}
