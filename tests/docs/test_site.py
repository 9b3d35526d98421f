"""The site: it builds without a warning, its generated pages hold every name, and it needs nothing from the network."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generate() -> Any:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["docs_generate"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(directory)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}", "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return directory


def test_every_page_is_built(site: Path) -> None:
    pages = {str(page.relative_to(site)) for page in site.rglob("*.html")}
    written = {str(page.relative_to(ROOT / "docs").with_suffix(".html")) for page in (ROOT / "docs").rglob("*.md")}
    made = {f"reference/{name}.html" for name in ("language", "host", "commands", "environment", "errors", "kernels")}
    assert written | made <= pages


def test_nothing_is_loaded_from_the_network(site: Path) -> None:
    loads = re.compile(
        r"""(?:<script[^>]*\bsrc|<img[^>]*\bsrc|<link[^>]*\brel="?(?:stylesheet|preconnect|icon)"?[^>]*\bhref)="?(https?://[^"> ]+)"""
    )
    found = {(page.name, url) for page in site.rglob("*.html") for url in loads.findall(page.read_text())}
    assert not found


def test_every_public_name_is_described_once(generate: Any) -> None:
    import epdsl_runtime

    from epdsl import api

    listed = [name for sections in (generate.LANGUAGE, generate.HOST) for _, names in sections.values() for name in names]
    assert len(listed) == len(set(listed))
    assert {*listed, *generate.SAME} == set(api.__all__)
    own = [name for _, names in generate.RUNTIME.values() for name in names]
    assert sorted(own) == sorted({*epdsl_runtime.__all__} - {*api.__all__})


def test_every_public_name_says_what_it_is(generate: Any) -> None:
    import inspect

    import epdsl_runtime

    from epdsl import api

    silent = [name for module in (api, epdsl_runtime) for name in module.__all__ if not inspect.getdoc(getattr(module, name))]
    assert not silent


def test_the_language_page_has_signatures_without_the_tracer(generate: Any) -> None:
    page = generate.language()
    assert "ep.atomic_cas(ptr, expected, desired, *, order=..., scope=...)" in page
    assert "ep.wait(ptr, *, until=..., order=..., scope=..., timeout_ns=...)" in page
    assert "`ep.SEQ_CST`" in page
    assert ".wait(parity, timeout_ns=...)" in page
    assert "Tracer" not in page


def test_the_commands_page_has_every_command_and_its_options(generate: Any) -> None:
    page = generate.commands()
    for command in ("run", "build", "dump", "check", "report", "bench", "trace", "devices", "kernels", "env", "cache clear"):
        assert f"`epdsl {command}`" in page
    assert "| `--seeds` | `20` | How many runs, each with its own seed. |" in page


def test_the_variables_page_has_the_table(generate: Any) -> None:
    page = generate.environment()
    assert "| `EPDSL_TIMEOUT_NS` | `60000000000` |" in page
    assert "| `EPDSL_DUMP` |  |" in page


def test_a_docstring_becomes_markdown(generate: Any) -> None:
    text = "What it does.\n\nmain    first\n        and more\nranks   second\n\nRaises nothing."
    assert generate.markdown(text) == "What it does.\n\n\n- `main`: first\n    and more\n- `ranks`: second\n\nRaises nothing."
