"""Running the code blocks of a page of the docs, in order, in a directory of their own.

    ```python title="ring.py"     a file, or what comes next in it; nothing runs
    ```diff title="ring.py"       a change of a file that an earlier block wrote
    ```python                     runs, with the names of the untitled blocks before it
    ```text                       what the Python block before it printed; `...` stands for any lines
    ```console                    `$ command` lines, each followed by what it prints, and by "(exit status 1)" where that is not 0

A line `<!-- not run: WHY -->` or `<!-- gpu -->` before a block has it left out; `<!-- every block: gpu -->` in a page has all of
them left out; `<!-- file: PATH -->` copies a file of the repository.

`python tests/docs/page_blocks.py PAGE ...` writes into the pages what their blocks print now.
"""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing.process
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^`\n]*)\n(?P<body>.*?)^(?P=indent)``` *$", re.M | re.S)
_MARK = re.compile(r"<!-- (gpu|not run: [^\n]*?|file: \S+) -->\s*$")
_PAGE_MARK = re.compile(r"<!-- every block: (gpu|not run: [^\n]*?) -->")
_TITLE = re.compile(r'title="([^"]+)"')
_EXIT = "(exit status {})"
_SHELL = re.compile(r"[|<>;&*]")


@dataclass(frozen=True)
class Block:
    """A fenced block. `skip` says why it is not run, `file` which file of the repository it needs."""

    page: Path
    line: int
    language: str
    title: str
    body: str
    span: tuple[int, int]
    indent: str
    skip: str = ""
    file: str = ""

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


class Wrong(AssertionError):
    """A block that does not do what the page says."""


def blocks_of(page: Path) -> list[Block]:
    """Every fenced block of a page, in order."""
    text = page.read_text()
    whole = _PAGE_MARK.search(text)
    found: list[Block] = []
    for match in _FENCE.finditer(text):
        indent, info = match["indent"], match["info"].strip()
        body = "".join(line.removeprefix(indent) for line in match["body"].splitlines(keepends=True))
        mark = _MARK.search(text[: match.start()])
        marked = mark[1] if mark else whole[1] if whole else ""
        title = _TITLE.search(info)
        found.append(
            Block(
                page,
                text.count("\n", 0, match.start()) + 1,
                info.split(" ")[0],
                title[1] if title else "",
                body,
                match.span("body"),
                indent,
                "" if marked.startswith("file: ") else marked,
                marked.removeprefix("file: ") if marked.startswith("file: ") else "",
            )
        )
    return found


def run_page(page: Path, directory: Path, update: bool = False) -> int:
    """Runs a page's blocks in an empty directory. Returns how many ran.

    update  write what blocks print into the page instead of comparing it

    Raises Wrong with the place of the block, what was expected and what came.
    """
    return _Runner(page, directory, update).run()


class _Runner:
    def __init__(self, page: Path, directory: Path, update: bool) -> None:
        self.page, self.directory, self.update = page, directory, update
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.printed: str | None = None
        self.changes: list[tuple[tuple[int, int], str]] = []

    def run(self) -> int:
        count = 0
        before = os.getcwd()
        os.chdir(self.directory)
        try:
            for block in blocks_of(self.page):
                count += self.one(block)
        finally:
            os.chdir(before)
        if self.changes:
            text = self.page.read_text()
            for (start, end), new in reversed(self.changes):
                text = text[:start] + new + text[end:]
            self.page.write_text(text)
        return count

    def one(self, block: Block) -> bool:
        printed, self.printed = self.printed, None
        if block.file:
            shutil.copy(ROOT / block.file, self.directory)
        if block.skip:
            return False
        match block.language, bool(block.title):
            case "python", True:
                with (self.directory / block.title).open("a") as file:
                    file.write(block.body)
            case "diff", True:
                self.patch(block)
            case "python", False:
                self.printed = self.execute(block)
            case "console", _:
                self.commands(block)
            case "text", _ if printed is not None:
                self.compare(block, block.body, printed)
            case _:
                raise Wrong(f"{block.place}: a {block.language or 'nameless'} block that nothing checks; mark it <!-- not run: WHY -->")
        return True

    def patch(self, block: Block) -> None:
        lines = [line for line in block.body.splitlines() if not line.startswith("@@")]
        old = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
        new = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
        file = self.directory / block.title
        text = file.read_text()
        if text.count(old) != 1:
            raise Wrong(f"{block.place}: what it changes is in {block.title} {text.count(old)} times:\n{old}")
        file.write_text(text.replace(old, new))

    def execute(self, block: Block) -> str:
        # A file of its own, in which the compiler finds the source of a kernel.
        file = self.directory / f"block_{block.line}.py"
        file.write_text(block.body)
        out = io.StringIO()
        with _process_like({}, ["python", str(file)]), contextlib.redirect_stdout(out):
            try:
                exec(compile(block.body, str(file), "exec"), self.names)
            except Exception as error:
                raise Wrong(f"{block.place} raised {type(error).__name__}: {error}") from error
        return out.getvalue()

    def commands(self, block: Block) -> None:
        shown: list[str] = []
        wanted: list[str] = []
        for command, expected in _commands(block.body):
            status, got = run_command(command, self.directory)
            got += f"{_EXIT.format(status)}\n" if status else ""
            if self.update:
                kept = (
                    expected if expected.strip() != "..." and matches(expected, got, self.directory) else masked_paths(got, self.directory)
                )
                shown.append(f"$ {command}\n{kept}")
            else:
                self.compare(block, expected, got, command)
            wanted.append(expected)
        if self.update:
            self.replace(block, "".join(shown))

    def compare(self, block: Block, expected: str, got: str, command: str = "") -> None:
        if expected.strip() == "..." and not self.update:
            raise Wrong(f"{block.place}: an output of `...` alone cannot be wrong")
        if matches(expected, got, self.directory):
            return
        if self.update:
            self.replace(block, masked_paths(got, self.directory))
            return
        what = f" ($ {command})" if command else ""
        raise Wrong(f"{block.place}{what}\n---- the page says\n{expected}---- it prints\n{masked_paths(got, self.directory)}")

    def replace(self, block: Block, body: str) -> None:
        if body != block.body:
            self.changes.append((block.span, "".join(f"{block.indent}{line}" for line in body.splitlines(keepends=True))))


def _commands(body: str) -> Iterator[tuple[str, str]]:
    """Each `$ command` (going on after a backslash) and the text below it."""
    command, output, goes_on = "", "", False
    for line in body.splitlines():
        if goes_on:
            command += f"\n{line}"
        elif line.startswith("$ "):
            if command:
                yield command, output
            command, output = line[2:], ""
        else:
            output += f"{line}\n"
        goes_on = (goes_on or line.startswith("$ ")) and line.endswith("\\")
    if command:
        yield command, output


def run_command(command: str, directory: Path) -> tuple[int, str]:
    """A command's exit status, and what it printed to both streams. `epdsl ...` and `python FILE` run in this process, which is quicker."""
    words = [] if _SHELL.search(command) else shlex.split(command.replace("\\\n", " "))
    settings: dict[str, str] = {}
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        settings[name] = value
    if not words or words[0] not in ("epdsl", "python") or words[1:2] == ["-m"]:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        done = subprocess.run(
            command, shell=True, cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return done.returncode, done.stdout
    out = io.StringIO()
    with _process_like(settings, words), _log_to(out), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            if words[0] == "epdsl":
                from epdsl.cli import main

                main()
            else:
                runpy.run_path(words[1], run_name="__main__")
            status = 0
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except Exception as error:
            traceback.print_exception(error.with_traceback(_frames_of(error, directory)))
            status = 1
    return status, out.getvalue()


def _frames_of(error: Exception, directory: Path) -> TracebackType | None:
    """The traceback as a process of its own would have it: from the page's file on."""
    frame = error.__traceback__
    while frame is not None and not frame.tb_frame.f_code.co_filename.startswith((str(directory), "<string>")) and frame.tb_next:
        file = frame.tb_frame.f_code.co_filename
        if os.sep not in file and file.endswith(".py"):
            break
        frame = frame.tb_next
    return frame


@contextlib.contextmanager
def _log_to(out: io.StringIO) -> Iterator[None]:
    """Has warnings of this package written as a program without logging of its own writes them."""
    log, handler = logging.getLogger("epdsl"), logging.StreamHandler(out)
    handler.setLevel(logging.WARNING)
    log.addHandler(handler)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = True


@contextlib.contextmanager
def _process_like(settings: dict[str, str], words: list[str]) -> Iterator[None]:
    """Sets the environment and sys.argv, and forgets afterwards what the command imported from the page's directory."""
    environment, arguments, path, modules = dict(os.environ), sys.argv, list(sys.path), set(sys.modules)
    # A file of the same size that was changed within a second would be taken for its old self.
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    os.environ.update(settings)
    sys.path.insert(0, os.getcwd())
    sys.argv = words if words[0] == "epdsl" else words[1:]
    # Where a new process looks for the program's file: the folder in which Python was started.
    started_in, multiprocessing.process.ORIGINAL_DIR = multiprocessing.process.ORIGINAL_DIR, os.getcwd()
    try:
        yield
    finally:
        multiprocessing.process.ORIGINAL_DIR = started_in
        os.environ.clear()
        os.environ.update(environment)
        sys.argv, sys.path[:], sys.dont_write_bytecode = arguments, path, writes
        here = os.getcwd()
        for name in set(sys.modules) - modules:
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(here) or name in ("__mp_main__",):
                del sys.modules[name]


# What differs between runs and machines, and what stands for it in a comparison.
_MASKS = (
    (re.compile(r"\b\d[\d.,]*(e[+-]\d+)? ?(ns|us|ms|s|kB|MB)\b"), "# unit"),
    (re.compile(r"\b0x[0-9a-f]{6,}\b"), "0x#"),
    (re.compile(r'(File "(?:epdsl|runtime)/[^"]+", line) \d+'), r"\1 #"),
    (re.compile(r"-[0-9a-f]{8}\b"), "-#"),
    (re.compile(r"\b[0-9a-f]{16}\b"), "#"),
    (re.compile(r"[ \t]+"), " "),
    (re.compile(r" +$", re.M), ""),
)


def masked_paths(text: str, directory: Path) -> str:
    """Without the directory the page ran in, and with the package's own as `epdsl`."""
    for place in (directory.resolve(), directory):
        text = text.replace(f"{place}/", "").replace(str(place), ".")
    text = text.replace(f"{ROOT}/", "")
    text = re.sub(r" +$", "", text, flags=re.M).strip("\n")
    return f"{text}\n" if text else ""


def matches(expected: str, got: str, directory: Path) -> bool:
    """Whether a text is what was expected but for times, sizes, addresses and hashes; `...` on a line of its own stands for any lines."""
    wanted, seen = (masked_paths(text, directory).rstrip("\n") for text in (expected, got))
    for pattern, stands in _MASKS:
        wanted, seen = pattern.sub(stands, wanted), pattern.sub(stands, seen)
    parts = [re.escape(part) for part in re.split(r"(?m)^\s*\.\.\.\n?", wanted.strip())]
    return re.fullmatch("(?s:.*?)".join(parts), seen.strip()) is not None


def main() -> None:
    """Rewrites what blocks print, in the pages given."""
    import tempfile

    for name in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as directory:
            print(name, run_page(Path(name).resolve(), Path(directory).resolve(), update=True))


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "runtime")]
    main()
