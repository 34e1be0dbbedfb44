"""Execution of a run from start to end."""

from __future__ import annotations

import os
from contextlib import closing

from megappo.checkpoint.files import checkpoints_directory, finished
from megappo.checkpoint.randomness import seed_generators
from megappo.config import Config
from megappo.config.schema import PHASES
from megappo.config.templates import end_of_turn_notes, thinking_notes
from megappo.data import PromptDataset, TrainingPrompts
from megappo.data.mixture import MixedPrompts
from megappo.data.unknown import unknown_token_warning
from megappo.errors import Interrupted
from megappo.observe.terminal.progress import PROGRESS
from megappo.ppo.assembly.components import RunComponents, RunMode, assemble
from megappo.ppo.assembly.rank_agreement import check_ranks
from megappo.ppo.assembly.start import Start, choose_start, final_folder, is_exported
from megappo.ppo.evaluation import evaluate_policy
from megappo.ppo.records.checkpoints import Checkpoints
from megappo.ppo.records.exports import export_actor
from megappo.ppo.reports.reporting import Reporter
from megappo.ppo.training_run import TrainingRun
from megappo.preflight.inputs import RunInputs
from megappo.preflight.resolved import ResolvedRun
from megappo.preflight.template_time import at_one_time
from megappo.runtime.launchers import left_variables
from megappo.runtime.lock import HeldDirectory, locked_directory
from megappo.runtime.process import Runtime, start_runtime
from megappo.runtime.watch.failures import Failure
from megappo.runtime.watch.interrupts import interruptible
from megappo.runtime.watch.watchdog import GENERATING, Limits, Watchdog, watched


def train(run: ResolvedRun) -> None:
    """Train with this configuration from the newest checkpoint, if any. Every rank calls this function.

    Raises Interrupted after an interrupted run has written a checkpoint.
    """
    config = run.config
    # The watchdog starts before the lock, which is the first collective after the ranks have connected.
    with (
        start_runtime(config.runtime, run.deadlines, with_servers=config.rollout.broadcasts) as runtime,
        watched(_watchdog(config, runtime)) as watchdog,
        locked_directory(config.run.path, runtime, private=config.run.private) as lock,
    ):
        check_ranks(config, runtime)
        seed_generators(config.run.seed, runtime.rank)
        start = choose_start(config, run.derived, runtime)
        config = start.config
        on_stage = watchdog.enter if watchdog is not None else None
        with (
            interruptible(runtime) as interrupts,
            closing(Reporter(config, run.derived, runtime, on_stage, lock.check, writes=start.has_work)) as reporter,
            runtime.failures.reporting(),
        ):
            resumed, inputs = start.checkpoint is not None, inputs_at(run, config)
            mode = RunMode(inputs=inputs, engine=run.engine, resumed=resumed, stop=interrupts)
            parts = assemble(config, run.derived, runtime, mode)
            if watchdog is not None:
                parts.engine.on_tokens = watchdog.made_tokens
            _train(parts, start, reporter, lock)


def inputs_at(run: ResolvedRun, started: Config) -> RunInputs | None:
    """Return the inputs that were already read, or None if chat templates used another time than the run."""
    is_another_time = run.config.data.template_time != started.data.template_time
    return None if run.inputs is not None and run.inputs.reads_clock and is_another_time else run.inputs


def _train(parts: RunComponents, start: Start, reporter: Reporter, lock: HeldDirectory) -> None:
    checkpoints = Checkpoints(parts, start)

    def let_finish(failure: Failure) -> None:
        if failure.hung_in != "checkpoint":  # do not wait for a hanging checkpoint again
            checkpoints.close()

    parts.runtime.failures.before_leaving(let_finish)
    try:
        with parts.runtime.failures.reporting():
            _train_and_export(parts, start, reporter, checkpoints, lock)
        parts.runtime.failures.done()
    finally:
        checkpoints.close()
        parts.close()


def _train_and_export(
    parts: RunComponents, start: Start, reporter: Reporter, checkpoints: Checkpoints, lock: HeldDirectory
) -> None:
    for sentence in (*data_lines(parts), *parts.origins, *start.sentences):
        reporter.message(sentence)
    reporter.continue_after(start)
    training = TrainingRun(parts, reporter, checkpoints)
    try:
        training.train()
    except Interrupted:
        PROGRESS.forget()
        lock.check()
        if training.is_resuming:
            reporter.message(
                f"stopped before the run continued after step {start.step}; its checkpoint is unchanged, and the "
                "same command continues from it"
            )
            raise
        with reporter.stage("checkpoint"):
            reporter.message(checkpoints.save_interrupted(training.boundary_when_stopped()))
        raise
    lock.check()
    checkpoints.finish()
    with reporter.stage("export"):
        if parts.config.run.export_final_model:
            out = final_folder(parts.config)
            if not is_exported(start, parts.runtime):
                export_actor(parts, out, parts.derived.steps, start.trained)
            reporter.message(f"the trained actor is in {out}")


def _watchdog(config: Config, runtime: Runtime) -> Watchdog | None:
    seconds, of_phases = runtime.deadlines.phase_seconds, runtime.deadlines.of_phases
    if seconds is None:
        return None

    def newest() -> str:
        return next((folder.name for folder in finished(checkpoints_directory(config.run.path))), "no checkpoint")

    limits = Limits(seconds, of_phases, PHASES if config.rollout.ahead else GENERATING)
    return Watchdog(config.run.path, limits, runtime, newest)


def _unwatched(_phase: str, _waits_for: str = "") -> None:
    """Do nothing. Used instead of the `enter` method of a watchdog."""


def evaluate(run: ResolvedRun) -> dict[str, float]:
    """Score the model on `data.validation` and `data.validation_sets`. Every rank calls this function."""
    config = run.config
    with (
        start_runtime(config.runtime, run.deadlines, with_servers=config.rollout.broadcasts) as runtime,
        watched(_watchdog(config, runtime)) as watchdog,
    ):
        check_ranks(config, runtime)
        config = at_one_time(config)
        mode = RunMode(training=False, inputs=inputs_at(run, config), engine=run.engine)
        enter = watchdog.enter if watchdog is not None else _unwatched
        with runtime.failures.reporting():
            parts = assemble(config, run.derived, runtime, mode)
            if watchdog is not None:
                parts.engine.on_tokens = watchdog.made_tokens
            with closing(parts), runtime.failures.reporting():
                if runtime.is_main:
                    print("\n".join(data_lines(parts, training=False)), flush=True)
                enter("sync")
                parts.engine.update_weights(parts.weights, 1)
                enter("evaluate", "answers to the validation prompts")
                metrics = evaluate_policy(parts, print)
        if runtime.is_main:
            for name, value in metrics.items():
                print(f"{name}: {value:.4f}")
    return metrics


def data_lines(parts: RunComponents, *, training: bool = True) -> list[str]:
    """Return lines on the number of prompts, dropped and truncated prompts, and unknown tokens."""
    train, validation = parts.train_prompts, parts.validation_prompts
    lines = [_count_line(train, "training prompts")] if training else []
    lines += list(left_variables(os.environ)) if training else []
    lines += thinking_notes(parts.config, str(parts.tokenizer.chat_template or "")) if training else []
    lines += end_of_turn_notes(parts.config, parts.tokenizer, parts.stop_token_ids)
    lines += [_count_line(data, f"validation prompts{name and f' of {name}'}") for name, data in validation.items()]
    sources = (train.sources if isinstance(train, MixedPrompts) else (train,)) if training else ()
    return lines + [
        w for data in (*sources, *validation.values()) if (w := unknown_token_warning(data, parts.tokenizer))
    ]


def _count_line(data: TrainingPrompts | PromptDataset, called: str) -> str:
    return f"{len(data)} {called}, {data.dropped} dropped and {data.truncated} cut as too long"
