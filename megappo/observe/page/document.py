"""Puts data, program and style into one HTML file that asks no network for anything.

Data stand in the page as JSON in an element that browsers do not run. Characters by which HTML could end that element
are JSON's own escapes, and the page's program shows every text as text, so nothing that a model wrote becomes markup.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from string import Template

from megappo.observe.json_values import JSONValue

_HERE = Path(__file__).parent
_LIBRARY = "plotly-basic.min.js"
_PROGRAM = ("charts.js", "curves.js", "sections.js", "samples.js", "start.js")
"""Files of the page's own program, in the order in which they run as one."""
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def document(data: Mapping[str, JSONValue]) -> bytes:
    """The page as UTF-8. `data`: in JSON's types, without numbers that are not finite; the page's program names its
    fields."""
    library, program = _own(_LIBRARY), "\n".join(map(_own, _PROGRAM))
    page = Template(_own("page.html")).substitute(
        policy=_policy(library, program),
        style=_own("page.css"),
        library=library,
        data=_embedded(data),
        program=program,
    )
    return page.encode(errors="backslashreplace")  # lone surrogates become JSON's own escapes


def _own(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _embedded(data: Mapping[str, JSONValue]) -> str:
    """JSON that can stand in a script element."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)


def _policy(*scripts: str) -> str:
    """A Content-Security-Policy under which these scripts run, and nothing is fetched. Plotly writes styles of its
    own, and draws what it exports as an image from `data:` or `blob:`."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
