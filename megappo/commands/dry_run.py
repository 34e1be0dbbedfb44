"""`megappo train --dry-run`: all parts of a run except training, in one process and without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain

from megappo.commands import ranks_option
from megappo.config import Config, ConfigError, derive, describe, print_rows
from megappo.config.start_lines import training_line
from megappo.doctor.findings import Finding, fine, until_refused
from megappo.doctor.inputs import method_findings, origin_findings, prompt_findings, scored_findings
from megappo.doctor.machine import disk
from megappo.doctor.settings import fit_finding, weight_findings
from megappo.doctor.software import generation_finding, logger_findings
from megappo.plan.engines import other_engine
from megappo.plan.hardware.machine_file import find_machine
from megappo.plan.hardware.machines import Machine
from megappo.plan.here import this_machine
from megappo.plan.inputs import Models
from megappo.plan.planner import default_machine, make_plan
from megappo.preflight.inputs import RunInputs, read_inputs
from megappo.preflight.resolved import outline_run


def dry_run(
    config: Config,
    config_path: str,
    overrides: Sequence[str],
    *,
    gpus_text: str | None = None,
    machine_name: str | None = None,
) -> None:
    """Load tokenizer and data, score samples, check the weights, plan the run, and print the results.

    Raises ConfigError with all problems, not only the first one.
    """
    unresolved, machine = config, this_machine() if machine_name is None else find_machine(machine_name)
    gpus = ranks_option("--gpus", gpus_text)
    on_cuda = None if machine_name is None else machine.is_cuda
    outline = outline_run(config, config_path, world_size=gpus, on_cuda=on_cuda)
    config, models, derived = outline.config, outline.models, outline.derived
    ranks = derived.world_size
    inputs, refusals = _read_inputs(config)
    if inputs is not None:
        with suppress(ConfigError):  # `prompt_findings` reports the error
            derived = derive(config, ranks, models.actor, models.critic, models.reference, prompts=len(inputs.training))
    print_rows(describe(config, derived))
    if machine_name is None:
        own_machine, (machine, fits) = machine, _fits_unnamed(unresolved, models, ranks, machine)
        advice = [fine("plan", "--machine selects another machine")] if machine is not own_machine else []
        plan = chain(fits, _spent(unresolved, models, ranks, machine), advice)
    else:
        fits = [fit_finding(config, models, machine, ranks, f"{ranks} x {machine.summary}")]
        plan = chain(fits, _spent(config, models, ranks, machine) if fits[0].state == "fine" else ())
    broken: list[str] = []
    for check, findings in {
        "data": refusals if inputs is None else prompt_findings(config, models, ranks, inputs),
        "reward": scored_findings(config),
        "algorithm": method_findings(config),
        "logger": logger_findings(config),
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
    print(f"would run: {_command(config_path, overrides, ranks, machine)}")
    print("dry run: nothing was trained and nothing is left on the disk")


def _read_inputs(config: Config) -> tuple[RunInputs | None, list[Finding]]:
    """Return the data of a run, or None and the findings that explain the error."""
    inputs: list[RunInputs] = []

    def reading() -> Iterator[Finding]:
        inputs.append(read_inputs(config, validation=True))
        yield from ()

    refusals = list(until_refused("data", reading()))
    return (inputs[0] if inputs else None), refusals


def _of_machine(config: Config) -> Iterator[Finding]:
    """Check this machine's software and disk for the run."""
    yield generation_finding(config)
    yield from disk(config.run.path)


def _fits_unnamed(config: Config, models: Models, ranks: int, own_machine: Machine) -> tuple[Machine, list[Finding]]:
    """Return a machine for the plan, and findings on whether the run fits.

    The machine is this machine if the run fits. Otherwise, it is the default machine of the table, without an error.
    """
    findings, instead = list[Finding](), ""
    if own_machine.is_cuda or config.runtime.device != "cuda":
        of_ranks = "1 rank" if ranks == 1 else f"{ranks} ranks"
        where = f"{ranks} x {own_machine.summary}" if own_machine.is_cuda else f"{of_ranks} on {own_machine.summary}"
        fit = fit_finding(config, models, own_machine, ranks, where)
        if fit.state == "fine":
            return own_machine, [fit]
        findings.append(replace(fit, state="slow"))
        instead = " instead"
    machine = default_machine(config)
    fit = fit_finding(config, models, machine, ranks, f"{ranks} x {machine.summary}{instead}")
    findings.append(fit if fit.state == "fine" else replace(fit, state="slow"))
    return machine, findings


def _spent(config: Config, models: Models, ranks: int, machine: Machine) -> Iterator[Finding]:
    """Report where a step spends its time, and the time with the other engine."""
    yield fine("plan", make_plan(config, models, machine, ranks).bottleneck)
    yield fine("plan", other_engine(config, models, machine, ranks).sentence)


def _command(config_path: str, overrides: Sequence[str], ranks: int, machine: Machine) -> str:
    nodes, per_node = machine.nodes_of(ranks)
    each = ", on each machine; HOST is the first" if nodes > 1 else ""
    return training_line(nodes, per_node, ["train", config_path, *overrides]) + each
