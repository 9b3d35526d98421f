"""The host side of the latency mode: buffers, `dispatch`, `combine`. Its kernels are in one of two protocols, with the same outputs:

flags   `epdsl.kernels.low_latency`: a flag a block and peer says that the payload before it is there
stamps  `epdsl.kernels.stamped`: each word says it of itself, at twice the bytes; quicker for few tokens

layer = LowLatencyMoE(rank, hidden=7168, n_experts=256, top_k=8, max_tokens_per_rank=128)
handle = layer.dispatch(x, topk_idx, topk_weights)
y = ...                              # bf16 rows, at the places of handle.rows
out = layer.combine(y, handle)       # [n_tokens, hidden] bf16
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from epdsl.env import TIMEOUT_NS
from epdsl.fingerprint import source_digests
from epdsl.kernels.low_latency import LowLatencyExchange
from epdsl.kernels.stamped import StampedExchange
from epdsl.moe_arrays import agreed_fields, check_tokens, dtype_of, on_device, output_of, tokens_on_device
from epdsl.sm_budget import budget

if TYPE_CHECKING:
    from epdsl_runtime.array import DeviceArray
    from epdsl_runtime.launch import Prepared
    from epdsl_runtime.rank import Rank, Symmetric

Protocol = Literal["flags", "stamps"]
STAMPED_SENDS = 32
"""Most tokens of a rank, times the ranks it sends each to, for which a layer takes stamps when it is not told what to take."""


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
        protocol: Protocol | None = None,
        timeout_ns: int | None = None,
    ) -> None:
        """Threads that are not given: one for 8 elements of a token, and at least one for each rank.

        n_blocks  with flags: see `sm_budget`; with stamps: max_tokens_per_rank, a block a token
        protocol  by default stamps for at most STAMPED_SENDS tokens times other ranks, where a block a token fits the device and n_blocks
                  is no other: a stamped payload goes to every rank, a flagged one only to those with an expert of the token

        Raises ValueError for what the kernels cannot be made for.
        """
        fits = max_tokens_per_rank < rank.device.info.num_sms and n_blocks in (None, max_tokens_per_rank)
        sends = max_tokens_per_rank * max(1, rank.size - 1)
        stamped = protocol == "stamps" or (protocol is None and sends <= STAMPED_SENDS and fits)
        family = StampedExchange if stamped else LowLatencyExchange
        blocks = budget(
            rank.device.info, "latency", fp8, max_tokens_per_rank, n_blocks or (max_tokens_per_rank if stamped else None)
        ).n_blocks
        # A thread for each flag that a block waits for, two of a rank.
        threads = num_threads or min(1024, -(-max(hidden // 8, 2 * rank.size) // 64) * 64)
        self.rank = rank
        self.kernel = k = family(
            hidden, n_experts, rank.size, top_k, max_tokens_per_rank, blocks, threads, fp8, timeout_ns or TIMEOUT_NS.get()
        )
        rank.agree("LowLatencyMoE", agreed_fields(k, ("timeout_ns",)) | source_digests(k.dispatch, k.combine))
        with rank.all_or_none():
            self._wire, self._back = _stamped_wire(rank, k) if isinstance(k, StampedExchange) else _flagged_wire(rank, k)
        self._dispatch_blocks = k.dispatch_blocks if isinstance(k, StampedExchange) else k.n_blocks
        self._epochs = rank.zeros("u32", self._dispatch_blocks)
        self._back_epochs = rank.zeros("u32", blocks)
        tokens = rank.size * max_tokens_per_rank
        self._banks = [self._outputs(tokens) for _ in range(2)]
        self._dispatches = 0

    @property
    def protocol(self) -> Protocol:
        return "stamps" if isinstance(self.kernel, StampedExchange) else "flags"

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
        k.dispatch.launch(self.rank, grid=self._dispatch_blocks, block=k.num_threads, args=args, stream=stream, cooperative=True)
        self._dispatches += 1
        return handle

    def prepare_dispatch(self, x: Any, topk_idx: Any, topk_weights: Any, stream: Any = None) -> tuple[Prepared, LowLatencyHandle]:
        """A dispatch of these device arrays to be launched again and again, each time into the same handle."""
        args, handle = self._dispatch(x, topk_idx, topk_weights)
        k = self.kernel
        grid, block = self._dispatch_blocks, k.num_threads
        prepared = k.dispatch.prepare(self.rank, grid=grid, block=block, args=args, stream=stream, cooperative=True)
        self._dispatches += 1
        return prepared, handle

    def _dispatch(self, x: Any, topk_idx: Any, topk_weights: Any) -> tuple[tuple[Any, ...], LowLatencyHandle]:
        k = self.kernel
        n_tokens = check_tokens(k, "bf16", x, topk_idx, topk_weights)
        bank = self._banks[self._dispatches % 2]
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
            *(each.peers for each in self._wire),
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
        y = on_device(self.rank, "y", y, "bf16")
        made, target = output_of(self.rank, out, handle.n_tokens, k.hidden)
        args = (
            y.view("u32"),
            handle.row_of,
            handle.weight_of,
            handle.source_tokens,
            handle.topk_idx,
            *(each.peers for each in self._back),
            self._back_epochs,
            target.view("u32"),
            self.rank.index,
        )
        return args, made

    def close(self) -> None:
        """Frees the buffers, on every rank together."""
        self.rank.release(*self._wire, *self._back)


Buffers = tuple["Symmetric", ...]


def _flagged_wire(rank: Rank, k: LowLatencyExchange) -> tuple[Buffers, Buffers]:
    """What the ranks write at each other in a dispatch, and in a combine, in order of the kernels' parameters."""

    def sender(word: int) -> int:
        return word // k.n_blocks % rank.size

    wire = (
        rank.symmetric("u32", 2 * k.bank_payload_words(), name="latency payload"),
        rank.symmetric("u32", 2 * k.bank_header_words(), name="latency headers"),
        rank.symmetric("u32", 2 * k.bank_count_words(), name="latency counts"),
        rank.symmetric("u64", k.flag_words(), "latency dispatch flags", sender),
    )
    back = (
        rank.symmetric("u32", 2 * k.back_words(), name="latency combine sums"),
        rank.symmetric("u64", k.flag_words(), "latency combine flags", sender),
    )
    return wire, back


def _stamped_wire(rank: Rank, k: StampedExchange) -> tuple[Buffers, Buffers]:
    """As `_flagged_wire`."""
    wire = rank.symmetric("u64", k.wire_words(), "latency words", lambda word: word // k.source_words % rank.size)
    back = rank.symmetric("u64", k.back_words(), "latency combine words", lambda word: word // k.source_sum_words % rank.size)
    return (wire,), (back,)
