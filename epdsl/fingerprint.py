"""What determines a compilation, as text to be hashed.

`reads` tells without building a kernel what building it would read: the code and constants it can reach, and the files they are in.
It names more than a build uses, never less; what it cannot tell raises Unknown, and the kernel is then built before its code is looked up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import importlib.util
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import epdsl_runtime

from epdsl.ir.types import StructType, Type
from epdsl.lang.source import keep_source
from epdsl.lang.types import TypeObject

ROOT = Path(__file__).parent
RUNTIME = Path(epdsl_runtime.__file__).parent
# Of the runtime: where code finds its context and the simulator's words, how parameters and objects are laid out.
_LAYOUTS = ("artifact.py", "context_layout.py", "dtypes.py", "sim_code.py", "sim_layout.py")
# Modules of the classes whose objects hold a function of the language.
_HOLDERS = frozenset(("epdsl.lang.function", "epdsl.kernel_object"))
# Written in the language: what a build reads, no part of the compiler.
_FAMILY = "epdsl.kernels"
_STDLIB = str(Path(os.__file__).parent)
_TOOLS = ("mlir", "llvmlite", "numpy")
# What annotations inside functions name most. They leave no trace in the code: these names count as mentioned wherever they stand.
_ANNOTATIONS = ("Any",)
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, type(Ellipsis), range, slice))
_CONTAINERS = frozenset((tuple, list, set, frozenset, dict))
_TOKENS = frozenset((
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.ClassMethodDescriptorType, types.MethodWrapperType,
))  # fmt: skip
_ALIASES = (types.GenericAlias, types.UnionType)


class Unknown(Exception):
    """A value whose content cannot be told."""


@dataclasses.dataclass(frozen=True)
class Reads:
    """What building a kernel reads.

    digest  of all of it
    names   every name that the reachable code mentions
    """

    digest: str
    names: frozenset[str]


def _stamp(path: str) -> tuple[int, int]:
    """What changes when a file is written: its time in nanoseconds and size in bytes. (0, 0) where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_size)


# Digests of files' lines, by the list that holds them; the list is kept so that its id stays its own.
_texts: dict[int, tuple[list[str], str]] = {}


def _text(lines: list[str]) -> str:
    found = _texts.get(id(lines))
    if found is None:
        found = _texts[id(lines)] = (lines, _digest("".join(lines)))
    return found[1]


@functools.cache
def _code(code: types.CodeType) -> str:
    """Content of a function's code."""
    digest = hashlib.sha256(code.co_code)
    digest.update(repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)).encode())
    for constant in code.co_consts:
        # A set's order differs by process.
        text = _code(constant) if isinstance(constant, types.CodeType) else _plain_text(constant)
        digest.update(text.encode(errors="surrogateescape"))
    return digest.hexdigest()


def _plain_text(value: Any) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _compiler_files() -> list[Path]:
    return [*sorted(path for path in ROOT.rglob("*.py") if path.parent.name != "kernels"), *(RUNTIME / name for name in _LAYOUTS)]


def _compiler_stamp() -> str:
    tools = (importlib.util.find_spec(name) for name in _TOOLS)
    files = [*map(str, _compiler_files()), *(str(spec.origin) for spec in tools if spec is not None)]
    return hashlib.sha256(repr([(name, _stamp(name)) for name in files]).encode()).hexdigest()


COMPILER = _compiler_stamp()
"""Differs where the compiler, or what it is made with, was installed anew or edited. Made of files' times, without reading them."""


def compiler_is_as_loaded() -> bool:
    """Whether the compiler's files are still those of this process: one that is edited meanwhile says nothing of what it makes."""
    return _compiler_stamp() == COMPILER


@functools.cache
def versions() -> dict[str, str]:
    """Versions of what makes code, and a digest of the compiler's own source."""
    from importlib.metadata import PackageNotFoundError, version

    import llvmlite.binding as llvm

    import epdsl

    try:
        mlir = version("xtc-mlir-python-bindings")
    except PackageNotFoundError:
        mlir = "unknown"
    source = hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in _compiler_files())).hexdigest()
    return {"epdsl": epdsl.__version__, "source": source, "mlir": mlir, "llvm": ".".join(map(str, llvm.llvm_version_info))}


@functools.cache
def host() -> str:
    """This machine, as the code generator for the simulator sees it."""
    import llvmlite.binding as llvm

    return f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"


def reads(function: Callable[..., Any], *values: Any) -> Reads:
    """What building `function` reads, given the compile-time `values`. Raises Unknown."""
    walk = _walked(function, values)
    return Reads(_digest("\n".join(walk.parts)), frozenset(walk.names))


_PLACES = re.compile(r"(?<= )/[^:\n]*/([^/:\n]+\.py):(?=\d+ )")


def source_digest(function: Callable[..., Any], *values: Any) -> str:
    """Like the digest of `reads`, wherever the files lie: ranks of a job compare it. Raises Unknown."""
    return _digest(_PLACES.sub(r"\1:", "\n".join(_walked(function, values).parts)))[:16]


def _walked(function: Callable[..., Any], values: Iterable[Any]) -> _Walk:
    walk = _Walk()
    walk.interpreted(function)
    for value in values:
        walk.value(value)
    return walk


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def source_digests(*kernels: Any) -> dict[str, str]:
    """By the name to show, a digest of each kernel's source without what its instance holds; none for one that cannot be told."""
    found: dict[str, str] = {}
    for kernel in kernels:
        with contextlib.suppress(Unknown):
            found[f"the source of kernel {kernel.name}"] = source_digest(kernel.function, type(kernel.instance))
    return found


@functools.cache
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Names a function's code looks up, its nested functions' too."""
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(dict.fromkeys(_names(constant)))
    return tuple(found)


def _is_loaded_late(module: types.ModuleType) -> bool:
    """Whether a module's names come to be when they are used, so that which are there says nothing."""
    return module.__name__.partition(".")[0] == "epdsl" or module.__name__ in sys.builtin_module_names


@functools.cache
def _is_fixed(module: str) -> bool:
    """Whether a module's content is told by a version: the compiler's, the standard library's, an installed package's."""
    # What runs as the program is the user's, also where an installed tool (a profiler, a test runner) runs it and has that name.
    if module in (_FAMILY, "__main__") or module.startswith(f"{_FAMILY}."):
        return False
    if module.partition(".")[0] in ("epdsl", "epdsl_runtime", "builtins"):
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module in sys.builtin_module_names
    return any(part in file for part in ("site-packages", "dist-packages")) or file.startswith(_STDLIB)


class _Walk:
    """Goes through everything that can be reached, once."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.names: set[str] = set()
        self._seen: dict[int, int] = {}
        # Keeps what was seen alive, so that no other object gets its id.
        self._kept: list[Any] = []

    def value(self, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self.parts.append(repr(value))
            return
        known = self._seen.get(id(value))
        if known is not None:
            self.parts.append(f"#{known}")
            return
        if kind in _TOKENS:
            self.parts.append(f"{kind.__name__} {value.__qualname__}")
            return
        if kind is types.ModuleType:
            self.parts.append(f"module {value.__name__}")
            return
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        if kind is types.FunctionType:
            self._function(value)
        elif kind is property:
            self.value(value.fget)
        elif kind in _CONTAINERS:
            self._container(value)
        elif isinstance(value, type):
            self._class(value)
        else:
            self._object(value, kind)

    def _container(self, value: Any) -> None:
        self.parts.append(f"{type(value).__name__} {len(value)}")
        if isinstance(value, dict):
            for key, each in value.items():
                self.value(key)
                self.value(each)
        elif isinstance(value, set | frozenset):
            if any(type(each) not in _PLAIN for each in value):  # pyright: ignore[reportUnknownVariableType]
                raise Unknown("a set of objects")
            self.parts += sorted(map(repr, value))  # pyright: ignore[reportUnknownArgumentType]
        else:
            for each in value:
                self.value(each)

    def _object(self, value: Any, kind: type) -> None:
        module = kind.__module__
        if module in _HOLDERS:
            self._holder(value)
        elif kind is TypeObject:
            self._type(value.type)
        elif hasattr(kind, "__dataclass_fields__") and module != "epdsl.ir.types":
            self.value(kind)
            for name in kind.__dataclass_fields__:
                self.value(getattr(value, name, None))
        elif module == "epdsl.ir.types":
            self._type(value)
        elif (inner := _wrapped(value)) is not None:
            self.parts.append(kind.__qualname__)
            for each in inner:
                self.value(each)
        elif isinstance(value, enum.Enum):
            self.value(kind)
            self.parts.append(value.name)
        elif module == "numpy":
            self._numpy(value)
        elif module == "typing" or kind in _ALIASES:
            self.parts.append(repr(value))
        elif module.startswith("epdsl."):
            self._of_ours(value, kind)
        else:
            raise Unknown(f"an object of {module}.{kind.__qualname__}")

    def _holder(self, value: Any) -> None:
        """`@ep.func`, `@ep.kernel` and methods of objects that are one."""
        self.parts.append(type(value).__qualname__)
        if hasattr(value, "func"):
            self.value(value.func)
        else:
            self.interpreted(value.function)
            self.value(getattr(value, "max_threads", None))
        self.value(getattr(value, "instance", None))

    def interpreted(self, function: types.FunctionType) -> None:
        """A function of the language."""
        known = self._seen.get(id(function))
        if known is not None:
            self.parts.append(f"#{known}")
            return
        self._seen[id(function)] = len(self._seen)
        self._kept.append(function)
        self._function(function, interpreted=True)

    def _type(self, kind: Type) -> None:
        """A type of the language. Structs have methods."""
        text, classes = _described(kind)
        self.parts.append(text)
        for each in classes:
            self.value(each)

    def _numpy(self, value: Any) -> None:
        if not hasattr(value, "tobytes") or value.dtype.hasobject:
            text = repr(value)
            if " at 0x" in text:
                raise Unknown(text)
            self.parts.append(text)
            return
        self.parts.append(f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}")

    def _of_ours(self, value: Any, kind: type) -> None:
        """The language's own objects: types, intrinsics, `ep.thread_idx`."""
        self.parts.append(kind.__qualname__)
        held = [getattr(value, name) for name in getattr(kind, "__slots__", ())] + list(getattr(value, "__dict__", {}).values())
        for each in held:
            self.value(each)

    def _function(self, function: types.FunctionType, interpreted: bool = False) -> None:
        """What a function is. One that is `interpreted` is what its text says, another what its code does."""
        code = function.__code__
        if _is_fixed(function.__module__):
            self.parts.append(f"function {function.__module__}.{function.__qualname__}")
            return
        content = f"{code.co_filename}:{code.co_firstlineno} {_text(keep_source(function))}" if interpreted else _code(code)
        self.parts.append(f"function {function.__module__}.{function.__qualname__} {content}")
        for held in (function.__defaults__, function.__kwdefaults__, function.__annotations__ if interpreted else None):
            if held:
                self._container(held)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                raise Unknown(f"{name} has no value yet") from None
            self.parts.append(name)
            self.value(content)
        names = (*_names(code), *_ANNOTATIONS) if interpreted else _names(code)
        self.names.update(names)
        self._globals(names, function.__globals__)

    def _globals(self, names: Iterable[str], scope: Mapping[str, Any]) -> None:
        """The global names that code mentions, and of the modules among them what it mentions of those."""
        scopes, known = [scope], {id(scope)}
        for found in scopes:
            for name in names:
                if name not in found:
                    continue
                value = found[name]
                self.parts.append(name)
                self.value(value)
                if type(value) is types.ModuleType and not _is_loaded_late(value) and id(vars(value)) not in known:
                    known.add(id(vars(value)))
                    scopes.append(vars(value))

    def _class(self, kind: type) -> None:
        for owner in kind.__mro__:
            self.parts.append(f"class {owner.__module__}.{owner.__qualname__}")
            if _is_fixed(owner.__module__):
                continue
            for name, value in vars(owner).items():
                if name in _IGNORED or name.startswith("_abc_") or (name[:2] == "__" and _is_generated(value)):
                    continue
                self.parts.append(name)
                self.value(value)


_IGNORED = frozenset((
    "__dict__", "__weakref__", "__doc__", "__module__", "__dataclass_fields__", "__dataclass_params__", "__match_args__", "__hash__",
    "__abstractmethods__", "__annotations__", "__static_attributes__", "__firstlineno__", "__parameters__", "__orig_bases__",
    "_member_map_", "_value2member_map_", "_hashable_values_", "_unhashable_values_", "_unhashable_values_map_", "__new__",
))  # fmt: skip


@functools.cache
def _described(kind: Type) -> tuple[str, tuple[type, ...]]:
    """A type as text, and the classes of the structs in it."""
    inner = [each for _, each in kind.fields] if isinstance(kind, StructType) else [getattr(kind, "elem", None)]
    own = (kind.cls,) if isinstance(kind, StructType) else ()
    return repr(kind), (*own, *(cls for each in inner if each is not None for cls in _described(each)[1]))


def _is_generated(value: Any) -> bool:
    """Whether `dataclass` made a method, of fields that are told anyway."""
    return isinstance(value, types.FunctionType) and value.__code__.co_filename in ("<string>", dataclasses.__file__)


def _wrapped(value: Any) -> tuple[Any, ...] | None:
    """What the usual wrappers hold; None for other objects."""
    match value:
        case staticmethod() | classmethod():
            return (value.__func__,)
        case functools.cached_property():
            return (value.func,)
        case functools.partial():
            return (value.func, value.args, value.keywords)
        case types.MethodType():
            return (value.__func__, value.__self__)
        case _ if type(value).__name__ == "_lru_cache_wrapper":
            return (value.__wrapped__,)
        case _:
            return None
