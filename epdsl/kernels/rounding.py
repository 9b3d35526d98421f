"""From f32 to the 8- and 4-bit numbers a token travels in, and back. Device functions, bit for bit what the formats publish.

e4m3   OCP FP8: nearest even, beyond 448 the largest finite, NaN 0x7F (what `cvt.rn.satfinite.e4m3x2.f32` gives)
e2m1   OCP FP4: nearest even, beyond 6 the largest finite, NaN 7 (what `cvt.rn.satfinite.e2m1x2.f32` gives)
e8m0   OCP MX scale: a power of two, code c is 2 ** (c - 127)
"""

from __future__ import annotations

import epdsl as ep

E4M3_LARGEST = 448.0
E2M1_LARGEST = 6.0
E4M3_NAN = 0x7F


def converts_e4m3(name: str) -> bool:
    """Whether an NVIDIA target has the e4m3 conversion: from sm_89 on."""
    digits = name.removeprefix("sm_").rstrip("af")
    return digits.isdigit() and int(digits) >= 89


@ep.func
def e4m3_of(x: ep.f32) -> ep.u8:
    """The e4m3 code of `x`."""
    code = ep.bitcast(ep.u8, ep.f8e4m3(ep.min(ep.max(x, -E4M3_LARGEST), E4M3_LARGEST)))
    # Not every machine keeps or makes the same NaN; the format has one.
    return ep.select(x == x, code, ep.u8(E4M3_NAN))


@ep.func
def e4m3_pair(low: ep.f32, high: ep.f32) -> ep.u16:
    """Two e4m3 codes, `low` in the lower byte."""
    if ep.target.vendor == "nvidia" and not ep.target.simulated and converts_e4m3(ep.target.name):
        pair = ep.inline_asm("cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;", "=h,f,f", high, low, result=ep.u16, vendor="nvidia")
    else:
        pair = ep.u16(e4m3_of(low)) | (ep.u16(e4m3_of(high)) << 8)
    return pair


@ep.func
def f32_of_e4m3(code: ep.u8) -> ep.f32:
    return ep.f32(ep.bitcast(ep.f8e4m3, code))


@ep.func
def e2m1_of(x: ep.f32) -> ep.u32:
    """The e2m1 code of `x`, 4 bits: the values are 0, 0.5, 1, 1.5, 2, 3, 4, 6; a tie goes to the even code."""
    a = ep.fabs(x)
    code = (
        ep.u32(a > 0.25) + ep.u32(a >= 0.75) + ep.u32(a > 1.25) + ep.u32(a >= 1.75) + ep.u32(a > 2.5) + ep.u32(a >= 3.5) + ep.u32(a > 5.0)
    )
    return ep.select(x == x, code | ((ep.bitcast(ep.u32, x) >> 31) << 3), ep.u32(7))


@ep.func
def f32_of_e2m1(code: ep.u32) -> ep.f32:
    """The value of the lowest 4 bits."""
    magnitude = code & 7
    exponent = magnitude >> 1
    normal = ((exponent + 126) << 23) | ((magnitude & 1) << 22)
    bits = ep.select(exponent == 0, (magnitude & 1) * 0x3F000000, normal)
    return ep.bitcast(ep.f32, bits | ((code & 8) << 28))


@ep.func
def e8m0_of(largest: ep.f32, element_largest: float, element_exponent: int, mantissa_bits: int, rounding: str) -> ep.u32:
    """The scale of a block whose largest magnitude is `largest` (not NaN), by `rounding`:

    "ceil"   the smallest power of two at least largest / element_largest (NVIDIA's recipe: nothing saturates)
    "floor"  the exponent of `largest` minus the element's (OCP MX v1.0, section 6.3)
    "even"   "floor" of `largest` rounded to the element's mantissa, half up (AMD Quark's)
    """
    if rounding == "ceil":
        bits = ep.bitcast(ep.u32, largest / element_largest)
        exponent = bits >> 23
        code = ep.select(exponent == 0, ep.u32(bits > 0x400000), exponent + ep.u32((bits & 0x7FFFFF) != 0))
    else:
        bits = ep.bitcast(ep.u32, largest)
        if rounding == "even":
            bits = bits + (1 << (22 - mantissa_bits))
        exponent = bits >> 23
        code = ep.select(exponent < element_exponent, ep.u32(0), exponent - element_exponent)
    return ep.min(code, ep.u32(254))


@ep.func
def power_of_two(code: ep.u32) -> ep.f32:
    """The value of an e8m0 code from 0 to 254."""
    return ep.bitcast(ep.f32, ep.select(code == 0, ep.u32(0x400000), code << 23))


@ep.func
def floats_of(word: ep.u32):
    """The two bf16 of a word as f32."""
    return ep.bitcast(ep.f32, word << 16), ep.bitcast(ep.f32, word & 0xFFFF0000)


@ep.func
def eight_floats(v):
    """Four words of bf16 as eight f32."""
    a, b = floats_of(v[0])
    c, d = floats_of(v[1])
    e, f = floats_of(v[2])
    g, h = floats_of(v[3])
    return a, b, c, d, e, f, g, h


@ep.func
def largest_magnitude(values, lanes: int) -> ep.f32:
    """The largest magnitude among `values` of `lanes` neighbouring lanes, a power of two; NaN does not count."""
    largest = ep.f32(0.0)
    for value in values:
        largest = ep.max(largest, ep.fabs(value))
    for step in (8, 4, 2, 1):
        if step < lanes:
            largest = ep.max(largest, ep.shfl_xor(largest, step))
    return largest
