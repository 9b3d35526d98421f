"""One job of the expert-parallel layer in any configuration, and everything that must be true of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from epdsl_runtime.rank import Rank

import epdsl.reference as ref
import epdsl.reference_formats as rf
from epdsl.kernels.expert import SampleExperts
from epdsl.moe import ExpertParallel, RoutingError
from epdsl.reference_layer import ReferenceLayer

SEED = 20261130
SCALE = 3.0


@dataclass(frozen=True)
class Job:
    """tokens of each rank in the first launch (they rotate), and what the layer is made with."""

    tokens: tuple[int, ...] = (5, 3)
    hidden: int = 128
    experts_per_rank: int = 3
    topk: int = 3
    launches: int = 3
    fused: bool = True
    routing: str = "skewed"
    seed: int = SEED
    first_launch: int = 0
    layer: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    @property
    def experts(self) -> int:
        return self.ranks * self.experts_per_rank

    @property
    def format(self) -> str:
        return self.layer.get("token_format", "bf16")

    @property
    def reference(self) -> ReferenceLayer:
        return ReferenceLayer(
            self.experts,
            self.ranks,
            self.format,
            SCALE,
            skip_a2a=self.layer.get("skip_a2a", False),
            shared=self.layer.get("fused_shared_expert", False),
            unreduced=self.layer.get("unreduced", False),
            any_order=self.layer.get("ep_prod_reserve", False),
        )

    def n_tokens(self, rank: int, launch: int) -> int:
        # With skip_a2a every rank has all tokens and sums over its own experts.
        return max(self.tokens) if self.layer.get("skip_a2a") else self.tokens[(rank + launch) % self.ranks]

    def routing_of(self, rank: int, launch: int) -> ref.Routing:
        source = 0 if self.layer.get("skip_a2a") else rank
        made = ref.skewed_routing(self.seed, source, launch, self.n_tokens(rank, launch), self.experts, self.topk)
        ids = made.topk_idx.copy()
        if self.routing == "one expert":
            ids[:] = -1
            ids[:, 0] = self.experts - 1
        elif self.routing == "dropped":
            ids[np.random.default_rng([self.seed, rank, launch]).random(ids.shape) < 0.5] = -1
        return ref.Routing(ids, made.topk_weights)

    def tokens_of(self, rank: int, launch: int) -> np.ndarray:
        source = 0 if self.layer.get("skip_a2a") else rank
        return ref.sample_tokens(self.seed, source, launch, self.n_tokens(rank, launch), self.hidden)


def given(job: Job, x: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    """What dispatch gets for these tokens."""
    options: dict[str, Any] = {"input_scale": SCALE} if job.format == "nvfp4" else {}
    if not job.layer.get("prequantized"):
        return x, options
    packed = job.reference.quantize(x)
    kind = {"bf16": ref.BF16, "fp8": rf.E4M3, "mxfp8": rf.E4M3}.get(job.format, np.dtype(np.uint8))
    codes = packed.codes.view(kind)
    return codes, options | ({} if packed.scales is None else {"scales": packed.scales})


def run_job(rank: Rank, job: Job) -> list[str]:
    """Launches everything without waiting in between where the results can be kept, and returns what was wrong."""
    layer = ExpertParallel(
        rank,
        hidden=job.hidden,
        n_experts=job.experts,
        top_k=job.topk,
        max_tokens_per_rank=max(*job.tokens, 1),
        timeout_ns=120 * 10**9,
        first_launch=job.first_launch,
        **job.layer,
    )
    y = rank.empty("bf16", (layer.config.max_recv_tokens, job.hidden))
    shared = bool(job.layer.get("fused_shared_expert"))
    experts = SampleExperts(layer.config.format, job.experts_per_rank, shared)
    problems: list[str] = []
    for launch in range(job.launches):
        x, options = given(job, job.tokens_of(rank.index, launch))
        routing = job.routing_of(rank.index, launch)
        part = job.reference.shared_part(rank.index, len(x))
        send = layer.dispatch if job.fused else lambda *a, **o: layer.dispatch_wait(layer.dispatch_async(*a, **o))
        handle = send(x, routing.topk_idx, routing.topk_weights, shared_tokens=part, **options)
        experts.scale.launch(rank, grid=2, block=128, args=(y, handle.received, rank.index * job.experts_per_rank))
        if job.fused:
            combined = layer.combine(y, handle)
        else:
            layer.combine_async(y, handle)
            combined = layer.combine_wait(handle)
        try:
            rank.synchronize()
        except RoutingError as error:
            problems.append(str(error))
        problems += [f"launch {launch}: {p}" for p in check_launch(rank.index, job, launch, layer, handle, combined.numpy())]
    return problems + rest_state(layer)


def check_launch(rank: int, job: Job, launch: int, layer: ExpertParallel, handle: Any, combined: np.ndarray) -> list[str]:
    routings = [job.routing_of(r, launch) for r in range(job.ranks)]
    tokens = [job.tokens_of(r, launch) for r in range(job.ranks)]
    right = job.reference
    problems = right.check_dispatch(layer, handle, rank, tokens, routings)
    wanted = right.combined(tokens[rank], routings, rank).astype(ref.BF16)
    if combined.shape != wanted.shape or combined.tobytes() != wanted.tobytes():
        bad = np.argwhere(combined.view(np.uint16) != wanted.view(np.uint16)) if combined.shape == wanted.shape else combined.shape
        problems.append(f"the combine differs from the sum in order, first at {bad[:1]}")
    error = right.check_combine(tokens[rank], routings, rank, combined)
    if not error.ratio <= 1:
        problems.append(f"the combine is {error.ratio} times its bound away at {error.place}")
    return problems


def rest_state(layer: ExpertParallel) -> list[str]:
    """Everything the next launch starts from must be as before the first, without the host's help."""
    counters, words = layer._dispatch_kernel.counters, layer._counters.numpy()
    kernel = layer._dispatch_kernel
    block, combine = words[counters.dispatch_wait_base :], words[counters.combine_base :]
    resting = {
        "expert_reserved, expert_finished, rank_completion": words[: counters.dispatch_wait_base],
        "dispatch cleanup": block[kernel.cleanup_counter_offset :][:1],
        "send_buf_ready, shared_expert_started": block[kernel.send_buf_ready_offset :][:2],
        "pair_done": block[kernel.pair_done_offset : kernel.pair_done_offset + kernel.n_pairs],
        "combine rank_completion": combine[: layer.rank.size],
        "combine cleanup": combine[layer._combine_kernel.cleanup_counter_offset :][:1],
        "reservation cursors": layer._recv_counts.local.numpy()[kernel.rc_cursor_base :],
    }
    return [f"{name} is not back to 0: {values.tolist()}" for name, values in resting.items() if values.any()]
