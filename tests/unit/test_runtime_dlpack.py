"""Arrays of ours in other libraries by DLPack: the same memory, kept alive, refused where that cannot be."""

import gc
import weakref

import numpy as np
import pytest
from epdsl_runtime.array import allocate_array, borrowed
from epdsl_runtime.dtypes import Element
from epdsl_runtime.foreign import tensor_in
from runtime_fakes import FakeDevice


@pytest.fixture
def device():
    made = FakeDevice()
    yield made
    made.close()


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "i8", "i32", "u64", "i1"])
def test_the_same_memory_is_kept_alive(device, dtype):
    array = allocate_array(device, (2, 3), dtype)
    array.copy_from(np.arange(6).reshape(2, 3).astype(array.dtype))
    other = np.from_dlpack(array)
    assert other.dtype == array.dtype and other.ctypes.data == array.address
    assert (other == np.arange(6).reshape(2, 3).astype(array.dtype)).all()
    array.fill_bytes(1)
    assert (other.view(np.uint8) == 1).all()
    held = weakref.ref(array)
    del array
    gc.collect()
    device.synchronize()
    assert (other.view(np.uint8) == 1).all() and held() is not None
    del other
    gc.collect()
    assert held() is None


def test_a_capsule_that_nobody_takes_is_given_back(device):
    array = allocate_array(device, (4,), "f32")
    assert array.__dlpack_device__() == (1, 0)
    held = weakref.ref(array)
    capsule = array.__dlpack__(max_version=(1, 0))
    del array
    gc.collect()
    assert held() is not None
    del capsule
    gc.collect()
    assert held() is None


def test_a_consumer_that_refuses_says_why(device):
    """NumPy drops the capsule while its error is on the way."""
    with pytest.raises(RuntimeError, match="Unsupported dtype"):
        np.from_dlpack(allocate_array(device, (4,), "bf16"))


def test_a_copy(device):
    array = allocate_array(device, (2, 2), "i32").copy_from(np.arange(4, dtype=np.int32).reshape(2, 2))
    other = np.from_dlpack(array, copy=True)
    array.zero()
    assert other.tolist() == [[0, 1], [2, 3]] and other.ctypes.data != array.address


@pytest.mark.parametrize(("dtype", "code", "bits"), [("bf16", 4, 16), ("f8e4m3", 10, 8), ("f8e5m2", 12, 8), ("i1", 6, 8), ("u64", 1, 64)])
def test_what_the_capsule_says(dtype, code, bits):
    """Against the numbers of dlpack.h."""
    from epdsl_runtime.array import DeviceArray

    array = DeviceArray(Managed(0), 1 << 40, (3, 5), dtype)  # pyright: ignore[reportArgumentType]
    capsule = array.__dlpack__()
    tensor = tensor_in(capsule)
    assert (tensor.data, tensor.device_type, tensor.device_id) == (1 << 40, 2, 2)
    assert (tensor.ndim, tensor.code, tensor.bits, tensor.lanes, tensor.byte_offset) == (2, code, bits, 1, 0)
    assert [tensor.shape[i] for i in range(2)] == [3, 5]
    assert not tensor.strides or [tensor.strides[i] for i in range(2)] == [5, 1]


def test_numpy_does_not_take_an_array_for_a_sequence(device):
    with pytest.raises(TypeError, match=r"<f32 array of shape \(4,\).* copy it to the host with numpy\(\)"):
        np.asarray(allocate_array(device, (4,), "f32"))


def test_what_cannot_be_handed_out(device):
    array = allocate_array(device, (4,), "f32")
    for place in ((2, 0), (1, 3)):
        with pytest.raises(BufferError, match=rf"is on DLPack device \(1, 0\), asked for on \({place[0]}, {place[1]}\); copy it there"):
            array.__dlpack__(dl_device=place)
    with pytest.raises(BufferError, match="holds Mailbox, which DLPack does not name"):
        allocate_array(device, (4,), Element("Mailbox", 12, None)).__dlpack__()


class Managed:
    """A device that is called a GPU, and counts how often a stream is waited for."""

    def __init__(self, ours):
        self.ours, self.waited, self.capturing = ours, [], None
        self.info = FakeDevice(2, kind="cuda").info
        self.waits = self

    def stream_handle(self, stream):
        return self.ours

    def for_stream(self, handle):
        self.waited.append(handle)


@pytest.mark.parametrize(
    ("ours", "theirs", "waited"), [(77, 77, []), (77, 5, [77]), (0, 1, []), (0, None, []), (0, 5, [0]), (77, -1, []), (77, None, [77])]
)
def test_the_consumers_stream_comes_after_ours(ours, theirs, waited):
    from epdsl_runtime.array import DeviceArray

    device = Managed(ours)
    array = DeviceArray(device, 4096, (2,), "bf16")  # pyright: ignore[reportArgumentType]
    array.__dlpack__(stream=theirs)
    assert device.waited == waited and array.__dlpack_device__() == (2, 2)


def test_an_array_of_another_library_is_borrowed(device):
    class Holder:
        def __init__(self):
            self.array = np.arange(3, dtype=np.int32)

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    holder = Holder()
    found = borrowed(device, holder)
    assert found is not None and (found.address, found.shape, found.dtype_name) == (holder.array.ctypes.data, (3,), "i32")
    del holder
    gc.collect()
    assert found.numpy().tolist() == [0, 1, 2] and found[1:].view("u8").numpy().tolist() == [1, 0, 0, 0, 2, 0, 0, 0]
    assert borrowed(device, 7) is None
