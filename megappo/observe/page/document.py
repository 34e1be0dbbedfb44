"""Writes data, program and style to one HTML file, which needs no network.

The page contains data as JSON in an element that browsers do not run. JSON escapes replace the characters that could
end the element. The program of the page shows every text as text, so texts of a model never become markup.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from string import Template

from megappo.files.json_values import JSONValue

_FOLDER = Path(__file__).parent
_LIBRARY = "plotly-basic.min.js"
_PROGRAM = ("charts.js", "curves.js", "sections.js", "samples.js", "start.js")
"""Files of the program of the page. The concatenated files run as one script."""
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def document(data: Mapping[str, JSONValue]) -> bytes:
    """Return the page as UTF-8. `data`: JSON types, without numbers that are not finite. The program of the page
    defines the fields."""
    library, program = _own(_LIBRARY), "\n".join(map(_own, _PROGRAM))
    page = Template(_own("page.html")).substitute(
        policy=_policy(library, program),
        style=_own("page.css"),
        library=library,
        data=_embedded(data),
        program=program,
    )
    return page.encode(errors="backslashreplace")  # lone surrogates become JSON escapes


def _own(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _embedded(data: Mapping[str, JSONValue]) -> str:
    """Return JSON for a script element."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)


def _policy(*scripts: str) -> str:
    """Return a Content-Security-Policy that allows these scripts and forbids requests. Plotly adds inline styles, and
    exports images from `data:` or `blob:`."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
