"""The catalogue of errors: each code's example is run and its whole text compared with `error_codes/CODE.txt`; no code is left out.

In the texts what differs by run is named: DIR a temporary directory, 0xADDRESS an address, HASH a digest, SECONDS a time.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from epdsl_runtime.bootstrap import ThreadBootstrap, ThreadHub
from epdsl_runtime.errors import CodedError
from epdsl_runtime.rank import Rank
from typer.testing import CliRunner

import epdsl as ep
from epdsl.cli import app
from epdsl.error_codes import CODES, SECTIONS, markdown, nearest

ROOT = Path(__file__).parents[2]
TEXTS = Path(__file__).parent / "error_codes"
_CODE = re.compile(r"EP\d{3}")
_QUOTED = re.compile(r"""["'](EP\d{3})["']""")


def fake_cuda(patch: pytest.MonkeyPatch) -> None:
    """A CUDA driver with two devices that do not reach each other and have no memory left."""
    driver = MagicMock()
    for call, given in {
        "cuInit": (0,),
        "cuDeviceGetCount": (0, 2),
        "cuDeviceCanAccessPeer": (0, 0),
        "cuMemAlloc": (2, 0),
        "cuGetErrorName": (0, b"CUDA_ERROR_OUT_OF_MEMORY"),
        "cuGetErrorString": (0, b"out of memory"),
        "cuDeviceGet": (0, 0),
        "cuDevicePrimaryCtxRetain": (0, 7),
        "cuCtxSetCurrent": (0,),
        "cuMemGetInfo": (0, 0, 1 << 30),
    }.items():
        getattr(driver, call).return_value = given
    patch.setitem(sys.modules, "cuda.bindings.driver", driver)
    import epdsl_runtime.cuda as cuda

    patch.setattr(cuda.ctypes, "CDLL", lambda *_: MagicMock())
    patch.setattr(cuda.ctypes, "PyDLL", lambda *_: MagicMock())


def no_bindings(patch: pytest.MonkeyPatch) -> None:
    """The package of the driver's bindings is not installed."""
    patch.setitem(sys.modules, "cuda.bindings.driver", None)


class Unshareable:
    """Enough of a device for two ranks to find that no memory of it can be shared."""

    share_kinds = ("fabric", "fd")
    info = SimpleNamespace(kind="cuda", index=0, uuid="")
    capturing = None

    def __init__(self) -> None:
        self.context_words = [0] * 64

    def allocate_shared(self, nbytes: int, kind: str) -> Any:
        raise RuntimeError(f"no {kind} memory here")


def unshareable(patch: pytest.MonkeyPatch) -> None:
    """`ep.spawn` on devices whose memory cannot be shared; raises what rank 0 raises."""

    def spawn(main: Callable[[Any], Any], ranks: int, device: str, peer_memory: str) -> None:
        import threading

        hub, failures = ThreadHub(ranks), {}

        def body(index: int) -> None:
            try:
                main(Rank(index, ranks, Unshareable(), ThreadBootstrap(hub, index, timeout=10), peer_memory))  # pyright: ignore
            except Exception as error:
                failures[index] = error

        threads = [threading.Thread(target=body, args=(index,)) for index in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        raise failures[0]

    patch.setattr(ep, "spawn", spawn)


# What stands in for the GPUs that an example is about.
MACHINES = {"EP220": no_bindings, "EP221": fake_cuda, "EP222": fake_cuda, "EP223": fake_cuda, "EP315": unshareable}


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Examples may set the project's variables and leave files: both end with the test."""
    for name in ("EPDSL_OVERRIDE_DIR", "EPDSL_DUMP", "ROCM_PATH", "PATH"):
        monkeypatch.setenv(name, "" if name.startswith("EPDSL") else os.environ.get(name, ""))
    monkeypatch.setenv("EPDSL_DUMP_DIR", str(tmp_path / "dump"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield monkeypatch


def settled(text: str, folder: Path) -> str:
    """An error's text without what differs by run."""
    text = re.sub(rf"{re.escape(str(folder))}(/tmp\w+)?", "DIR", text)
    text = re.sub(r"0x[0-9a-f]{9,}", "0xADDRESS", text)
    text = re.sub(r"\b[0-9a-f]{16}\b", "HASH", text)
    text = re.sub(r" for \d+\.\d s\b", " for SECONDS", text)
    return re.sub(r"kernel-[0-9a-f]{8}\b", "kernel-HASH", text)


def said(code: str, folder: Path) -> str:
    """The whole text that a code's example raises."""
    path = folder / f"{code}.py"
    path.write_text(CODES[code].example)
    with pytest.raises(Exception) as caught:
        runpy.run_path(str(path), run_name="__main__")
    assert isinstance(caught.value, CodedError) and caught.value.code == code, caught.value
    return settled(str(caught.value), folder).rstrip()


@pytest.mark.parametrize("code", CODES)
def test_an_example_raises_its_code_with_the_whole_text(code: str, environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if code in MACHINES:
        MACHINES[code](environment)
    assert said(code, tmp_path) == (TEXTS / f"{code}.txt").read_text().rstrip()


def used_codes() -> dict[str, list[str]]:
    """Every code written in the sources, outside the catalogue, with the places."""
    found: dict[str, list[str]] = {}
    for folder in (ROOT / "epdsl", ROOT / "runtime"):
        for path in folder.rglob("*.py"):
            if "error_codes" in path.parts:
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                for code in _QUOTED.findall(line):
                    found.setdefault(code, []).append(f"{path.name}:{number}")
    return found


def test_the_sources_and_the_catalogue_know_the_same_codes() -> None:
    used = used_codes()
    assert {code: used[code] for code in used.keys() - CODES.keys()} == {}
    assert sorted(CODES.keys() - used.keys()) == []


def test_every_code_has_its_text_and_no_text_is_left_over() -> None:
    assert sorted(path.stem for path in TEXTS.iterdir()) == sorted(CODES)
    for code in CODES:
        assert (TEXTS / f"{code}.txt").read_text().startswith(f"{code}: ")


def test_the_catalogue_is_in_order_and_complete() -> None:
    rows = [row for section in SECTIONS.values() for row in section]
    assert [row.code for row in rows] == sorted(CODES) and len(rows) == len(CODES)
    assert len({row.title for row in rows}) == len(rows)
    for row in rows:
        assert _CODE.fullmatch(row.code)
        assert row.title[0].islower() or row.title.startswith("EPDSL_")
        assert not row.title.endswith(".") and row.cause.endswith(".") and row.fix.endswith(".")


def test_codes_of_the_language_cover_every_case() -> None:
    """The first words of each case in `errors/` are a code of the catalogue."""
    for path in (Path(__file__).parent / "errors").glob("*.txt"):
        assert path.read_text().partition(": ")[0] in CODES, path.name


def test_the_page_has_every_code_once() -> None:
    page = markdown()
    assert re.findall(r"^### (EP\d{3}): .* \{ #(ep\d{3}) \}$", page, re.M) == [(code, code.lower()) for code in CODES]
    assert page.startswith("# Errors\n") and page.count("```python") == len(CODES)


def explained(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["explain", *arguments])


def test_explain_shows_a_code() -> None:
    done = explained("ep044")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0].rstrip() == "EP044: not one access on every target"
    assert "  A program that raises it" not in lines and "A program that raises it" in [line.rstrip() for line in lines]
    assert "      ep.store(p, 1, order=ep.RELEASE, scope=ep.SYSTEM)" in [line.rstrip() for line in lines]


def test_explain_lists_all_as_text_and_json() -> None:
    done = explained("--json")
    assert [row["code"] for row in json.loads(done.stdout)] == sorted(CODES)
    assert set(json.loads(done.stdout)[0]) == {"code", "title", "cause", "fix", "example"}
    listed = explained().stdout
    assert re.findall(r"^ *(EP\d{3}) ", listed, re.M) == sorted(CODES)


def test_explain_of_an_unknown_code_names_the_nearest() -> None:
    done = explained("EP440")
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr == f"epdsl: there is no error EP440; the nearest is {nearest('EP440')}: {CODES[nearest('EP440')].title}\n"
    assert nearest("EP0444") == "EP044" and nearest("e044") == "EP044"
