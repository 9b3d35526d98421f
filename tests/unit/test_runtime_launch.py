"""What a launch may look like, arrays, and prepared launches."""

import gc
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from epdsl_runtime.array import allocate_array
from epdsl_runtime.artifact import Artifact, Param
from epdsl_runtime.driver_device import DriverDevice
from epdsl_runtime.driver_wait import DriverStream
from epdsl_runtime.launch import Launcher, LaunchError, dim3, launcher, stream_of, target_runs
from runtime_fakes import FakeDevice

ARTIFACT = Artifact(
    "copy",
    "sim:nvidia",
    "nvidia",
    32,
    (Param("src", "pointer", "f32", 4, 16), Param("n", "scalar", "i32", 4)),
    1024,
    (),
    b"",
    max_threads=256,
)


@pytest.fixture
def device():
    made = FakeDevice()
    yield made
    made.close()


def test_extents():
    assert dim3(4, "grid") == (4, 1, 1)
    assert dim3((4, np.int32(2)), "grid") == (4, 2, 1)
    assert dim3((1, 2, 3), "grid") == (1, 2, 3)
    for wrong in (0, -1, (1, 0), (), (1, 2, 3, 4)):
        with pytest.raises(LaunchError, match="grid"):
            dim3(wrong, "grid")
    for wrong in (1.5, "1", None, np.array([1, 1])):
        with pytest.raises(TypeError, match="grid is a number"):
            dim3(wrong, "grid")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("grid", "block", "shared", "text"),
    [
        (1, 48, 0, "a block of 48 threads is not a multiple of the warp of 32"),
        (1, 512, 0, "a block of 512 threads, but it is compiled for at most 256"),
        ((1, 70000), 32, 0, "grid extent y is 70000, the limit is 65535"),
        (1, (1, 1, 128), 0, "block extent z is 128, the limit is 64"),
        (1, 32, 65536, r"needs 66560 bytes of shared memory \(1024 its own, 65536 asked for\), sim:0 has 65536"),
        (1, 32, -1, "shared_bytes is -1"),
    ],
)
def test_shapes_that_cannot_run_are_refused_with_both_numbers(device, grid, block, shared, text):
    with pytest.raises(LaunchError, match=text):
        launcher(device, ARTIFACT).launch(grid=grid, block=block, shared_bytes=shared, args=(0, 0))
    assert not device.launches


@pytest.mark.parametrize("shared", ["1", 16.0, None])
def test_shared_memory_is_a_whole_number_of_bytes(device, shared):
    array = allocate_array(device, (4,), "f32")
    with pytest.raises(TypeError, match=rf"shared_bytes is a whole number of bytes, got {shared!r}"):
        launcher(device, ARTIFACT).launch(grid=1, block=32, shared_bytes=shared, args=(array, 1))
    launcher(device, ARTIFACT).launch(grid=np.int64(1), block=[32], shared_bytes=np.int64(16), args=(array, 1))  # pyright: ignore[reportArgumentType]
    assert [launch[:3] for launch in device.launches] == [((1, 1, 1), (32, 1, 1), 16)]


def test_a_grid_of_more_threads_than_amd_starts_along_an_axis():
    device = FakeDevice(vendor="amd", warp_size=64, target="sim:amd")
    amd = replace(ARTIFACT, target="sim:amd", vendor="amd", warp_size=64)
    array = allocate_array(device, (4,), "f32")
    with pytest.raises(LaunchError, match="16777216 blocks of 256 threads along x are 4294967296, the limit is 4294967295"):
        launcher(device, amd).launch(grid=2**24, block=256, args=(array, 1))
    launcher(device, amd).launch(grid=2**24 - 1, block=256, args=(array, 1))
    assert len(device.launches) == 1
    device.close()


@pytest.mark.parametrize("wrong", [None, "sim", 3])
def test_a_launch_is_on_a_rank_or_a_device(wrong):
    with pytest.raises(TypeError, match=rf"takes a rank or a device as its first argument, got {wrong!r} "):
        launcher(wrong, ARTIFACT)


def test_the_devices_own_limit_counts_too(device):
    with pytest.raises(LaunchError, match="a block of 2048 threads, sim:0 takes at most 1024"):
        launcher(device, replace(ARTIFACT, max_threads=None)).launch(grid=1, block=2048, args=(0, 0))


def test_a_grid_whose_blocks_wait_for_each_other_must_be_resident(device):
    array = allocate_array(device, (4,), "f32")
    with pytest.raises(LaunchError, match=r"a grid of 9 blocks .* holds 8 blocks of 32 threads at once"):
        launcher(device, ARTIFACT).launch(grid=9, block=32, args=(array, 1), cooperative=True)
    launcher(device, ARTIFACT).launch(grid=8, block=32, args=(array, 1), cooperative=True)
    launcher(device, ARTIFACT).launch(grid=9, block=32, args=(array, 1))
    assert [launch[0] for launch in device.launches] == [(8, 1, 1), (9, 1, 1)]


@pytest.mark.parametrize(
    ("target", "device", "runs"),
    [
        ("sm_90", "sm_90", True),
        ("sm_80", "sm_90", True),
        ("sm_90", "sm_80", False),
        ("sm_90a", "sm_90", True),
        ("sm_90a", "sm_100", False),
        ("gfx942", "gfx942", True),
        ("gfx90a", "gfx942", False),
        ("sim:nvidia", "sim:amd", False),
        ("sm_90", "sim:nvidia", False),
    ],
)
def test_targets(target, device, runs):
    assert target_runs(target, device) is runs


def test_the_artifact_must_be_for_the_device(device):
    with pytest.raises(LaunchError, match="copy is compiled for gfx942, sim:0 is sim:nvidia"):
        Launcher(device, replace(ARTIFACT, target="gfx942"))


def test_a_prepared_launch_binds_once_and_patches(device):
    array, other = allocate_array(device, (4,), "f32"), allocate_array(device, (4,), "f32")
    prepared = launcher(device, ARTIFACT).prepare(grid=2, block=64, args=(array, 5))
    prepared()
    prepared.set(n=6)()
    prepared.set(src=other, n=7)()
    assert [launch[4] for launch in device.launches] == [[array.address, 5], [array.address, 6], [other.address, 7]]
    with pytest.raises(ValueError, match="'n' is i32"):
        prepared.set(n=2**31)
    with pytest.raises(TypeError, match="no parameter 'm'; it has src, n"):
        prepared.set(m=1)
    # None of the arguments is changed when one is refused.
    for wrong in ({"n": 9, "src": 0}, {"src": array, "n": "x"}, {"n": 9, "m": 1}):
        with pytest.raises(TypeError):
            prepared.set(**wrong)
    prepared()
    assert device.launches[-1][4] == [other.address, 7] and prepared.launches == 4
    assert launcher(device, ARTIFACT) is launcher(device, ARTIFACT)


def test_a_prepared_launch_does_not_use_freed_memory(device):
    array, other = allocate_array(device, (4,), "f32"), allocate_array(device, (4,), "f32")
    prepared = launcher(device, ARTIFACT).prepare(grid=2, block=64, args=(array[:2], 5))
    array.free()
    for _ in range(2):
        with pytest.raises(ValueError, match="was freed; allocate another array"):
            prepared()
    prepared.set(src=other)()
    third = allocate_array(device, (4,), "f32")
    prepared.set(src=third)()
    # It does not use this one any more.
    other.free()
    prepared()
    assert [launch[4] for launch in device.launches] == [[address, 5] for address in (other._address, third.address, third.address)]
    assert prepared.launches == 3
    third.free()
    device.capturing = object()
    with pytest.raises(ValueError, match="was freed; allocate another array"):
        prepared()


def test_streams_of_other_libraries():
    class Torch:
        cuda_stream = 77

    class Protocol:
        def __cuda_stream__(self):
            return 0, 88

    class Wrapped(Protocol):
        handle = object()

    class Raw:
        def __index__(self):
            return 55

    assert stream_of(None) is None
    streams = (Torch(), Protocol(), Wrapped(), Raw(), 99, np.int64(98))
    assert [stream_of(s).handle for s in streams] == [77, 88, 88, 55, 99, 98]  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.raises(TypeError, match="no stream"):
        stream_of("default")


def test_arrays_move_data_both_ways(device):
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    array = allocate_array(device, (3, 4), "f32").copy_from(values)
    assert (array.nbytes, array.size, len(array)) == (48, 12, 3)
    np.testing.assert_array_equal(array.numpy(), values)
    np.testing.assert_array_equal(array[1:].numpy(), values[1:])
    np.testing.assert_array_equal(array[-1].numpy(), values[2])
    np.testing.assert_array_equal(array.view("u32").numpy(), values.view(np.uint32))
    np.testing.assert_array_equal(array.reshape(2, 6).numpy(), values.reshape(2, 6))
    array[1].zero()
    array[2].fill_bytes(255)
    assert array.numpy()[1].tolist() == [0] * 4 and np.isnan(array.numpy()[2]).all()
    scalar = allocate_array(device, (), "i32").copy_from(np.array(4, np.int32))
    assert scalar.numpy()[()] == 4
    assert allocate_array(device, (0, 7), "i32").numpy().shape == (0, 7)


def test_array_misuse_is_refused(device):
    array = allocate_array(device, (4,), "f32")
    with pytest.raises(TypeError, match="dtype float64"):
        array.copy_from(np.zeros(4))
    with pytest.raises(ValueError, match=r"source of shape \(3,\)"):
        array.copy_from(np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="step 1 only, not 2"):
        array[::2]
    with pytest.raises(IndexError, match="row 4 is outside"):
        array[4]
    with pytest.raises(ValueError, match="has 4 elements, shape"):
        array.reshape(3)
    with pytest.raises(ValueError, match="is a view"):
        array[1:].free()
    view = array[2:]
    array.free()
    array.free()
    for use in (array.numpy, view.numpy, lambda: array.address, array.zero):
        with pytest.raises(ValueError, match="was freed; allocate another"):
            use()
    assert "freed" in repr(view)


def test_dropped_arrays_are_freed_when_the_device_is_idle(device):
    array = allocate_array(device, (4,), "f32")
    address, view = array.address, array[1:]
    del array
    gc.collect()
    device.synchronize()
    assert device.events == []
    del view
    gc.collect()
    assert device.events == []
    device.synchronize()
    assert device.events == [("free", address)]


def test_a_closed_stream_is_refused():
    """Its handle would be the default stream's."""

    class Gpu:
        def __init__(self):
            self.driver = self.waits = self
            self.destroyed = []

        def stream_create(self):
            return 5

        def stream_destroy(self, handle):
            self.destroyed.append(handle)

        def add(self, handle):
            pass

        remove = add

    gpu = Gpu()
    stream = DriverStream(gpu)  # pyright: ignore[reportArgumentType]
    assert stream.handle == 5
    stream.close()
    stream.close()
    assert gpu.destroyed == [5]
    with pytest.raises(ValueError, match=r"a stream of .* was closed; make another with device.stream\(\)"):
        _ = stream.handle


def test_launches_without_a_stream_go_to_pytorchs_current_one(monkeypatch):
    """Once the program uses PyTorch on a GPU; to the default stream before, and without PyTorch."""
    device = object.__new__(DriverDevice)
    used: list[int] = []
    device.given_up, device.capturing, device._closed, device._info = None, None, False, FakeDevice(kind="cuda", index=3).info
    device.waits = SimpleNamespace(used=used.append)  # pyright: ignore[reportAttributeAccessIssue]
    current = {3: 77, 0: 5}
    initialised: list[bool] = [False]
    cuda = SimpleNamespace(is_initialized=lambda: initialised[0], current_stream=lambda index: SimpleNamespace(cuda_stream=current[index]))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert device.stream_handle(None) == 0
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    assert device.stream_handle(None) == 0
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert device.stream_handle(None) == 0
    initialised[0] = True
    assert device.stream_handle(None) == 77
    current[3] = 88
    assert device.stream_handle(None) == 88
    assert device.stream_handle(stream_of(SimpleNamespace(cuda_stream=99))) == 99
    assert used == [0, 0, 0, 77, 88, 99]
