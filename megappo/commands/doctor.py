"""`megappo doctor`: checks of one machine, or of a job on several ranks."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence

import torch.distributed as dist

from megappo.commands import add_config_arguments
from megappo.config import Derived, load_config
from megappo.doctor.devices import device_findings
from megappo.doctor.engines import differing_settings, engine_findings
from megappo.doctor.findings import Finding, any_broken, as_json, as_text, fine, merge, slow
from megappo.doctor.judges import judge_findings
from megappo.doctor.machine import machine_findings
from megappo.doctor.network import clock_finding, group_findings, group_kinds, join, rendezvous_finding
from megappo.doctor.settings import settings_findings
from megappo.doctor.software import software_findings
from megappo.preflight.resolved import outline_run
from megappo.runtime.device import own_device
from megappo.runtime.launchers import Ranks, read_ranks
from megappo.runtime.ranks.objects import all_gather_objects


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megappo doctor`."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    add_config_arguments(parser, optional=True)


def run(arguments: argparse.Namespace) -> bool:
    """Run all checks. Every rank calls this function, and rank 0 prints. Return True if no finding is broken.

    Raises ConfigError for settings that cannot run on the number of ranks.
    """
    ranks, path, as_json_text = read_ranks(os.environ), arguments.config, arguments.json
    outline = outline_run(load_config(path, arguments.overrides), path) if path is not None else None
    config, derived = (None, None) if outline is None else (outline.config, outline.derived)
    machine = socket.gethostname()
    own: list[Finding] = []
    if ranks.local_rank == 0:
        own = [*software_findings(config), *device_findings(config, ranks), *machine_findings(config, ranks)]
        if outline is not None:
            world_size = outline.derived.world_size
            own += settings_findings(outline.config, outline.models, world_size)
            own += engine_findings(outline.config, outline.models, ranks, world_size)
            own += judge_findings(outline.config)
    if ranks.world_size == 1:
        _print(merge([(machine, own)]), [machine], as_json_text)
        return not any_broken(own)
    problem = rendezvous_finding(ranks) or join(ranks)
    if problem is not None:  # each rank prints its own findings, because they cannot be gathered
        _print(merge([(machine, [*own, problem])]), [machine], as_json_text)
        return False
    is_well = _together(machine, own, ranks, derived, as_json_text)
    dist.destroy_process_group()  # skipped after an error, as NCCL would wait for the other ranks
    return is_well


def _together(machine: str, own: list[Finding], ranks: Ranks, derived: Derived | None, as_json_text: bool) -> bool:
    """Gather the findings of all machines, measure the network between them, and print on rank 0."""
    everyone = all_gather_objects((machine, own))
    machines = list(dict.fromkeys(name for name, _ in everyone))
    findings = merge(everyone)
    findings += differing_settings(findings)
    # All ranks have the same `findings`, so they make the same decision about the collectives below.
    if any_broken(findings):
        findings.append(slow("group", "none was measured, because a check is broken", "fix that first"))
    else:
        findings.append(fine("rendezvous", f"{ranks.world_size} ranks met on {', '.join(machines)}"))
        findings.append(clock_finding(machine))
        findings += group_findings(group_kinds(derived, ranks.world_size), own_device(ranks))
    if ranks.rank == 0:
        _print(findings, machines, as_json_text)
    return not any_broken(findings)


def _print(findings: Sequence[Finding], machines: Sequence[str], as_json_text: bool) -> None:
    print(as_json(findings, machines) if as_json_text else as_text(findings, len(machines)), flush=True)
