"""The CUDA and HIP devices: without a driver, and through the real bindings over a stand-in for the driver's library (standin/driver.c)."""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "standin"
LIBRARIES = {"cuda": "libcuda.so.1", "hip": "libamdhip64.so"}
PACKAGES = {"cuda": "cuda.bindings", "hip": "hip"}


def installed(kind: str) -> bool:
    try:
        return importlib.util.find_spec(PACKAGES[kind]) is not None
    except ModuleNotFoundError:
        return False


def run(code: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "runtime"), str(root), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *code],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def compiler() -> list[str]:
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    pytest.skip("no C compiler to build the stand-in with")


@pytest.fixture(scope="module")
def standin(tmp_path_factory):
    """Runs a script of standin/ over the stand-in for a kind's library, which is built once."""
    built = {}

    def over(kind, script, *args):
        if not installed(kind):
            pytest.skip(f"the {kind} bindings are not installed")
        if kind not in built:
            library = tmp_path_factory.mktemp(kind) / LIBRARIES[kind]
            options = ["-shared", "-fPIC", "-w", f"-D{kind.upper()}", f"-Wl,-soname,{LIBRARIES[kind]}", "-lpthread", "-ldl"]
            subprocess.run([*compiler(), str(HERE / "driver.c"), "-o", str(library), *options], check=True, timeout=120)
            built[kind] = library.parent
        # IPC handles of the stand-in are paths of at most 63 characters.
        state = Path("/tmp") / f"epdsl-standin-{os.getpid()}-{kind}"
        state.mkdir()
        try:
            return run([str(HERE / script), kind, *args], LD_LIBRARY_PATH=str(built[kind]), STANDIN_DIR=str(state), STANDIN_KIND=kind)
        finally:
            shutil.rmtree(state)

    return over


@pytest.mark.parametrize("kind", LIBRARIES)
def test_a_driver_device_conforms_over_the_stand_in(kind, standin):
    done = standin(kind, "conformance.py")
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "conforms", done.stdout + done.stderr


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
        assert all("was not usable" in line or "cuInit" in line or "hipInit" in line for line in lines), (library, lines)


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
