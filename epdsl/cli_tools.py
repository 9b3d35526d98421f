"""What the commands share: progress, tables, finding a kernel in a file."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from epdsl_runtime.errors import traceback_text

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


class Failure(Exception):
    """A usage error, as the user should read it."""


def usage(message: str) -> NoReturn:
    """Ends the command with exit status 2."""
    typer.echo(f"epdsl: {message}", err=True)
    raise typer.Exit(2)


def imported(path: Path) -> Any:
    """Runs a Python file as a module. Raises Failure for another file, and with what the file raises, from its own line on."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise Failure(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # Registered, so that annotations and dataclasses of the file find their module.
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        at = error.__traceback__
        while at is not None and at.tb_frame.f_code.co_filename != module.__file__:
            at = at.tb_next
        raise Failure(f"{path} cannot be imported:\n{traceback_text(error.with_traceback(at)).rstrip()}") from None
    return module


def load_kernel(name: str) -> Any:
    """The kernel that FILE.py:NAME names; NAME may have dots (an object's kernel).

    Raises Failure saying what is missing.
    """
    file, _, attribute = name.rpartition(":") if ":" in name else (name, "", "")
    path = Path(file)
    if not file or not (attribute or path.is_file()):
        raise Failure(f"{name!r} names no kernel; write FILE.py:NAME")
    if not path.is_file():
        raise Failure(f"{file} is no file")
    module = found = imported(path)
    names = [n for n, v in vars(module).items() if hasattr(v, "compile") and hasattr(v, "launch")]
    if not attribute:
        raise Failure(f"{name!r} names no kernel; write {file}:NAME, its kernels are {', '.join(names) or 'none'}")
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise Failure(f"{file} has no {attribute}; its kernels are {', '.join(names) or 'none'}")
        found = getattr(found, part)
    if not hasattr(found, "compile"):
        raise Failure(f"{attribute} in {file} is {type(found).__name__}, not a kernel; kernels are marked @ep.kernel")
    return found


@contextmanager
def progress_of(what: str, total: int) -> Iterator[str | None]:
    """A progress bar on a terminal, nothing elsewhere.

    Yields the path of a file that workers append a byte to for every step done (they may be other processes), or None.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    handle, path = tempfile.mkstemp(prefix="epdsl-progress-")
    os.close(handle)
    done = threading.Event()
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )

    def follow() -> None:
        task = bar.add_task(what, total=total)
        while not done.wait(0.1):
            bar.update(task, completed=os.path.getsize(path))

    with bar:
        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield path
        finally:
            done.set()
            thread.join()
            Path(path).unlink(missing_ok=True)


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table; on a pipe it is as wide as it needs, on a terminal as wide as that."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(markup=False) if sys.stdout.isatty() else Console(markup=False, width=240, color_system=None)
    if title:
        console.print(title, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        numeric = bool(rows) and all(_is_number(row[number]) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", no_wrap=numeric)
    for row in rows:
        # As Text: a reason such as "pip install epdsl[cuda]" is not markup.
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def _is_number(text: str) -> bool:
    number, _, unit = text.partition(" ")
    return len(unit) <= 2 and number.rstrip("%").replace(",", "").replace(".", "").replace("e-", "").replace("e+", "").isdecimal()


def time_text(us: float) -> str:
    """Microseconds with three digits and a fitting unit."""
    return next((f"{us / size:.3g} {unit}" for size, unit in ((1e6, "s"), (1e3, "ms")) if us >= 0.9995 * size), f"{us:.3g} us")


def byte_text(n: int) -> str:
    """Bytes with three digits and a decimal unit."""
    return next((f"{n / size:.3g} {unit}" for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if n >= 0.9995 * size), f"{n} B")
