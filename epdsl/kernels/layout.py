"""Where the words of the control buffers lie. Plain arithmetic: neither the language nor a device is needed.

Names and order follow the public description of the counter block (`EPLocalSyncCounters`). Two things differ from it:

* The combine has counters of its own. In the original its election counter is laid over the dispatch's prefix sums, which leave
  an arbitrary value there.
* Words that other blocks or ranks wait for hold the number of the launch, so nothing has to be set back between launches.
"""

from __future__ import annotations

from dataclasses import dataclass

from epdsl.env import TIMEOUT_NS

EP_DATA_READY_FLAG = 1024
"""Added to the end row in a pair's counter word, so that "ends at row 0" differs from memory nobody wrote."""

DROPPED = 0xFFFF
"""The expert id in a message's header that stands for a selection that is not sent."""

ROUTE_NONE = -1
ROUTE_OUT_OF_RANGE = -2
ROUTE_REPEATED = -3

DISPATCH_EPOCH = 0
COMBINE_EPOCH = 1
EPOCH_WORDS = 2

STATUS_OUT_OF_RANGE = 0
STATUS_REPEATED = 2
STATUS_SRC_INFO = 4
STATUS_WORDS = 6
"""Each kind of fault has two u64 words: how often it was seen, and the smallest `row << 32 | column` it was seen at."""
STATUS_NO_ROW = 0xFFFFFFFFFFFFFFFF

VECTOR_BYTES = 16

MAX_BLOCK_THREADS = 1024
"""Threads of the largest block on every target."""

DEFAULT_TIMEOUT_NS = TIMEOUT_NS.get()


def ceildiv(a: int, b: int) -> int:
    return -(-a // b)


def align_up(n: int, alignment: int) -> int:
    return ceildiv(n, alignment) * alignment


@dataclass(frozen=True)
class EPLocalSyncCounters:
    """Offsets, in i32 words, of the counter block each rank keeps for itself. All zero before the first launch."""

    n_experts: int
    n_ranks: int

    @property
    def dispatch_async_size(self) -> int:
        """expert_reserved [E], expert_finished [E], rank_completion [R]."""
        return align_up(2 * self.n_experts + max(8, self.n_ranks), 4)

    @property
    def dispatch_wait_size(self) -> int:
        """The block that `EPDispatchKernel`'s `*_offset` members index."""
        return align_up(8 * self.n_experts + 8, 4)

    @property
    def combine_size(self) -> int:
        """rank_completion [R], cleanup, ready."""
        return align_up(max(8, self.n_ranks) + 2, 4)

    @property
    def expert_reserved_base(self) -> int:
        return 0

    @property
    def expert_finished_base(self) -> int:
        return self.n_experts

    @property
    def dispatch_rank_completion_base(self) -> int:
        return 2 * self.n_experts

    @property
    def dispatch_wait_base(self) -> int:
        return self.dispatch_async_size

    @property
    def combine_base(self) -> int:
        return self.dispatch_wait_base + self.dispatch_wait_size

    @property
    def total_size(self) -> int:
        return self.combine_base + self.combine_size


def refuse_unserved(kernel: str, **parameters: bool) -> None:
    """Raises NotImplementedError naming the first parameter that is set."""
    for name, value in parameters.items():
        if value:
            raise NotImplementedError(f"{kernel}: {name}={value!r} is not served; leave {name} at False")


def check_geometry(
    kernel: str, num_threads: int, n_sms: int, n_experts: int, n_ranks: int, p2p_world_size: int, top_k: int, max_tokens: int
) -> None:
    """What both kernels need of their parameters.

    Raises ValueError with both numbers, NotImplementedError when the ranks do not all reach each other.
    """
    if n_ranks < 1 or n_experts < 1 or n_experts % n_ranks:
        raise ValueError(f"{kernel}: {n_experts} experts cannot be divided over {n_ranks} ranks; n_experts must be a multiple of n_ranks")
    if p2p_world_size != n_ranks:
        raise NotImplementedError(
            f"{kernel}: p2p_world_size={p2p_world_size} with {n_ranks} ranks is not served; "
            f"every rank must reach every other, so set it to {n_ranks}"
        )
    if not 1 <= top_k <= n_experts:
        raise ValueError(f"{kernel}: top_k={top_k} of {n_experts} experts; top_k must be between 1 and n_experts")
    if n_experts > DROPPED:
        raise ValueError(f"{kernel}: {n_experts} experts do not fit the message header's 16-bit ids; at most {DROPPED}")
    if num_threads < 64 or num_threads % 64:
        raise ValueError(f"{kernel}: num_threads={num_threads} must be a multiple of 64, so that it is whole warps on every vendor")
    if num_threads > MAX_BLOCK_THREADS:
        raise ValueError(f"{kernel}: num_threads={num_threads}, but no GPU's block has more than {MAX_BLOCK_THREADS} threads; use fewer")
    if n_sms < 2:
        raise ValueError(f"{kernel}: n_sms={n_sms}, but at least 2 blocks are needed: one monitors or waits while the others copy")
    rows = max_tokens * n_ranks * top_k
    if max_tokens < 1 or rows >= 2**31:
        raise ValueError(
            f"{kernel}: max_tokens_per_rank={max_tokens} with top_k={top_k} on {n_ranks} ranks is {rows} rows; "
            "it must be at least 1 and below 2**31"
        )
