"""The host side of the expert-parallel kernels: buffers for a configuration, `dispatch` and `combine`.

    layer = ExpertParallel(rank, hidden=7168, n_experts=256, top_k=8, max_tokens_per_rank=128)
    handle = layer.dispatch(x, topk_idx, topk_weights)     # handle.output, .row_offsets, .expert_ids, .src_info
    y = ...                                                # the experts, row by row of handle.output
    out = layer.combine(y, handle)                         # [n_tokens, hidden]

Every rank calls the same sequence, also with 0 tokens. Nothing here waits for the device: results are ready after
`rank.synchronize()`, which also raises `RoutingError` for what only the kernels could see.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from epdsl_runtime.errors import CodedError

from .fingerprint import source_digests
from .kernels.buffers import CombineState, DispatchState, FormatHandler, ReceivedTokens, TokenInput
from .kernels.layout import EPOCH_WORDS, STATUS_NO_ROW, STATUS_OUT_OF_RANGE, STATUS_REPEATED, STATUS_SRC_INFO, STATUS_WORDS
from .moe_arrays import as_bytes, check_array, check_input_scale, on_device, rows_of
from .moe_config import Completion, MoEConfig

if TYPE_CHECKING:
    from epdsl_runtime.array import DeviceArray
    from epdsl_runtime.rank import Rank

__all__ = ["Completion", "DispatchHandle", "ExpertParallel", "MoEConfig", "RoutingError"]

SIMULATED_BLOCKS = 8
SIMULATED_THREADS = 256
GPU_THREADS = 1024


def bundle(kind: Any, **fields: Any) -> Any:
    """A kernel's struct of host values: arrays and numbers, where its fields are declared as what the kernel sees."""
    return kind(**fields)


class RoutingError(CodedError, ValueError):
    """A kernel met selections or rows it could not use; they were left out and nothing was written outside a buffer.

    rank    the rank that saw it
    kind    "out of range", "repeated" or "source"
    count   how many
    row     the first row of topk_idx (or of the dispatched rows, for "source")
    column  its selection k
    """

    def __init__(self, rank: int, kind: str, count: int, row: int, column: int, text: str) -> None:
        super().__init__("EP320", text)
        self.rank, self.kind, self.count, self.row, self.column = rank, kind, count, row, column

    def __reduce__(self) -> tuple[Any, ...]:
        return RoutingError, (self.rank, self.kind, self.count, self.row, self.column, self.message)


@dataclass(frozen=True, eq=False)
class DispatchHandle:
    """What a dispatch made, on the device. The tensors are the layer's own and are overwritten by its next dispatch.

    A slot is a local expert; with fused_shared_expert slot 0 is the shared expert and the local ones follow.

    output         [max_recv_tokens, columns] of the format's type: received tokens, slot by slot; other rows are undefined
    scales         of the format's shape and type (see `TokenFormat.scale_shape`), None for bf16
    scale_offsets  i32 [slots]: for scales in tiles, a slot's first tile minus (its first row // 128); None without scales
    row_offsets    u32 [slots + 1]: slot s begins at row row_offsets[s]; it ends before the next, up to the format's row padding
    expert_counts  i32 [slots]: rows of each slot, without padding
    expert_ids     i32 [slots]: number of each slot
    src_info       i32 [max_recv_tokens, 2]: (token on its rank, selection k) of each row; k is -1 in the shared expert's
    routed_ids     i32 [max_tokens_per_rank, top_k]: this rank's topk_idx with what was not sent as -1
    topk_weights   f32 [n_tokens, top_k]: as given
    n_tokens       tokens this rank dispatched
    launch         number of the dispatch, from 1
    received       all of it as kernels take it
    shared         (first token, tokens) whose rows the shared expert got
    """

    output: DeviceArray
    scales: DeviceArray | None
    scale_offsets: DeviceArray | None
    row_offsets: DeviceArray
    expert_counts: DeviceArray
    expert_ids: DeviceArray
    src_info: DeviceArray
    routed_ids: DeviceArray
    topk_weights: DeviceArray
    n_tokens: int
    launch: int
    received: ReceivedTokens
    shared: tuple[int, int] = (0, 0)
    inputs: tuple[Any, ...] = ()


class ExpertParallel:
    """One rank's part of an expert-parallel layer. Every rank makes it with the same configuration, at the same time.

    `num_threads` and `n_sms` default to a launch that fills a GPU, and to something small on the simulator. `options` are the other
    fields of `MoEConfig`. `first_launch` is the number the launches count from; they are compared for equality alone, so any will do.

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
        first_launch: int = 0,
        **options: Any,
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
            **options,
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
        with rank.all_or_none():
            self._allocate(first_launch)
        self._remove_callback = rank.on_synchronize(self._check_status)
        # No rank may write to a peer whose counters are not yet zero.
        rank.barrier()

    def _agree(self) -> None:
        """Raises ValueError on every rank when two were given different layers, or have other kernels under the same names."""
        names = [f.name for f in fields(MoEConfig) if f.name not in ("n_ranks", "num_threads", "n_sms", "trace", "timeout_ns")]
        kernels = (self._dispatch_kernel.dispatch, self._combine_kernel.combine)
        self.rank.agree("ExpertParallel", {name: getattr(self.config, name) for name in names} | source_digests(*kernels))

    def _allocate(self, first_launch: int) -> None:
        rank, config = self.rank, self.config
        dispatch, combine, made = self._dispatch_kernel, self._combine_kernel, self.config.format
        tokens, rows, slots = config.max_tokens_per_rank, config.max_recv_tokens, dispatch.n_slots

        def same(word: int) -> int:
            return word

        def sender(word: int, kernel: Any, n_pairs: int, sources: int) -> int | None:
            """The rank that writes a word of the counts: pairs' words, then one a rank, then words of this rank's own."""
            if config.skip_a2a:
                return rank.index
            flag = word - kernel.rank_flag_base
            return word % sources if word < n_pairs else flag if 0 <= flag < rank.size else None

        def dispatcher(word: int) -> int | None:
            return sender(word, dispatch, dispatch.n_pairs, dispatch.n_sources)

        def combiner(word: int) -> int | None:
            return sender(word, combine, combine.n_pairs, combine.n_targets)

        self._recv_bufs = rank.symmetric("u8", dispatch.recv_buf_size(), "dispatch recv_buf")
        self._recv_counts = rank.symmetric("u64", dispatch.recv_count_size(), "dispatch recv_count", dispatcher)
        self._consumed = rank.symmetric("u32", rank.size, "dispatch consumed", same)
        self._reservations = rank.symmetric("u64", dispatch.reservations_size(), "dispatch reservations")
        self._combine_recv_bufs = rank.symmetric("u8", combine.recv_buf_size(), "combine recv_buf")
        self._combine_recv_counts = rank.symmetric("u64", combine.recv_count_size(), "combine recv_count", combiner)
        self._combine_consumed = rank.symmetric("u32", rank.size, "combine consumed", same)
        self._send_buf = rank.zeros("u8", dispatch.send_buf_size())
        self._counters = rank.zeros("i32", dispatch.counters.total_size)
        self._mailbox = rank.zeros("i32", dispatch.mailbox_size())
        self._epochs = rank.array(np.full(EPOCH_WORDS, first_launch, np.uint32))
        for consumed in (self._consumed, self._combine_consumed):
            consumed.local.copy_from(np.full(rank.size, first_launch, np.uint32))
        self._status = rank.empty("u64", STATUS_WORDS)
        self._clear_status()
        self.trace_memory = rank.zeros("u64", config.trace.words(config.n_sms))
        self._unit_scale = rank.array(np.ones(1, np.float32))
        self._output = rank.empty(made.output_dtype, (rows, made.output_columns))
        self._scales = rank.zeros(made.scale_dtype, made.scale_shape(rows, slots)) if made.group_size else None
        self._scale_offsets = rank.zeros("i32", slots)
        self._row_offsets = rank.zeros("u32", slots + 1)
        self._expert_counts = rank.zeros("i32", slots)
        self._expert_ids = rank.zeros("i32", slots)
        self._src_info = rank.empty("i32", (rows, 2))
        self._routed_ids = rank.empty("i32", (tokens, config.top_k))
        self._combined = rank.empty(config.output_type, (tokens * (config.top_k if config.unreduced else 1), config.hidden))
        shared = {"counters": self._counters, "epochs": self._epochs, "status": self._status, "trace": self.trace_memory}
        self._dispatch_state = bundle(
            DispatchState,
            recv_bufs=self._recv_bufs.peers,
            recv_counts=self._recv_counts.peers,
            consumed=self._consumed.peers,
            reservations=self._reservations.peers,
            mailbox=self._mailbox,
            my_rank=rank.index,
            **shared,
        )
        self._combine_state = bundle(
            CombineState,
            recv_bufs=self._combine_recv_bufs.peers,
            recv_counts=self._combine_recv_counts.peers,
            consumed=self._combine_consumed.peers,
            my_rank=rank.index,
            **shared,
        )

    def close(self) -> None:
        """Collective: frees the buffers that peers reach. Without it `rank.close()` does so at the end of the job."""
        self._remove_callback()
        self.rank.release(
            self._recv_bufs,
            self._recv_counts,
            self._consumed,
            self._reservations,
            self._combine_recv_bufs,
            self._combine_recv_counts,
            self._combine_consumed,
        )

    # ---- dispatch

    def dispatch(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        *,
        scales: Any = None,
        input_scale: Any = None,
        shared_tokens: tuple[int, int] | None = None,
        validate: bool = False,
        stream: Any = None,
    ) -> DispatchHandle:
        """Sends every token to its experts and receives those for this rank's, in one launch.

        x              bf16 [n, hidden], n from 0 to max_tokens_per_rank; with prequantized, the format's output type and columns
        topk_idx       i32 [n, top_k]: experts of each token, -1 for none
        topk_weights   f32 [n, top_k]: used by the combine
        scales         with prequantized: [n, groups] of the format's scale type
        input_scale    f32 [1] or a number above 0: the global scale of a format that has one (nvfp4); 1 by default
        shared_tokens  with fused_shared_expert: (first, count) of the tokens for this rank's shared expert; all by default
        validate       also read topk_idx on the host and raise before the launch for an id that is out of range or repeated in its row

        Each is a device array, a NumPy array (uploaded), or an array of another library on this device.
        Raises TypeError or ValueError before anything is launched. Ids the kernel finds wrong are left out and raise `RoutingError` at
        the next synchronisation.
        """
        handle, tokens = self._begin(x, topk_idx, topk_weights, scales, input_scale, shared_tokens, validate)
        self._launch(self._dispatch_kernel.dispatch, (self._dispatch_state, tokens, handle.received), stream)
        self._launched += 1
        return handle

    def dispatch_arguments(self, x: Any, topk_idx: Any, topk_weights: Any, **options: Any) -> tuple[DispatchHandle, Any, Any]:
        """For a kernel of your own that runs all phases of a dispatch: (handle, its DispatchState, its TokenInput), options as above.

        The third struct such a kernel needs is handle.received. Its launch must follow: it counts as this layer's.
        """
        handle, tokens = self._begin(x, topk_idx, topk_weights, **{**_NO_OPTIONS, **options})
        self._launched += 1
        return handle, self._dispatch_state, tokens

    def dispatch_async(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        *,
        scales: Any = None,
        input_scale: Any = None,
        shared_tokens: tuple[int, int] | None = None,
        validate: bool = False,
        stream: Any = None,
    ) -> DispatchHandle:
        """The sending half of `dispatch`. The handle's tensors are filled by `dispatch_wait`."""
        handle, tokens = self._begin(x, topk_idx, topk_weights, scales, input_scale, shared_tokens, validate)
        self._launch(self._dispatch_kernel.dispatch_async, (self._dispatch_state, tokens), stream)
        self._launched += 1
        self._open = handle
        return handle

    def dispatch_wait(self, handle: DispatchHandle, *, stream: Any = None) -> DispatchHandle:
        """The receiving half. Returns `handle`.

        Raises RuntimeError when `handle` is not of the dispatch that was begun last.
        """
        if self._open is not handle:
            raise RuntimeError(f"dispatch_wait of launch {handle.launch}, but {self._open_text('dispatch', self._open)}")
        args = (self._dispatch_state, handle.received, self._send_buf, *handle.shared)
        self._launch(self._dispatch_kernel.dispatch_wait, args, stream)
        self._open = None
        return handle

    # ---- combine

    def combine(self, y: Any, handle: DispatchHandle, *, out: DeviceArray | None = None, stream: Any = None) -> DeviceArray:
        """Sends the experts' rows back and sums each token's rows times its weights, in one launch.

        y    bf16 [max_recv_tokens, hidden]: one row for each row of handle.output
        out  where to write, [n_tokens, hidden] of output_type; by default memory of the layer, overwritten by its next combine

        Sums in f32 in order of k. Selections that were not sent contribute nothing; the shared expert's row is added last. With skip_a2a
        the sum is over this rank's experts. With unreduced there is no sum and the result is [n_tokens * top_k, hidden]. Returns it.
        Raises TypeError or ValueError before anything is launched; RuntimeError when another dispatch was made after `handle`'s.
        """
        source, target = self._begin_combine(y, handle), self._output_of(out, handle)
        args = (self._combine_state, source, self._src_info, *self._reduce_args(target, handle))
        self._launch(self._combine_kernel.combine, args, stream)
        return target

    def combine_async(self, y: Any, handle: DispatchHandle, *, stream: Any = None) -> None:
        """The sending half of `combine`."""
        source = self._begin_combine(y, handle)
        self._launch(self._combine_kernel.combine_async, (self._combine_state, source, self._src_info), stream)
        self._combining, self._combine_input = handle, source

    def combine_wait(self, handle: DispatchHandle, *, out: DeviceArray | None = None, stream: Any = None) -> DeviceArray:
        """The receiving half. Returns [n_tokens, hidden].

        Raises RuntimeError when `handle` is not of the combine that was begun last.
        """
        if self._combining is not handle:
            raise RuntimeError(f"combine_wait of launch {handle.launch}, but {self._open_text('combine', self._combining)}")
        target = self._output_of(out, handle)
        args = (self._combine_state, self._combine_input, *self._reduce_args(target, handle))
        self._launch(self._combine_kernel.combine_wait, args, stream)
        self._combining = None
        return target

    # ---- what both need

    def _reduce_args(self, target: DeviceArray, handle: DispatchHandle) -> tuple[Any, ...]:
        return as_bytes(self.rank, "out", target), handle.routed_ids, handle.topk_weights, handle.n_tokens, *handle.shared

    def _launch(self, kernel: Any, args: tuple[Any, ...], stream: Any) -> None:
        # Blocks wait for each other, so the whole grid must be resident: a cooperative launch refuses any other.
        kernel.launch(self.rank, grid=self.config.n_sms, block=self.config.num_threads, args=args, stream=stream, cooperative=True)

    def _begin(
        self,
        x: Any,
        topk_idx: Any,
        topk_weights: Any,
        scales: Any,
        input_scale: Any,
        shared_tokens: tuple[int, int] | None,
        validate: bool,
    ) -> tuple[DispatchHandle, TokenInput]:
        config, made = self.config, self.config.format
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
        checks = [
            ("x", x, *((made.output_dtype, made.output_columns) if made.prequantized else ("bf16", config.hidden))),
            ("topk_idx", topk_idx, "i32", config.top_k),
            ("topk_weights", topk_weights, "f32", config.top_k),
        ]
        if made.prequantized and made.group_size:
            if scales is None:
                raise ValueError(f"tokens that are quantised already need scales, {made.scale_dtype} [{n_tokens}, {made.n_groups}]")
            checks.append(("scales", scales, made.scale_dtype, made.n_groups))
        elif scales is not None:
            raise ValueError("scales are for tokens that are quantised already; make the layer with prequantized=True")
        for name, value, dtype, columns in checks:
            check_array(name, value, dtype, (n_tokens, columns))
        if input_scale is not None:
            input_scale = check_input_scale(input_scale, made.has_global_scale, type(made).__name__)
        if validate:
            self._validate(topk_idx)
        shared = self._shared_tokens(shared_tokens, n_tokens)
        tokens, ids, weights, *given = (on_device(self.rank, name, value, dtype) for name, value, dtype, _ in checks)
        overall = self._unit_scale if input_scale is None else on_device(self.rank, "input_scale", input_scale, "f32")
        input_scales = given[0] if given else overall
        received = bundle(
            ReceivedTokens,
            handler=bundle(
                FormatHandler,
                output=self._output.view("u8"),
                scales=(self._output if self._scales is None else self._scales).view("u8"),
                scale_offsets=self._scale_offsets,
                n_rows=config.max_recv_tokens,
                input_scale=overall,
            ),
            row_offsets=self._row_offsets,
            expert_ids=self._expert_ids,
            expert_counts=self._expert_counts,
            src_info=self._src_info,
            l1_arrival=self._row_offsets,
        )
        handle = DispatchHandle(
            self._output,
            self._scales,
            self._scale_offsets if made.scales_in_tiles else None,
            self._row_offsets,
            self._expert_counts,
            self._expert_ids,
            self._src_info,
            self._routed_ids,
            weights,
            n_tokens,
            self._launched + 1,
            received,
            shared,
            (tokens, ids, input_scales),
        )
        return handle, bundle(
            TokenInput,
            tokens=as_bytes(self.rank, "x", tokens),
            scales=as_bytes(self.rank, "scales", input_scales),
            topk_ids=ids,
            n_tokens=n_tokens,
            send_buf=self._send_buf,
            routed_ids=self._routed_ids,
            shared_start=shared[0],
            shared_count=shared[1],
        )

    def _shared_tokens(self, given: tuple[int, int] | None, n_tokens: int) -> tuple[int, int]:
        if not self.config.fused_shared_expert:
            if given is not None:
                raise ValueError("shared_tokens are for a layer with fused_shared_expert=True")
            return 0, 0
        start, count = given or (0, n_tokens)
        if start < 0 or count < 0 or start + count > n_tokens:
            raise ValueError(f"shared_tokens=({start}, {count}) are not tokens of the {n_tokens} given")
        return start, count

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
        return on_device(self.rank, "y", y, "bf16")

    def _output_of(self, out: DeviceArray | None, handle: DispatchHandle) -> DeviceArray:
        rows = handle.n_tokens * (self.config.top_k if self.config.unreduced else 1)
        if out is None:
            return self._combined[:rows]
        check_array("out", out, self.config.output_type, (rows, self.config.hidden))
        if not hasattr(out, "view") or isinstance(out, np.ndarray):
            raise TypeError(f"out is a {type(out).__name__}; give a device array, such as rank.empty(...)")
        return out

    def _open_text(self, what: str, handle: DispatchHandle | None) -> str:
        return f"no {what} is under way" if handle is None else f"the {what} of launch {handle.launch} is under way"

    # ---- ids and rows the kernels refuse

    def _validate(self, topk_idx: Any) -> None:
        ids = topk_idx if isinstance(topk_idx, np.ndarray) else on_device(self.rank, "topk_idx", topk_idx, "i32").numpy()
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


_NO_OPTIONS: dict[str, Any] = {"scales": None, "input_scale": None, "shared_tokens": None, "validate": False}

_FAULTS = {
    STATUS_OUT_OF_RANGE: ("out of range", "topk_idx[{row}, {column}] is not an expert: ids go from 0 to {last}, or -1 for none"),
    STATUS_REPEATED: ("repeated", "topk_idx[{row}, {column}] repeats an expert of its row; each may be named once"),
    STATUS_SRC_INFO: (
        "source",
        "row {row} of the dispatched rows has no valid source in src_info and was not sent back; "
        "something wrote over src_info after the dispatch",
    ),
}
