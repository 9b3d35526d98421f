"""What a launch may look like, arrays, and prepared launches."""

import gc
from dataclasses import replace

import numpy as np
import pytest
from epdsl_runtime.array import allocate_array
from epdsl_runtime.artifact import Artifact, Param
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
    with pytest.raises(TypeError, match="grid is a number"):
        dim3(1.5, "grid")  # pyright: ignore[reportArgumentType]


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
    assert launcher(device, ARTIFACT) is launcher(device, ARTIFACT)


def test_streams_of_other_libraries():
    class Torch:
        cuda_stream = 77

    class Protocol:
        def __cuda_stream__(self):
            return 0, 88

    assert stream_of(None) is None
    assert [stream_of(s).handle for s in (Torch(), Protocol(), 99)] == [77, 88, 99]  # pyright: ignore[reportOptionalMemberAccess]
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
