"""Device functions every kernel may use, written in the language itself."""

from __future__ import annotations

from typing import Any

from .function import func
from .loops import Unroll as unroll
from .maths import bitcast, fabs, select
from .memory import load, store
from .threads import block_dim, block_idx, grid_dim, lane_id, shfl_xor, thread_idx, warp_size
from .types import f8e4m3, f8e5m2, f16, f32, f64, i32, u8, u32


@func
def flat_thread():
    """The thread's place in its block."""
    return thread_idx.x + block_dim.x * (thread_idx.y + block_dim.y * thread_idx.z)


@func
def flat_block():
    """The block's place in its grid."""
    return block_idx.x + grid_dim.x * (block_idx.y + grid_dim.y * block_idx.z)


@func
def _strided_copy(dst: Any, src: Any, nbytes: Any, first: Any, stride: Any):
    d, s = dst.cast(u32), src.cast(u32)
    for i in range(first, nbytes // 16, stride):
        store(d + i * 4, load(s + i * 4, width=4))


@func
def copy(dst: Any, src: Any, nbytes: Any, group: Any = None):
    """Copies `nbytes` (a multiple of 16, both addresses 16-byte aligned), 16 bytes a thread, by the threads of `group` or the whole block.

    Only copies: a barrier makes the bytes visible to the other threads.
    """
    if group is None:
        _strided_copy(dst, src, nbytes, flat_thread(), block_dim.x * block_dim.y * block_dim.z)
    else:
        _strided_copy(dst, src, nbytes, flat_thread() - group.thread_base, i32(group.num_threads))


@func
def warp_copy(dst: Any, src: Any, nbytes: Any):
    """Copies `nbytes` (a multiple of 16) by the lanes of one warp, 16 bytes a lane."""
    _strided_copy(dst, src, nbytes, lane_id(), i32(warp_size()))


@func
def warp_reduce(op: str, value: Any):
    """`value` of all lanes combined with "add", "min", "max", "and", "or" or "xor", in one fixed order; every lane gets the result."""
    assert op in ("add", "min", "max", "and", "or", "xor"), f"ep.warp_reduce has no operation {op}"
    distance = warp_size() // 2
    for _ in unroll(range(warp_size().bit_length() - 1)):
        other = shfl_xor(value, distance)
        if op == "add":
            value = value + other
        elif op == "min":
            value = min(value, other)
        elif op == "max":
            value = max(value, other)
        elif op == "and":
            value = value & other
        elif op == "or":
            value = value | other
        else:
            value = value ^ other
        distance = distance // 2
    return value


# ---- 8-bit floats (OCP OFP8), round to nearest even


@func
def _to_small(x: f32, exponent_bits: int, mantissa_bits: int, largest: int, special: int):
    bits = bitcast(u32, x)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    shift = 23 - mantissa_bits
    bias = (1 << (exponent_bits - 1)) - 1
    # Normal results: round the f32 at the narrower mantissa, then move the exponent's bias.
    rounded = magnitude + ((1 << (shift - 1)) - 1) + ((magnitude >> shift) & 1)
    normal = (rounded >> shift) - ((127 - bias) << mantissa_bits)
    # Results below the smallest normal: adding a power of two lets f32 addition round at the right bit.
    anchor = (127 - bias + 1 + shift) << 23
    small = bitcast(u32, bitcast(f32, magnitude) + bitcast(f32, u32(anchor))) - anchor
    code = select(magnitude < ((127 - bias + 1) << 23), small, normal)
    code = select(code > largest, u32(special), code)
    code = select(magnitude > 0x7F800000, u32(0x7F), code)
    return u8(sign | code)


@func
def to_f8e4m3(x: f32):
    """f32 to e4m3 as ml_dtypes rounds: nearest even, beyond 448 and infinities become NaN."""
    return bitcast(f8e4m3, _to_small(x, 4, 3, 0x7E, 0x7F))


@func
def to_f8e5m2(x: f32):
    """f32 to e5m2 as ml_dtypes rounds: nearest even, beyond 57344 becomes infinity."""
    return bitcast(f8e5m2, _to_small(x, 5, 2, 0x7B, 0x7C))


@func
def _from_small(code: u8, exponent_bits: int, mantissa_bits: int):
    wide = u32(code)
    sign = (wide & 0x80) << 24
    magnitude = wide & 0x7F
    bias = (1 << (exponent_bits - 1)) - 1
    scale = bitcast(f32, u32((127 + 127 - bias) << 23))
    value = bitcast(f32, magnitude << (23 - mantissa_bits)) * scale
    return bitcast(f32, bitcast(u32, value) | sign)


@func
def from_f8e4m3(x: f8e4m3):
    code = bitcast(u8, x)
    value = _from_small(code, 4, 3)
    nan = bitcast(f32, u32(0x7FC00000) | ((u32(code) & 0x80) << 24))
    return select((code & 0x7F) == 0x7F, nan, value)


@func
def from_f8e5m2(x: f8e5m2):
    code = bitcast(u8, x)
    magnitude = code & 0x7F
    value = _from_small(code, 5, 2)
    sign = (u32(code) & 0x80) << 24
    special = bitcast(f32, select(magnitude == 0x7C, u32(0x7F800000), u32(0x7FC00000)) | sign)
    return select(magnitude >= 0x7C, special, value)


@func
def f64_to_f16(x: f64):
    """f64 to f16 with one rounding: to f32 rounded to odd, which f16 rounds as it would have rounded x."""
    near = f32(x)
    back = f64(near)
    bits = bitcast(u32, near)
    bits = select(fabs(back) > fabs(x), bits - 1, bits)
    return f16(bitcast(f32, select(back == x, bits, bits | 1)))


TO_SMALL = {"f8e4m3": to_f8e4m3, "f8e5m2": to_f8e5m2}
FROM_SMALL = {"f8e4m3": from_f8e4m3, "f8e5m2": from_f8e5m2}
