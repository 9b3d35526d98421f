"""The host side of the expert-parallel kernels: buffers for a configuration, `dispatch` and `combine`.

    layer = ExpertParallel(rank, hidden=7168, n_experts=256, top_k=8, max_tokens_per_rank=128)
    handle = layer.dispatch(x, topk_idx, topk_weights)     # handle.output, .row_offsets, .expert_ids, .src_info
    y = ...                                                # the experts, row by row of handle.output
    out = layer.combine(y, handle)                         # [n_tokens, hidden]

Every rank calls the same sequence, also with 0 tokens. Nothing here waits for the device: results are ready after
`rank.synchronize()`, which also raises `RoutingError` for what only the kernels could see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .kernels.combine import EPCombineKernel
from .kernels.dispatch import EPDispatchKernel
from .kernels.layout import (
    DEFAULT_TIMEOUT_NS,
    EPOCH_WORDS,
    STATUS_NO_ROW,
    STATUS_OUT_OF_RANGE,
    STATUS_REPEATED,
    STATUS_SRC_INFO,
    STATUS_WORDS,
    VECTOR_BYTES,
)
from .kernels.token_format import BF16TokenFormat
from .moe_arrays import check_array, on_device, rows_of

if TYPE_CHECKING:
    from epdsl_runtime.array import DeviceArray
    from epdsl_runtime.rank import Rank

Completion = Literal["rank", "expert"]
SIMULATED_BLOCKS = 8
SIMULATED_THREADS = 256
GPU_THREADS = 1024


class RoutingError(ValueError):
    """A kernel met selections or rows it could not use; they were left out and nothing was written outside a buffer.

    rank    the rank that saw it
    kind    "out of range", "repeated" or "source"
    count   how many
    row     the first row of topk_idx (or of the dispatched rows, for "source")
    column  its selection k
    """

    def __init__(self, rank: int, kind: str, count: int, row: int, column: int, text: str) -> None:
        super().__init__(text)
        self.rank, self.kind, self.count, self.row, self.column = rank, kind, count, row, column


@dataclass(frozen=True)
class MoEConfig:
    """What the buffers and kernels of a layer depend on. Equal on every rank.

    hidden               elements of a token, bf16; a multiple of 8
    n_experts            experts of the whole layer; rank r has those from r * n_experts / n_ranks on
    top_k                selections a token has
    max_tokens_per_rank  most tokens a rank may dispatch at once
    n_ranks              ranks that take part
    num_threads, n_sms   threads of a block and blocks of a launch
    completion           "rank": a system-scope release per rank; "expert": per (expert, rank)
    output_type          of the combine, "bf16" or "f32"
    timeout_ns           how long any wait on the device may take
    """

    hidden: int
    n_experts: int
    top_k: int
    max_tokens_per_rank: int
    n_ranks: int
    num_threads: int
    n_sms: int
    completion: Completion = "rank"
    output_type: Literal["bf16", "f32"] = "bf16"
    timeout_ns: int = DEFAULT_TIMEOUT_NS

    def __post_init__(self) -> None:
        if self.completion not in ("rank", "expert"):
            raise ValueError(f"completion={self.completion!r} is not known; it is 'rank' or 'expert'")
        if self.hidden < 1 or 2 * self.hidden % VECTOR_BYTES:
            raise ValueError(
                f"hidden={self.hidden} is {2 * self.hidden} bytes a token, which is not a multiple of {VECTOR_BYTES} bytes; "
                "use a multiple of 8 elements"
            )
        _ = self.dispatch_kernel, self.combine_kernel

    @property
    def dispatch_kernel(self) -> EPDispatchKernel:
        by_rank = self.completion == "rank"
        return EPDispatchKernel(
            num_threads=self.num_threads,
            n_sms=self.n_sms,
            n_experts=self.n_experts,
            n_ranks=self.n_ranks,
            max_tokens_per_rank=self.max_tokens_per_rank,
            p2p_world_size=self.n_ranks,
            token_fmt_type=BF16TokenFormat(hid_dim=self.hidden, top_k=self.top_k),
            has_rank_flag=by_rank,
            ep_ord_r=by_rank,
            timeout_ns=self.timeout_ns,
        )

    @property
    def combine_kernel(self) -> EPCombineKernel:
        by_rank = self.completion == "rank"
        return EPCombineKernel(
            num_threads=self.num_threads,
            n_sms=self.n_sms,
            top_k=self.top_k,
            n_experts=self.n_experts,
            n_ranks=self.n_ranks,
            msg_bytes=2 * self.hidden,
            max_tokens_per_rank=self.max_tokens_per_rank,
            p2p_world_size=self.n_ranks,
            has_rank_flag=by_rank,
            ep_ord_r=by_rank,
            output_type=self.output_type,
            timeout_ns=self.timeout_ns,
        )

    @property
    def n_local_experts(self) -> int:
        return self.n_experts // self.n_ranks

    @property
    def max_recv_tokens(self) -> int:
        """Rows of the dispatch's output."""
        return self.dispatch_kernel.max_recv_tokens


@dataclass(frozen=True, eq=False)
class DispatchHandle:
    """What a dispatch made, on the device. The tensors are the layer's own and are overwritten by its next dispatch.

    output        bf16 [max_recv_tokens, hidden]: received tokens, expert by expert; rows from row_offsets[L] on are undefined
    row_offsets   u32 [L + 1]: local expert e has the rows from row_offsets[e] to row_offsets[e + 1]
    expert_ids    i32 [L]: number of each local expert
    src_info      i32 [max_recv_tokens, 2]: (token on its rank, selection k) of each row
    routed_ids    i32 [max_tokens_per_rank, top_k]: this rank's topk_idx with what was not sent as -1
    topk_weights  f32 [n_tokens, top_k]: as given
    n_tokens      tokens this rank dispatched
    launch        number of the dispatch, from 1
    """

    output: DeviceArray
    row_offsets: DeviceArray
    expert_ids: DeviceArray
    src_info: DeviceArray
    routed_ids: DeviceArray
    topk_weights: DeviceArray
    n_tokens: int
    launch: int
    inputs: tuple[Any, ...] = ()


class ExpertParallel:
    """One rank's part of an expert-parallel layer. Every rank makes it with the same configuration, at the same time.

    `num_threads` and `n_sms` default to a launch that fills a GPU, and to something small on the simulator.

    Raises ValueError, with both numbers, for a configuration that cannot work on this device.
    """

    def __init__(
        self,
        rank: Rank,
        *,
        hidden: int,
        n_experts: int,
        top_k: int,
        max_tokens_per_rank: int,
        num_threads: int | None = None,
        n_sms: int | None = None,
        completion: Completion = "rank",
        output_type: Literal["bf16", "f32"] = "bf16",
        timeout_ns: int = DEFAULT_TIMEOUT_NS,
    ) -> None:
        info = rank.device.info
        simulated = info.kind == "sim"
        self.rank = rank
        self.config = MoEConfig(
            hidden=hidden,
            n_experts=n_experts,
            top_k=top_k,
            max_tokens_per_rank=max_tokens_per_rank,
            n_ranks=rank.size,
            num_threads=num_threads or (SIMULATED_THREADS if simulated else min(GPU_THREADS, info.max_threads_per_block)),
            n_sms=n_sms or (SIMULATED_BLOCKS if simulated else info.num_sms),
            completion=completion,
            output_type=output_type,
            timeout_ns=timeout_ns,
        )
        config = self.config
        if config.num_threads > info.max_threads_per_block:
            raise ValueError(
                f"num_threads={config.num_threads}, but a block of {info.name} has at most {info.max_threads_per_block} threads"
            )
        self._dispatch_kernel = config.dispatch_kernel
        self._combine_kernel = config.combine_kernel
        self._launched = 0
        self._open: DispatchHandle | None = None
        self._combining: DispatchHandle | None = None
        self._agree()
        self._allocate()
        self._remove_callback = rank.on_synchronize(self._check_status)
        # No rank may write to a peer whose counters are not yet zero.
        rank.barrier()

    def _agree(self) -> None:
        """Raises ValueError on every rank when two were given different layers."""
        names = ("hidden", "n_experts", "top_k", "max_tokens_per_rank", "completion")
        mine = {name: getattr(self.config, name) for name in names}
        for peer, theirs in enumerate(self.rank.allgather(mine)):
            for name in names:
                if theirs[name] != mine[name]:
                    raise ValueError(f"{name} differs by rank: rank {self.rank.index} has {mine[name]!r}, rank {peer} has {theirs[name]!r}")

    def _allocate(self) -> None:
        rank, config = self.rank, self.config
        dispatch, combine = self._dispatch_kernel, self._combine_kernel
        tokens, rows, local = config.max_tokens_per_rank, config.max_recv_tokens, config.n_local_experts
        self._recv_bufs = rank.symmetric("u8", dispatch.recv_buf_size(), "dispatch recv_buf")
        self._recv_counts = rank.symmetric("u64", dispatch.recv_count_size(), "dispatch recv_count")
        self._consumed = rank.symmetric("u32", rank.size, "dispatch consumed")
        self._combine_recv_bufs = rank.symmetric("u8", combine.recv_buf_size(), "combine recv_buf")
        self._combine_recv_counts = rank.symmetric("u64", combine.recv_count_size(), "combine recv_count")
        self._combine_consumed = rank.symmetric("u32", rank.size, "combine consumed")
        self._send_buf = rank.zeros("u8", dispatch.send_buf_size())
        self._counters = rank.zeros("i32", dispatch.counters.total_size)
        self._epochs = rank.zeros("u32", EPOCH_WORDS)
        self._status = rank.empty("u64", STATUS_WORDS)
        self._clear_status()
        self._output = rank.empty("bf16", (rows, config.hidden))
        self._row_offsets = rank.zeros("u32", local + 1)
        self._expert_ids = rank.zeros("i32", local)
        self._src_info = rank.empty("i32", (rows, 2))
        self._routed_ids = rank.empty("i32", (tokens, config.top_k))
        self._combined = rank.empty(config.output_type, (tokens, config.hidden))

    def close(self) -> None:
        """Collective: frees the buffers that peers reach. Without it `rank.close()` does so at the end of the job."""
        self._remove_callback()
        self.rank.release(
            self._recv_bufs, self._recv_counts, self._consumed, self._combine_recv_bufs, self._combine_recv_counts, self._combine_consumed
        )

    # ---- dispatch

    def dispatch(self, x: Any, topk_idx: Any, topk_weights: Any, *, validate: bool = False, stream: Any = None) -> DispatchHandle:
        """Sends every token to its experts and receives those for this rank's, in one launch.

        x             bf16 [n, hidden], n from 0 to max_tokens_per_rank
        topk_idx      i32 [n, top_k]: experts of each token, -1 for none
        topk_weights  f32 [n, top_k]: used by the combine
        validate      also read topk_idx on the host and raise before the launch for an id that is out of range or repeated in its row

        Each is a device array, a NumPy array (uploaded), or an array of another library on this device.
        Raises TypeError or ValueError before anything is launched. Ids the kernel finds wrong are left out and raise `RoutingError` at
        the next synchronisation.
        """
        handle = self._begin(x, topk_idx, topk_weights, validate)
        self._launch(
            self._dispatch_kernel.dispatch,
            (
                *self._send_args(handle),
                self._output,
                self._row_offsets,
                self._expert_ids,
                self._src_info,
                *self._dispatch_peers,
                self._counters,
                self._epochs,
                self._status,
                self.rank.index,
            ),
            stream,
        )
        self._launched += 1
        return handle

    def dispatch_async(self, x: Any, topk_idx: Any, topk_weights: Any, *, validate: bool = False, stream: Any = None) -> DispatchHandle:
        """The sending half of `dispatch`. The handle's tensors are filled by `dispatch_wait`."""
        handle = self._begin(x, topk_idx, topk_weights, validate)
        args = (*self._send_args(handle), *self._dispatch_peers, self._counters, self._epochs, self._status, self.rank.index)
        self._launch(self._dispatch_kernel.dispatch_async, args, stream)
        self._launched += 1
        self._open = handle
        return handle

    def dispatch_wait(self, handle: DispatchHandle, *, stream: Any = None) -> DispatchHandle:
        """The receiving half. Returns `handle`.

        Raises RuntimeError when `handle` is not of the dispatch that was begun last.
        """
        if self._open is not handle:
            raise RuntimeError(f"dispatch_wait of launch {handle.launch}, but {self._open_text('dispatch', self._open)}")
        args = (self._output, self._row_offsets, self._expert_ids, self._src_info, *self._dispatch_peers)
        self._launch(self._dispatch_kernel.dispatch_wait, (*args, self._counters, self._epochs, self.rank.index), stream)
        self._open = None
        return handle

    # ---- combine

    def combine(self, y: Any, handle: DispatchHandle, *, out: DeviceArray | None = None, stream: Any = None) -> DeviceArray:
        """Sends the experts' rows back and sums each token's rows times its weights, in one launch.

        y    bf16 [max_recv_tokens, hidden]: one row for each row of handle.output
        out  where to write, [n_tokens, hidden] of output_type; by default memory of the layer, overwritten by its next combine

        Sums in f32 in order of k. Selections that were not sent contribute nothing. Returns [n_tokens, hidden].
        Raises TypeError or ValueError before anything is launched; RuntimeError when another dispatch was made after `handle`'s.
        """
        source, target = self._begin_combine(y, handle), self._output_of(out, handle)
        args = (source, self._src_info, *self._reduce_args(target, handle), *self._combine_peers)
        self._launch(self._combine_kernel.combine, (*args, self._counters, self._epochs, self._status, self.rank.index), stream)
        return target

    def combine_async(self, y: Any, handle: DispatchHandle, *, stream: Any = None) -> None:
        """The sending half of `combine`."""
        source = self._begin_combine(y, handle)
        args = (source, self._src_info, *self._combine_peers, self._counters, self._epochs, self._status, self.rank.index)
        self._launch(self._combine_kernel.combine_async, args, stream)
        self._combining = handle

    def combine_wait(self, handle: DispatchHandle, *, out: DeviceArray | None = None, stream: Any = None) -> DeviceArray:
        """The receiving half. Returns [n_tokens, hidden].

        Raises RuntimeError when `handle` is not of the combine that was begun last.
        """
        if self._combining is not handle:
            raise RuntimeError(f"combine_wait of launch {handle.launch}, but {self._open_text('combine', self._combining)}")
        target = self._output_of(out, handle)
        args = (*self._reduce_args(target, handle), *self._combine_peers, self._counters, self._epochs, self.rank.index)
        self._launch(self._combine_kernel.combine_wait, args, stream)
        self._combining = None
        return target

    # ---- what both need

    @property
    def _dispatch_peers(self) -> tuple[Any, ...]:
        return self._recv_bufs.peers, self._recv_counts.peers, self._consumed.peers

    @property
    def _combine_peers(self) -> tuple[Any, ...]:
        return self._combine_recv_bufs.peers, self._combine_recv_counts.peers, self._combine_consumed.peers

    def _send_args(self, handle: DispatchHandle) -> tuple[Any, ...]:
        x, topk_idx = handle.inputs
        return x, topk_idx, handle.n_tokens, self._send_buf, self._routed_ids

    def _reduce_args(self, target: DeviceArray, handle: DispatchHandle) -> tuple[Any, ...]:
        return target.view("u8"), handle.routed_ids, handle.topk_weights, handle.n_tokens

    def _launch(self, kernel: Any, args: tuple[Any, ...], stream: Any) -> None:
        # Blocks wait for each other, so the whole grid must be resident: a cooperative launch refuses any other.
        kernel.launch(self.rank, grid=self.config.n_sms, block=self.config.num_threads, args=args, stream=stream, cooperative=True)

    def _begin(self, x: Any, topk_idx: Any, topk_weights: Any, validate: bool) -> DispatchHandle:
        config = self.config
        if self._open is not None:
            raise RuntimeError(f"a dispatch cannot begin: {self._open_text('dispatch', self._open)}; call dispatch_wait first")
        if self._combining is not None:
            raise RuntimeError(f"a dispatch cannot begin: {self._open_text('combine', self._combining)}; call combine_wait first")
        n_tokens = rows_of("x", x)
        if n_tokens > config.max_tokens_per_rank:
            raise ValueError(
                f"rank {self.rank.index}: x has {n_tokens} tokens, "
                f"but the layer was made for max_tokens_per_rank={config.max_tokens_per_rank}"
            )
        checks = (
            ("x", x, "bf16", config.hidden),
            ("topk_idx", topk_idx, "i32", config.top_k),
            ("topk_weights", topk_weights, "f32", config.top_k),
        )
        for name, value, dtype, columns in checks:
            check_array(name, value, dtype, (n_tokens, columns))
        if validate:
            self._validate(topk_idx)
        tokens, ids, weights = (on_device(self.rank, value, dtype) for name, value, dtype, _ in checks)
        return DispatchHandle(
            self._output,
            self._row_offsets,
            self._expert_ids,
            self._src_info,
            self._routed_ids,
            weights,
            n_tokens,
            self._launched + 1,
            (tokens, ids),
        )

    def _begin_combine(self, y: Any, handle: DispatchHandle) -> Any:
        config = self.config
        if handle.output is not self._output:
            raise RuntimeError("a combine of another layer's dispatch; give the handle that this layer's dispatch returned")
        if handle.launch != self._launched:
            raise RuntimeError(
                f"a combine of launch {handle.launch}, but the layer is at launch {self._launched}, which has overwritten what it needs; "
                "combine before the next dispatch"
            )
        if self._open is not None:
            raise RuntimeError(f"a combine cannot begin: {self._open_text('dispatch', self._open)}; call dispatch_wait first")
        if self._combining is not None:
            raise RuntimeError(f"a combine cannot begin: {self._open_text('combine', self._combining)}; call combine_wait first")
        check_array("y", y, "bf16", (config.max_recv_tokens, config.hidden))
        return on_device(self.rank, y, "bf16")

    def _output_of(self, out: DeviceArray | None, handle: DispatchHandle) -> DeviceArray:
        if out is None:
            return self._combined[: handle.n_tokens]
        check_array("out", out, self.config.output_type, (handle.n_tokens, self.config.hidden))
        if not hasattr(out, "view") or isinstance(out, np.ndarray):
            raise TypeError(f"out is a {type(out).__name__}; give a device array, such as rank.empty(...)")
        return out

    def _open_text(self, what: str, handle: DispatchHandle | None) -> str:
        return f"no {what} is under way" if handle is None else f"the {what} of launch {handle.launch} is under way"

    # ---- ids and rows the kernels refuse

    def _validate(self, topk_idx: Any) -> None:
        ids = np.asarray(topk_idx.numpy() if hasattr(topk_idx, "numpy") else topk_idx)
        if not ids.size:
            return
        n_experts = self.config.n_experts
        wrong = np.argwhere((ids < -1) | (ids >= n_experts))
        if len(wrong):
            row, column = (int(v) for v in wrong[0])
            raise self._error(STATUS_OUT_OF_RANGE, len(wrong), row, column)
        ordered = np.sort(ids, axis=1)
        rows = np.flatnonzero(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1))
        if len(rows):
            row = int(rows[0])
            seen = ids[row].tolist()
            column = next(k for k, expert in enumerate(seen) if expert >= 0 and expert in seen[:k])
            raise self._error(STATUS_REPEATED, len(rows), row, column)

    def _clear_status(self) -> None:
        clear = np.zeros(STATUS_WORDS, np.uint64)
        clear[1::2] = STATUS_NO_ROW
        self._status.copy_from(clear)

    def _check_status(self) -> None:
        words = [int(w) for w in self._status.numpy()]
        found = [self._error(kind, words[kind], words[kind + 1] >> 32, words[kind + 1] & 0xFFFFFFFF) for kind in _FAULTS if words[kind]]
        if found:
            self._clear_status()
            for other in found[1:]:
                found[0].add_note(f"and {other}")
            raise found[0]

    def _error(self, kind: int, count: int, row: int, column: int) -> RoutingError:
        name, text = _FAULTS[kind]
        others = f"; {count} in all" if count > 1 else ""
        what = text.format(row=row, column=column, last=self.config.n_experts - 1)
        return RoutingError(self.rank.index, name, count, row, column, f"rank {self.rank.index}: {what}{others}")


_FAULTS = {
    STATUS_OUT_OF_RANGE: ("out of range", "topk_idx[{row}, {column}] is not an expert: ids go from 0 to {last}, or -1 for none"),
    STATUS_REPEATED: ("repeated", "topk_idx[{row}, {column}] repeats an expert of its row; each may be named once"),
    STATUS_SRC_INFO: (
        "source",
        "row {row} of the dispatched rows has no valid source in src_info and was not sent back; "
        "something wrote over src_info after the dispatch",
    ),
}
