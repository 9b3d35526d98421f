"""Token formats that quantise: blockwise FP8, MXFP8, MXFP4 and NVFP4.

Each says how the scale of a group follows from its largest magnitude and how elements follow from the scale; both in f32, each operation
rounded to nearest even, so that NumPy gives the same bits (`epdsl.reference_formats`). NaN does not count for a scale.
"""

# A device function of a subclass takes the subclass as self, which a descriptor cannot say.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import epdsl as ep

from .layout import VECTOR_BYTES
from .rounding import (
    E2M1_LARGEST,
    E4M3_LARGEST,
    e2m1_of,
    e4m3_of,
    e4m3_pair,
    e8m0_of,
    eight_floats,
    f32_of_e2m1,
    f32_of_e4m3,
    largest_magnitude,
    power_of_two,
)
from .token_format import BF16TokenFormat, FormatHandler, TokenFormat

Rounding = Literal["ceil", "floor", "even"]
SMALLEST_BLOCKWISE = 1e-4


@ep.func
def eight_e4m3(values, factor: ep.f32):
    """Eight e4m3 codes of value * factor, in two words."""
    v = tuple([value * factor for value in values])
    low = ep.u32(e4m3_pair(v[0], v[1])) | (ep.u32(e4m3_pair(v[2], v[3])) << 16)
    high = ep.u32(e4m3_pair(v[4], v[5])) | (ep.u32(e4m3_pair(v[6], v[7])) << 16)
    return low, high


@ep.func
def eight_e2m1(values, factor: ep.f32):
    """Eight e2m1 codes of value * factor in one word, the first in the lowest bits."""
    word = ep.u32(0)
    for i in (0, 1, 2, 3, 4, 5, 6, 7):
        word = word | (e2m1_of(values[i] * factor) << (4 * i))
    return (word,)


@ep.func
def eight_of_e4m3(source: ep.Ptr[ep.u8], scale: ep.f32):
    return tuple([f32_of_e4m3(source[i]) * scale for i in (0, 1, 2, 3, 4, 5, 6, 7)])


@ep.func
def eight_of_e2m1(word: ep.u32, scale: ep.f32):
    return tuple([f32_of_e2m1(word >> (4 * i)) * scale for i in (0, 1, 2, 3, 4, 5, 6, 7)])


@dataclass(frozen=True)
class BlockwiseFP8TokenFormat(TokenFormat):
    """e4m3 elements, an f32 scale for every 128: scale = max(absmax, 1e-4) / 448, element = e4m3(x * (448 / max(absmax, 1e-4))).

    Output scales are transposed, [groups, rows], and every expert's rows start at a multiple of 4, so that 16 bytes of scales belong to
    one expert.
    """

    @property
    def payload_bytes(self) -> int:
        return self.hid_dim

    @property
    def group_size(self) -> int:
        return 128

    @property
    def scale_bytes(self) -> int:
        return 4

    @property
    def row_padding(self) -> int:
        return VECTOR_BYTES // self.scale_bytes

    @property
    def output_dtype(self) -> str:
        return "f8e4m3"

    @property
    def scale_dtype(self) -> str:
        return "f32"

    def scale_shape(self, n_rows: int, n_slots: int) -> tuple[int, ...]:
        return (self.n_groups, n_rows)

    @ep.func
    def scale_place(self, handler: FormatHandler, scale_row: ep.i64, group: ep.i32) -> ep.i64:
        return (ep.i64(group) * handler.n_rows + scale_row) * self.scale_bytes

    @ep.func
    def quantize_chunk(self, words, lanes: int, input_scales):
        values = eight_floats(words)
        largest = ep.max(ep.f32(SMALLEST_BLOCKWISE), largest_magnitude(values, lanes))
        return largest / E4M3_LARGEST, eight_e4m3(values, E4M3_LARGEST / largest)

    @ep.func
    def load_eight(self, handler: FormatHandler, row: ep.i64, scale_row: ep.i64, column: ep.i32):
        place = self.scale_place(handler, scale_row, column // self.group_size)
        return eight_of_e4m3(handler.output + (row * self.payload_bytes + column), (handler.scales + place).cast(ep.f32)[0])


@dataclass(frozen=True)
class _BlockScaledFormat(TokenFormat):
    """8-bit scales for small groups.

    scale_rounding  how an e8m0 scale is rounded, see `rounding.e8m0_of`
    fold_scales     lay output scales out in tiles of 128 x 4, each expert's from a tile of its own, as block-scaled GEMMs read them
    """

    scale_rounding: Rounding = "ceil"
    fold_scales: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale_rounding not in ("ceil", "floor", "even"):
            raise ValueError(f"{type(self).__name__}: scale_rounding={self.scale_rounding!r}; it is 'ceil', 'floor' or 'even'")

    @property
    def scale_bytes(self) -> int:
        return 1

    @property
    def scales_in_tiles(self) -> bool:
        return self.fold_scales

    @ep.func
    def scale_code(self, handler: FormatHandler, scale_row: ep.i64, column: ep.i32) -> ep.u8:
        return handler.scales[self.scale_place(handler, scale_row, column // self.group_size)]


@dataclass(frozen=True)
class MXFP8TokenFormat(_BlockScaledFormat):
    """OCP MXFP8: e4m3 elements, an e8m0 scale for every 32; element = e4m3(x / scale)."""

    @property
    def payload_bytes(self) -> int:
        return self.hid_dim

    @property
    def group_size(self) -> int:
        return 32

    @property
    def output_dtype(self) -> str:
        return "f8e4m3"

    @ep.func
    def quantize_chunk(self, words, lanes: int, input_scales):
        values = eight_floats(words)
        code = e8m0_of(largest_magnitude(values, lanes), E4M3_LARGEST, 8, 3, self.scale_rounding)
        return ep.u8(code), eight_e4m3(values, power_of_two(254 - code))

    @ep.func
    def load_eight(self, handler: FormatHandler, row: ep.i64, scale_row: ep.i64, column: ep.i32):
        scale = power_of_two(ep.u32(self.scale_code(handler, scale_row, column)))
        return eight_of_e4m3(handler.output + (row * self.payload_bytes + column), scale)


@dataclass(frozen=True)
class MXFP4TokenFormat(_BlockScaledFormat):
    """OCP MXFP4: e2m1 elements, two a byte (the first in the lower half), an e8m0 scale for every 32."""

    scale_rounding: Rounding = "even"

    @property
    def payload_bytes(self) -> int:
        return self.hid_dim // 2

    @property
    def group_size(self) -> int:
        return 32

    @property
    def output_dtype(self) -> str:
        return "u8"

    @property
    def output_columns(self) -> int:
        return self.hid_dim // 2

    @ep.func
    def quantize_chunk(self, words, lanes: int, input_scales):
        values = eight_floats(words)
        code = e8m0_of(largest_magnitude(values, lanes), E2M1_LARGEST, 2, 1, self.scale_rounding)
        return ep.u8(code), eight_e2m1(values, power_of_two(254 - code))

    @ep.func
    def load_eight(self, handler: FormatHandler, row: ep.i64, scale_row: ep.i64, column: ep.i32):
        scale = power_of_two(ep.u32(self.scale_code(handler, scale_row, column)))
        return eight_of_e2m1((handler.output + (row * self.payload_bytes + column // 2)).cast(ep.u32)[0], scale)


@dataclass(frozen=True)
class NVFP4TokenFormat(_BlockScaledFormat):
    """NVFP4: e2m1 elements, an e4m3 scale for every 16, an f32 scale g for the whole tensor.

    scale = e4m3(g * absmax / 6), element = e2m1(x * (1 / (scale / g))), 0 where the scale is 0.
    """

    @property
    def payload_bytes(self) -> int:
        return self.hid_dim // 2

    @property
    def group_size(self) -> int:
        return 16

    @property
    def has_global_scale(self) -> bool:
        return True

    @property
    def output_dtype(self) -> str:
        return "u8"

    @property
    def output_columns(self) -> int:
        return self.hid_dim // 2

    @ep.func
    def quantize_chunk(self, words, lanes: int, input_scales):
        values = eight_floats(words)
        overall = ep.f32(input_scales(0))
        code = e4m3_of(overall * largest_magnitude(values, lanes) / E2M1_LARGEST)
        scale = f32_of_e4m3(code)
        factor = ep.f32(0.0)
        if code != 0:
            factor = 1.0 / (scale / overall)
        # A block of zeros stays zeros, also where infinity or NaN would make something of 0.
        word = eight_e2m1(values, factor)[0]
        return code, (ep.select(code != 0, word, ep.u32(0)),)

    @ep.func
    def load_eight(self, handler: FormatHandler, row: ep.i64, scale_row: ep.i64, column: ep.i32):
        scale = f32_of_e4m3(self.scale_code(handler, scale_row, column)) / handler.input_scale[0]
        return eight_of_e2m1((handler.output + (row * self.payload_bytes + column // 2)).cast(ep.u32)[0], scale)


FORMATS: dict[str, type[TokenFormat]] = {
    "bf16": BF16TokenFormat,
    "fp8": BlockwiseFP8TokenFormat,
    "mxfp8": MXFP8TokenFormat,
    "mxfp4": MXFP4TokenFormat,
    "nvfp4": NVFP4TokenFormat,
}
"""Token formats by the name the command line gives them."""
