"""`megappo train --dry-run`: everything of a run but training, in one process and without a GPU."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megappo.commands import ranks_option
from megappo.config import Config, ConfigError, Derived, describe, print_rows
from megappo.doctor.findings import Finding, fine, until_refused
from megappo.doctor.inputs import method_findings, origin_findings, prompt_findings, scored_findings
from megappo.doctor.machine import disk
from megappo.doctor.settings import fit_finding, weight_findings
from megappo.doctor.software import generation_finding
from megappo.plan.engines import other_engine
from megappo.plan.here import this_machine
from megappo.plan.inputs import Models
from megappo.plan.machine_file import find_machine
from megappo.plan.machines import Machine
from megappo.plan.planner import default_machine, make_plan
from megappo.preflight.resolved import outline_run


def dry_run(
    config: Config,
    config_path: str,
    overrides: Sequence[str],
    *,
    gpus_text: str | None = None,
    machine_name: str | None = None,
) -> None:
    """Load tokenizer and data, score samples, look through the weights, plan; print what would run.

    Raises ConfigError with every problem, not only the first.
    """
    given, machine = config, this_machine() if machine_name is None else find_machine(machine_name)
    gpus = ranks_option("--gpus", gpus_text)
    on_cuda = None if machine_name is None else machine.is_cuda
    outline = outline_run(config, config_path, world_size=gpus, on_cuda=on_cuda)
    config, models, derived = outline.config, outline.models, outline.derived
    ranks = derived.world_size
    print_rows(describe(config, derived))
    plan = _plan(config, models, ranks, machine) if machine_name else _plan_unnamed(given, models, ranks, machine)
    broken: list[str] = []
    for check, findings in {
        "data": prompt_findings(config, models, ranks),
        "reward": scored_findings(config),
        "algorithm": method_findings(config),
        "weights": weight_findings(config),
        "starts from": origin_findings(config),
        "machine": _of_machine(config),
        "plan": plan,
    }.items():
        for finding in until_refused(check, findings):
            if finding.state == "broken":
                broken.append(finding.sentence())
            else:
                print(finding.line(), flush=True)
    if broken:
        raise ConfigError(dict.fromkeys(broken))
    print(f"would run: {_command(config_path, overrides, derived)}")
    print("dry run: nothing was trained and nothing is left on the disk")


def _of_machine(config: Config) -> Iterator[Finding]:
    """What the run needs of this machine's software and disk."""
    yield generation_finding(config)
    yield from disk(config.run.path)


def _plan(config: Config, models: Models, ranks: int, machine: Machine) -> Iterator[Finding]:
    """Memory and time on a machine that was named, on which the run must fit."""
    fit = fit_finding(config, models, machine, ranks, f"{ranks} x {machine.summary}")
    yield fit
    if fit.state == "fine":
        yield from _spent(config, models, ranks, machine)


def _plan_unnamed(config: Config, models: Models, ranks: int, here: Machine) -> Iterator[Finding]:
    """Memory and time on this machine; a run that does not fit here is planned for GPUs of the table too, and not
    refused."""
    machine, instead = here, ""
    if here.is_cuda or config.runtime.device != "cuda":
        of_ranks = "1 rank" if ranks == 1 else f"{ranks} ranks"
        where = f"{ranks} x {here.summary}" if here.is_cuda else f"{of_ranks} on {here.summary}"
        fit = fit_finding(config, models, here, ranks, where)
        if fit.state == "fine":
            yield fit
            yield from _spent(config, models, ranks, here)
            return
        yield replace(fit, state="slow")
        instead = " instead"
    machine = default_machine(config)
    fit = fit_finding(config, models, machine, ranks, f"{ranks} x {machine.summary}{instead}")
    yield fit if fit.state == "fine" else replace(fit, state="slow")
    yield from _spent(config, models, ranks, machine)
    yield fine("plan", "another machine is named with --machine")


def _spent(config: Config, models: Models, ranks: int, machine: Machine) -> Iterator[Finding]:
    """What a step's time is spent on there, and what it would be with the other engine."""
    yield fine("plan", make_plan(config, models, machine, ranks).bottleneck)
    yield fine("plan", other_engine(config, models, machine, ranks).sentence)


def _command(config_path: str, overrides: Sequence[str], derived: Derived) -> str:
    words = shlex.join(["-m", "megappo", "train", config_path, *overrides])
    return f"torchrun --nproc-per-node {derived.world_size} {words}, or as many ranks over several machines"
