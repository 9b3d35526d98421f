"""Errors that have a code. `epdsl explain CODE` says what each code means; this package knows the bare codes alone."""

from __future__ import annotations

import traceback
from typing import TypeVar

from .env import DEBUG

Coded = TypeVar("Coded", bound="CodedError")
_OURS = frozenset(("epdsl", "epdsl_runtime"))


class CodedError(Exception):
    """An error whose kind has a code.

    code     "EP" and three digits
    message  what went wrong, without the code
    """

    code: str

    def __init__(self, code: str, message: str) -> None:
        # Not super(): an OSError further on would read two arguments as an errno and its text.
        Exception.__init__(self, code, message)
        self.code = code

    @property
    def message(self) -> str:
        return str(self.args[1])

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class ArgumentTypeError(CodedError, TypeError):
    """A kernel argument of a type its parameter does not take."""


class ArgumentValueError(CodedError, ValueError):
    """A kernel argument whose value its parameter does not take."""


def shown(error: Coded) -> Coded:
    """The error without the frames and the errors that led to it, to be raised again by the function that the user called.

    EPDSL_DEBUG=1 keeps them.
    """
    if DEBUG.get():
        return error
    error.__cause__ = None
    return error.with_traceback(None)


def traceback_text(error: BaseException) -> str:
    """An error's traceback as text, from the user's first line on.

    That of an error with a code, which says itself where it stands, ends at the user's last line and leaves out what it was raised from.
    EPDSL_DEBUG=1 leaves all of it in.
    """
    told = traceback.TracebackException.from_exception(error)
    if not DEBUG.get():
        if isinstance(error, CodedError):
            told.__cause__ = None
        mine = [frame.f_globals.get("__name__", "").partition(".")[0] in _OURS for frame, _ in traceback.walk_tb(error.__traceback__)]
        if not all(mine):
            first, last = mine.index(False), len(mine) - mine[::-1].index(False)
            kept = list(told.stack)[first : last if isinstance(error, CodedError) else len(mine)]
            told.stack = traceback.StackSummary.from_list(kept)
    return "".join(told.format())
