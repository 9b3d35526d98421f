"""Names of targets and what they say. Needs no MLIR."""

import subprocess
import sys
from pathlib import Path

import pytest

from epdsl.targets import parse_target

KNOWN = "sim, sim:nvidia, sim:amd, sm_80, sm_89, sm_90, sm_90a, sm_100, sm_120, gfx90a, gfx942, gfx950, gfx1100, gfx1200, gfx1201"


@pytest.mark.parametrize(
    ("name", "vendor", "warp_size", "named_barriers", "bulk_copy"),
    [
        ("sim:nvidia", "nvidia", 32, True, True),
        ("sim:amd", "amd", 64, False, False),
        ("sm_80", "nvidia", 32, True, False),
        ("sm_89", "nvidia", 32, True, False),
        ("sm_90", "nvidia", 32, True, True),
        ("sm_90a", "nvidia", 32, True, True),
        ("sm_100", "nvidia", 32, True, True),
        ("sm_120", "nvidia", 32, True, True),
        ("gfx90a", "amd", 64, False, False),
        ("gfx942", "amd", 64, False, False),
        ("gfx950", "amd", 64, False, False),
        ("gfx1100", "amd", 32, False, False),
        ("gfx1200", "amd", 32, False, False),
        ("gfx1201", "amd", 32, False, False),
    ],
)
def test_properties(name, vendor, warp_size, named_barriers, bulk_copy):
    target = parse_target(name)
    assert (target.name, target.vendor, target.warp_size) == (name, vendor, warp_size)
    assert target.has_named_barriers == named_barriers
    assert target.has_bulk_copy == bulk_copy
    assert target.simulated == name.startswith("sim")
    assert target.triple == ("" if target.simulated else {"nvidia": "nvptx64-nvidia-cuda", "amd": "amdgcn-amd-amdhsa"}[vendor])


def test_alias():
    assert parse_target("sim") == parse_target("sim:nvidia")


def test_ptx_version():
    assert parse_target("sm_90").ptx_version == "8.3"
    assert parse_target("sm_90").features == "+ptx83"
    assert parse_target("gfx942").ptx_version == ""


def test_unknown_lists_what_is_known():
    with pytest.raises(ValueError, match="unknown target 'sm_70': known are " + KNOWN):
        parse_target("sm_70")


@pytest.mark.parametrize("name", ["gfx942:sramecc+:xnack-", "amdgcn-amd-amdhsa--gfx942:sramecc+:xnack-"])
def test_a_chip_with_its_features_is_told_to_be_written_without(name):
    with pytest.raises(ValueError) as error:
        parse_target(name)
    said = f"unknown target '{name}': write 'gfx942', whose code runs on every gfx942, with every setting of sramecc and xnack"
    assert str(error.value) == said


def test_imports_no_mlir():
    path = Path(parse_target.__code__.co_filename)
    code = f"import runpy, sys; runpy.run_path({str(path)!r}); sys.exit(any(m.split('.')[0] in ('mlir', 'llvmlite') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
