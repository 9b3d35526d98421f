"""The catalogue of errors: what each code means, why, what to do, and a program that raises it.

EP001 to EP099 the language, EP100 to EP199 targets and code generation, EP200 to EP299 launches, EP300 to EP399 running.
A code stands for a kind of mistake; it is never reused and never renumbered.
"""

from __future__ import annotations

import difflib

from .code import ErrorCode
from .device import DEVICE
from .language import LANGUAGE
from .launches import LAUNCHES
from .running import RUNNING
from .targets import TARGETS

__all__ = ["CODES", "SECTIONS", "ErrorCode", "markdown", "nearest"]

SECTIONS: dict[str, tuple[ErrorCode, ...]] = {
    "Names, calls, types and numbers": LANGUAGE,
    "Memory, threads and reports": DEVICE,
    "Targets, code generation and dumps": TARGETS,
    "Launches, graphs and devices": LAUNCHES,
    "Running": RUNNING,
}
CODES: dict[str, ErrorCode] = {row.code: row for rows in SECTIONS.values() for row in rows}


_ABOUT = (
    "What is wrong with a kernel, a launch or a job begins with a code; `epdsl explain CODE` shows the same text on a terminal. A wrong "
    "argument of a function on the host (a device's name, a shape, a number of ranks) is a plain `ValueError` or `TypeError`: its one line "
    "says what was given, what is taken, and there is no more to explain."
)


def nearest(code: str) -> str:
    """The code of the catalogue that is most like `code`."""
    return difflib.get_close_matches(code, CODES, 1, 0.0)[0]


def markdown() -> str:
    """The catalogue as a page: a section for each code, under an anchor that is the code in lower case."""
    parts = ["# Errors", _ABOUT]
    for title, rows in SECTIONS.items():
        parts.append(f"## {title}")
        for row in rows:
            parts += [
                f"### {row.code}: {row.title} {{ #{row.code.lower()} }}",
                row.cause,
                f"**What to do.** {row.fix}",
                f"```python\n{row.example}```",
            ]
    return "\n\n".join(parts) + "\n"
