"""What an expert-parallel layer is made with, and the kernels that follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .kernels.combine import EPCombineKernel
from .kernels.combine_parameters import CombineSchedule
from .kernels.dispatch import EPDispatchKernel
from .kernels.dispatch_parameters import SmSchedule
from .kernels.layout import DEFAULT_TIMEOUT_NS, VECTOR_BYTES
from .kernels.quantized_format import FORMATS
from .kernels.signal import Ordering
from .kernels.token_format import TokenFormat
from .kernels.trace import NO_TRACE, TraceBuf

Completion = Literal["rank", "expert", "every"]

_FORMAT_OPTIONS: dict[str, Any] = {"prequantized": False, "fold_scales": False, "tile_claims": 1, "staged": False}
"""Options of a format that is given by name, and what they are without."""


@dataclass(frozen=True)
class MoEConfig:
    """What the buffers and kernels of a layer depend on. Equal on every rank.

    hidden               elements of a token, bf16; a multiple of 8
    n_experts            experts of the whole layer; rank r has those from r * n_experts / n_ranks on
    top_k                selections a token has
    max_tokens_per_rank  most tokens a rank may dispatch at once
    n_ranks              ranks that take part
    num_threads, n_sms   threads of a block and blocks of a launch
    completion           "rank": the destination acquires once a rank; "expert": per (expert, rank) with an elected release a rank;
                         "every": per (expert, rank), a release each
    ordering             of "expert": "acq_rel", or "seed" for the original's racy one
    output_type          of the combine, "bf16" or "f32"
    token_format         "bf16", "fp8", "mxfp8", "mxfp4", "nvfp4", or a TokenFormat of this hidden and top_k
    prequantized         tokens are given in the format already, with scales
    fold_scales, tile_claims, staged   of a format given by name: see `TokenFormat` and the block-scaled formats
    fused_shared_expert, skip_a2a, ep_final_layout, ep_prod_reserve, ep_copy_role_split, ep_send_join_named, sm_schedule
                         see `DispatchParameters`
    combine_schedule, unreduced   see `EPCombineKernel`
    trace                where the kernels' events go
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
    ordering: Ordering = "acq_rel"
    output_type: Literal["bf16", "f32"] = "bf16"
    token_format: str | TokenFormat = "bf16"
    prequantized: bool = False
    fold_scales: bool = False
    tile_claims: int = 1
    staged: bool = False
    fused_shared_expert: bool = False
    skip_a2a: bool = False
    ep_final_layout: bool = False
    ep_prod_reserve: bool = False
    ep_copy_role_split: bool = False
    ep_send_join_named: bool = False
    sm_schedule: SmSchedule = "auto"
    combine_schedule: CombineSchedule = "auto"
    unreduced: bool = False
    trace: TraceBuf = NO_TRACE
    timeout_ns: int = DEFAULT_TIMEOUT_NS

    def __post_init__(self) -> None:
        if self.completion not in ("rank", "expert", "every"):
            raise ValueError(f"completion={self.completion!r} is not known; it is 'rank', 'expert' or 'every'")
        if self.ordering != "acq_rel" and self.completion != "expert":
            raise ValueError(
                f"ordering={self.ordering!r} with completion={self.completion!r}, which elects no one by it; "
                "use completion='expert', or leave ordering at 'acq_rel'"
            )
        if self.hidden < 1 or 2 * self.hidden % VECTOR_BYTES:
            raise ValueError(
                f"hidden={self.hidden} is {2 * self.hidden} bytes a token, which is not a multiple of {VECTOR_BYTES} bytes; "
                "use a multiple of 8 elements"
            )
        made = self.format
        if (made.hid_dim, made.top_k) != (self.hidden, self.top_k):
            raise ValueError(
                f"token_format is for {made.hid_dim} elements and top_k={made.top_k}, "
                f"the layer has hidden={self.hidden} and top_k={self.top_k}"
            )
        _ = self.dispatch_kernel, self.combine_kernel

    @property
    def format(self) -> TokenFormat:
        """The token format. Raises ValueError for an unknown name, and for options that it does not have."""
        options: dict[str, Any] = {name: getattr(self, name) for name in _FORMAT_OPTIONS if getattr(self, name) != _FORMAT_OPTIONS[name]}
        if isinstance(self.token_format, TokenFormat):
            if options:
                given = ", ".join(f"{name}={value!r}" for name, value in options.items())
                raise ValueError(f"{given} beside a token_format that is made already; give it to {type(self.token_format).__name__}(...)")
            return self.token_format
        if self.token_format not in FORMATS:
            raise ValueError(f"token_format={self.token_format!r} is not known; it is one of {', '.join(FORMATS)}")
        kind = FORMATS[self.token_format]
        if self.fold_scales and "fold_scales" not in kind.__dataclass_fields__:
            folded = [name for name, made in FORMATS.items() if "fold_scales" in made.__dataclass_fields__]
            raise ValueError(
                f"fold_scales=True with token_format={self.token_format!r}, which has no scales in tiles; use it with {', '.join(folded)}"
            )
        return kind(hid_dim=self.hidden, top_k=self.top_k, **options)

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
            token_fmt_type=self.format,
            fused_shared_expert=self.fused_shared_expert,
            skip_a2a=self.skip_a2a,
            has_rank_flag=by_rank,
            ep_ord_r=by_rank,
            ep_final_layout=self.ep_final_layout,
            ep_prod_reserve=self.ep_prod_reserve,
            ep_copy_role_split=self.ep_copy_role_split,
            ep_send_join_named=self.ep_send_join_named,
            release_every=self.completion == "every",
            ordering=self.ordering,
            sm_schedule=self.sm_schedule,
            trace=self.trace,
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
            fused_shared_expert=self.fused_shared_expert,
            skip_a2a=self.skip_a2a,
            has_rank_flag=by_rank,
            ep_ord_r=by_rank,
            release_every=self.completion == "every",
            ordering=self.ordering,
            unreduced=self.unreduced,
            schedule=self.combine_schedule,
            output_type=self.output_type,
            trace=self.trace,
            timeout_ns=self.timeout_ns,
        )

    @property
    def n_local_experts(self) -> int:
        return self.n_experts // self.n_ranks

    @property
    def max_recv_tokens(self) -> int:
        """Rows of the dispatch's output."""
        return self.dispatch_kernel.max_recv_tokens
