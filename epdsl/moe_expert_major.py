"""The host side of the throughput mode with expert-major rows (see `epdsl.kernels.expert_major`): buffers, `dispatch`, `combine`.

layer = ExpertMajorMoE(rank, hidden=7168, n_experts=256, top_k=8, max_tokens_per_rank=4096, alignment=128)
handle = layer.dispatch(x, topk_idx, topk_weights)
y = ...                              # bf16 rows, at the places of handle.rows
out = layer.combine(y, handle)       # [n_tokens, hidden] bf16
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from epdsl.env import TIMEOUT_NS
from epdsl.fingerprint import source_digests
from epdsl.kernels.expert_major import ExpertMajorExchange
from epdsl.moe_arrays import agreed_fields, check_tokens, dtype_of, on_device, output_of, rows_of, tokens_on_device
from epdsl.sm_budget import budget

if TYPE_CHECKING:
    from epdsl_runtime.array import DeviceArray
    from epdsl_runtime.launch import Prepared
    from epdsl_runtime.rank import Rank


@dataclass(frozen=True, eq=False)
class ExpertMajorHandle:
    """What a dispatch brought, in memory of this rank alone: valid until the next dispatch of the layer.

    rows           [max_rows, hidden] e4m3 or bf16; local expert e's are expert_rows[e] and the expert_counts[e] - 1 that follow
    scales         [max_rows, hidden / 128] f32, None without fp8
    expert_rows    [n_local_experts + 1] i32: each expert's first row, a multiple of the alignment; then the rows in use
    expert_counts  [n_local_experts] i32
    row_of         [n_ranks, max_tokens_per_rank, top_k] i32: the row of each selection of each rank's tokens, -1 when not here
    weight_of      the same, f32: the router's weight
    source_tokens  [n_ranks] i32: tokens each rank dispatched
    topk_idx       this rank's own selections
    n_tokens       tokens this rank dispatched

    An expert's rows are in order of (source rank, token). Rows between an expert's last and the next expert's first hold nothing of use.
    """

    rows: DeviceArray
    scales: DeviceArray | None
    expert_rows: DeviceArray
    expert_counts: DeviceArray
    row_of: DeviceArray
    weight_of: DeviceArray
    source_tokens: DeviceArray
    topk_idx: Any
    n_tokens: int


class ExpertMajorMoE:
    """Buffers and kernels of one layer on one rank. Every rank makes it with the same arguments and calls the same sequence."""

    def __init__(
        self,
        rank: Rank,
        *,
        hidden: int,
        n_experts: int,
        top_k: int,
        max_tokens_per_rank: int,
        n_blocks: int | None = None,
        send_blocks: tuple[int, int] | None = None,
        fp8: bool = True,
        alignment: int = 1,
        timeout_ns: int | None = None,
        **tuning: Any,
    ) -> None:
        """`tuning`: the other fields of `ExpertMajorExchange`. Blocks that are not given: see `sm_budget`."""
        self.rank = rank
        share = budget(rank.device.info, "expert-major", fp8, max_tokens_per_rank, n_blocks)
        self.kernel = k = ExpertMajorExchange(
            hidden,
            n_experts,
            rank.size,
            top_k,
            max_tokens_per_rank,
            share.n_blocks,
            send_blocks=send_blocks or share.send_blocks,
            fp8=fp8,
            alignment=alignment,
            timeout_ns=timeout_ns or TIMEOUT_NS.get(),
            **tuning,
        )
        rank.agree("ExpertMajorMoE", agreed_fields(k, ("timeout_ns",)) | source_digests(k.dispatch, k.combine))

        def source(word: int) -> int:
            return word // max_tokens_per_rank % rank.size

        def counter(word: int) -> int:
            return word % k.bank_counts // (k.n_local_experts + 1)

        with rank.all_or_none():
            self._recv = rank.symmetric("u32", 2 * k.bank_tokens * k.payload_words, name="tokens")
            self._headers = rank.symmetric("u32", 2 * k.bank_tokens * k.top_k * 2, name="token headers")
            self._counts = rank.symmetric("u64", 2 * k.bank_counts, "expert counts", counter)
            self._flags = rank.symmetric("u32", 2 * k.bank_tokens, "token flags", source)
            self._back = rank.symmetric("u32", 2 * k.bank_tokens * k.vectors * 4, name="token sums")
            self._back_flags = rank.symmetric("u32", 2 * k.bank_tokens, "sum flags", source)
            self._begun = rank.symmetric("u32", rank.size, "dispatches begun", lambda word: word)
            self._back_begun = rank.symmetric("u32", rank.size, "combines begun", lambda word: word)
        self._epochs = rank.zeros("u32", k.n_blocks)
        self._claims = rank.zeros("i32", 2)
        self._back_epochs = rank.zeros("u32", k.n_blocks)
        self._rows = rank.empty("f8e4m3" if fp8 else "bf16", (k.max_rows, hidden))
        self._scales = rank.empty("f32", (k.max_rows, k.groups)) if fp8 else None
        self._expert_rows = rank.zeros("i32", k.n_local_experts + 1)
        self._expert_counts = rank.zeros("i32", k.n_local_experts)
        self._row_of = rank.empty("i32", (rank.size, max_tokens_per_rank, top_k))
        self._weight_of = rank.empty("f32", (rank.size, max_tokens_per_rank, top_k))
        self._source_tokens = rank.zeros("i32", rank.size)

    @property
    def rows(self) -> DeviceArray:
        """The rows that every handle of this layer has."""
        return self._rows

    def dispatch(self, x: Any, topk_idx: Any, topk_weights: Any, stream: Any = None) -> ExpertMajorHandle:
        """Sends x [n_tokens, hidden] bf16 to the experts topk_idx [n_tokens, top_k] i32; topk_weights f32 alike. Returns at once.

        An expert named twice by a token gets it once, with the sum of both weights. Raises ValueError or TypeError, before anything is
        launched, for a wrong shape or dtype or too many tokens.
        """
        args, handle = self._dispatch(x, topk_idx, topk_weights)
        k = self.kernel
        k.dispatch.launch(self.rank, grid=k.n_blocks, block=k.num_threads[0], args=args, stream=stream, cooperative=True)
        return handle

    def prepare_dispatch(self, x: Any, topk_idx: Any, topk_weights: Any, stream: Any = None) -> tuple[Prepared, ExpertMajorHandle]:
        """A dispatch of these device arrays to be launched again and again, each time into the same handle."""
        args, handle = self._dispatch(x, topk_idx, topk_weights)
        k = self.kernel
        return k.dispatch.prepare(self.rank, grid=k.n_blocks, block=k.num_threads[0], args=args, stream=stream, cooperative=True), handle

    def _dispatch(self, x: Any, topk_idx: Any, topk_weights: Any) -> tuple[tuple[Any, ...], ExpertMajorHandle]:
        k = self.kernel
        n_tokens = check_tokens(k, "bf16", x, topk_idx, topk_weights)
        if n_tokens:
            x, topk_idx, topk_weights = tokens_on_device(self.rank, "bf16", x, topk_idx, topk_weights)
            x = x.view("u32")
        else:
            # Nothing is read from them; an empty array has no address to pass.
            x, topk_idx, topk_weights = self._recv.local, self._row_of, self._weight_of
        handle = ExpertMajorHandle(
            rows=self._rows,
            scales=self._scales,
            expert_rows=self._expert_rows,
            expert_counts=self._expert_counts,
            row_of=self._row_of,
            weight_of=self._weight_of,
            source_tokens=self._source_tokens,
            topk_idx=topk_idx,
            n_tokens=n_tokens,
        )
        args = (
            x,
            topk_idx,
            topk_weights,
            n_tokens,
            self._recv.peers,
            self._headers.peers,
            self._counts.peers,
            self._flags.peers,
            self._begun.peers,
            self._epochs,
            self._claims,
            self._rows.view("u32"),
            (self._weight_of if self._scales is None else self._scales).view("u32"),
            self._expert_rows,
            self._expert_counts,
            self._row_of,
            self._weight_of,
            self._source_tokens,
            self.rank.index,
        )
        return args, handle

    def combine(self, y: Any, handle: ExpertMajorHandle, out: DeviceArray | None = None, stream: Any = None) -> DeviceArray:
        """The weighted sums of a token's rows at its source: [n_tokens, hidden] bf16.

        y [max_rows, hidden] bf16: a row for each of handle.rows
        """
        args, made = self._combine(y, handle, out)
        k = self.kernel
        k.combine.launch(self.rank, grid=k.n_blocks, block=k.num_threads[1], args=args, stream=stream, cooperative=True)
        return made if handle.n_tokens == made.shape[0] else made[: handle.n_tokens]

    def prepare_combine(self, y: Any, handle: ExpertMajorHandle, out: DeviceArray, stream: Any = None) -> Prepared:
        """A combine of these device arrays to be launched again and again."""
        args, _ = self._combine(y, handle, out)
        k = self.kernel
        return k.combine.prepare(self.rank, grid=k.n_blocks, block=k.num_threads[1], args=args, stream=stream, cooperative=True)

    def _combine(self, y: Any, handle: ExpertMajorHandle, out: DeviceArray | None) -> tuple[tuple[Any, ...], DeviceArray]:
        k = self.kernel
        rows = rows_of("y", y)
        if y.shape[1] != k.hidden or dtype_of(y) != "bf16" or rows != k.max_rows:
            raise ValueError(f"y is {dtype_of(y)} of shape {tuple(y.shape)}, expected bf16 of {k.max_rows} rows of {k.hidden}")
        made, target = output_of(self.rank, out, handle.n_tokens, k.hidden)
        args = (
            on_device(self.rank, "y", y, "bf16").view("u32"),
            handle.row_of,
            handle.weight_of,
            handle.source_tokens,
            handle.topk_idx,
            self._back.peers,
            self._back_flags.peers,
            self._back_begun.peers,
            self._back_epochs,
            target.view("u32"),
            self.rank.index,
        )
        return args, made

    def close(self) -> None:
        """Frees the buffers, on every rank together."""
        self.rank.release(self._recv, self._headers, self._counts, self._flags, self._back, self._back_flags, self._begun, self._back_begun)
