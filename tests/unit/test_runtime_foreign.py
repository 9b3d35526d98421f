"""Arrays of other libraries as arguments: their address, or a refusal that names the parameter. None of the libraries is needed."""

import re
import sys

import numpy as np
import pytest
from epdsl_runtime.array import DeviceArray, allocate_array
from epdsl_runtime.artifact import Param
from epdsl_runtime.binding import bind
from runtime_fakes import FakeDevice

POINTER = Param("src", "pointer", "f32", 4, 16)
POINTER_1 = Param("src", "pointer", "f32", 4, 1)


@pytest.fixture
def device():
    made = FakeDevice()
    yield made
    made.close()


class Interface:
    def __init__(self, address, typestr="<f4", shape=(4,), strides=None):
        self.__cuda_array_interface__ = {"shape": shape, "typestr": typestr, "data": (address, False), "strides": strides, "version": 3}


def test_cuda_array_interface():
    cuda = FakeDevice(kind="cuda")
    assert bind((POINTER,), (Interface(4096),), cuda) == [4096]
    assert bind((POINTER,), (Interface(4096, shape=(2, 3), strides=(12, 4)),), cuda) == [4096]
    with pytest.raises(TypeError, match=r"got a Interface of shape \(4,\) of f64"):
        bind((POINTER,), (Interface(4096, "<f8"),), cuda)
    with pytest.raises(ValueError, match="contiguous"):
        bind((POINTER,), (Interface(4096, shape=(2, 3), strides=(24, 4)),), cuda)
    with pytest.raises(ValueError, match=r"'src' must be memory of sim:0, got a Interface .* in CUDA memory"):
        bind((POINTER,), (Interface(4096),), FakeDevice())
    made = allocate_array(cuda, (2, 3), "bf16")
    assert made.__cuda_array_interface__["typestr"] == "<u2"
    assert made.__cuda_array_interface__["data"] == (made.address, False)
    with pytest.raises(AttributeError, match="not in CUDA memory"):
        _ = allocate_array(FakeDevice(), (2,), "f32").__cuda_array_interface__


class Anything:
    """An array of another library with these attributes."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def interface(**changes):
    made = {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3, **changes}
    return Anything(__cuda_array_interface__={name: value for name, value in made.items() if value is not Ellipsis})


class Streams:
    """A device that is called a GPU: launches go to stream `ours`; `waited` has the streams that the host waited for."""

    def __init__(self, ours=0, capturing=None, kind="cuda"):
        self.info, self.waits, self.ours, self.waited, self.capturing = FakeDevice(kind=kind).info, self, ours, [], capturing

    def stream_handle(self, stream):
        return self.ours

    def for_stream(self, handle):
        self.waited.append(handle)


def test_cuda_array_interface_of_every_version():
    cuda = Streams()
    assert bind((POINTER,), (interface(version=2, strides=None),), cuda) == [4096]
    assert bind((POINTER,), (interface(version=0),), cuda) == [4096]
    assert bind((POINTER,), (interface(shape=(0,), data=(0, False)),), cuda) == [0]
    for changes, text in {
        "read-only": ({"data": (4096, True)}, r"'src' got a Anything of shape \(4,\) that is read-only, and a kernel may write"),
        "a mask": ({"mask": object()}, r"'src' got a Anything of shape \(4,\) with a mask, which kernels do not have"),
        "no memory": ({"data": (0, False)}, r"'src' got a Anything of shape \(4,\), which has no memory: its address is 0"),
        "no memory, told otherwise": ({"data": None}, "its address is 0"),
    }.values():
        with pytest.raises(ValueError, match=text):
            bind((POINTER,), (interface(**changes),), cuda)
    for typestr in ("<V2", "<c8", ">f4", "|O", "nonsense"):
        with pytest.raises(TypeError, match=rf"'src' got a Anything of shape \(4,\) of type '{re.escape(typestr)}', which kernels do not"):
            bind((POINTER,), (interface(typestr=typestr),), cuda)


@pytest.mark.parametrize(
    ("ours", "theirs", "waited"), [(0, None, []), (0, 1, []), (0, 77, [77]), (77, 77, []), (77, 1, [1]), (0, 2, [2]), (77, ..., [])]
)
def test_launches_come_after_the_stream_that_an_interface_names(ours, theirs, waited):
    device = Streams(ours)
    bind((POINTER,), (interface(stream=theirs),), device)
    assert device.waited == waited
    device = Streams(ours, capturing=object())
    bind((POINTER,), (interface(stream=theirs),), device)
    assert device.waited == [], "a capture cannot wait, and runs nothing"


def test_what_pytorch_captures_orders_nothing(monkeypatch):
    cuda = Anything(is_initialized=lambda: True, is_current_stream_capturing=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", Anything(Tensor=FakeTensor, cuda=cuda))
    device, array = Streams(77), OnGpu()
    bind((POINTER, POINTER_1), (interface(stream=5), array), device)
    assert (device.waited, array.asked) == ([], [-1])


def test_our_interface_names_the_stream_of_our_launches():
    for ours, named in ((0, 1), (77, 77)):
        made = DeviceArray(Streams(ours), 4096, (2,), "f32").__cuda_array_interface__  # pyright: ignore[reportArgumentType]
        assert (made["stream"], made["version"], made["strides"]) == (named, 3, None)


class Packed:
    """An exporter that is no NumPy array: what torch's CPU tensors are to us."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_dlpack(device):
    raw = np.zeros(64, np.uint8)
    start = -raw.ctypes.data % 16
    values = raw[start : start + 32].view(np.float32)
    assert bind((POINTER,), (Packed(values),), device) == [values.ctypes.data]
    with pytest.raises(TypeError, match=r"'src' is a pointer to f32, got a Packed of shape \(4,\) of f64"):
        bind((POINTER,), (Packed(values.view(np.float64)),), device)
    with pytest.raises(ValueError, match=r"strides \(2,\); a kernel needs it contiguous"):
        bind((Param("src", "pointer", "f32", 4),), (Packed(values[::2]),), device)
    with pytest.raises(ValueError, match=r"must be memory of cuda:0, got a Packed in CPU memory"):
        bind((POINTER,), (Packed(values),), FakeDevice(kind="cuda"))


class OnGpu:
    """A DLPack exporter whose memory is said to be on `place`; `asked` has the streams it was asked for."""

    def __init__(self, place=(2, 0), values=None):
        self.place, self.asked, self.values = place, [], np.zeros(64, np.float32)[:4] if values is None else values

    def __dlpack_device__(self):
        return self.place

    def __dlpack__(self, stream="none was given"):
        self.asked.append(stream)
        return self.values.__dlpack__()


@pytest.mark.parametrize(
    ("kind", "place", "ours", "asked"),
    [
        ("cuda", (2, 0), 0, 1),
        ("cuda", (2, 0), 77, 77),
        ("cuda", (13, 0), 0, 1),
        ("hip", (10, 0), 0, 0),
        ("hip", (10, 0), 77, 77),
        ("cuda", (3, 0), 0, "none was given"),
    ],
)
def test_a_dlpack_exporter_is_told_our_stream(kind, place, ours, asked):
    """As DLPack numbers them: the default stream is 1 on CUDA, 0 on ROCm; host memory has none, and a capture orders nothing."""
    array = OnGpu(place)
    bind((POINTER_1,), (array,), Streams(ours, kind=kind))
    bind((POINTER_1,), (array,), Streams(ours, capturing=object(), kind=kind))
    assert array.asked == [asked, asked if place[0] == 3 else -1]


def test_dlpack_is_asked_before_the_interface_that_does_not_tell_the_device():
    array = OnGpu(place=(2, 1))
    array.__cuda_array_interface__ = interface().__cuda_array_interface__  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match="'src' must be on device 0, got a OnGpu on device 1"):
        bind((POINTER,), (array,), Streams())
    assert array.asked == []


def test_what_an_exporter_raises_is_told_with_the_parameter(device):
    fixed = np.zeros(4, np.float32)
    fixed.flags.writeable = False
    for array, text in (
        (Packed(fixed), "'src' got a Packed whose __dlpack__\\(\\) raised BufferError: .*readonly.* it may write"),
        (Packed(np.zeros(4, ">f4")), "raised BufferError: .*byte order"),
        (Packed(7), "'src' got a Packed whose __dlpack_device__\\(\\) raised AttributeError"),
    ):
        with pytest.raises(ValueError, match=text):
            bind((POINTER,), (array,), device)
    with pytest.raises(TypeError, match=r"'src' got a Packed of shape \(4,\) of DLPack type \(code 5, 64 bits, 1 lanes\)"):
        bind((POINTER,), (Packed(np.zeros(4, np.complex64)),), device)
    with pytest.raises(TypeError, match=r"'src' is a pointer to f32, got <class .*Packed'> \(type\)"):
        bind((POINTER,), (Packed,), device)


class FakeTensor:
    """What is asked of a torch tensor."""

    def __init__(self, **changes):
        self.shape, self.dtype, self.layout, self.device = (4,), "torch.float32", "torch.strided", Anything(type="cpu", index=None)
        self.is_nested, self.address, self.strides, self.negated = False, 4096, (1,), False
        self.__dict__.update(changes)

    def is_contiguous(self):
        return self.strides == (1,)

    def stride(self):
        return self.strides

    def is_neg(self):
        return self.negated

    def data_ptr(self):
        if self.address is None:
            raise RuntimeError("Cannot access data pointer of Tensor")
        return self.address

    @property
    def __dlpack__(self):
        raise AssertionError("a torch tensor is read as one: its DLPack refuses one that needs a gradient")


class Derived(FakeTensor):
    """A program's own kind of tensor."""


@pytest.fixture
def torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", Anything(Tensor=FakeTensor))


def test_torch_tensors(torch, device):
    assert bind((POINTER,), (FakeTensor(),), device) == [4096]
    assert bind((POINTER,), (Derived(),), device) == [4096]
    assert bind((POINTER,), (FakeTensor(shape=(0,), address=0),), device) == [0]
    cuda = Anything(info=FakeDevice(kind="cuda", index=1).info)
    assert bind((POINTER,), (FakeTensor(device=Anything(type="cuda", index=1)),), cuda) == [4096]  # pyright: ignore[reportArgumentType]
    for name, text in {"bf16": "bfloat16", "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "i1": "bool", "u32": "uint32"}.items():
        assert bind((Param("src", "pointer", name, 2),), (FakeTensor(dtype=f"torch.{text}"),), device) == [4096]
    with pytest.raises(ValueError, match=r"'src' must be on device 1, got a torch FakeTensor .* on device 0"):
        bind((POINTER,), (FakeTensor(device=Anything(type="cuda", index=0)),), cuda)  # pyright: ignore[reportArgumentType]
    for changes, text in (
        ({"layout": "torch.sparse_csr"}, "got a torch.sparse_csr torch tensor; a kernel needs it dense"),
        ({"is_nested": True}, "got a nested torch tensor; a kernel needs it dense"),
        ({"strides": (2,)}, r"with strides \(2,\); a kernel needs it contiguous: call .contiguous"),
        ({"negated": True}, "that is negated when it is read; call .resolve_neg"),
        ({"address": 0}, r"got a torch FakeTensor of shape \(4,\), which has no memory: its address is 0"),
        ({"address": None}, r"whose data_ptr\(\) raised RuntimeError: Cannot access data pointer"),
        ({"device": Anything(type="meta", index=None)}, "must be memory of sim:0"),
    ):
        with pytest.raises(ValueError, match=f"'src'.*{text}"):
            bind((POINTER,), (FakeTensor(**changes),), device)
    with pytest.raises(TypeError, match=r"'src' got a torch FakeTensor of shape \(4,\) of torch.float8_e4m3fnuz, which kernels do not"):
        bind((POINTER,), (FakeTensor(dtype="torch.float8_e4m3fnuz"),), device)
