"""Arguments become parameter words, or a refusal that names the parameter, what it takes and what it got."""

import ctypes
import struct
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from epdsl_runtime.array import PeerTable, allocate_array
from epdsl_runtime.artifact import Param, Slot
from epdsl_runtime.binding import Address, bind
from epdsl_runtime.parameters import ParameterBlock
from runtime_fakes import FakeDevice

POINTER = Param("src", "pointer", "f32", 4, 16)
PEERS = Param("dst", "peers", "f32", 4, 4, True)


@pytest.fixture
def device():
    made = FakeDevice()
    yield made
    made.close()


def one(dtype: str, arg):
    return bind((Param("n", "scalar", dtype, 8),), (arg,))[0]


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        ("i1", 0, 1),
        ("i8", -128, 127),
        ("u8", 0, 255),
        ("i16", -32768, 32767),
        ("u16", 0, 65535),
        ("i32", -(2**31), 2**31 - 1),
        ("u32", 0, 2**32 - 1),
        ("i64", -(2**63), 2**63 - 1),
        ("u64", 0, 2**64 - 1),
    ],
)
def test_integers_are_range_checked(dtype, low, high):
    assert (one(dtype, low), one(dtype, high)) == (low, high)
    for outside in (low - 1, high + 1):
        with pytest.raises(ValueError, match=rf"'n' is {dtype}, which holds {low} to {high}; {outside} does not fit"):
            one(dtype, outside)


def test_numpy_scalars_and_bools_are_numbers():
    assert one("i32", np.int64(-5)) == -5
    assert one("u64", np.uint64(2**64 - 1)) == 2**64 - 1
    assert one("i1", np.bool_(True)) == 1
    assert one("i32", np.array(7)) == 7
    assert one("f32", np.float64(0.5)) == 0.5
    assert one("f32", 3) == 3.0
    assert one("f32", ml_dtypes.bfloat16(1.5)) == 1.5
    with pytest.raises(ValueError, match="-1 does not fit"):
        one("u32", np.int32(-1))


@pytest.mark.parametrize(
    ("dtype", "arg"), [("i32", 1.0), ("i32", "1"), ("i32", None), ("f32", "1"), ("f32", 1j), ("f32", None), ("i32", np.float32(2))]
)
def test_what_is_no_number_of_the_kind_is_refused(dtype, arg):
    with pytest.raises(TypeError, match=f"'n' takes .*{dtype}.* got"):
        one(dtype, arg)


@pytest.mark.parametrize(
    ("dtype", "largest"), [("f16", 65504.0), ("bf16", 3.3895e38), ("f32", 3.4028e38), ("f8e4m3", 448.0), ("f8e5m2", 57344.0)]
)
def test_floats_that_would_become_infinite_are_refused(dtype, largest):
    assert one(dtype, -largest) == -largest
    assert one(dtype, float("inf")) == float("inf")
    with pytest.raises(ValueError, match=rf"'n' is {dtype}, whose largest number is"):
        one(dtype, largest * 1.01)


def test_arrays_give_their_address(device):
    array = allocate_array(device, (8,), "f32")
    assert bind((POINTER,), (array,), device) == [array.address]
    assert bind((POINTER,), (Address(64),)) == [64]
    assert bind((Param("src", "pointer", "f32", 4, 4),), (array[1:],)) == [array.address + 4]


def test_wrong_arrays_are_refused(device):
    array = allocate_array(device, (8,), "i32")
    with pytest.raises(TypeError, match="'src' is a pointer to f32, got an array of i32"):
        bind((POINTER,), (array,))
    with pytest.raises(ValueError, match=r"'src' must be aligned to 16 bytes; address 0x.* is 4 bytes past"):
        bind((POINTER,), (allocate_array(device, (8,), "f32")[1:],))
    with pytest.raises(TypeError, match=r"got 64 \(int\); wrap a raw address as Address"):
        bind((POINTER,), (64,))
    with pytest.raises(TypeError, match=r"got a NumPy array of float32 and shape \(3,\); upload it with rank.array"):
        bind((POINTER,), (np.zeros(3, np.float32),))
    array.free()
    with pytest.raises(ValueError, match="was freed"):
        bind((Param("src", "pointer", "i32", 4),), (array,))
    other = FakeDevice(index=1)
    with pytest.raises(ValueError, match="must be memory of sim:0"):
        bind((POINTER,), (allocate_array(other, (4,), "f32"),), device)
    other.close()


def test_peer_tables(device):
    table = PeerTable(allocate_array(device, (2,), "u64"), "f32", 64, (4096, 8192))
    assert bind((PEERS,), (table,), device) == [table.address, 2]
    with pytest.raises(TypeError, match="'dst' takes peers' buffers of u32, got buffers of f32"):
        bind((Param("dst", "peers", "u32", 4),), (table,))
    with pytest.raises(TypeError, match=r"'dst' takes a table .* got 4096"):
        bind((PEERS,), (4096,))
    with pytest.raises(ValueError, match="rank 1's buffer is at 0x2004"):
        bind((Param("dst", "peers", "f32", 4, 16),), (PeerTable(table.table, "f32", 64, (4096, 8196)),))
    with pytest.raises(TypeError, match=r"'src' is a pointer to f32, got .*; pass the local array"):
        bind((POINTER,), (table,))


@dataclass
class Box:
    slot: object
    inner: object


STRUCT = Param(
    "box",
    "struct",
    "Box",
    fields=(
        Param("slot", "pointer", "u32", 4, 4),
        Param(
            "inner",
            "struct",
            "Inner",
            fields=(Param("n", "scalar", "i16", 2), Param("w", "array", "f32", fields=(Param("", "scalar", "f32", 4),), count=3)),
        ),
    ),
)


def test_structs_nest_and_come_from_objects_or_mappings(device):
    slot = allocate_array(device, (1,), "u32")
    wanted = [slot.address, 7, 1.0, 2.0, 3.0]
    assert bind((STRUCT,), (Box(slot, {"n": 7, "w": (1, 2, 3)}),)) == wanted
    assert bind((STRUCT,), ({"slot": slot, "inner": {"n": 7, "w": np.array([1, 2, 3], np.float32)}},)) == wanted
    with pytest.raises(TypeError, match=r"'box' is a struct Box with fields slot, inner; .* has no 'inner'"):
        bind((STRUCT,), ({"slot": slot},))
    with pytest.raises(ValueError, match=r"'box.inner.n' is i16, which holds -32768 to 32767; 40000"):
        bind((STRUCT,), (Box(slot, {"n": 40000, "w": (1, 2, 3)}),))
    with pytest.raises(ValueError, match=r"'box.inner.w' takes 3 values, got 2"):
        bind((STRUCT,), (Box(slot, {"n": 4, "w": (1, 2)}),))
    with pytest.raises(TypeError, match=r"'box.inner.w\[1\]' takes a number"):
        bind((STRUCT,), (Box(slot, {"n": 4, "w": (1, "x", 2)}),))


def test_the_number_of_arguments_is_checked():
    with pytest.raises(TypeError, match=r"takes 2 arguments \(src, dst\), 1 were passed"):
        bind((POINTER, PEERS), (1,))


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


class Packed:
    """An exporter that is no NumPy array: what torch's CPU tensors are to us."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


def test_dlpack(device):
    raw = np.zeros(64, np.uint8)
    start = -raw.ctypes.data % 16
    values = raw[start : start + 32].view(np.float32)
    assert bind((POINTER,), (Packed(values),), device) == [values.ctypes.data]
    with pytest.raises(TypeError, match=r"'src' is a pointer to f32, got a Packed of shape \(4,\) of f64"):
        bind((POINTER,), (Packed(values.view(np.float64)),), device)
    with pytest.raises(ValueError, match=r"strides \(2,\); a kernel needs it contiguous"):
        bind((Param("src", "pointer", "f32", 4),), (Packed(values[::2]),), device)
    with pytest.raises(ValueError, match=r"must be memory of cuda:0, got a Packed .* in CPU memory"):
        bind((POINTER,), (Packed(values),), FakeDevice(kind="cuda"))


def test_the_parameter_block_lays_slots_out_as_the_abi_does():
    slots = [
        Slot("a", "u8", 1),
        Slot("b", "u64", 8),
        Slot("c", "bf16", 2),
        Slot("d", "f32", 4),
        Slot("e", "f8e4m3", 1),
        Slot("f", "f16", 2),
        Slot("g", "i1", 1),
    ]
    block = ParameterBlock(slots)
    assert block.offsets == (0, 8, 16, 20, 24, 26, 28)
    block.fill([255, 2**64 - 1, 1.5, 1.5, 1.5, 1.5, 1])
    assert bytes(block) == struct.pack("<B7xQHxxfBxeB", 255, 2**64 - 1, 0x3FC0, 1.5, 0x3C, 1.5, 1)
    pointers = (ctypes.c_void_p * 7).from_address(block.address)
    assert ctypes.c_uint64.from_address(pointers[1]).value == 2**64 - 1
    block.patch(1, 5)
    block.patch(2, -2.0)
    assert ctypes.c_uint64.from_address(pointers[1]).value == 5
    assert ctypes.c_uint16.from_address(pointers[2]).value == 0xC000
    assert pointers[6] - pointers[0] == 28
