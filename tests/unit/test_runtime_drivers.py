"""The CUDA and HIP devices: without a driver, and through the real bindings over a stand-in for the driver's library (standin/driver.c)."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from standin.build import HERE, LIBRARIES, NoCompiler, build

PACKAGES = {"cuda": "cuda.bindings", "hip": "hip"}


def installed(kind: str) -> bool:
    try:
        return importlib.util.find_spec(PACKAGES[kind]) is not None
    except ModuleNotFoundError:
        return False


def run(code: list[str], timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "runtime"), str(root), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *code],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.fixture(scope="module")
def standin(tmp_path_factory):
    """Runs a script of standin/ over the stand-in for a kind's library, which is built once."""
    built = {}

    def over(kind, script, *args, old=False):
        if not installed(kind):
            pytest.skip(f"the {kind} bindings are not installed")
        if (kind, old) not in built:
            try:
                built[kind, old] = build(kind, tmp_path_factory.mktemp(kind), old)
            except NoCompiler as error:
                pytest.skip(str(error))
        # IPC handles of the stand-in are paths of at most 63 characters.
        state = Path("/tmp") / f"epdsl-standin-{os.getpid()}-{kind}"
        state.mkdir()
        try:
            return run([str(HERE / script), kind, *args], LD_LIBRARY_PATH=str(built[kind, old]), STANDIN_DIR=str(state), STANDIN_KIND=kind)
        finally:
            shutil.rmtree(state)

    return over


@pytest.mark.parametrize("kind", LIBRARIES)
def test_a_driver_device_conforms_over_the_stand_in(kind, standin):
    done = standin(kind, "conformance.py")
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "conforms", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("cuda", "launches"),
        ("hip", "hip:0 cannot be used: libamdhip64.so is older than the bindings and has no hipGetDeviceProperties; install a"),
    ],
)
def test_a_library_older_than_the_bindings(kind, said, standin):
    done = standin(kind, "older.py", old=True)
    assert done.returncode == 0 and done.stdout.startswith(said), done.stdout + done.stderr


@pytest.mark.parametrize("kind", LIBRARIES)
@pytest.mark.parametrize(
    ("what", "code", "said"),
    [("calls", 0, "every call ended"), ("exit", 1, "a wait timed out: rank 0, kernel stuck"), ("spawn", 0, "the jobs ended")],
)
def test_a_kernel_that_never_ends_holds_up_nothing(kind, what, code, said, standin):
    start = time.monotonic()
    done = standin(kind, "stuck.py", what)
    assert done.returncode == code and done.stdout.splitlines()[-1].startswith(said), done.stdout + done.stderr
    if what == "exit":
        assert "a kernel still runs on <" in done.stderr and "this process ends without waiting for it" in done.stderr
        assert time.monotonic() - start < 15


SUITE = {
    "structs": (["test_language_structs.py", "--device", "hip:0"], 13),
    "two ranks": (["test_low_latency.py", "-k", "full and flags and True", "--device", "hip"], 1),
    "graphs": (["test_graphs.py", "-k", "can_hold or latency", "--device", "hip"], 2),
}


@pytest.mark.parametrize("part", [part if part == "two ranks" else pytest.param(part, marks=pytest.mark.slow) for part in SUITE])
def test_the_tests_of_the_simulator_pass_over_the_stand_in_for_hip(part):
    """A part of them, on processes where they have two ranks; suite.py runs any."""
    if not installed("hip"):
        pytest.skip("the hip bindings are not installed")
    (file, *chosen), least = SUITE[part]
    done = run([str(HERE / "suite.py"), f"tests/sim/{file}", "-q", "-m", "not slow", *chosen], timeout=280)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and passed and int(passed[1]) >= least, done.stdout[-3000:] + done.stderr


@pytest.mark.parametrize(("kind", "library"), [("cuda", "libcuda.so.1"), ("hip", "libamdhip64.so")])
def test_a_machine_without_the_driver_is_told_so(kind, library):
    code = f"""
import epdsl_runtime.{kind} as m
from epdsl_runtime.driver_device import DeviceUnavailable
from epdsl_runtime.devices import open_device
for call in (m.device_count, lambda: open_device("{kind}:0")):
    try:
        print("works", call())
    except DeviceUnavailable as error:
        print("unavailable:", error)
"""
    lines = run(["-c", code]).stdout.splitlines()
    if any(line.startswith("works") for line in lines):
        pytest.skip(f"this machine has a {kind} device")
    assert len(lines) == 2 and all(line.startswith(f"unavailable: EP220: no {kind.upper()} device: ") for line in lines), lines
    if installed(kind):
        advice = {"cuda": "; install the NVIDIA driver", "hip": "; install ROCm, or set ROCM_PATH to where it is"}[kind]
        missing = [f"{library} was not usable" in line and line.endswith(advice) for line in lines]
        assert all(found or "cuInit" in line or "hipInit" in line for found, line in zip(missing, lines, strict=True)), lines


@pytest.mark.parametrize(("kind", "extra"), [("cuda", "cuda"), ("hip", "rocm")])
def test_a_machine_without_the_bindings_is_told_which_extra_to_install(kind, extra):
    code = f"""
import sys
sys.modules["cuda"] = sys.modules["cuda.bindings"] = sys.modules["hip"] = None
from epdsl_runtime.devices import list_devices, working_kind
print([d.reason for d in list_devices() if d.spec == "{kind}"][0])
print(working_kind())
"""
    lines = run(["-c", code]).stdout.splitlines()
    assert "the Python bindings are not installed" in lines[0] and f"pip install 'epdsl[{extra}]'" in lines[0]
    assert lines[1] == "sim"


def test_names_of_devices():
    from epdsl_runtime.devices import Spec, parse_spec

    assert [parse_spec(s) for s in ("sim", "sim:amd", "cuda", "cuda:3", "hip:0")] == [
        Spec("sim", None, "nvidia"),
        Spec("sim", None, "amd"),
        Spec("cuda"),
        Spec("cuda", 3),
        Spec("hip", 0),
    ]
    assert [str(parse_spec(s)) for s in ("sim", "cuda", "hip:1")] == ["sim:nvidia", "cuda", "hip:1"]
    for wrong in ("gpu", "cuda:x", "sim:intel", "cuda:-1", ""):
        with pytest.raises(ValueError, match="names no device; it is sim, sim:nvidia"):
            parse_spec(wrong)


def test_auto_follows_the_environment(monkeypatch):
    from epdsl_runtime.devices import Spec, parse_spec

    monkeypatch.setenv("EPDSL_DEVICE", "sim:amd")
    assert parse_spec("auto") == Spec("sim", None, "amd")
    monkeypatch.setenv("EPDSL_DEVICE", "auto")
    monkeypatch.setattr("epdsl_runtime.devices.working_kind", lambda: "cuda")
    assert parse_spec("auto") == Spec("cuda")


def test_importing_the_runtime_loads_neither_numpy_nor_a_driver_nor_the_compiler():
    code = """
import sys, epdsl_runtime, epdsl_runtime.artifact, epdsl_runtime.context_layout
print(sorted(n for n in ("numpy", "ml_dtypes", "cuda", "hip", "epdsl", "mlir", "llvmlite") if n in sys.modules))
import epdsl_runtime.cuda, epdsl_runtime.hip, epdsl_runtime.spawn, epdsl_runtime.rank, epdsl_runtime.launch
print(sorted(n for n in ("ml_dtypes", "cuda", "hip", "epdsl", "mlir", "llvmlite") if n in sys.modules))
print(epdsl_runtime.Artifact.__name__, epdsl_runtime.open_device.__name__, sorted(epdsl_runtime._HOMES) == epdsl_runtime.__all__)
"""
    assert run(["-c", code]).stdout.splitlines() == ["[]", "[]", "Artifact open_device True"]
