"""What a configuration of the expert-major mode is, and the sizes that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from epdsl.env import TIMEOUT_NS

from .blockwise import GROUP
from .exchange import GROUP_THREADS, check_experts, check_groups, check_hidden, check_roles

MASK_BITS = 32
"""Tokens of a block that one word of a bit mask of `ExpertMajorPlaces` stands for."""


@dataclass(frozen=True)
class ExpertMajorParameters:
    """A configuration of the expert-major mode; equal on every rank. Raises ValueError for one that is none.

    hidden               elements of a token, bf16; a multiple of 128, of 512 with fp8
    n_experts, n_ranks   rank r has the experts from r * n_experts / n_ranks on
    top_k                selections a token has
    max_tokens_per_rank  most tokens a rank may dispatch at once
    n_blocks             blocks of a launch, all resident at once: the share of the device it takes
    num_threads          threads of a block in the dispatch and in the combine, groups of 128
    send_blocks          blocks that send, in the dispatch and in the combine; the others expand or sum
    fp8                  whether the dispatch carries e4m3 with a f32 scale per 128 elements, quantised here; else bf16
    alignment            an expert's first row is a multiple of it
    timeout_ns           how long any wait may take
    """

    hidden: int
    n_experts: int
    n_ranks: int
    top_k: int
    max_tokens_per_rank: int
    n_blocks: int
    num_threads: tuple[int, int] = (512, 896)
    send_blocks: tuple[int, int] = (104, 55)
    fp8: bool = True
    alignment: int = 1
    timeout_ns: int = field(default_factory=TIMEOUT_NS.get)

    def __post_init__(self) -> None:
        check_hidden(self.hidden, self.fp8)
        check_experts(self.n_experts, self.n_ranks, self.top_k)
        for threads in self.num_threads:
            check_groups(threads)
        if self.n_ranks > GROUP_THREADS:
            raise ValueError(f"n_ranks={self.n_ranks}; a thread of a group waits for each rank's sum, so at most {GROUP_THREADS}")
        if not 1 <= self.max_tokens_per_rank <= 1 << 16:
            raise ValueError(f"max_tokens_per_rank={self.max_tokens_per_rank}; it must be from 1 to {1 << 16}")
        if self.alignment < 1:
            raise ValueError(f"alignment={self.alignment}; it must be at least 1")
        for name, blocks in zip(("dispatch", "combine"), self.send_blocks, strict=True):
            check_roles(name, blocks, self.n_blocks)

    # ---- sizes

    @property
    def n_local_experts(self) -> int:
        return self.n_experts // self.n_ranks

    @property
    def vectors(self) -> int:
        """Pieces of 8 elements a token has."""
        return self.hidden // 8

    @property
    def trips(self) -> int:
        """How often a group's threads go over a token on its way out."""
        return -(-self.pieces // GROUP_THREADS)

    @property
    def pieces(self) -> int:
        """Pieces of 16 bytes that a token's elements are on the wire and in the output."""
        return self.hidden // (16 if self.fp8 else 8)

    @property
    def groups(self) -> int:
        """Scales of a token."""
        return self.hidden // GROUP

    @property
    def payload_words(self) -> int:
        """u32 words of a token on the wire: its pieces, then its scales."""
        return 4 * self.pieces + (self.groups if self.fp8 else 0)

    @property
    def max_rows(self) -> int:
        """Rows a rank may need, each expert's first row aligned."""
        selections = self.n_ranks * self.max_tokens_per_rank * min(self.top_k, self.n_local_experts)
        return selections + self.n_local_experts * (self.alignment - 1)

    @property
    def bank_tokens(self) -> int:
        """Tokens of all sources: entries of one bank of the receive buffers and flags."""
        return self.n_ranks * self.max_tokens_per_rank

    @property
    def bank_counts(self) -> int:
        """u64 words of one bank of the counts: per source each local expert's, then its tokens."""
        return self.n_ranks * (self.n_local_experts + 1)

    @property
    def run(self) -> int:
        """Most tokens a block sends."""
        return -(-self.max_tokens_per_rank // self.send_blocks[0])

    @property
    def tally_words(self) -> int:
        """Words of a block's counts for each expert: the tokens before its own, then a bit for each of its own."""
        return 1 + -(-self.run // MASK_BITS)
