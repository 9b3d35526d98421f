"""Arguments become parameter words, or a refusal that names the parameter, what it takes and what it got."""

import ctypes
import struct
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from epdsl_runtime.array import PeerTable, allocate_array
from epdsl_runtime.artifact import Param, Slot
from epdsl_runtime.binding import Address, Binder, bind
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


@pytest.mark.parametrize("arg", [np.array([1.5]), np.array([1.0, 2.0]), np.complex64(1), np.str_("3")])
def test_what_python_would_turn_into_a_float_is_refused(arg):
    with pytest.raises(TypeError, match=r"'n' takes a number \(f32\), got"):
        one("f32", arg)


def test_an_integer_beyond_every_float_is_refused():
    with pytest.raises(ValueError, match=r"'n' is f64; 10{76}\.\.\. \(int\) does not fit"):
        one("f64", 10**400)


class Moody:
    """What a tensor without values does when it is asked for one."""

    def __index__(self):
        raise RuntimeError("cannot be called on meta tensors")

    __float__ = __index__


@pytest.mark.parametrize("dtype", ["i32", "f32"])
def test_a_number_that_cannot_be_read_is_told_with_the_parameter(dtype):
    with pytest.raises(TypeError, match=rf"'n' takes .*{dtype}.* got <.*Moody"):
        one(dtype, Moody())


def test_arrays_give_their_address(device):
    array = allocate_array(device, (8,), "f32")
    assert bind((POINTER,), (array,), device) == [array.address]
    assert bind((POINTER,), (Address(64),)) == [64]
    assert bind((Param("src", "pointer", "f32", 4, 4),), (array[1:],)) == [array.address + 4]


def test_wrong_arrays_are_refused(device):
    array = allocate_array(device, (8,), "i32")
    with pytest.raises(TypeError, match=r"'src' is a pointer to f32, got an array of i32; upload it as that: rank\.array\(x, ep\.f32\)$"):
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


@dataclass
class Box2:
    n: object
    w: object


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


def test_the_fast_way_gives_what_the_checked_one_gives(device):
    """Literals, for arguments that it takes and for those that it leaves to the other."""
    slot, table = allocate_array(device, (1,), "u32"), PeerTable(allocate_array(device, (2,), "u64"), "f32", 64, (4096, 8192))
    params = (STRUCT, PEERS, Param("k", "scalar", "i32", 4), Param("f", "scalar", "f32", 4))
    binder = Binder(params)
    wanted = [slot.address, 7, 1.0, 2.0, 3.0, table.address, 2, -5, 0.5]
    for inner in (Box2(7, (1, 2, 3)), {"n": np.int16(7), "w": [1, 2, 3]}):
        for k, f in ((-5, 0.5), (np.int64(-5), np.float32(0.5))):
            assert binder((Box(slot, inner), table, k, f), device) == wanted
            assert binder(({"slot": slot, "inner": inner}, table, k, f), device) == wanted


def test_the_fast_way_refuses_what_the_checked_one_refuses(device):
    slot = allocate_array(device, (1,), "u32")

    def table(dtype="f32", addresses=(4096, 8192), where=device):
        return PeerTable(allocate_array(where, (2,), "u64"), dtype, 64, addresses)

    binder = Binder((STRUCT, Param("dst", "peers", "f32", 4, 16, True)))
    good = Box(slot, Box2(7, (1, 2, 3)))
    with pytest.raises(ValueError, match=r"'box.inner.n' is i16, which holds -32768 to 32767; 40000"):
        binder((Box(slot, Box2(40000, (1, 2, 3))), table()), device)
    with pytest.raises(TypeError, match=r"'box.slot' is a pointer to u32, got an array of f32"):
        binder((Box(allocate_array(device, (1,), "f32"), Box2(7, (1, 2, 3))), table()), device)
    with pytest.raises(TypeError, match=r"'box.inner' is a struct Inner with fields n, w; 3 \(int\) has no 'n'"):
        binder((Box(slot, 3), table()), device)
    with pytest.raises(TypeError, match="'dst' takes peers' buffers of f32, got buffers of u32"):
        binder((good, table("u32")), device)
    with pytest.raises(ValueError, match="'dst' must be aligned to 16 bytes; rank 1's buffer is at 0x2004"):
        binder((good, table(addresses=(4096, 8196))), device)
    other = FakeDevice(index=1)
    with pytest.raises(ValueError, match="'dst' must be a table in memory of sim:0"):
        binder((good, table(where=other)), device)
    other.close()
    gone = table()
    gone.table.free()
    with pytest.raises(ValueError, match="was freed"):
        binder((good, gone), device)


def test_what_is_no_tuple_of_arguments_is_refused(device):
    for wrong in (None, (n for n in (1, 2)), 5):
        with pytest.raises(TypeError, match="args is a tuple with one argument for each parameter, got"):
            Binder((POINTER, PEERS))(wrong, device)


def test_the_number_of_arguments_is_checked():
    with pytest.raises(TypeError, match=r"takes 2 arguments \(src, dst\), 1 were passed"):
        bind((POINTER, PEERS), (1,))
    with pytest.raises(TypeError, match=r"^EP207: args is a tuple .* for each parameter, got 7 \(int\); write args=\(x,\) for one$"):
        bind((POINTER, PEERS), 7)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        TypeError, match=r"^EP207: args is a tuple .*, got a NumPy array of float64 and shape \(2,\); write args=\(x,\) for one$"
    ):
        bind((POINTER, PEERS), np.zeros(2))  # pyright: ignore[reportArgumentType]


def test_another_block_of_the_same_slots_has_memory_of_its_own():
    first = ParameterBlock([Slot("a", "u8", 1), Slot("b", "u64", 8)])
    second = first.another()
    first.fill([1, 2])
    second.fill([3, 4])
    assert (bytes(first), bytes(second)) == (struct.pack("<B7xQ", 1, 2), struct.pack("<B7xQ", 3, 4))
    pointers = (ctypes.c_void_p * 2).from_address(second.address)
    assert ctypes.c_uint64.from_address(pointers[1]).value == 4


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
