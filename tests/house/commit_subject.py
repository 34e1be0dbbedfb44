"""Check of the subject of a commit message, for the hook `commit-msg` of pre-commit.

Usage: python -m tests.house.commit_subject FILE
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LONGEST = 72
"""Maximum number of characters of a subject."""
_FORM = re.compile(r"[a-z0-9_.-]+: [a-z]\S*(?: .+)?[^.]")
_GENERATED = ("Merge ", "Revert ", "fixup! ", "squash! ")
"""First words of subjects that git writes."""


def subject_problem(message: str) -> str | None:
    """Return the reason why the first line of a commit message is not a valid subject, or None."""
    subject = message.split("\n", 1)[0].rstrip()
    if subject.startswith(_GENERATED):
        return None
    if len(subject) > LONGEST:
        return f"the subject has {len(subject)} characters, must have at most {LONGEST}; shorten it"
    if not _FORM.fullmatch(subject):
        return (
            f"the subject is '{subject}', must be 'room: imperative verb ...' without a final period; "
            "write for example 'engines: reuse one client per server'"
        )
    return None


if __name__ == "__main__":
    problem = subject_problem(Path(sys.argv[1]).read_text())
    if problem is not None:
        sys.exit(f"commit message: {problem}")
