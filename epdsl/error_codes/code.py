"""One row of the catalogue of errors."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class ErrorCode:
    """A kind of mistake.

    code     "EP" and three digits; never reused, never renumbered
    title    what is wrong, in a few words
    cause    why that is an error
    fix      what to do
    example  a whole program that raises it; the tests run it
    """

    code: str
    title: str
    cause: str
    fix: str
    example: str

    def as_dict(self) -> dict[str, str]:
        return {"code": self.code, "title": self.title, "cause": self.cause, "fix": self.fix, "example": self.example}


def program(text: str) -> str:
    """An example as a program: without the catalogue's indentation, behind the import that all of them need."""
    return f"import epdsl as ep\n\n\n{textwrap.dedent(text).strip()}\n"
