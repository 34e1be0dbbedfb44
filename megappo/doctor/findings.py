"""Findings of checks: the one form in which doctor and dry run say what they found, on one machine and on all of
them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from megappo.errors import verdict_of

State = Literal["fine", "slow", "broken"]


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str
    state: State
    """`slow`: a run works, but not as fast or as safely as it could; `broken`: a run fails."""
    words: str
    """What was found, with its units."""
    remedy: str = ""
    """What to do; empty where it is fine."""
    machines: tuple[str, ...] = ()
    """Host names it was found on; empty: it holds for the whole job."""

    def sentence(self, where: str = "") -> str:
        """What was found, `where`, and what to do."""
        return f"{self.words}{where}; {self.remedy}" if self.remedy else f"{self.words}{where}"

    def line(self, all_machines: int = 1) -> str:
        """The finding as one line."""
        where = ""
        if all_machines > 1 and self.machines:
            few = ", ".join(self.machines[:4]) + (", ..." if len(self.machines) > 4 else "")
            where = f" (all {all_machines} machines)" if len(self.machines) == all_machines else f" ({few})"
        return f"{self.state:<7} {self.check:<16} {self.sentence(where)}"


def fine(check: str, words: str) -> Finding:
    """A finding that asks for nothing."""
    return Finding(check, "fine", words)


def slow(check: str, words: str, remedy: str) -> Finding:
    """A finding of something that works and could be better."""
    return Finding(check, "slow", words, remedy)


def broken(check: str, words: str, remedy: str) -> Finding:
    """A finding of something with which a run would fail."""
    return Finding(check, "broken", words, remedy)


def from_sentence(check: str, state: State, sentence: object) -> Finding:
    """A finding with the sentence of a rule or of its error, whose last part, behind a semicolon, is the remedy."""
    words, _, remedy = str(sentence).rpartition("; ")
    return Finding(check, state, words, remedy) if words else Finding(check, state, remedy)


def until_refused(check: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Findings as they come, and a broken one for each problem of the error that ends them; an error that is a bug
    goes on."""
    try:
        yield from findings
    except Exception as error:
        verdict = verdict_of(error)
        if verdict.is_unforeseen:
            raise
        yield from (from_sentence(check, "broken", sentence) for sentence in verdict.sentences)


def merge(found: Iterable[tuple[str, Sequence[Finding]]]) -> list[Finding]:
    """The findings of (machine, findings) pairs; a finding of several machines appears once, with their names."""
    machines_of: dict[Finding, list[str]] = {}
    for machine, findings in found:
        for finding in findings:
            names = machines_of.setdefault(finding, [])
            if machine not in names:
                names.append(machine)
    order = {check: n for n, check in enumerate(dict.fromkeys(finding.check for finding in machines_of))}
    merged = [Finding(f.check, f.state, f.words, f.remedy, tuple(names)) for f, names in machines_of.items()]
    return sorted(merged, key=lambda finding: order[finding.check])


def any_broken(findings: Iterable[Finding]) -> bool:
    """Whether a run would fail."""
    return any(finding.state == "broken" for finding in findings)


def as_text(findings: Sequence[Finding], machines: int) -> str:
    """One line per finding, and how many of each kind there are."""
    counts = {state: sum(f.state == state for f in findings) for state in ("fine", "slow", "broken")}
    total = ", ".join(f"{count} {state}" for state, count in counts.items())
    return "\n".join([*(finding.line(machines) for finding in findings), total])


def as_json(findings: Sequence[Finding], machines: Sequence[str]) -> str:
    """`machines`, `findings` with the fields of `Finding`, and `broken`: whether a run would fail."""
    content = {
        "machines": list(machines),
        "broken": any_broken(findings),
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(content, indent=2)
