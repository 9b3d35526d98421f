"""Pages of the site that are made from the program: language, host side, commands, variables, errors, kernel family.

A hook of mkdocs (`on_files` adds the pages). `pages()` needs no mkdocs.
"""

from __future__ import annotations

import dataclasses
import enum
import html
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

LANGUAGE: dict[str, tuple[str, tuple[str, ...]]] = {
    "Kernels and functions": ("", ("kernel", "func", "struct", "unroll", "scenario", "control_words")),
    "Types": ("", ("Ptr", "Peers", "Array", "Const", "vec")),
    "Scalar types": (
        "Inside a kernel `ep.f32(x)` converts; outside it makes a NumPy scalar. Each has `.nbytes` and `.name`.",
        ("i1", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "f16", "bf16", "f32", "f64", "f8e4m3", "f8e5m2"),
    ),
    "Orders and scopes": ("What each pairs with: [the rules](../memory-order.md#the-rules).", ("Order", "Scope")),
    "Memory": ("`p[i]` and `p[i] = v` are plain accesses.", ("load", "store", "shared", "copy", "warp_copy", "fence", "wait")),
    "Atomics": (
        "Each takes a pointer to a word of 32 or 64 bits.",
        (
            *(f"atomic_{name}" for name in ("add", "sub", "min", "max", "and", "or", "xor", "xchg", "cas")),
            *(f"reduce_{name}" for name in ("add", "sub", "min", "max", "and", "or", "xor")),
        ),
    ),
    "Where a thread is": (
        "",
        (
            "thread_idx",
            "block_idx",
            "block_dim",
            "grid_dim",
            "lane_id",
            "warp_id",
            "warp_size",
            "target",
            "clock",
            "globaltimer",
            "sleep_ns",
        ),
    ),
    "Barriers": ("", ("barrier", "named_barrier", "named_arrive", "Group", "group_barrier", "warp_sync")),
    "Warps": (
        "None of these orders memory; `ep.warp_sync` does.",
        ("shfl", "shfl_up", "shfl_down", "shfl_xor", "ballot", "any", "all", "elect", "warp_reduce"),
    ),
    "The copy engine": ("", ("bulk_copy", "bulk_commit", "bulk_wait", "MBarrier", "proxy_fence")),
    "Values": ("", ("select", "min", "max", "sqrt", "floor", "fabs", "bitcast", "popcount", "count_trailing_zeros")),
    "Reports": ("", ("printf", "device_assert", "trap", "inline_asm", "CompileError")),
}
HOST: dict[str, tuple[str, tuple[str, ...]]] = {
    "Ranks": ("", ("spawn", "init", "Rank", "open_device")),
    "Kernels": ("What `@ep.kernel` makes.", ("Kernel", "Artifact")),
    "Failures": ("", ("RankFailed", "PeerTimeout", "DeviceAssertionError")),
}
RUNTIME: dict[str, tuple[str, tuple[str, ...]]] = {
    "Arrays": ("", ("DeviceArray", "Symmetric", "PeerTable", "Address")),
    "Launches": ("", ("Prepared", "Graph", "Launcher", "launcher")),
    "What kernels report": ("", ("KernelFault",)),
    "What ranks report": ("", ("CollectiveError", "Disagreement", "OutOfStep", "Health")),
    "What a job reports": ("", ("BootstrapTimeout", "JobTimeout", "LauncherError", "Refused", "SpawnError")),
    "What devices report": (
        "",
        ("LaunchError", "CaptureError", "DeviceUnavailable", "DriverError", "NoSharing", "SharingError", "Sharing", "list_devices"),
    ),
    "Parts of an artifact": ("", ("Param", "Slot", "Site")),
}
SAME = {"ACQUIRE": "Order", "ACQ_REL": "Order", "RELAXED": "Order", "RELEASE": "Order", "SEQ_CST": "Order"}
SAME |= {"BLOCK": "Scope", "DEVICE": "Scope", "SYSTEM": "Scope"}

_FIELD = re.compile(r"(\w[\w, ]*?)(?:  +)(\S.*)")
_LONG = 100


def markdown(text: str) -> str:
    """A docstring: its lines `name  meaning` (and what is indented below them) become a list, the rest stays."""
    lines, out = inspect.cleandoc(text).splitlines(), []
    listing = False
    for line in lines:
        if (found := _FIELD.fullmatch(line)) and not line.startswith(" "):
            if not listing:
                out.append("")
            names = ", ".join(f"`{name.strip()}`" for name in found[1].split(","))
            out.append(f"- {names}: {found[2]}")
            listing = True
        elif listing and line.startswith(" "):
            out.append(f"    {line.strip()}")
        else:
            if listing and line:
                out.append("")
            listing = False
            out.append(line)
    return "\n".join(out)


def signature(name: str, thing: Any, method: bool = False) -> str:
    """As it is called, without annotations; on several lines when long."""
    from epdsl.lang.intrinsic import as_called

    try:
        parameters = list(inspect.signature(thing).parameters.values())
    except (TypeError, ValueError):
        return name
    if method:
        parameters = parameters[1:]
    shown = [as_called(p) for p in parameters]
    marks: list[str] = []
    for parameter, text in zip(parameters, shown, strict=True):
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in marks and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
            marks.append("*")
        marks.append(text)
    line = f"{name}({', '.join(marks)})"
    return line if len(line) <= _LONG else f"{name}(\n    " + ",\n    ".join(marks) + ",\n)"


def _entry(name: str, thing: Any) -> Iterator[str]:
    """One name: heading, how it is called, what it says of itself, its members."""
    described = thing if inspect.getdoc(thing) else type(thing)
    yield f"### `{name}`\n"
    if isinstance(thing, enum.EnumType):
        yield markdown(inspect.getdoc(thing) or "")
        yield "\n" + " ".join(f"`ep.{member.name}`" for member in thing) + "\n"
        return
    if callable(thing) and not inspect.isclass(thing):
        yield f"```python\n{signature(name, thing)}\n```\n"
    yield markdown(inspect.getdoc(described) or "") + "\n"
    if inspect.isclass(thing):
        yield from _members(thing)


def _members(thing: type) -> Iterator[str]:
    """The public methods and properties that say what they are."""
    for name, member in vars(thing).items():
        if name.startswith("_") or isinstance(member, type):
            continue
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        text = inspect.getdoc(function) if callable(function) else None
        if not text:
            continue
        shown = name if isinstance(member, property) else signature(name, function, method=True)
        yield f"```python\n.{shown}\n```\n"
        yield markdown(text) + "\n"


def _names(module: Any, prefix: str, sections: dict[str, tuple[str, tuple[str, ...]]]) -> str:
    parts: list[str] = []
    for heading, (text, names) in sections.items():
        parts.append(f"\n## {heading}\n")
        if text:
            parts.append(f"{text}\n")
        if heading == "Scalar types":
            parts.append("| type | |\n|---|---|")
            parts += [f"| `{prefix}{name}` | {_cell(inspect.getdoc(getattr(module, name)))} |" for name in names]
            continue
        for name in names:
            parts.extend(_entry(f"{prefix}{name}", getattr(module, name)))
    return "\n".join(parts)


def language() -> str:
    """Every name that a kernel uses."""
    from epdsl import api

    intro = (
        "# Language\n\nThe names of `import epdsl as ep` that are used inside kernels, and what makes kernels. "
        "An order and a scope have no default: leaving one out is an error.\n"
    )
    return intro + _names(api, "ep.", LANGUAGE)


def host() -> str:
    """Every name that a program around kernels uses."""
    import epdsl_runtime

    from epdsl import api

    intro = (
        "# Host side\n\nWhat runs on the CPU: ranks, memory, launches. How ranks start and meet: [Runtime](../runtime.md). "
        "Names without `ep.` are of the package `epdsl_runtime`, which needs no compiler.\n"
    )
    return intro + _names(api, "ep.", HOST) + _names(epdsl_runtime, "", RUNTIME)


def commands() -> str:
    """Every command and its options, from the command line's own description."""
    import typer

    from epdsl.cli import app

    root: Any = typer.main.get_command(app)
    parts = ["# Command line\n", "Exit status: 0 success, 1 a finding or a failed verification, 2 a usage error.\n"]
    for name, command in root.commands.items():
        inner = getattr(command, "commands", None)
        parts += [f"## `epdsl {name}`\n", _help(command)]
        if name == "dump":
            parts += _stages()
        if inner:
            for sub, each in inner.items():
                parts += [f"### `epdsl {name} {sub}`\n", _help(each)]
    return "\n".join(parts)


def _stages() -> list[str]:
    from epdsl.stages import MEANING

    rows = [f"| `{name}` | {_cell(meaning)} |" for name, meaning in MEANING.items()]
    return ["### Stages\n", "| stage | holds |", "|---|---|", *rows, ""]


def _help(command: Any) -> str:
    parts = [inspect.cleandoc(command.help or ""), ""]
    shown = [p for p in getattr(command, "params", []) if not p.hidden and p.name != "help"]
    if shown:
        parts += ["| option | default | |", "|---|---|---|"]
    for parameter in shown:
        if parameter.param_type_name == "argument":
            name = f"`{parameter.name.upper()}`"
        else:
            name = ", ".join(f"`{o}`" for o in parameter.opts) + "".join(f" / `{o}`" for o in parameter.secondary_opts)
        parts.append(f"| {name} | {_default(parameter)} | {_cell(parameter.help)} |")
    return "\n".join([*parts, ""])


def _default(parameter: Any) -> str:
    value = getattr(parameter.default, "value", parameter.default)
    if parameter.required:
        return "required"
    if value is True and parameter.secondary_opts:
        return f"`{parameter.opts[0]}`"
    if value is None or value == [] or value is False or callable(value):
        return ""
    return f"`{value}`" if str(value) else ""


def environment() -> str:
    """Every environment variable, from the table."""
    from epdsl.env import VARIABLES

    rows = [f"| `{v.name}` | {_shown_default(v)} | {_cell(v.meaning)} |" for v in VARIABLES]
    return "\n".join(
        [
            "# Environment variables\n",
            "`epdsl env` prints them with the values in force. A value that does not parse is an error that names the variable.\n",
            "| variable | default | meaning |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def _shown_default(variable: Any) -> str:
    from pathlib import Path

    if variable.default in ("", ()):
        return ""
    if isinstance(variable.default, bool):
        return f"`{int(variable.default)}`"
    return f"`{str(variable.default).replace(str(Path.home()), '~')}`"


def kernels() -> str:
    """The kernel family: every dataclass of it with its parameters."""
    parts = [
        "# Kernel family\n",
        "The expert-parallel kernels that `epdsl run` uses, as frozen dataclasses: the fields are compile-time parameters. "
        "`epdsl kernels` prints the same.\n",
    ]
    for family in _families():
        parts += [f"## `{family['name']}`\n", f"{family['summary']}\n"]
        if family["kernels"]:
            parts.append(f"Kernels: {', '.join(f'`{name}`' for name in family['kernels'])}\n")
        if family["parameters"]:
            parts += ["| parameter | type | default |", "|---|---|---|"]
        for p in family["parameters"]:
            default = "required" if p["required"] else f"`{p['default']!r}`"
            parts.append(f"| `{p['name']}` | `{_cell(p['type'])}` | {default} |")
        parts.append("")
    return "\n".join(parts)


def _families() -> list[dict[str, Any]]:
    """What `epdsl kernels --json` says."""
    import contextlib
    import io
    import json

    from epdsl.cli import kernels as listed

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        listed(as_json=True)
    return json.loads(text.getvalue())


def errors() -> str:
    """The catalogue of error codes."""
    if importlib.util.find_spec("epdsl.error_codes") is None:
        return "# Errors\n\nEvery error says what is wrong, where, and what to write instead.\n"
    from epdsl.error_codes import markdown as catalogue  # pyright: ignore

    return catalogue()


def _cell(text: str | None) -> str:
    """Text for a cell of a table."""
    return html.escape(" ".join((text or "").split()), quote=False).replace("|", "\\|")


@dataclasses.dataclass(frozen=True)
class Page:
    """A page of the site that no file holds. `path` is below docs/."""

    path: str
    make: Callable[[], str]


PAGES = (
    Page("reference/language.md", language),
    Page("reference/host.md", host),
    Page("reference/commands.md", commands),
    Page("reference/environment.md", environment),
    Page("reference/errors.md", errors),
    Page("reference/kernels.md", kernels),
)


def on_files(files: Any, config: Any) -> Any:
    """The hook of mkdocs: adds the pages."""
    from mkdocs.structure.files import File

    for page in PAGES:
        files.append(File.generated(config, page.path, content=page.make()))
    return files
