"""How a token lies in a message: payload, then the source's token index, then the experts it goes to.

    [ elements | scales | src_info: i32 token index | topk_info: top_k u16 global expert ids ]

Every part starts at a multiple of `alignment` bytes. No router weight travels: the source applies them in the combine.

A format packs a token with `copy_token_to_send_buf` (quantising it on the way, unless the input is quantised already) and unpacks a
message with `copy_msg_to_output_tensor`. What it needs of the output is in a `FormatHandler`.
"""

# A device function of a subclass takes the subclass as self, which a descriptor cannot say.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any

import epdsl as ep

from .layout import VECTOR_BYTES, align_up, ceildiv
from .rounding import eight_floats

CHUNK = 8
"""Elements a thread packs at a time: 16 bytes of bf16."""

SCALE_TILE_ROWS = 128
SCALE_TILE_COLUMNS = 4
SCALE_TILE_BYTES = SCALE_TILE_ROWS * SCALE_TILE_COLUMNS


@ep.struct
class FormatHandler:
    """Where received tokens go, for every format.

    output         [rows, row_bytes] bytes
    scales         as the format lays them out; not touched by a format without scales
    scale_offsets  i32 [slots]: for scales in tiles, block of a slot's first scale tile minus (its first row / 128)
    n_rows         rows of the output
    input_scale    f32 [1]: the global scale of a format that has one
    """

    output: ep.Ptr[ep.u8]
    scales: ep.Ptr[ep.u8]
    scale_offsets: ep.Ptr[ep.i32]
    n_rows: ep.i32
    input_scale: ep.Ptr[ep.f32]


@dataclass(frozen=True)
class TokenFormat:
    """What every format has in common.

    hid_dim       elements of a token
    top_k         experts a token goes to
    alignment     bytes, a power of two of at least 16
    prequantized  the input is in this format already, with its scales beside it, and is only moved
    tile_rows     rows a block claims at a time when it copies received tokens out
    tile_claims   claims that a tile of rows takes, each for one of as many equal parts of every row, so that a few rows occupy more blocks
    staged        received rows pass through shared memory by the copy engine, a warp's part of a row at a time; where the target has no
                  such engine they are copied by the warp's lanes as without it
    """

    hid_dim: int
    top_k: int
    alignment: int = VECTOR_BYTES
    prequantized: bool = False
    tile_rows: int = 128
    tile_claims: int = 1
    staged: bool = False

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.alignment < VECTOR_BYTES or self.alignment & (self.alignment - 1):
            raise ValueError(f"{name}: alignment={self.alignment} must be a power of two of at least {VECTOR_BYTES} bytes")
        if self.hid_dim < 1 or self.payload_bytes % VECTOR_BYTES:
            raise ValueError(
                f"{name}: a token of {self.hid_dim} elements takes {self.payload_bytes} bytes; it must be a multiple of {VECTOR_BYTES}"
            )
        if self.group_size and self.hid_dim % self.group_size:
            raise ValueError(
                f"{name}: {self.hid_dim} elements are not whole groups of {self.group_size}, which share a scale; "
                f"use a multiple of {self.group_size}"
            )
        if self.tile_rows < 1:
            raise ValueError(f"{name}: tile_rows={self.tile_rows} must be at least 1")
        units = self.hid_dim // self.part_unit
        if self.tile_claims < 1 or units % self.tile_claims:
            raise ValueError(
                f"{name}: tile_claims={self.tile_claims} does not divide the {units} units of {self.part_unit} elements of a token; "
                f"use a divisor of {units}"
            )

    # ---- what a format says about itself

    @property
    def payload_bytes(self) -> int:
        """Bytes of the token's elements."""
        raise NotImplementedError(f"{type(self).__name__} does not say how many bytes its payload takes")

    @property
    def group_size(self) -> int:
        """Elements that share a scale; 0 for a format without scales."""
        return 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of one scale."""
        return 0

    @property
    def scales_in_tiles(self) -> bool:
        """Whether output scales lie in tiles of 128 rows by 4 columns, as block-scaled grouped GEMMs read them."""
        return False

    @property
    def row_padding(self) -> int:
        """Every expert's rows of the output start at a multiple of this."""
        return 1

    @property
    def has_global_scale(self) -> bool:
        """Whether quantising needs an f32 scale for the whole tensor."""
        return False

    @property
    def output_dtype(self) -> str:
        raise NotImplementedError(f"{type(self).__name__} does not say what its elements are")

    @property
    def scale_dtype(self) -> str:
        return "u8"

    @property
    def output_columns(self) -> int:
        """Elements of `output_dtype` in a row."""
        return self.hid_dim

    # ---- sizes that follow

    @property
    def n_groups(self) -> int:
        """Scales of a token."""
        return self.hid_dim // self.group_size if self.group_size else 0

    @property
    def scales_offset(self) -> int:
        return align_up(self.payload_bytes, self.alignment)

    def token_size(self) -> int:
        return self.scales_offset + align_up(self.n_groups * self.scale_bytes, self.alignment)

    def src_info_size(self) -> int:
        return align_up(4, self.alignment)

    def topk_info_size(self) -> int:
        return align_up(2 * self.top_k, self.alignment)

    @property
    def part_unit(self) -> int:
        """Elements that one claim copies whole: 16 bytes of them and whole groups."""
        return lcm(self.group_size or 1, VECTOR_BYTES * self.hid_dim // self.payload_bytes)

    @property
    def part_bytes(self) -> int:
        """Bytes of a row's elements that one claim copies."""
        return self.payload_bytes // self.tile_claims

    @property
    def part_groups(self) -> int:
        """Scales of a row that one claim copies."""
        return self.n_groups // self.tile_claims

    def staging_bytes(self, n_warps: int, has_bulk_copy: bool) -> int:
        """Bytes of shared memory in which `n_warps` warps stage; 0 without `staged`, or on a target without the copy engine."""
        return n_warps * self.part_bytes if self.staged and has_bulk_copy else 0

    @property
    def src_info_offset(self) -> int:
        return self.token_size()

    @property
    def topk_info_offset(self) -> int:
        return self.token_size() + self.src_info_size()

    def msg_size(self) -> int:
        """Bytes of one message."""
        return self.token_size() + self.src_info_size() + self.topk_info_size()

    def scale_shape(self, n_rows: int, n_slots: int) -> tuple[int, ...]:
        """Shape of the output's scales for `n_rows` rows of `n_slots` experts."""
        if self.scales_in_tiles:
            tiles = n_rows // SCALE_TILE_ROWS + n_slots
            return (tiles, ceildiv(self.n_groups, SCALE_TILE_COLUMNS), 32, SCALE_TILE_ROWS // 32, SCALE_TILE_COLUMNS)
        return (n_rows, self.n_groups)

    # ---- on the device

    @ep.func
    def src_info(self, message: ep.Ptr[ep.u8]) -> ep.Ptr[ep.i32]:
        return (message + self.src_info_offset).cast(ep.i32)

    @ep.func
    def topk_info(self, message: ep.Ptr[ep.u8]) -> ep.Ptr[ep.u16]:
        return (message + self.topk_info_offset).cast(ep.u16)

    @ep.func
    def first_scale_row(self, handler: FormatHandler, row_offsets: ep.Ptr[ep.u32], slot: ep.i32) -> ep.i64:
        """Row of the scales where expert slot `slot` begins."""
        first = ep.i64(row_offsets[slot])
        if self.scales_in_tiles:
            first = (first // SCALE_TILE_ROWS + handler.scale_offsets[slot]) * SCALE_TILE_ROWS
        return first

    @ep.func
    def scale_place(self, handler: FormatHandler, scale_row: ep.i64, group: ep.i32) -> ep.i64:
        """Byte offset of a scale in the output's scales."""
        if self.scales_in_tiles:
            tile = (scale_row // SCALE_TILE_ROWS) * ceildiv(self.n_groups, SCALE_TILE_COLUMNS) + group // SCALE_TILE_COLUMNS
            inside = scale_row % SCALE_TILE_ROWS
            place = tile * SCALE_TILE_BYTES + (inside % 32) * 16 + (inside // 32) * 4 + group % SCALE_TILE_COLUMNS
        else:
            place = (scale_row * self.n_groups + group) * self.scale_bytes
        return place

    @ep.func
    def staging(self, n_warps: int, warp: ep.i32, comm_smem_base: int):
        """Warp number `warp`'s stage, `comm_smem_base` bytes into the placed part of shared memory, and its barrier.

        None where nothing is staged. The messages to be copied must have been acquired by this thread.
        """
        stage = None
        nbytes = self.staging_bytes(n_warps, ep.target.has_bulk_copy)
        if nbytes:
            full = ep.MBarrier(ep.shared(ep.u64, n_warps) + warp)
            stage = (ep.shared(ep.u8, nbytes, at=comm_smem_base) + warp * self.part_bytes, full)
            if ep.lane_id() == 0:
                full.init(1)
                ep.proxy_fence("shared")
                # After the acquire too: the engine, which reads other threads' ordinary stores, must not run ahead of it.
                ep.proxy_fence("global")
        return stage

    @ep.func
    def publish_to_engine(self):
        """This thread's ordinary stores to a message may be read by the copy engine once they are released; for a format that stages."""
        if self.staging_bytes(1, ep.target.has_bulk_copy):
            ep.proxy_fence("global")

    @ep.func
    def copy_part(self, target: ep.Ptr[ep.u8], source: ep.Ptr[ep.u8], stage: Any, copied: ep.i32, timeout_ns: int):
        """One warp copies a part of a row's elements; its number `copied` with this stage."""
        if stage is None:
            ep.warp_copy(target, source, self.part_bytes)
        elif ep.lane_id() == 0:
            at, full = stage
            full.expect(self.part_bytes)
            ep.bulk_copy(at, source, self.part_bytes, barrier=full)
            full.wait(copied & 1, timeout_ns=timeout_ns)
            ep.bulk_copy(target, at, self.part_bytes)
            ep.bulk_commit()
            ep.bulk_wait(0, read="source")

    @ep.func
    def finish_parts(self, stage: Any):
        """What this warp copied through `stage` is in place; to be called before it is released."""
        if stage is not None:
            if ep.lane_id() == 0:
                ep.bulk_wait(0, read="full")
                # The copy engine wrote it, and the release is of ordinary accesses.
                ep.proxy_fence("global")

    @ep.func
    def copy_msg_to_output_tensor(
        self,
        handler: FormatHandler,
        row: ep.i64,
        scale_row: ep.i64,
        message: ep.Ptr[ep.u8],
        part: ep.i32,
        stage: Any,
        copied: ep.i32,
        timeout_ns: int,
    ):
        """One warp copies part number `part` of `message`'s payload to a row of the output, and that part's scales to their place.

        stage, copied  see `copy_part`
        """
        begin = part * self.part_bytes
        self.copy_part(handler.output + row * self.payload_bytes + begin, message + begin, stage, copied, timeout_ns)
        if self.group_size:
            source = message + self.scales_offset
            first = part * self.part_groups
            for group in range(first + ep.lane_id(), first + self.part_groups, ep.warp_size()):
                place = self.scale_place(handler, scale_row, group)
                if self.scale_bytes == 4:
                    (handler.scales + place).cast(ep.u32)[0] = source.cast(ep.u32)[group]
                else:
                    handler.scales[place] = source[group]

    @ep.func
    def copy_token_to_send_buf(self, message: ep.Ptr[ep.u8], tokens: ep.Ptr[ep.u8], token: ep.i32, group, input_scales: Any = None):
        """All threads of `group` pack token number `token` of `tokens` into the payload of `message`.

        input_scales(i) gives, for a quantised input, the scale of block i of the whole input (its code as the format stores it), and for
        a format with a global scale, that (i = 0).
        """
        if self.prequantized or self.group_size == 0:
            ep.copy(message, tokens + ep.i64(token) * self.payload_bytes, self.payload_bytes, group=group)
            if self.group_size:
                for i in range(ep.thread_idx.x - group.thread_base, self.n_groups, group.num_threads):
                    self.store_scale(message, i, input_scales(ep.i64(token) * self.n_groups + i))
        else:
            self.quantize_token(message, (tokens + ep.i64(token) * (2 * self.hid_dim)).cast(ep.u32), group, input_scales)

    @ep.func
    def store_scale(self, message: ep.Ptr[ep.u8], group: ep.i32, code):
        if self.scale_bytes == 4:
            (message + self.scales_offset).cast(ep.f32)[group] = code
        else:
            (message + self.scales_offset)[group] = code

    @ep.func
    def quantize_chunk(self, words: Any, lanes: int, input_scales: Any) -> Any:
        """The scale of the group that `lanes` neighbouring lanes hold, and this lane's 8 elements packed in one or two words."""
        raise NotImplementedError(f"{type(self).__name__} does not quantise")

    @ep.func
    def load_eight(self, handler: FormatHandler, row: ep.i64, scale_row: ep.i64, column: ep.i32) -> Any:
        """Eight elements of a received row as f32, from `column` on, a multiple of 8."""
        raise NotImplementedError(f"{type(self).__name__} does not expand")

    @ep.func
    def quantize_token(self, message: ep.Ptr[ep.u8], token: ep.Ptr[ep.u32], group, input_scales):
        """A thread packs 8 elements; the lanes that hold a group find its scale together, so whole warps go through the loop."""
        lanes = self.group_size // CHUNK
        n_chunks = self.hid_dim // CHUNK
        lane = ep.lane_id()
        warp_start = (ep.thread_idx.x - group.thread_base) - lane
        for start in range(warp_start, n_chunks, group.num_threads):
            chunk = start + lane
            words = ep.vec(ep.u32, 4)(0, 0, 0, 0)
            if chunk < n_chunks:
                words = ep.load(token + chunk * 4, width=4)
            code, packed = self.quantize_chunk(words, lanes, input_scales)
            if chunk < n_chunks:
                if self.payload_bytes == self.hid_dim:
                    ep.store((message + chunk * CHUNK).cast(ep.u32), ep.vec(ep.u32, 2)(packed[0], packed[1]))
                else:
                    (message + chunk * (CHUNK // 2)).cast(ep.u32)[0] = packed[0]
                if lane % lanes == 0:
                    self.store_scale(message, chunk // lanes, code)


@dataclass(frozen=True)
class BF16TokenFormat(TokenFormat):
    """The token as it is: `hid_dim` bf16 values."""

    @property
    def payload_bytes(self) -> int:
        return 2 * self.hid_dim

    @property
    def output_dtype(self) -> str:
        return "bf16"

    @ep.func
    def load_eight(self, handler: FormatHandler, row: ep.i64, scale_row: ep.i64, column: ep.i32):
        return eight_floats(ep.load((handler.output + (row * self.hid_dim + column) * 2).cast(ep.u32), width=4))
