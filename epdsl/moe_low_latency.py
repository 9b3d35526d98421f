"""The host side of the latency mode (see `epdsl.kernels.low_latency`): buffers, `dispatch`, `combine`.

layer = LowLatencyMoE(rank, hidden=7168, n_experts=256, top_k=8, max_tokens_per_rank=128)
handle = layer.dispatch(x, topk_idx, topk_weights)
y = ...                              # bf16 rows, at the places of handle.rows
out = layer.combine(y, handle)       # [n_tokens, hidden] bf16
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from epdsl.env import TIMEOUT_NS
from epdsl.fingerprint import source_digests
from epdsl.kernels.low_latency import LowLatencyExchange
from epdsl.moe_arrays import agreed_fields, check_tokens, dtype_of, on_device, tokens_on_device
from epdsl.sm_budget import budget

if TYPE_CHECKING:
    from epdsl_runtime.array import DeviceArray
    from epdsl_runtime.launch import Prepared
    from epdsl_runtime.rank import Rank


@dataclass(frozen=True, eq=False)
class LowLatencyHandle:
    """What a dispatch brought. Valid until the second dispatch after it, or the next replay of its graph.

    rows           [n_local_experts, capacity, hidden] e4m3 or bf16; expert e's rows are the first expert_counts[e]
    scales         [n_local_experts, capacity, hidden / 128] f32, None without fp8
    expert_counts  [n_local_experts] i32
    row_of         [n_ranks, max_tokens_per_rank, top_k] i32: where each selection's row is, -1 when not here
    n_tokens       tokens this rank dispatched
    """

    rows: DeviceArray
    scales: DeviceArray | None
    expert_counts: DeviceArray
    row_of: DeviceArray
    weight_of: DeviceArray
    source_tokens: DeviceArray
    topk_idx: DeviceArray
    n_tokens: int


class LowLatencyMoE:
    """Buffers and kernels of one layer on one rank. Every rank makes it with the same arguments and calls the same sequence."""

    def __init__(
        self,
        rank: Rank,
        *,
        hidden: int,
        n_experts: int,
        top_k: int,
        max_tokens_per_rank: int,
        fp8: bool = True,
        n_blocks: int | None = None,
        num_threads: int | None = None,
        timeout_ns: int | None = None,
    ) -> None:
        """Blocks that are not given: see `sm_budget`; threads: one for 8 elements of a token, and at least one for each rank."""
        blocks = budget(rank.device.info, "latency", fp8, max_tokens_per_rank, n_blocks).n_blocks
        threads = num_threads or min(1024, -(-max(hidden // 8, rank.size) // 64) * 64)
        self.rank = rank
        self.kernel = k = LowLatencyExchange(
            hidden, n_experts, rank.size, top_k, max_tokens_per_rank, blocks, threads, fp8, timeout_ns or TIMEOUT_NS.get()
        )
        tokens = rank.size * max_tokens_per_rank
        rank.agree("LowLatencyMoE", agreed_fields(k, ("timeout_ns",)) | source_digests(k.dispatch, k.combine))

        def sender(word: int) -> int:
            return word // blocks % rank.size

        with rank.all_or_none():
            self._recv = rank.symmetric("u32", 2 * k.bank_payload_words(), name="latency payload")
            self._headers = rank.symmetric("u32", 2 * k.bank_header_words(), name="latency headers")
            self._counts = rank.symmetric("u32", 2 * k.bank_count_words(), name="latency counts")
            self._flags = rank.symmetric("u64", k.flag_words(), "latency dispatch flags", sender)
            self._back = rank.symmetric("u32", 2 * k.back_words(), name="latency combine sums")
            self._back_flags = rank.symmetric("u64", k.flag_words(), "latency combine flags", sender)
        self._epochs = rank.zeros("u32", blocks)
        self._back_epochs = rank.zeros("u32", blocks)
        self._banks = [self._outputs(tokens) for _ in range(2)]
        self._dispatches = 0

    def _outputs(self, tokens: int) -> LowLatencyHandle:
        rank, k = self.rank, self.kernel
        shape = (k.n_local_experts, k.capacity)
        return LowLatencyHandle(
            rows=rank.empty("f8e4m3" if k.fp8 else "bf16", (*shape, k.hidden)),
            scales=rank.empty("f32", (*shape, k.groups)) if k.fp8 else None,
            expert_counts=rank.zeros("i32", k.n_local_experts),
            row_of=rank.empty("i32", (rank.size, k.max_tokens_per_rank, k.top_k)),
            weight_of=rank.empty("f32", (rank.size, k.max_tokens_per_rank, k.top_k)),
            source_tokens=rank.zeros("i32", rank.size),
            topk_idx=rank.empty("i32", (k.max_tokens_per_rank, k.top_k)),
            n_tokens=tokens,
        )

    def dispatch(self, x: Any, topk_idx: Any, topk_weights: Any, stream: Any = None) -> LowLatencyHandle:
        """Sends x [n_tokens, hidden] bf16 to the experts topk_idx [n_tokens, top_k] i32; topk_weights f32 alike. Returns at once.

        Raises ValueError or TypeError, before anything is launched, for a wrong shape or dtype or too many tokens.
        """
        args, handle = self._dispatch(x, topk_idx, topk_weights)
        k = self.kernel
        k.dispatch.launch(self.rank, grid=k.n_blocks, block=k.num_threads, args=args, stream=stream, cooperative=True)
        return handle

    def prepare_dispatch(self, x: Any, topk_idx: Any, topk_weights: Any, stream: Any = None) -> tuple[Prepared, LowLatencyHandle]:
        """A dispatch of these device arrays to be launched again and again, each time into the same handle."""
        args, handle = self._dispatch(x, topk_idx, topk_weights)
        k = self.kernel
        prepared = k.dispatch.prepare(self.rank, grid=k.n_blocks, block=k.num_threads, args=args, stream=stream, cooperative=True)
        return prepared, handle

    def _dispatch(self, x: Any, topk_idx: Any, topk_weights: Any) -> tuple[tuple[Any, ...], LowLatencyHandle]:
        k = self.kernel
        n_tokens = check_tokens(k, "bf16", x, topk_idx, topk_weights)
        bank = self._banks[self._dispatches % 2]
        self._dispatches += 1
        if n_tokens:
            x, topk_idx, topk_weights = tokens_on_device(self.rank, "bf16", x, topk_idx, topk_weights)
        else:
            # Nothing is read from them; an empty array has no address to pass.
            x, topk_idx, topk_weights = bank.rows, bank.topk_idx, bank.weight_of
        args = (
            x.view("u32"),
            topk_idx,
            topk_weights,
            n_tokens,
            self._recv.peers,
            self._headers.peers,
            self._counts.peers,
            self._flags.peers,
            self._epochs,
            bank.rows.view("u32"),
            bank.scales if bank.scales is not None else bank.weight_of,
            bank.expert_counts,
            bank.row_of,
            bank.weight_of,
            bank.source_tokens,
            self.rank.index,
        )
        return args, replace(bank, topk_idx=topk_idx, n_tokens=n_tokens)

    def combine(self, y: Any, handle: LowLatencyHandle, out: Any = None, stream: Any = None) -> DeviceArray:
        """The weighted sums of the experts' rows, at their source: [n_tokens, hidden] bf16. y [n_local_experts, capacity, hidden] bf16."""
        args, made = self._combine(y, handle, out)
        k = self.kernel
        k.combine.launch(self.rank, grid=k.n_blocks, block=k.num_threads, args=args, stream=stream, cooperative=True)
        return made if handle.n_tokens == made.shape[0] else made[: handle.n_tokens]

    def prepare_combine(self, y: Any, handle: LowLatencyHandle, out: DeviceArray, stream: Any = None) -> Prepared:
        """A combine of these device arrays to be launched again and again."""
        args, _ = self._combine(y, handle, out)
        k = self.kernel
        return k.combine.prepare(self.rank, grid=k.n_blocks, block=k.num_threads, args=args, stream=stream, cooperative=True)

    def _combine(self, y: Any, handle: LowLatencyHandle, out: Any) -> tuple[tuple[Any, ...], DeviceArray]:
        k = self.kernel
        expected = (k.n_local_experts, k.capacity, k.hidden)
        if tuple(y.shape) != expected or dtype_of(y) != "bf16":
            raise ValueError(f"y is {dtype_of(y)} of shape {tuple(y.shape)}, expected bf16 of shape {expected}")
        y = on_device(self.rank, y, "bf16")
        made = out if out is not None else self.rank.empty("bf16", (max(1, handle.n_tokens), k.hidden))
        args = (
            y.view("u32"),
            handle.row_of,
            handle.weight_of,
            handle.source_tokens,
            handle.topk_idx,
            self._back.peers,
            self._back_flags.peers,
            self._back_epochs,
            on_device(self.rank, made, "bf16").view("u32"),
            self.rank.index,
        )
        return args, made

    def close(self) -> None:
        """Frees the buffers, on every rank together."""
        self.rank.release(self._recv, self._headers, self._counts, self._flags, self._back, self._back_flags)
