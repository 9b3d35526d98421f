"""The host side of the throughput mode (see `epdsl.kernels.throughput`): buffers, `dispatch`, `combine`.

layer = ThroughputMoE(rank, hidden=7168, n_experts=256, top_k=8, max_tokens_per_rank=4096, n_blocks=24)
handle = layer.dispatch(x, topk_idx, topk_weights)
y = ...                              # one bf16 row for each row of handle.rows, summed over this rank's experts
out = layer.combine(y, handle)       # [n_tokens, hidden] bf16
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from epdsl.env import TIMEOUT_NS
from epdsl.fingerprint import source_digests
from epdsl.kernels.throughput import ThroughputExchange
from epdsl.moe_arrays import agreed_fields, check_array, check_tokens, dtype_of, on_device, output_of, rows_of, tokens_on_device
from epdsl.sm_budget import budget

if TYPE_CHECKING:
    from collections.abc import Callable

    from epdsl_runtime.array import DeviceArray
    from epdsl_runtime.launch import Prepared
    from epdsl_runtime.rank import Rank


@dataclass(frozen=True, eq=False)
class ThroughputHandle:
    """What a dispatch brought: rows in order of (source, token), valid until the second dispatch after it or the next replay of its graph.

    rows       [max_rows, hidden] bf16 or e4m3; the first rank_rows[-1] of them are in use
    scales     [max_rows, hidden / 128] f32, None without fp8
    topk_idx   [max_rows, top_k] i32: local experts, -1 for selections of other ranks
    weights    [max_rows, top_k] f32
    token      [max_rows] i32: the row's index at its source
    rank_rows  [n_ranks + 1] i32: where each source's rows begin; the last is their number
    row_of     [max_tokens_per_rank, n_ranks] i32: where this rank's tokens went, -1 where they did not
    sent       [2, n_ranks] i32: first row and number of this rank's rows at each rank
    """

    rows: DeviceArray
    scales: DeviceArray | None
    topk_idx: DeviceArray
    weights: DeviceArray
    token: DeviceArray
    rank_rows: DeviceArray
    row_of: DeviceArray
    sent: DeviceArray
    n_tokens: int


class ThroughputMoE:
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
        num_threads: int = 1024,
        send_blocks: int | None = None,
        fp8: bool = False,
        timeout_ns: int | None = None,
        **tuning: Any,
    ) -> None:
        """`tuning`: the other fields of `ThroughputExchange`. Blocks that are not given: see `sm_budget`."""
        self.rank = rank
        share = budget(rank.device.info, "throughput", fp8, max_tokens_per_rank, n_blocks)
        self.kernel = k = ThroughputExchange(
            hidden,
            n_experts,
            rank.size,
            top_k,
            max_tokens_per_rank,
            share.n_blocks,
            num_threads,
            fp8,
            send_blocks or share.send_blocks[1],
            timeout_ns=timeout_ns or TIMEOUT_NS.get(),
            **tuning,
        )
        rank.agree("ThroughputMoE", agreed_fields(k, ("timeout_ns",)) | source_digests(k.dispatch, k.combine))

        def counter(word: int) -> int:
            return word % rank.size**2 // rank.size

        rows = (2, k.max_rows)
        with rank.all_or_none():
            self._x = rank.symmetric("f8e4m3" if fp8 else "bf16", (*rows, hidden), name="rows")
            self._scales = rank.symmetric("f32", (*rows, hidden // 128 if fp8 else 1), name="scales")
            self._ids = rank.symmetric("i32", (*rows, top_k), name="row selections")
            self._weights = rank.symmetric("f32", (*rows, top_k), name="row weights")
            self._token = rank.symmetric("i32", rows, name="row tokens")
            self._counts = rank.symmetric("u64", k.count_words(), "token counts", counter)
            self._done = rank.symmetric("u64", k.flag_words(), "dispatch flags", lambda word: word // k.n_blocks % rank.size)
            self._back = rank.symmetric("bf16", (2, rank.size, max_tokens_per_rank, hidden), name="combine rows")
            self._flags = rank.symmetric(
                "u32", 2 * rank.size * max_tokens_per_rank, "row flags", lambda word: word // max_tokens_per_rank % rank.size
            )
            self._begun = rank.symmetric("u32", rank.size, "combines begun", lambda word: word)
        self._epochs = rank.zeros("u32", k.n_blocks)
        self._back_epochs = rank.zeros("u32", k.n_blocks)
        self._own = [
            (rank.zeros("i32", rank.size + 1), rank.empty("i32", (max_tokens_per_rank, rank.size)), rank.zeros("i32", (2, rank.size)))
            for _ in range(2)
        ]
        self._launches = 0

    def dispatch(self, x: Any, topk_idx: Any, topk_weights: Any, x_scales: Any = None, stream: Any = None) -> ThroughputHandle:
        """Sends x [n_tokens, hidden] (bf16, or e4m3 with x_scales [n_tokens, hidden / 128] f32) to the ranks of topk_idx [n_tokens, top_k].

        Raises ValueError or TypeError, before anything is launched, for a wrong shape or dtype or too many tokens.
        """
        args, handle = self._dispatch(x, topk_idx, topk_weights, x_scales, (self._launches + 1) % 2)
        k = self.kernel
        k.dispatch.launch(self.rank, grid=k.n_blocks, block=k.num_threads, args=args, stream=stream, cooperative=True)
        # Not before: ranks use the same bank, also after one was refused something.
        self._launches += 1
        return handle

    def prepare_dispatch(self, x: Any, topk_idx: Any, topk_weights: Any, x_scales: Any = None) -> Callable[[], ThroughputHandle]:
        """A dispatch of these device arrays to be launched again and again: each call launches it and returns its handle."""
        both = [self._dispatch(x, topk_idx, topk_weights, x_scales, bank) for bank in range(2)]
        k = self.kernel
        ready = [k.dispatch.prepare(self.rank, grid=k.n_blocks, block=k.num_threads, args=args, cooperative=True) for args, _ in both]

        def launch() -> ThroughputHandle:
            bank = (self._launches + 1) % 2
            ready[bank]()
            self._launches += 1
            return both[bank][1]

        return launch

    def _handle(self, bank: int, n_tokens: int, own: tuple[DeviceArray, DeviceArray, DeviceArray]) -> ThroughputHandle:
        rank_rows, row_of, sent = own
        return ThroughputHandle(
            rows=self._x.local[bank],
            scales=self._scales.local[bank] if self.kernel.fp8 else None,
            topk_idx=self._ids.local[bank],
            weights=self._weights.local[bank],
            token=self._token.local[bank],
            rank_rows=rank_rows,
            row_of=row_of,
            sent=sent,
            n_tokens=n_tokens,
        )

    def _dispatch(self, x: Any, topk_idx: Any, topk_weights: Any, x_scales: Any, bank: int) -> tuple[tuple[Any, ...], ThroughputHandle]:
        k = self.kernel
        dtype = "f8e4m3" if k.fp8 else "bf16"
        n_tokens = check_tokens(k, dtype, x, topk_idx, topk_weights)
        if k.fp8:
            check_array("x_scales", x_scales, "f32", (n_tokens, k.hidden // 128))
        elif x_scales is not None:
            raise ValueError("x_scales is for a layer made with fp8=True")
        own = self._own[bank]
        if n_tokens:
            x, topk_idx, topk_weights = tokens_on_device(self.rank, dtype, x, topk_idx, topk_weights)
            x_scales = on_device(self.rank, "x_scales", x_scales, "f32") if k.fp8 else topk_weights
        else:
            # Nothing is read from them; an empty array has no address to pass.
            x, x_scales, topk_idx, topk_weights = self._x.local, self._scales.local, own[1], self._weights.local
        args = (
            x.view("u8"),
            x_scales.view("u8"),
            topk_idx,
            topk_weights,
            n_tokens,
            self._x.peers.view("u8"),
            self._scales.peers.view("u8"),
            self._ids.peers,
            self._weights.peers,
            self._token.peers,
            self._counts.peers,
            self._done.peers,
            self._epochs,
            own[1],
            own[2],
            own[0],
            self.rank.index,
            bank,
        )
        return args, self._handle(bank, n_tokens, own)

    def combine(self, y: Any, handle: ThroughputHandle, out: DeviceArray | None = None, stream: Any = None) -> DeviceArray:
        """The sums of a token's rows over the ranks, at its source: [n_tokens, hidden] bf16.

        y [rows, hidden] bf16: a row for each of handle.rows
        """
        args, made = self._combine(y, handle, out)
        k = self.kernel
        k.combine.launch(self.rank, grid=k.n_blocks, block=k.num_threads, args=args, stream=stream, cooperative=True)
        return made if handle.n_tokens == made.shape[0] else made[: handle.n_tokens]

    def prepare_combine(self, y: Any, handle: ThroughputHandle, out: DeviceArray) -> Prepared:
        """A combine of these device arrays to be launched again and again."""
        args, _ = self._combine(y, handle, out)
        k = self.kernel
        return k.combine.prepare(self.rank, grid=k.n_blocks, block=k.num_threads, args=args, cooperative=True)

    def _combine(self, y: Any, handle: ThroughputHandle, out: DeviceArray | None) -> tuple[tuple[Any, ...], DeviceArray]:
        k = self.kernel
        rows = rows_of("y", y)
        if y.shape[1] != k.hidden or dtype_of(y) != "bf16" or rows > k.max_rows:
            raise ValueError(f"y is {dtype_of(y)} of shape {tuple(y.shape)}, expected bf16 of at most {k.max_rows} rows of {k.hidden}")
        made, target = output_of(self.rank, out, handle.n_tokens, k.hidden)
        args = (
            on_device(self.rank, "y", y, "bf16").view("u32"),
            handle.rank_rows,
            handle.token,
            handle.row_of,
            handle.n_tokens,
            self._back.peers.view("u32"),
            self._flags.peers,
            self._begun.peers,
            self._back_epochs,
            target.view("u32"),
            self.rank.index,
        )
        return args, made

    def close(self) -> None:
        """Frees the buffers, on every rank together."""
        self.rank.release(
            *(
                self._x,
                self._scales,
                self._ids,
                self._weights,
                self._token,
                self._counts,
                self._done,
                self._back,
                self._flags,
                self._begun,
            )
        )
