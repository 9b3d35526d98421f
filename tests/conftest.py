"""Shared fixtures. `pytest --device cuda` runs the tests of `tests/sim` on GPUs instead of the simulator."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="sim", help="sim (both vendors), or one device: sim:nvidia, sim:amd, cuda, hip")
    parser.addoption("--check-seeds", type=int, default=0, help="seeds for each test of the checker, instead of each test's own few")


def pytest_configure(config: pytest.Config) -> None:
    """One cache for the run and its workers, which inherit the environment: nothing is taken from earlier runs or left to later ones."""
    if not hasattr(config, "workerinput") and "EPDSL_CACHE_DIR" not in os.environ:
        directory = tempfile.mkdtemp(prefix="epdsl-tests-")
        os.environ["EPDSL_CACHE_DIR"] = directory
        os.environ.setdefault("EPDSL_DUMP_DIR", os.path.join(directory, "dump"))
        config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))


def device_names(config: pytest.Config) -> list[str]:
    chosen = config.getoption("--device")
    return ["sim:nvidia", "sim:amd"] if chosen == "sim" else [chosen]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device_name" in metafunc.fixturenames:
        metafunc.parametrize("device_name", device_names(metafunc.config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_gpu = not config.getoption("--device").startswith("sim")
    skip = pytest.mark.skip(reason="needs a GPU: pytest --device cuda")
    for item in items:
        if "gpu" in item.keywords and not on_gpu:
            item.add_marker(skip)


@pytest.fixture
def device(device_name: str) -> Iterator[Any]:
    """One open device of the kind the run is for."""
    import epdsl as ep

    opened = ep.open_device(device_name)
    yield opened
    opened.close()
