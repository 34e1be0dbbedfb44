"""Findings of checks, the common output format of `doctor` and of a dry run, for one machine and for several
machines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from megappo.errors import verdict_of

State = Literal["fine", "slow", "broken"]


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    check: str
    state: State
    """State of the check. With `slow`, a run works, but is slower or less safe than possible. With `broken`, a run
    fails."""
    text: str
    """Description of the result with its units."""
    remedy: str = ""
    """Remedy; empty for the state `fine`."""
    machines: tuple[str, ...] = ()
    """Host names of the machines with this result; empty if the result is valid for the whole job."""

    def sentence(self, where: str = "") -> str:
        """Return the description, `where` and the remedy as one sentence."""
        return f"{self.text}{where}; {self.remedy}" if self.remedy else f"{self.text}{where}"

    def line(self, all_machines: int = 1) -> str:
        """Return the finding as one line."""
        where = ""
        if all_machines > 1 and self.machines:
            few = ", ".join(self.machines[:4]) + (", ..." if len(self.machines) > 4 else "")
            where = f" (all {all_machines} machines)" if len(self.machines) == all_machines else f" ({few})"
        return f"{self.state:<7} {self.check:<16} {self.sentence(where)}"


def fine(check: str, text: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(check, "fine", text)


def slow(check: str, text: str, remedy: str) -> Finding:
    """Return a finding on something that works but can be improved."""
    return Finding(check, "slow", text, remedy)


def broken(check: str, text: str, remedy: str) -> Finding:
    """Return a finding on something that makes a run fail."""
    return Finding(check, "broken", text, remedy)


def from_sentence(check: str, state: State, sentence: object) -> Finding:
    """Return a finding from the sentence of a rule or error. The part after the last semicolon is the remedy."""
    text, _, remedy = str(sentence).rpartition("; ")
    return Finding(check, state, text, remedy) if text else Finding(check, state, remedy)


def until_refused(check: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield the findings, and a broken finding for each problem of an error that ends the checks. Raise an unexpected
    error again."""
    try:
        yield from findings
    except Exception as error:
        verdict = verdict_of(error)
        if verdict.is_unforeseen:
            raise
        yield from (from_sentence(check, "broken", sentence) for sentence in verdict.sentences)


def merge(findings_of_machines: Iterable[tuple[str, Sequence[Finding]]]) -> list[Finding]:
    """Return the findings of (machine, findings) pairs. Equal findings of several machines become one finding with the
    names of these machines."""
    machines_of: dict[Finding, list[str]] = {}
    for machine, findings in findings_of_machines:
        for finding in findings:
            names = machines_of.setdefault(finding, [])
            if machine not in names:
                names.append(machine)
    order = {check: n for n, check in enumerate(dict.fromkeys(finding.check for finding in machines_of))}
    merged = [Finding(f.check, f.state, f.text, f.remedy, tuple(names)) for f, names in machines_of.items()]
    return sorted(merged, key=lambda finding: order[finding.check])


def any_broken(findings: Iterable[Finding]) -> bool:
    """Return whether a run would fail."""
    return any(finding.state == "broken" for finding in findings)


def as_text(findings: Sequence[Finding], machines: int) -> str:
    """Return one line per finding, and a line with the number of findings of each state."""
    counts = {state: sum(f.state == state for f in findings) for state in ("fine", "slow", "broken")}
    total = ", ".join(f"{count} {state}" for state, count in counts.items())
    return "\n".join([*(finding.line(machines) for finding in findings), total])


def as_json(findings: Sequence[Finding], machines: Sequence[str]) -> str:
    """Return JSON with three keys: `machines`, `findings` with the fields of `Finding`, and `broken`, which is true if
    a run would fail. The key of `Finding.text` is `words`."""
    fields = [asdict(finding) for finding in findings]
    content = {
        "machines": list(machines),
        "broken": any_broken(findings),
        "findings": [{"words" if name == "text" else name: value for name, value in f.items()} for f in fields],
    }
    return json.dumps(content, indent=2)
