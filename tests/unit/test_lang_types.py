"""Types: sizes and layouts, promotion, what a number may become, and types made of others."""

from __future__ import annotations

import numpy as np
import pytest

import epdsl as ep
from epdsl.ir.types import F32, I8, I32, I64, SCALARS, U8, U64, accepts, default_type, known_multiple, promote
from epdsl.lang.errors import CompileError
from epdsl.lang.types import as_type

NUMPY = {n: n.replace("i", "int").replace("u", "uint").replace("uintt", "uint") for n in ("i8", "i16", "i32", "i64")}
NUMPY |= {"u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64", "f16": "float16", "f32": "float32", "f64": "float64"}


@pytest.mark.parametrize("left", NUMPY)
@pytest.mark.parametrize("right", NUMPY)
def test_promotion_is_numpys_where_no_value_is_lost(left: str, right: str) -> None:
    found = promote(SCALARS[left], SCALARS[right])
    wanted = np.result_type(NUMPY[left], NUMPY[right])
    mixed = (left[0] == "f") != (right[0] == "f")
    if mixed or (wanted.kind == "f" and left[0] != "f"):
        assert found is None
    else:
        assert found is not None and np.dtype(NUMPY[found.name]) == wanted
    assert promote(SCALARS[right], SCALARS[left]) == found


def test_types_without_a_common_one() -> None:
    for left, right in (("f16", "bf16"), ("f8e4m3", "f32"), ("f8e4m3", "f8e4m3"), ("f8e5m2", "f8e4m3"), ("i1", "f32")):
        assert promote(SCALARS[left], SCALARS[right]) is None
    assert promote(SCALARS["i1"], I32) == I32 and promote(SCALARS["bf16"], F32) == F32


def test_what_a_number_may_become() -> None:
    assert accepts(I8, -128) and not accepts(I8, 128) and not accepts(U8, -1) and accepts(U64, 2**64 - 1)
    assert accepts(F32, 3) and not accepts(I32, 3.0) and accepts(I32, True) and not accepts(SCALARS["i1"], 1)
    assert [default_type(v) for v in (True, 1, -(2**31), 2**31, 2**63, 2**64, 1.5)] == [SCALARS["i1"], I32, I32, I64, U64, None, F32]


def test_known_multiples_stop_at_4096() -> None:
    assert [known_multiple(v) for v in (1, 12, 4096, 8192, 0, -24)] == [1, 4, 4096, 4096, 4096, 8]


@ep.struct
class Inner:
    a: ep.u8
    b: ep.f64


@ep.struct
class Outer:
    x: ep.u16
    inner: Inner
    many: ep.Array[ep.u8, 5]
    ptr: ep.Ptr[ep.i32]
    peers: ep.Peers[ep.f32]
    wide: ep.vec(ep.u32, 4)  # pyright: ignore[reportInvalidTypeForm]


def test_structs_lie_in_memory_as_in_c() -> None:
    kind = as_type(Outer)
    assert kind.offsets == {"x": 0, "inner": 8, "many": 24, "ptr": 32, "peers": 40, "wide": 64}  # pyright: ignore[reportAttributeAccessIssue]
    assert (kind.nbytes, kind.align, as_type(Inner).nbytes) == (80, 16, 16)


def test_names_of_types() -> None:
    shown = {
        ep.Ptr[ep.f32]: "Ptr[f32]",
        ep.Peers[ep.bf16]: "Peers[bf16]",
        ep.Array[ep.i32, 3]: "Array[i32, 3]",
        ep.vec(ep.u8, 16): "vec(u8, 16)",
        ep.Ptr[Outer]: "Ptr[Outer]",
    }
    assert {str(as_type(kind)): text for kind, text in shown.items()} == {text: text for text in shown.values()}
    assert repr(ep.f32) == "ep.f32" and repr(ep.Ptr[ep.f32]) == "ep.Ptr[f32]"
    assert (ep.f32.nbytes, ep.f32.name) == (4, "f32")


def test_a_scalar_type_makes_numpy_scalars_outside_kernels() -> None:
    assert isinstance(ep.u16(7), np.uint16) and ep.bf16(1.5).dtype.name == "bfloat16"
    with pytest.raises(OverflowError):
        ep.u8(256)


@pytest.mark.parametrize(("elem", "n"), [(ep.u32, 8), (ep.f64, 4), (ep.u8, 3), (ep.i1, 8)])
def test_vectors_have_at_most_16_bytes(elem: object, n: int) -> None:
    with pytest.raises(CompileError, match="is not a vector of up to 16 bytes"):
        ep.vec(elem, n)


@pytest.mark.parametrize("kind", [int, str, np.float32, None, [], "ep.f32"])
def test_what_is_no_type_is_refused_with_its_line(kind: object) -> None:
    with pytest.raises(CompileError, match="is not a type of the language") as caught:
        ep.Ptr[kind]
    assert caught.value.places[-1].text.strip() == "ep.Ptr[kind]"
