"""`@ep.func`: a device function. It holds the Python function; the interpreter inlines it where it is called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, overload

from .errors import CompileError
from .source import keep_source
from .types import keep_annotations

P = ParamSpec("P")
R = TypeVar("R")


class Func(Generic[P, R]):
    """A device function: inlined where it is called and specialised on its compile-time arguments."""

    def __init__(self, function: Callable[P, R]) -> None:
        keep_annotations(function)
        keep_source(function)
        self.function = function
        functools.update_wrapper(self, function)

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Func[P, R]: ...
    @overload
    def __get__(self, instance: object, owner: Any = None) -> Callable[..., R]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else BoundFunc(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        raise CompileError("EP013", f"{self.function.__qualname__} is a device function", "call it from an @ep.kernel or another @ep.func")

    def __repr__(self) -> str:
        return f"<ep.func {self.function.__qualname__}>"


class BoundFunc:
    """An @ep.func method of a compile-time object (a policy, a kernel family)."""

    def __init__(self, func: Func[..., Any], instance: Any) -> None:
        self.func = func
        self.instance = instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.func(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<ep.func {self.func.function.__qualname__} of {self.instance!r}>"


def func(function: Callable[P, R]) -> Func[P, R]:
    """Makes a device function: `@ep.func`. It is inlined where a kernel or another one calls it, and specialised on what is known then.

    As a method of a frozen dataclass it may use the fields of `self` as compile-time constants.
    """
    return Func(function)
