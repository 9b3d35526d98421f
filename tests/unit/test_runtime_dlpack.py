"""Arrays of ours in other libraries by DLPack: the same memory, kept alive, refused where that cannot be."""

import gc

import numpy as np
import pytest
from epdsl_runtime import dlpack
from epdsl_runtime.array import allocate_array, borrowed
from epdsl_runtime.dtypes import Element
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
    held = len(dlpack._held)
    del array
    gc.collect()
    device.synchronize()
    assert (other.view(np.uint8) == 1).all() and len(dlpack._held) == held
    del other
    gc.collect()
    assert len(dlpack._held) == held - 1


def test_a_capsule_that_nobody_takes_is_given_back(device):
    array = allocate_array(device, (4,), "f32")
    held = len(dlpack._held)
    capsule = array.__dlpack__(max_version=(1, 0))
    assert len(dlpack._held) == held + 1
    del capsule
    assert len(dlpack._held) == held and array.__dlpack_device__() == (1, 0)


def test_what_cannot_be_handed_out(device):
    array = allocate_array(device, (4,), "f32")
    with pytest.raises(BufferError, match="is handed out as it is; copy it"):
        array.__dlpack__(copy=True)
    with pytest.raises(BufferError, match=r"is on DLPack device \(1, 0\), asked for on \(2, 0\)"):
        array.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="holds Mailbox, which DLPack does not name"):
        allocate_array(device, (4,), Element("Mailbox", 12, None)).__dlpack__()


class Managed:
    """A device that is called a GPU, and counts how often a stream is waited for."""

    def __init__(self, ours):
        self.ours, self.waited = ours, []
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
        shape = (3,)

        def __init__(self):
            self.array = np.arange(3, dtype=np.int32)

        def __dlpack__(self, **options):
            return self.array.__dlpack__(**options)

    holder = Holder()
    found = borrowed(device, holder)
    assert found is not None and (found.address, found.shape, found.dtype_name) == (holder.array.ctypes.data, (3,), "i32")
    del holder
    gc.collect()
    assert found.numpy().tolist() == [0, 1, 2] and found[1:].view("u8").numpy().tolist() == [1, 0, 0, 0, 2, 0, 0, 0]
    assert borrowed(device, 7) is None
