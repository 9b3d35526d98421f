"""What a rank of an expert-parallel layer must receive and give back, for every option of the layer. NumPy alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import reference, reference_formats

if TYPE_CHECKING:
    from .moe import DispatchHandle, ExpertParallel


@dataclass(frozen=True)
class ReferenceLayer:
    """The options that change what is right.

    token_format, input_scale    name of the format and its global scale
    skip_a2a                     every rank has the same tokens and keeps to its own experts
    shared                       this rank's tokens also go to a shared expert: all, or with skip_a2a the rank's share of them
    """

    n_experts: int
    n_ranks: int
    token_format: str = "bf16"
    input_scale: float = 1.0
    skip_a2a: bool = False
    shared: bool = False
    unreduced: bool = False
    any_order: bool = False
    scale_rounding: str | None = None

    def shared_part(self, rank: int, n_tokens: int) -> tuple[int, int] | None:
        """(first, count) of the tokens for a rank's shared expert; None without one."""
        if not self.shared:
            return None
        if not self.skip_a2a:
            return 0, n_tokens
        start = rank * (n_tokens // self.n_ranks) + min(rank, n_tokens % self.n_ranks)
        return start, (n_tokens + self.n_ranks - rank - 1) // self.n_ranks

    def sent(self, routings: Sequence[reference.Routing], rank: int) -> list[reference.Routing]:
        """Every rank's routing as far as `rank` sees it: with skip_a2a only its own, and only its experts."""
        if not self.skip_a2a:
            return list(routings)
        own = reference.local_selections(routings[rank].topk_idx, self.n_experts, self.n_ranks, rank)
        return [
            reference.Routing(own if r == rank else np.full_like(routing.topk_idx, -1), routing.topk_weights)
            for r, routing in enumerate(routings)
        ]

    def quantize(self, x: NDArray[Any]) -> reference_formats.Quantized:
        return reference_formats.quantize(self.token_format, x, self.input_scale, self.scale_rounding)

    def expanded(self, x: NDArray[Any]) -> NDArray[np.float32]:
        """Tokens as an expert sees them."""
        return reference_formats.dequantize(self.token_format, self.quantize(x), self.input_scale)

    def check_dispatch(
        self,
        layer: ExpertParallel,
        handle: DispatchHandle,
        rank: int,
        tokens: Sequence[NDArray[Any]],
        routings: Sequence[reference.Routing],
    ) -> list[str]:
        """What is wrong with what `rank` received, bit for bit."""
        made = layer.config.format
        sent = self.sent(routings, rank)
        offsets, ids, counts = (a.numpy() for a in (handle.row_offsets, handle.expert_ids, handle.expert_counts))
        total = int(offsets[-1])
        packed = [self.quantize(t) for t in tokens]
        part = self.shared_part(rank, len(tokens[rank]))
        sources = handle.src_info[:total].numpy()
        options: dict[str, Any] = {"padding": made.row_padding, "shared": part, "any_order": self.any_order}
        output = handle.output[:total].numpy().view(np.uint8)
        problems = reference.check_dispatch([p.codes for p in packed], sent, self.n_experts, rank, output, offsets, ids, sources, **options)
        wanted = reference.expected_counts(sent, self.n_experts, rank).sum(axis=1).tolist()
        wanted = [part[1], *wanted] if part else wanted
        if counts.tolist() != wanted:
            problems.append(f"rank {rank}: expert_counts is {counts.tolist()}, expected {wanted}")
        if handle.scales is not None and total:
            scales = reference_formats.gather_scales(self.token_format, handle.scales.numpy(), offsets, counts, made.scales_in_tiles)
            got = np.ascontiguousarray(scales[:, : made.n_groups]).view(np.uint8)
            right = [np.ascontiguousarray(p.scales).view(np.uint8) for p in packed]
            found = reference.check_dispatch(right, sent, self.n_experts, rank, got, offsets, ids, sources, **options)
            problems += [f"scales: {p}" for p in found]
        return problems

    def combined(self, x: NDArray[Any], routings: Sequence[reference.Routing], rank: int) -> NDArray[np.float32]:
        """What the sample experts' combine gives, before the last rounding: bit for bit."""
        routing, tokens = self.sent(routings, rank)[rank], self.expanded(x)
        if self.unreduced:
            return reference.combine_unreduced(tokens, routing, self.n_experts).astype(np.float32)
        return reference.combine_in_order(tokens, routing, self.n_experts, self.shared_part(rank, len(x)))

    def check_combine(
        self, x: NDArray[Any], routings: Sequence[reference.Routing], rank: int, combined: NDArray[Any]
    ) -> reference.CombineError:
        """How far a combine is from the exact sum of the experts' rows; without a sum, whether it is equal."""
        if self.unreduced:
            wrong = np.argwhere(combined.astype(np.float32) != self.combined(x, routings, rank))
            place = tuple(int(v) for v in wrong[0]) if len(wrong) else (0, 0)
            return reference.CombineError(0.0, float("inf") if len(wrong) else 0.0, place)  # pyright: ignore[reportArgumentType]
        routing, tokens = self.sent(routings, rank)[rank], self.expanded(x)
        return reference.check_combine(tokens, routing, self.n_experts, combined, self.shared_part(rank, len(x)))
