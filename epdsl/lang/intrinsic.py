"""Operations of the language: Python functions that emit IR when a kernel calls them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from .errors import CompileError
from .tracer import Tracer

P = ParamSpec("P")
R = TypeVar("R")


class Intrinsic(Generic[P, R]):
    """`ep.NAME`. Calling it outside a kernel is an error; the interpreter calls `emit`."""

    def __init__(self, function: Callable[Concatenate[Tracer, P], R]) -> None:
        self.function = function
        self.name = function.__name__
        # The parameter that is written before the call, where this is a method of a pointer.
        self.owner = ""
        functools.update_wrapper(self, function)  # pyright: ignore[reportArgumentType]
        self.__signature__ = inspect.Signature(list(inspect.signature(function).parameters.values())[1:])

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        raise CompileError("EP013", f"ep.{self.name} exists only inside a kernel", "call it from an @ep.kernel or @ep.func")

    def emit(self, tracer: Tracer, args: Any, kwargs: Any) -> R:
        try:
            return self.function(tracer, *args, **kwargs)  # pyright: ignore[reportCallIssue]
        except TypeError:
            try:
                self.__signature__.bind(*args, **kwargs)
            except TypeError as error:
                shown = ", ".join(as_called(p) for p in self.__signature__.parameters.values())
                raise CompileError("EP008", f"ep.{self.name}: {error}", f"ep.{self.name}({shown})") from None
            raise
        except CompileError as error:
            if error.about and not error.places:
                tracer.at_argument([p for p in self.__signature__.parameters if p != self.owner], error.about)
            raise

    def __repr__(self) -> str:
        return f"ep.{self.name}"


# Keywords that have to be written. They stand in signatures with None, so that leaving them out has an error of its own.
_WRITTEN = ("order", "scope", "until", "timeout_ns")


def as_called(parameter: inspect.Parameter) -> str:
    """A parameter as a call writes it, without its annotation: `order=...` for what has to be given."""
    if parameter.name in _WRITTEN and parameter.default is None:
        return f"{parameter.name}=..."
    return str(parameter.replace(annotation=inspect.Parameter.empty))


def intrinsic(function: Callable[Concatenate[Tracer, P], R]) -> Intrinsic[P, R]:
    return Intrinsic(function)


class BoundIntrinsic:
    """An intrinsic with its first argument given: a pointer's method."""

    def __init__(self, function: Intrinsic[..., Any], first: Any) -> None:
        self.function, self.first = function, first


class Member:
    """An object whose attributes exist only inside a kernel (`ep.thread_idx.x`, `ep.target.vendor`)."""

    def attribute(self, tracer: Tracer, name: str) -> Any:
        raise NotImplementedError


def required(operation: str, **given: Any) -> None:
    """Raises CompileError naming the keywords that were left out."""
    missing = [name for name, value in given.items() if value is None]
    if missing:
        keywords = {"order": "order=ep.RELAXED | ep.ACQUIRE | ep.RELEASE | ...", "scope": "scope=ep.BLOCK | ep.DEVICE | ep.SYSTEM"}
        raise CompileError(
            "EP040",
            f"ep.{operation} needs {' and '.join(f'{m}=' for m in missing)}: an order or scope is never assumed",
            ", ".join(keywords[m] for m in missing),
        )
